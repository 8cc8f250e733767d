"""Layers of a middle pipeline stage that run packed micro-batches, for what these take: on a group
of ranks, or as one rank of a group computes, where nothing is sent."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt import gpt_layer_specs as specs
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn

from benchmarks.one_rank import Silent
from benchmarks.stack import config_of
from megatron_burst.attention import BurstAttentionFunction
from megatron_burst.engine.passes import Passes
from megatron_burst.kernels.backends import choose_backend, kernel_of
from megatron_burst.masks.documents import Documents
from megatron_burst.masks.sample import Sample
from megatron_burst.mcore import patches
from megatron_burst.mcore.packed import consecutive_part
from megatron_burst.mcore.specs import burst_spec
from megatron_burst.resolve import resolve
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.spec import AttentionShape, Spec
from megatron_burst.schedule.topology import pretend_nodes
from megatron_burst.tools.job.model import Model
from megatron_burst.tools.speeds import problem_of


@dataclass
class Part:
    """The micro-batch that one rank computes its part of; all layers share it.

    Attributes:
        ends: boundaries of its documents, over all ranks.
        ranks: how many.
        carrier: between them.
    """

    ends: Tensor
    ranks: int
    carrier: Silent
    passes: Passes | None = None
    documents: Documents | None = None


class PartOfAttention(nn.Module):
    """Core attention of the last rank of a group, without the others: on noise for their keys."""

    part: Part  # set before each micro-batch

    def __init__(self, *_: object, **__: object) -> None:
        """Take what Megatron passes."""
        super().__init__()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
    ) -> Tensor:
        """Attention of [t, h, d] tensors; returns [t, h * d]."""
        part, q, k, v = self.part, query[None], key[None], value[None]
        if part.passes is None:
            part.passes = _passes(part, q, k, v)
            sizes, sample = (q.shape[1], part.ranks), Sample(part.ends, None, None)
            part.documents = Documents(sample, sizes, Layout.DOCUMENTS, q.device)
        out, _ = BurstAttentionFunction.apply(q, k, v, None, part.passes, part.documents, 1)
        return out[0].flatten(1)


def _passes(part: Part, q: Tensor, k: Tensor, v: Tensor) -> Passes:
    mask = Mask(right=0, documents=True)
    backend, _ = choose_backend(problem_of(q, k, v, mask=mask), "auto")
    (_, rows, heads, dim), heads_kv = q.shape, k.shape[2]
    shape = AttentionShape(1, rows, heads, heads_kv, dim, dim, q.dtype.itemsize, 4, 4)
    kernel = kernel_of(backend, q.device)
    opened = Spec(pretend_nodes(part.ranks, 1), shape, Layout.DOCUMENTS, mask, kernel)
    return Passes(resolve(opened)[0], backend, part.carrier, dim**-0.5, q.dtype)


class PackedLayers:
    """Layers with gradients, and the micro-batches that they run.

    Args:
        model: the sizes.
        dtype: of weights and activations.
        alone: run a rank's part of a group that is not there.
        rows: of a rank, at most.
    """

    def __init__(self, model: Model, dtype: torch.dtype, alone: bool, rows: int) -> None:
        if not alone:
            patches.apply("attention")  # RoPE follows a micro-batch's group
        self._alone, ranks = alone, parallel_state.get_context_parallel_world_size()
        self._carriers: dict[int, Silent] = {}  # whose memory is used again
        config = config_of(
            dtype, num_layers=model.layers, hidden_size=model.hidden, ffn_hidden_size=model.ffn,
            num_attention_heads=model.heads_q, num_query_groups=model.heads_kv,
            kv_channels=model.dim_qk, qk_layernorm=True, context_parallel_size=ranks,
            cp_comm_type=None if alone else "burst",
        )  # fmt: skip
        te = specs.get_gpt_layer_with_transformer_engine_spec
        local = specs.get_gpt_layer_local_spec
        spec = (
            te(qk_layernorm=True) if HAVE_TE else local(qk_layernorm=True, normalization="RMSNorm")
        )
        if alone:
            attention = spec.submodules.self_attention
            attention.submodules = replace(attention.submodules, core_attention=PartOfAttention)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = GPTModel(
            config, spec if alone else burst_spec(spec), vocab_size=8, max_sequence_length=rows,
            pre_process=False, post_process=False, position_embedding_type="rope",
        ).to(device=device, dtype=dtype)  # fmt: skip
        shape = rows, 1, model.hidden
        self._hidden, self._dout = (torch.randn(shape, dtype=dtype, device=device) for _ in "io")

    def micro_batch(self, lengths: Sequence[int], cp: int) -> Callable[[], None]:
        """Forward and backward of documents on this rank, one of `cp`; lengths are multiples of
        2 * cp."""
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        rows, part = (
            int(ends[-1]) // cp,
            Part(ends, cp, self._carriers.setdefault(cp, Silent(cp - 1))),
        )
        hidden, dout = self._hidden[:rows].requires_grad_(), self._dout[:rows]
        own, options = (ends // cp, {}) if self._alone else (ends, _group(cp))
        own, longest = own.to(hidden.device), max(lengths) // (cp if self._alone else 1)
        params = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=own, cu_seqlens_kv=own, cu_seqlens_q_padded=own,
            cu_seqlens_kv_padded=own, max_seqlen_q=longest, max_seqlen_kv=longest, **options,
        )  # fmt: skip

        def run() -> None:
            PartOfAttention.part = part
            self._model.set_input_tensor(hidden)
            self._model(None, None, None, packed_seq_params=params).backward(dout)

        return run


def _group(cp: int) -> dict:
    """What a micro-batch's parameters say of its group; none if it is all ranks."""
    whole: dist.ProcessGroup = parallel_state.get_context_parallel_group()
    if cp == whole.size():
        return {}
    return {"cp_group": consecutive_part(whole, cp), "local_cp_size": cp}
