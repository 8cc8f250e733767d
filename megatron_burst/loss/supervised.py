"""Counts the tokens that are not ignored."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.comm.announce import announce
from megatron_burst.comm.store import TP
from megatron_burst.loss.statistics import WHO
from megatron_burst.loss.tensor_parallel import TensorParallel


@dataclass(frozen=True, slots=True)
class SupervisedCount:
    """Numbers of valid tokens in each block, while they are copied to the CPU."""

    counts: Tensor  # [blocks] on the CPU, valid once `arrived`
    arrived: torch.cuda.Event | None = None

    @property
    def blocks(self) -> int:
        """Number of blocks that were counted."""
        return len(self.counts)

    def wait(self) -> tuple[int, ...]:
        """The numbers; the CPU waits until the GPU has counted."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return tuple(self.counts.tolist())


# what says which tokens are computed: a count of those that are not ignored; "count": count them
# now, for which the CPU waits for the GPU; "all": none is skipped on a GPU
Supervised = SupervisedCount | Literal["count", "all"]


def count_supervised(labels: Tensor, loss_mask: Tensor | None = None, *, ignore_index: int = -100,
                     tp_group: dist.ProcessGroup | None = None,
                     sequence_parallel: bool = False) -> SupervisedCount:  # fmt: skip
    """Start counting the tokens that are not ignored, so that a loss or log-probabilities skip
    others.

    Call it as soon as the batch is available, long before the loss. Reading the count then does
    not stall the GPU, which still has the whole forward pass to run. Arguments are those of
    `linear_cross_entropy`, which does not need this on the CPU. If the loss has more tokens than
    were counted, it is refused on the CPU; on a GPU it is NaN.
    """
    tp = TensorParallel.of(tp_group, sequence_parallel)
    counts = valid_counts(valid_tokens(labels, loss_mask, ignore_index), tp.blocks)
    if tp.group is not None:
        announce(tp.group, {"counted": str(tuple(labels.shape))}, WHO, kind=TP)
        dist.all_reduce(counts, dist.ReduceOp.MAX, tp.group)  # all ranks send equally many rows
    if not counts.is_cuda:
        return SupervisedCount(counts)
    on_cpu = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
    on_cpu.copy_(counts, non_blocking=True)
    return SupervisedCount(on_cpu, torch.cuda.current_stream().record_event())


def valid_tokens(labels: Tensor, loss_mask: Tensor | None, ignore_index: int,
                 several: bool = False) -> Tensor:  # fmt: skip
    """Which tokens are not ignored, contiguous, in the shape of the labels; `several`: of labels
    with a last axis of classes, if one class is not ignored."""
    valid = labels != ignore_index
    valid = valid.any(-1) if several else valid
    return (valid if loss_mask is None else valid & (loss_mask != 0)).contiguous()


def valid_counts(valid: Tensor, blocks: int) -> Tensor:
    """Numbers of valid tokens in each block, int64 [blocks]."""
    return valid.view(blocks, -1).sum(1) if valid.numel() else valid.new_zeros(blocks, dtype=int)
