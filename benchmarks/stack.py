"""Stacks of Megatron's transformer layers: to measure recomputation on, and packed micro-batches,
on a group of ranks or as one rank of a group computes, where nothing is sent."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt import gpt_layer_specs as specs
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import ModuleSpec, TransformerConfig
from torch import Tensor, nn

from benchmarks.layers import Mode, Widths
from benchmarks.one_rank import Silent, passes_of_last
from megatron_burst.attention import BurstAttentionFunction
from megatron_burst.config import BurstConfig
from megatron_burst.engine.passes import Passes
from megatron_burst.errors import BurstError
from megatron_burst.masks.documents import Documents
from megatron_burst.masks.sample import Sample
from megatron_burst.mcore import patches
from megatron_burst.mcore.packed import consecutive_part
from megatron_burst.mcore.specs import burst_spec
from megatron_burst.schedule.layout import Layout
from megatron_burst.tools.job.model import Model


def start(cpu: bool, cp_size: int) -> None:
    """Make Megatron's groups, all ranks one context-parallel group."""
    if cpu:
        from megatron_burst.tools import cpu_mode

        cpu_mode.install(training=False)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=cp_size)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    patches.switch_on_keep(BurstConfig(keep="all"))


class Stack:
    """A middle stage's layers with burst's attention, or Megatron's with this `cp_comm_type`."""

    def __init__(self, widths: Widths, burst: bool, comm_type: str = "p2p") -> None:
        cp_size = parallel_state.get_context_parallel_world_size()
        if not burst and cp_size > 1 and not HAVE_TE:
            raise BurstError(
                "benchmarks.recompute: Megatron's own context parallelism needs TransformerEngine, "
                "because its local attention holds whole sequences; got none installed; pip "
                "install --no-build-isolation -e '.[te]' in megatron_burst's checkout"
            )
        self.burst = burst and cp_size > 1
        comm_type = "burst" if burst else comm_type
        self._config = config_of(
            widths, widths.head_dim, getattr(torch, widths.dtype), context_parallel_size=cp_size,
            cp_comm_type=comm_type if cp_size > 1 else None,
        )  # fmt: skip
        spec = burst_spec(layer_spec()) if self.burst else layer_spec()
        self._model = middle_stage(self._config, spec, widths.seq)
        shape = (widths.seq // cp_size, widths.batch, widths.hidden)
        device = next(self._model.parameters()).device
        self._hidden, self._dout = (
            torch.randn(shape, dtype=self._config.params_dtype, device=device) for _ in range(2)
        )
        self._hidden.requires_grad_()

    def use(self, mode: Mode) -> None:
        """Recompute and keep as a mode says."""
        layers = max(1, len(self._model.decoder.layers) // 2) if mode.half_of_layers else None
        offload = "results" if mode.offload else "none"
        self.set(mode.recompute, BurstConfig(keep=mode.keep, keep_offload=offload), layers)

    def set(self, recompute: str, burst: BurstConfig, layers: int | None = None) -> None:
        """Choose how activations are recomputed ("full", "selective": attention only, or "off"),
        what is kept with burst's other options, and in how many layers; None: all."""
        full = recompute == "full"
        self._config.recompute_granularity = "full" if full else None
        self._config.recompute_method = "uniform" if full else None
        self._config.recompute_num_layers = 1 if full else None
        self._config.burst = replace(burst, keep_layers=layers)
        for layer in self._model.decoder.layers:
            attention = layer.self_attention
            attention.checkpoint_core_attention = recompute == "selective"
            if self.burst:
                forward = attention.core_attention.burst
                attention.core_attention.burst = replace(forward, config=self._config.burst)

    def run(self) -> Sequence[Tensor]:
        """One forward and backward pass; the gradients."""
        self._model.set_input_tensor(self._hidden)
        out = self._model(None, None, None)
        out.backward(self._dout)
        grad, self._hidden.grad = self._hidden.grad, None
        return [grad]

    def attention_alone(self) -> Callable[[], None]:
        """A function that runs attention's forward once per layer, on the first layer's tensors."""
        cores = [layer.self_attention.core_attention for layer in self._model.decoder.layers]
        taken: list[tuple] = []
        hook = cores[0].register_forward_pre_hook(
            lambda module, args, kwargs: taken.append((args, kwargs)), with_kwargs=True
        )
        self._model.set_input_tensor(self._hidden)
        with torch.no_grad():
            self._model(None, None, None)
        hook.remove()
        args, kwargs = taken[0]

        def attend() -> None:
            with torch.no_grad():
                for core in cores:
                    core(*args, **kwargs)

        return attend


def layer_spec(**options: object) -> ModuleSpec:
    """Megatron's spec of a layer with RMSNorm: TransformerEngine's where it is installed."""
    if HAVE_TE:
        return specs.get_gpt_layer_with_transformer_engine_spec(**options)
    return specs.get_gpt_layer_local_spec(normalization="RMSNorm", **options)


def packed_of(ends: Tensor, longest: int, **options: object) -> PackedSeqParams:
    """Megatron's parameters of documents that end there, on the device; none is padded."""
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, cu_seqlens_q_padded=ends,
        cu_seqlens_kv_padded=ends, max_seqlen_q=longest, max_seqlen_kv=longest, **options,
    )  # fmt: skip


def middle_stage(config: TransformerConfig, spec: ModuleSpec, rows: int) -> GPTModel:
    """The layers of a middle pipeline stage, without embedding and head."""
    return GPTModel(
        config, spec, vocab_size=8, max_sequence_length=rows, pre_process=False,
        post_process=False, position_embedding_type="rope",
    ).to(config.params_dtype)  # fmt: skip


def config_of(
    sizes: Widths | Model, head_dim: int, dtype: torch.dtype, **options: object
) -> TransformerConfig:
    """Megatron's configuration of a gated model with RMSNorm, without biases or dropout."""
    cpu_mode = not torch.cuda.is_available()
    return TransformerConfig(
        num_layers=sizes.layers, hidden_size=sizes.hidden, ffn_hidden_size=sizes.ffn,
        num_attention_heads=sizes.heads_q, num_query_groups=sizes.heads_kv, kv_channels=head_dim,
        gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False,
        normalization="RMSNorm", hidden_dropout=0.0, attention_dropout=0.0,
        bf16=dtype is torch.bfloat16, fp16=dtype is torch.float16, params_dtype=dtype,
        pipeline_dtype=dtype, use_cpu_initialization=cpu_mode, masked_softmax_fusion=not cpu_mode,
        bias_activation_fusion=not cpu_mode, bias_dropout_fusion=not cpu_mode,
        apply_rope_fusion=HAVE_TE and not cpu_mode, persist_layer_norm=False,
        gradient_accumulation_fusion=False, **options,
    )  # fmt: skip


@dataclass
class Part:
    """The micro-batch that one rank computes its part of; all layers share it."""

    ends: Tensor  # boundaries of its documents, over all ranks
    ranks: int  # how many
    carrier: Silent  # between them
    passes: Passes | None = None
    documents: Documents | None = None


class PartOfAttention(nn.Module):
    """Core attention of the last rank of a group, without the others: on noise for their keys."""

    part: Part  # set before each micro-batch

    def __init__(self, *_: Any, **__: Any) -> None:
        """Take what Megatron passes."""
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Attention of [t, h, d] tensors; returns [t, h * d]."""
        part, q, k, v = self.part, query[None], key[None], value[None]
        if part.passes is None:
            part.passes = passes_of_last(part.carrier, part.ranks, q, k, v, Layout.DOCUMENTS)
            sizes, sample = (q.shape[1], part.ranks), Sample(part.ends, None, None)
            part.documents = Documents(sample, sizes, Layout.DOCUMENTS, q.device)
        out, _ = BurstAttentionFunction.apply(q, k, v, None, part.passes, part.documents, 1)
        return out[0].flatten(1)


class PackedLayers:
    """Layers, and the micro-batches that they run; `alone`: a rank's part of a missing group."""

    def __init__(self, model: Model, dtype: torch.dtype, alone: bool, rows: int) -> None:
        if not alone:
            patches.apply("attention")  # RoPE follows a micro-batch's group
        self._alone, ranks = alone, parallel_state.get_context_parallel_world_size()
        self._carriers: dict[int, Silent] = {}  # whose memory is used again
        config = config_of(
            model, model.dim_qk, dtype, qk_layernorm=True, context_parallel_size=ranks,
            cp_comm_type=None if alone else "burst",
        )  # fmt: skip
        spec = layer_spec(qk_layernorm=True)
        if alone:
            attention = spec.submodules.self_attention
            attention.submodules = replace(attention.submodules, core_attention=PartOfAttention)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = middle_stage(config, spec if alone else burst_spec(spec), rows).to(device)
        shape = rows, 1, model.hidden
        self._hidden, self._dout = (torch.randn(shape, dtype=dtype, device=device) for _ in "io")

    def micro_batch(self, lengths: Sequence[int], cp: int) -> Callable[[], None]:
        """Both passes of documents on this rank, one of `cp`; lengths are multiples of 2 * cp."""
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        rows = int(ends[-1]) // cp
        part = Part(ends, cp, self._carriers.setdefault(cp, Silent(cp - 1)))
        hidden, dout = self._hidden[:rows].requires_grad_(), self._dout[:rows]
        shared, options = cp if self._alone else 1, {}
        group: dist.ProcessGroup = parallel_state.get_context_parallel_group()
        if not self._alone and cp < group.size():
            options = {"cp_group": consecutive_part(group, cp), "local_cp_size": cp}
        own = (ends // shared).to(hidden.device)
        params = packed_of(own, max(lengths) // shared, **options)

        def run() -> None:
            PartOfAttention.part = part
            self._model.set_input_tensor(hidden)
            self._model(None, None, None, packed_seq_params=params).backward(dout)

        return run
