"""Per-token values of padded rows on context-parallel ranks, for TRL's trainers: GRPO and DPO."""

import torch
from torch.distributed import DeviceMesh
from trl.trainer.utils import FusedCausalLMOutput

from megatron_burst import unshard
from megatron_burst.hf import shard_batch


def values_of_rows(
    model: torch.nn.Module, group: DeviceMesh | None, *, input_ids: torch.Tensor,
    attention_mask: torch.Tensor, labels: torch.Tensor, **_,
) -> FusedCausalLMOutput:  # fmt: skip
    """What `model(..., fused_lm_head=True)` returns for rows [b, s]: values [b, s - 1] of all
    labels, on all ranks, with gradients. The rows are packed without padding, and sharded."""
    real = attention_mask.bool()
    ends = torch.tensor([0, *real.sum(1).cumsum(0).tolist()])
    packed = {"input_ids": input_ids[real][None], "labels": labels[real][None]}
    batch = shard_batch(packed | {"cu_seqlens": ends}, group=group)
    outputs = model(**batch, use_cache=False, fused_lm_head=True)

    def spread(x: torch.Tensor | None) -> torch.Tensor | None:
        """Rows of the shard, each of which predicts the next token, to their tokens."""
        if x is None:
            return None
        values = x if x.is_floating_point() else x.float()
        whole = unshard(values, group=group, cu_seqlens=batch["burst"].cu_seqlens)[0]
        of_tokens = whole[: int(ends[-1])].roll(1)  # a document's last row predicts nothing
        rows = whole.new_zeros(real.shape).masked_scatter(real, of_tokens)[:, 1:]
        return rows.to(x.dtype)

    names = "log_probs", "entropy", "mean_logits", "is_top1", "label_mask"
    return FusedCausalLMOutput(**{name: spread(outputs.get(name)) for name in names})
