"""The ranks that share a vocabulary: what they send each other of hidden states, statistics and
gradients."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.comm.alone import Ranks, group_or_default
from megatron_burst.loss.attempt import Attempt
from megatron_burst.loss.rows import Rows
from megatron_burst.loss.statistics import WHO, combined
from megatron_burst.loss.tiles import Sizes


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
            if self.blocks == 1:
                yield piece, attempt(rows.take, hidden, piece)
                continue
            rows_and_works = self._gather(attempt, hidden, rows, piece)
            if transfer is not None:
                yield _finished(*transfer)
            transfer = piece, *rows_and_works
            del rows_and_works
        if transfer is not None:
            yield _finished(*transfer)

    def _gather(
        self, attempt: Attempt, hidden: Tensor, rows: Rows, piece: slice
    ) -> tuple[Tensor, list[dist.Work]]:
        """A piece's rows [blocks * some, h] of all ranks, and what has to be waited for."""
        some, width = piece.stop - piece.start, hidden.shape[-1]
        shape = self.blocks * some, width
        gathered = attempt.or_nan(attempt(hidden.new_empty, shape), shape, hidden.dtype)
        if rows.shares is None:
            own = attempt(rows.take, hidden, rows.own(piece))
            own = attempt.or_nan(own, (some, width), hidden.dtype)
            return gathered, [dist.all_gather_into_tensor(gathered, own, self.group, True)]
        works = []
        for part in rows.parts(piece):
            target = gathered[part.of_piece]
            if part.rank == self.rank:
                own = attempt(rows.take, hidden, part.of_all)
                target.copy_(attempt.or_nan(own, target.shape, target.dtype))
            works.append(dist.broadcast(target, None, self.group, True, part.rank))
        return gathered, works

    def combine(self, attempt: Attempt, stats: Tensor) -> Tensor | None:
        """Statistics [4, ...] of the whole vocabulary from its parts'; None after a failure."""
        if self.size == 1 or stats.numel() == 0:
            return stats
        # gathered, because sums relative to different maxima cannot be all-reduced
        return attempt(combined, self.gather(attempt, stats))

    def add_up(self, attempt: Attempt, x: Tensor | None, shape: Sequence[int], dtype: torch.dtype
               ) -> Tensor:  # fmt: skip
        """The sum of all ranks' tensors; NaN after a failure."""
        total = attempt.or_nan(x, shape, dtype).contiguous()
        if self.size > 1 and total.numel():
            dist.all_reduce(total, group=self.group)
        return total

    def gather(self, attempt: Attempt, x: Tensor) -> Tensor:
        """A tensor of each rank, [ranks, ...]."""
        shape = self.size * len(x), *x.shape[1:]
        parts = attempt.or_nan(attempt(x.new_empty, shape), shape, x.dtype)
        dist.all_gather_into_tensor(parts, x.contiguous(), self.group)
        return parts.view(self.size, *x.shape)


def _finished(piece: slice, x: Tensor, works: list[dist.Work]) -> tuple[slice, Tensor]:
    for work in works:
        work.wait()
    return piece, x


class _Reduction(NamedTuple):
    works: list[dist.Work]
    waiting: list[tuple[slice, Tensor]]  # this rank's rows, which are put to their places then
    source: Tensor  # not freed before


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
        self._reductions: list[_Reduction] = []

    def put(self, piece: slice, grad: Tensor | None) -> None:
        """Add a chunk of this rank's part, [blocks * some, h] of any dtype; None: it failed."""
        tp, like, rows, attempt = self._tp, self._like, self._rows, self._attempt
        if tp.size == 1:
            attempt(rows.put, self._grad, rows.own(piece), grad)
            return
        cast = attempt(Tensor.to, grad, like.dtype)
        some, width = piece.stop - piece.start, like.shape[-1]
        total = attempt.or_nan(cast, (tp.blocks * some, width), like.dtype)
        own = [(rows.own(piece), total)]
        if tp.blocks == 1:
            works = [dist.all_reduce(total, group=tp.group, async_op=True)]
        elif rows.shares is None:
            part = attempt.or_nan(
                attempt(total.new_empty, (some, width)), (some, width), like.dtype
            )
            works = [dist.reduce_scatter_tensor(part, total, group=tp.group, async_op=True)]
            own = [(rows.own(piece), part)]
        else:
            shares = list(rows.parts(piece))
            works = [dist.reduce(total[x.of_piece], group=tp.group, async_op=True, group_dst=x.rank)
                     for x in shares]  # fmt: skip
            own = [(x.of_all, total[x.of_piece]) for x in shares if x.rank == tp.rank]
        self._reductions.append(_Reduction(works, own, total))
        if len(self._reductions) > 1:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        """Wait for the oldest reduction."""
        oldest = self._reductions.pop(0)
        for work in oldest.works:
            work.wait()
        for own, values in oldest.waiting:
            self._attempt(self._rows.put, self._grad, own, values)

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
