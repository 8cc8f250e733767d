"""Megatron-Core's own LM head and loss, as GPTModel puts them together: to measure beside ours."""

import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor

from megatron_burst.mcore import cpu_mode


def native_mean_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, group: dist.ProcessGroup, fused: bool
) -> Tensor:
    """The mean loss, differentiable; all logits exist.

    Args:
        hidden: [tokens, h], the same on all ranks.
        weight: [vocab / tp, h], this rank's classes.
        labels: [tokens] int64.
        group: tensor-parallel ranks.
        fused: with --cross-entropy-loss-fusion, whose steps torch compiles.
    """
    if not hidden.is_cuda:
        cpu_mode.install(training=False)
    logits = F.linear(copy_to_tensor_model_parallel_region(hidden, group), weight).unsqueeze(1)
    labels = labels.unsqueeze(1)
    if fused:
        return fused_vocab_parallel_cross_entropy(logits, labels, group).mean()
    return vocab_parallel_cross_entropy(logits, labels, 0.0, group).mean()
