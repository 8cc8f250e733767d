"""Selects tokens; sends rows, gradients and statistics between tensor-parallel ranks."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.comm.alone import Ranks, group_or_default
from megatron_burst.comm.announce import announce
from megatron_burst.comm.store import TP
from megatron_burst.loss.attempt import Attempt
from megatron_burst.loss.statistics import WHO, Stat
from megatron_burst.loss.tiles import Sizes

_ROWS_AT_ONCE = 1024  # converted at a time


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens in blocks: a single one, or one per rank if ranks hold parts of the sequence."""

    labels: Tensor  # [blocks, n] int64
    valid: Tensor  # [blocks, n], false where a token is left out
    block: int  # the one whose hidden states this rank holds
    order: Tensor | None  # [blocks, n] int64: the token's index in its block; None: identity
    tokens: int  # per block, including those that are not computed
    sound: Tensor | None = None  # 1, or NaN if no loss of these tokens would be right
    failure: Exception | None = None  # of this rank, which has no data then

    @classmethod
    def lacking(
        cls, blocks: int, tokens: int, block: int, most: int | None, failure: Exception
    ) -> "Rows":
        """Rows of a rank that failed to make them: what its collectives need."""
        count = tokens if most is None else min(most, tokens)
        empty = torch.empty(blocks, count, dtype=torch.int64, device="meta")
        order = None if count == tokens else empty
        return cls(empty, empty, block, order, tokens, failure=failure)

    @classmethod
    def of(cls, labels: Tensor, valid: Tensor, block: int, most: int | None,
           sound: Tensor | None = None) -> "Rows":  # fmt: skip
        """The rows to compute of [blocks, tokens]; `most`: valid ones per block, if known."""
        tokens, order = labels.shape[1], None
        if most is not None and most < tokens:
            order = valid.int().argsort(dim=1, descending=True, stable=True)[:, :most]
            labels, valid = labels.gather(1, order), valid.gather(1, order)
        return cls(labels, valid, block, order, tokens, sound)

    @property
    def count(self) -> int:
        """Rows per block."""
        return self.labels.shape[1]

    def take(self, hidden: Tensor, piece: slice) -> Tensor:
        """Some of this rank's rows [some, h], contiguous; zero where a token is left out: a NaN
        there would reach the weight's gradient, as 0 * NaN is NaN."""
        valid = self.valid[self.block, piece].unsqueeze(1)
        if self.order is None and hidden.is_contiguous():
            return torch.where(valid, hidden.view(-1, hidden.shape[-1])[piece], 0)
        if self.order is None:
            index = torch.arange(piece.start, piece.stop, device=hidden.device)
        else:
            index = self.order[self.block, piece]
        # all indices in one call: a view of strided tokens would be copied entirely
        picked = hidden[torch.unravel_index(index, hidden.shape[:-1])]
        return picked.masked_fill_(~valid, 0)

    def spread(self, values: Tensor) -> Tensor:
        """[blocks, n] as [blocks, tokens], 0 where a token is left out."""
        values = torch.where(self.valid, values, 0)
        if self.order is not None:
            full = values.new_zeros(len(values), self.tokens)
            values = full.scatter_(1, self.order, values)
        return values if self.sound is None else values * self.sound

    def collect(self, values: Tensor) -> Tensor:
        """[blocks, tokens] as [blocks, n], 0 where a token is left out."""
        if self.order is not None:
            values = values.gather(1, self.order)
        values = torch.where(self.valid, values, 0)
        return values if self.sound is None else values * self.sound

    def put(self, full: Tensor, piece: slice, rows: Tensor) -> None:
        """Write this rank's rows of a piece [some, h] to their places in full [tokens, h]."""
        if self.order is None:
            full[piece] = rows
            return
        indices = self.order[self.block, piece].split(_ROWS_AT_ONCE)
        for index, part in zip(indices, rows.split(_ROWS_AT_ONCE), strict=True):
            full.index_copy_(0, index, part.to(full.dtype))


