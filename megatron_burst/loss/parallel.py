"""What travels between tensor-parallel ranks: rows, their gradients, statistics."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.loss.rows import Rows
from megatron_burst.loss.statistics import Stat
from megatron_burst.loss.tiles import Sizes


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """The ranks that hold parts of the vocabulary.

    Attributes:
        group: None where one rank holds all of it.
        sequence_parallel: whether each also holds a part of the sequence only.
    """

    group: dist.ProcessGroup | None = None
    sequence_parallel: bool = False

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @property
    def blocks(self) -> int:
        """Into how many parts the sequence is split."""
        return self.size if self.sequence_parallel else 1

    def chunks(
        self, hidden: Tensor, rows: Rows, size: int, backwards: bool = False
    ) -> Iterator[tuple[slice, Tensor]]:
        """Rows of all blocks, some at a time: (which of a block, [blocks * some, h]).

        The next ones are on their way while the caller computes.
        """
        step = size // self.blocks
        pieces = [slice(i, min(i + step, rows.count)) for i in range(0, rows.count, step)]
        if backwards:
            pieces.reverse()
        if self.blocks == 1:
            for piece in pieces:
                yield piece, rows.take(hidden, piece.start, piece.stop)
            return
        coming = None
        for piece in pieces:
            started = piece, *self._start_gather(rows.take(hidden, piece.start, piece.stop))
            if coming is not None:
                yield self._landed(*coming)
            coming = started
        if coming is not None:
            yield self._landed(*coming)

    def _start_gather(self, mine: Tensor) -> tuple[Tensor, dist.Work]:
        everyones = mine.new_empty(self.blocks * mine.shape[0], mine.shape[1])
        work = dist.all_gather_into_tensor(everyones, mine, self.group, async_op=True)
        return everyones, work

    @staticmethod
    def _landed(piece: slice, x: Tensor, work: dist.Work) -> tuple[slice, Tensor]:
        work.wait()
        return piece, x

    def combine(self, stats: Tensor) -> Tensor:
        """Statistics [4, ...] over the whole vocabulary from those of its parts: one collective.

        Sums relative to different maxima cannot be added on the way, so ranks get all parts.
        """
        if self.size == 1 or stats.numel() == 0:
            return stats
        parts = stats.new_empty(self.size * len(stats), *stats.shape[1:])
        dist.all_gather_into_tensor(parts, stats.contiguous(), self.group)
        parts = parts.view(self.size, *stats.shape)
        lses = parts[:, Stat.LSE]
        whole = parts.sum(0)
        whole[Stat.LSE] = lses.logsumexp(0)
        whole[Stat.MEAN] = ((lses - whole[Stat.LSE]).exp() * parts[:, Stat.MEAN]).sum(0)
        return whole


class HiddenGrad:
    """The hidden states' gradient, summed over the vocabulary's parts as chunks come.

    At most two sums are under way, so what they read takes the memory of two chunks.

    Attributes:
        mine: [tokens, h], of this rank's tokens; 0 where one is not computed.
    """

    def __init__(self, tp: TensorParallel, rows: Rows, like: Tensor) -> None:
        self._tp, self._rows = tp, rows
        shape = rows.tokens, like.shape[-1]
        self.mine = like.new_empty(shape) if rows.order is None else like.new_zeros(shape)
        self._under_way: list[tuple[dist.Work, slice, Tensor, Tensor]] = []

    def put(self, piece: slice, grad: Tensor) -> None:
        """Take a chunk [blocks * some, h] of this rank's part of the sum, of any dtype."""
        tp = self._tp
        if tp.size == 1:
            return self._rows.put(self.mine, piece, grad)
        some = grad = grad.to(self.mine.dtype)
        if tp.blocks > 1:
            if self._rows.order is None:  # straight to its place
                some = self.mine[piece]
            else:
                some = grad.new_empty(len(grad) // tp.blocks, grad.shape[1])
            work = dist.reduce_scatter_tensor(some, grad, group=tp.group, async_op=True)
        else:
            work = dist.all_reduce(grad, group=tp.group, async_op=True)
        self._under_way.append((work, piece, some, grad))
        if len(self._under_way) > 1:
            self._land()

    def _land(self) -> None:
        """Wait for the oldest sum."""
        work, piece, some, _ = self._under_way.pop(0)
        work.wait()
        if self._rows.order is not None or self._tp.blocks == 1:
            self._rows.put(self.mine, piece, some)

    def finish(self) -> Tensor:
        """All of it."""
        while self._under_way:
            self._land()
        return self.mine


def sizes_of(rows: int, hidden: Tensor, weight: Tensor, tp: TensorParallel, held: int = 0) -> Sizes:
    """What tiles are chosen for; the same on all ranks, which compute the same chunks together.

    Args:
        rows: of all blocks.
        hidden: of the model's dtype.
        weight: [vocab / tp, h].
        tp: ranks that share the vocabulary.
        held: bytes of sums that the call holds besides.
    """
    return Sizes(rows, *weight.shape, hidden.element_size(), tp.size, tp.blocks,
                 processors_of(hidden.device), held)  # fmt: skip


def processors_of(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 elsewhere."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def first_class(tp: TensorParallel, weight: Tensor) -> int:
    """The first class of this rank's part of the vocabulary."""
    return tp.rank * weight.shape[0]


def out_of_range(rows: Rows, vocab: int) -> Tensor:
    """[blocks, n], true where a token that counts has a label outside of the vocabulary."""
    return rows.valid & ((rows.labels < 0) | (rows.labels >= vocab))


def poisoned(stats: Tensor) -> Tensor:
    """Statistics whose LSE is NaN where the target's logit is: loss and gradient become NaN."""
    target = stats[Stat.TARGET]
    stats[Stat.LSE] = torch.where(target.isnan(), target, stats[Stat.LSE])
    return stats
