"""A packed sample, its documents one by one as the reference, and Megatron's model on both.

Import it where a test module is imported, as tests.mcore.gpt.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F

from tests.mcore.gpt import (
    VOCAB,
    Model,
    Parallel,
    Run,
    _complete_grads,
    _sum_over_cp,
    build,
    config_of,
    sharded,
)
from tests.ranks import preload

preload("megatron_burst.mcore.packed")


@dataclass(frozen=True)
class Sample:
    """Concatenated documents: tokens of each, without and with padding."""

    lengths: tuple[int, ...]
    padded: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.padded)

    def boundaries(self, padded: bool) -> torch.Tensor:
        lengths = (0, *(self.padded if padded else self.lengths))
        return torch.tensor(lengths).cumsum(0).int()

    def documents(self) -> list[slice]:
        """Where each document's tokens lie, without padding and empty documents."""
        ends = zip(pairwise(self.boundaries(True).tolist()), self.lengths, strict=True)
        return [slice(start, start + length) for (start, _), length in ends if length]

    def batch(self) -> dict:
        """The whole sample, as Megatron's data loader returns it: [1, tokens]."""
        generator = torch.Generator().manual_seed(7)
        tokens, labels = torch.randint(0, VOCAB, (2, 1, self.tokens), generator=generator)
        mask, positions = torch.zeros(1, self.tokens, dtype=torch.float64), torch.zeros_like(tokens)
        for where in self.documents():
            mask[:, where] = 1
            positions[:, where] = torch.arange(where.stop - where.start)
        return {
            "tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": positions,
            "cu_seqlens": self.boundaries(False)[None],
            "cu_seqlens_padded": self.boundaries(True)[None],
            "max_seqlen": torch.tensor([max(self.padded)]),
        }  # fmt: skip


# Each padded length is a multiple of 2 * 4 ranks; one without padding, an empty one, one that is
# all padding, and a tail.
SAMPLE = Sample(lengths=(5, 16, 0, 0, 13, 9), padded=(8, 16, 0, 8, 16, 16))
OTHER = Sample(lengths=(30, 7, 24), padded=(32, 8, 24))
ANYWHERE = Sample(lengths=(5, 17, 1, 30, 11), padded=(5, 17, 1, 30, 11))


def params_of(batch: dict, **others):
    """What Megatron's pretrain_gpt.py makes of a batch, plus the lengths without padding."""
    from megatron.core.packed_seq_params import PackedSeqParams

    starts, padded = batch["cu_seqlens"][0], batch["cu_seqlens_padded"][0]
    longest = int(batch["max_seqlen"])
    return PackedSeqParams(**dict(
        qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded, max_seqlen_q=longest, max_seqlen_kv=longest,
    ) | others)  # fmt: skip


def shard(batch: dict, group=None, **options) -> dict:
    """This context-parallel rank's part, by Megatron's own function, as launched runs shard it
    without TransformerEngine.

    Up to 0.17 that function requires TransformerEngine: it gets a stand-in.
    """
    from megatron.core import parallel_state, utils

    from megatron_burst.mcore import patches
    from megatron_burst.mcore.packed import partitioned_indices

    patches.apply("packed")

    group = group or parallel_state.get_context_parallel_group()
    own = getattr(utils, "get_thd_batch_on_this_cp_rank", None)
    if own is None or "cu_seqlens" not in batch:
        return sharded(batch, group, **options)
    engine = SimpleNamespace(thd_get_partitioned_indices=partitioned_indices)
    boundaries = (batch[name][0] for name in ("cu_seqlens", "cu_seqlens_padded"))
    with mock.patch.multiple(utils, tex=engine, is_te_min_version=lambda version: True):
        return own(batch, *boundaries, batch["max_seqlen"], group.size(), group.rank())[0]


def spec_of(model: Model, mask: str = "causal"):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.enums import AttnMaskType

    spec = get_gpt_layer_local_spec(normalization="RMSNorm", multi_latent_attention=model.latent)
    spec.submodules.self_attention.params["attn_mask_type"] = AttnMaskType[mask]
    return spec


def megatron_alone(parallel: Parallel, model: Model, mask: str = "causal", **options):
    """The model with Megatron's own attention, without recomputation."""
    from tests.mcore.gpt import core_for_latent

    spec = spec_of(model, mask)
    if model.latent:
        spec.submodules.self_attention.submodules.core_attention = core_for_latent()
    return build(config_of(parallel, replace(model, recompute=False), **options), spec)


def one_by_one(
    sample: Sample, parallel: Parallel, model: Model, mask: str = "causal", **options
) -> Run:
    """The reference: each document as its own sequence, with Megatron alone."""
    gpt = megatron_alone(parallel, model, mask, **options)
    batch, total = sample.batch(), torch.zeros((), dtype=torch.float64)
    for where in sample.documents():
        names = "tokens", "position_ids", "labels"
        tokens, places, labels = (batch[name][:, where] for name in names)
        tokens, places, labels = with_sequence_parallel(parallel, tokens, places, labels)
        logits = gpt(tokens, places, attention_mask=None)
        logits = logits[:, : where.stop - where.start]
        loss = F.cross_entropy(
            logits.flatten(0, 1), labels[:, : where.stop - where.start].flatten(), reduction="sum"
        )
        loss.backward()
        total += loss.detach()
    return Run(_sum_over_cp(total), _complete_grads(gpt))


def with_sequence_parallel(parallel: Parallel, *rows: torch.Tensor) -> list[torch.Tensor]:
    """Add a token where TP ranks could not share the rows equally; causal attention ignores it."""
    pad = -rows[0].shape[1] % parallel.tp
    return [F.pad(x, (0, pad)) for x in rows]


def packed(gpt, batch: dict, params) -> Run:
    """Loss and gradients of a packed sample, of which this rank has its rows."""
    logits = gpt(batch["tokens"], batch["position_ids"], None, packed_seq_params=params)
    losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    loss = (losses * batch["loss_mask"].flatten()).sum()
    loss.backward()
    return Run(_sum_over_cp(loss.detach()), _complete_grads(gpt))