@dataclass(frozen=True, slots=True)
class SupervisedCount:
    """The largest number of valid tokens in a block, while it is copied to the CPU."""

    blocks: int  # number of blocks that were counted
    count: Tensor  # on the CPU, valid once `arrived`
    arrived: torch.cuda.Event | None = None

    def wait(self) -> int:
        """The number; the CPU waits until the GPU has counted."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return int(self.count)


def count_supervised(labels: Tensor, loss_mask: Tensor | None = None, *, ignore_index: int = -100,
                     tp_group: dist.ProcessGroup | None = None,
                     sequence_parallel: bool = False) -> SupervisedCount:  # fmt: skip
    """Start counting the tokens that are not ignored, so that `linear_cross_entropy` skips others.

    Call it as soon as the batch is available, long before the loss. Reading the count then does
    not stall the GPU, which still has the whole forward pass to run. Arguments are those of
    `linear_cross_entropy`, which does not need this on the CPU. If the loss has more tokens than
    were counted, it is refused on the CPU; on a GPU it is NaN.
    """
    tp = TensorParallel.of(tp_group, sequence_parallel)
    most = most_valid(valid_tokens(labels, loss_mask, ignore_index), tp.blocks)
    if tp.group is not None:
        announce(tp.group, {"counted": str(tuple(labels.shape))}, WHO, kind=TP)
        dist.all_reduce(most, dist.ReduceOp.MAX, tp.group)  # all ranks gather equally many
    if not most.is_cuda:
        return SupervisedCount(tp.blocks, most)
    count = torch.empty((), dtype=most.dtype, pin_memory=True)
    count.copy_(most, non_blocking=True)
    return SupervisedCount(tp.blocks, count, torch.cuda.current_stream().record_event())


def valid_tokens(labels: Tensor, loss_mask: Tensor | None, ignore_index: int) -> Tensor:
    """Which tokens are not ignored, contiguous, in the shape of the labels."""
    valid = labels != ignore_index
    return (valid if loss_mask is None else valid & (loss_mask != 0)).contiguous()


def most_valid(valid: Tensor, blocks: int) -> Tensor:
    """The largest number of valid tokens in a block, as a scalar tensor."""
    counts = valid.view(blocks, -1).sum(1) if valid.numel() else valid.sum()
    return counts.max()


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """The ranks that hold parts of the vocabulary."""

    group: dist.ProcessGroup | None = None  # None if one rank holds all of it
    sequence_parallel: bool = False  # whether the sequence is sharded over them too

    @classmethod
    def of(cls, group: Ranks, sequence_parallel: bool) -> "TensorParallel":
        group = None if group is None else group_or_default(group, WHO)
        return cls() if group is None or group.size() == 1 else cls(group, sequence_parallel)

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @property
    def blocks(self) -> int:
        """Number of parts of the sequence."""
        return self.size if self.sequence_parallel else 1

    @property
    def block(self) -> int:
        """The part of the sequence whose hidden states this rank holds."""
        return self.rank if self.sequence_parallel else 0

    def sizes(self, rows: int, hidden: Tensor, weight: Tensor, sum_bytes: int = 0) -> Sizes:
        """The sizes that tiles are chosen for, equal on all ranks. `rows`: of all blocks;
        `sum_bytes`: of the call's other sums."""
        classes, width = weight.shape
        return Sizes(rows, classes, width, hidden.element_size(), self.size, self.blocks,
                     processors_of(hidden.device), sum_bytes)  # fmt: skip

    def attempt(self, like: Tensor, rows: Rows | None = None) -> Attempt:
        """A pass of all ranks, on the device of a tensor."""
        return Attempt(self.group, like.device, None if rows is None else rows.failure)

    def chunks(
        self, attempt: Attempt, hidden: Tensor, rows: Rows, size: int, backwards: bool = False
    ) -> Iterator[tuple[slice, Tensor | None]]:
        """Rows of all blocks, some at a time: (slice of each block, [blocks * some, h]). The next
        ones are sent while the caller computes."""
        step = size // self.blocks
        pieces = [slice(i, min(i + step, rows.count)) for i in range(0, rows.count, step)]
        if backwards:
            pieces.reverse()
        transfer = None
        for piece in pieces:
            own = attempt(rows.take, hidden, piece)
            if self.blocks == 1:
                yield piece, own
                continue
            shape = piece.stop - piece.start, hidden.shape[-1]
            own = attempt.or_nan(own, shape, hidden.dtype)
            shape = self.blocks * shape[0], shape[1]
            gathered = attempt.or_nan(attempt(own.new_empty, shape), shape, own.dtype)
            work = dist.all_gather_into_tensor(gathered, own, self.group, async_op=True)
            if transfer is not None:
                yield _finished(*transfer)
            transfer = piece, gathered, work
            del own, gathered, work
        if transfer is not None:
            yield _finished(*transfer)

    def combine(self, attempt: Attempt, stats: Tensor) -> Tensor | None:
        """Statistics [4, ...] of the whole vocabulary from its parts'; None after a failure."""
        if self.size == 1 or stats.numel() == 0:
            return stats
        # gathered, because sums relative to different maxima cannot be all-reduced
        shape = self.size * len(stats), *stats.shape[1:]
        parts = attempt.or_nan(attempt(stats.new_empty, shape), shape, stats.dtype)
        dist.all_gather_into_tensor(parts, stats.contiguous(), self.group)
        return attempt(_combined, parts.view(self.size, *stats.shape))


