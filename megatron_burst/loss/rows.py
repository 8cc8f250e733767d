"""Which tokens are computed: rows of the hidden states, in the blocks that ranks hold."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

_ROWS_AT_ONCE = 1024  # that are converted


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens in blocks: one of all tokens, or one a rank where ranks hold a part of the sequence.

    Attributes:
        labels: [blocks, n] int64.
        valid: [blocks, n], false where a token is left out.
        mine: the block that this rank holds hidden states of.
        order: [blocks, n] int64, which token of its block a row is; None where it is itself.
        tokens: of a block, those that are not computed included.
    """

    labels: Tensor
    valid: Tensor
    mine: int
    order: Tensor | None
    tokens: int

    @property
    def count(self) -> int:
        """Rows of a block."""
        return self.labels.shape[1]

    def take(self, hidden: Tensor, start: int, stop: int) -> Tensor:
        """Some of this rank's rows [stop - start, h], contiguous; zero where a token is left out.

        Zero, because a NaN there would reach the weight's gradient: 0 * NaN is NaN.
        """
        valid = self.valid[self.mine, start:stop].unsqueeze(1)
        if self.order is None and hidden.is_contiguous():
            return torch.where(valid, hidden.view(-1, hidden.shape[-1])[start:stop], 0)
        if self.order is None:
            index = torch.arange(start, stop, device=hidden.device)
        else:
            index = self.order[self.mine, start:stop]
        # by all indices at once: a view of strided tokens would be copied as a whole
        picked = hidden[torch.unravel_index(index, hidden.shape[:-1])]
        return picked.masked_fill_(~valid, 0)

    def spread(self, values: Tensor) -> Tensor:
        """[blocks, n] as [blocks, tokens], 0 where a token is left out."""
        values = torch.where(self.valid, values, 0)
        if self.order is None:
            return values
        return values.new_zeros(len(values), self.tokens).scatter_(1, self.order, values)

    def collect(self, values: Tensor) -> Tensor:
        """[blocks, tokens] as [blocks, n], 0 where a token is left out."""
        if self.order is not None:
            values = values.gather(1, self.order)
        return torch.where(self.valid, values, 0)

    def put(self, full: Tensor, piece: slice, some: Tensor) -> None:
        """Write this rank's rows of a piece [some, h] to their places in full [tokens, h]."""
        if self.order is None:
            full[piece] = some
            return
        places = self.order[self.mine, piece].split(_ROWS_AT_ONCE)
        for place, part in zip(places, some.split(_ROWS_AT_ONCE), strict=True):
            full.index_copy_(0, place, part.to(full.dtype))


def rows_of(labels: Tensor, valid: Tensor, mine: int, most: int | None) -> Rows:
    """The rows to compute.

    Args:
        labels: [blocks, tokens].
        valid: [blocks, tokens], which tokens count.
        mine: see `Rows`.
        most: in no block do more tokens count; None: unknown, all are computed.
    """
    tokens = labels.shape[1]
    if most is None or most >= tokens:
        return Rows(labels, valid, mine, None, tokens)
    order = valid.int().argsort(dim=1, descending=True, stable=True)[:, :most]
    return Rows(labels.gather(1, order), valid.gather(1, order), mine, order, tokens)


@dataclass(frozen=True, slots=True)
class SupervisedCount:
    """The largest number of tokens that count in a block, on its way to the CPU.

    Attributes:
        blocks: number of blocks that it was counted for.
        count: on the CPU, valid once `arrived`.
        arrived: None where it always is.
    """

    blocks: int
    count: Tensor
    arrived: torch.cuda.Event | None = None

    def wait(self) -> int:
        """The number; the CPU waits until the GPU has come to where counting was started."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return int(self.count)


def count_supervised(
    labels: Tensor,
    loss_mask: Tensor | None = None,
    *,
    ignore_index: int = -100,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
) -> SupervisedCount:
    """Start counting the tokens that count, for `linear_cross_entropy` to compute only these.

    Start it where the batch is at hand, long before the loss: the CPU then waits, if at all, for a
    GPU that has the whole forward pass still before it. Arguments are those of
    `linear_cross_entropy`; on the CPU that counts by itself.
    """
    blocks = tp_group.size() if sequence_parallel and tp_group is not None else 1
    valid = valid_tokens(labels, loss_mask, ignore_index).view(blocks, -1)
    most = valid.sum(1).max() if valid.numel() else valid.sum()
    if tp_group is not None and tp_group.size() > 1:
        dist.all_reduce(most, dist.ReduceOp.MAX, tp_group)  # all ranks gather alike
    if not most.is_cuda:
        return SupervisedCount(blocks, most)
    count = torch.empty((), dtype=most.dtype, pin_memory=True)
    count.copy_(most, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return SupervisedCount(blocks, count, arrived)


def valid_tokens(labels: Tensor, loss_mask: Tensor | None, ignore_index: int) -> Tensor:
    """Which tokens count, contiguous, in the shape of the labels."""
    valid = labels != ignore_index
    return (valid if loss_mask is None else valid & (loss_mask != 0)).contiguous()