def _combined(parts: Tensor) -> Tensor:
    """Statistics of the whole vocabulary, from [ranks, 4, ...]."""
    lses, whole = parts[:, Stat.LSE], parts.sum(0)
    whole[Stat.LSE] = lses.logsumexp(0)
    whole[Stat.MEAN] = ((lses - whole[Stat.LSE]).exp() * parts[:, Stat.MEAN]).sum(0)
    return whole


def _finished(piece: slice, x: Tensor, work: dist.Work) -> tuple[slice, Tensor]:
    work.wait()
    return piece, x


class HiddenGrad:
    """The hidden states' gradient, summed over the vocabulary's parts chunk by chunk.

    At most two reductions are in flight, so their inputs take the memory of two chunks.
    """

    def __init__(self, tp: TensorParallel, rows: Rows, like: Tensor, attempt: Attempt) -> None:
        self._tp, self._rows, self._like, self._attempt = tp, rows, like, attempt
        shape = rows.tokens, like.shape[-1]
        make = like.new_empty if rows.order is None else like.new_zeros
        # [tokens, h], of this rank's tokens; 0 for those that are not computed
        self._grad = attempt(make, shape)
        self._reductions: list[tuple[dist.Work, slice, Tensor, Tensor]] = []

    def put(self, piece: slice, grad: Tensor | None) -> None:
        """Add a chunk of this rank's part, [blocks * some, h] of any dtype; None: it failed."""
        tp, like, attempt = self._tp, self._like, self._attempt
        if tp.size == 1:
            attempt(self._rows.put, self._grad, piece, grad)
            return
        shape = piece.stop - piece.start, like.shape[-1]
        cast = attempt(Tensor.to, grad, like.dtype)
        total = grad = attempt.or_nan(cast, (tp.blocks * shape[0], shape[1]), like.dtype)
        if tp.blocks > 1:
            if self._rows.order is None and self._grad is not None:  # straight to its place
                total = self._grad[piece]
            else:
                total = attempt.or_nan(attempt(grad.new_empty, shape), shape, grad.dtype)
            work = dist.reduce_scatter_tensor(total, grad, group=tp.group, async_op=True)
        else:
            work = dist.all_reduce(grad, group=tp.group, async_op=True)
        self._reductions.append((work, piece, total, grad))
        if len(self._reductions) > 1:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        """Wait for the oldest reduction."""
        work, piece, total, _ = self._reductions.pop(0)
        work.wait()
        if self._rows.order is not None or self._tp.blocks == 1:
            self._attempt(self._rows.put, self._grad, piece, total)

    def finish(self, shape: torch.Size) -> Tensor | None:
        """The whole gradient in a shape; None after a failure."""
        while self._reductions:
            self._finish_oldest()
        return self._attempt(Tensor.view, self._grad, shape)


def processors_of(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 elsewhere."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
