"""Slots in which a rank lays what other ranks of its node are to have, and how they get it.

Rows are sent by NCCL or gloo (`SentSlots`), or the ranks who need them pull them through symmetric
memory with the GPU's copy engines, which takes no multiprocessor from the kernels (`PulledSlots`).
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

Shape = tuple[int, ...]
Parcels = Sequence[tuple[int, Tensor]]  # (the cp rank at the other end, what goes or comes)


class UnderWay(Protocol):
    """Something that was started and that the current stream can wait for."""

    def wait(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Give:
    """Rows of this rank's slot that another rank takes."""

    peer: int
    rows: slice


@dataclass(frozen=True, slots=True)
class Take:
    """Rows of another rank's slot, and where they go."""

    peer: int
    rows: slice
    target: Tensor


class Slots(Protocol):
    """The slots of one call. What goes between two ranks goes in the same order on both.

    With a single slot, a round's contents must have been used up before the next round is filled.
    """

    def __len__(self) -> int: ...

    def view(self, index: int, shape: Shape, dtype: torch.dtype) -> Tensor:
        """A round's slot as [rows, ...]; the current stream may write it from now on."""

    def exchange(
        self, index: int, view: Tensor, gives: Sequence[Give], takes: Sequence[Take]
    ) -> UnderWay:
        """Once the current stream has filled the slot, let everyone have what they take."""


class SentSlots:
    """Slots whose rows are sent to those who need them; two rounds may be under way.

    Args:
        buffers: flat bytes, one for each slot.
        exchange: (sends, recvs) -> transfer.
    """

    def __init__(
        self, buffers: Sequence[Tensor], exchange: Callable[[Parcels, Parcels], UnderWay]
    ) -> None:
        self._buffers, self._exchange = buffers, exchange

    def __len__(self) -> int:
        return len(self._buffers)

    def view(self, index: int, shape: Shape, dtype: torch.dtype) -> Tensor:
        return view_as(self._buffers[index % len(self._buffers)], shape, dtype)

    def exchange(
        self, index: int, view: Tensor, gives: Sequence[Give], takes: Sequence[Take]
    ) -> UnderWay:
        sends = [(give.peer, view[give.rows]) for give in gives]
        return self._exchange(sends, [(take.peer, take.target) for take in takes])


class PulledSlots:
    """Slots that other ranks read for themselves.

    Flow control is one barrier of the ranks a round, behind the kernels that fill the slot and
    before the copies that read it, on a stream of its own. A slot is filled again once the barrier
    of a later round has shown that everyone's copies out of it are behind them; so there is one
    slot more than rounds under way, and numbers go on from call to call. A single slot has no later
    round to tell, and takes a second barrier behind the copies.

    Args:
        buffers: for each slot, flat bytes of every rank by cp rank.
        barriers: for each slot, what lets the current stream wait for that of all other ranks.
        cp_rank: this rank.
        stream: for barriers and copies; None on CPU.
    """

    def __init__(
        self,
        buffers: Sequence[Mapping[int, Tensor]],
        barriers: Sequence[Callable[[], None]],
        cp_rank: int,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._buffers, self._barriers, self._cp_rank = buffers, barriers, cp_rank
        self._stream = stream
        self._rounds = self._first = 0  # since ever, and when this call began
        self._passed: deque[torch.cuda.Event] = deque(maxlen=max(1, len(buffers) - 1))

    def __len__(self) -> int:
        return len(self._buffers)

    @property
    def slot_bytes(self) -> int:
        return self._buffers[0][self._cp_rank].numel()

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's slots together."""
        return len(self) * self.slot_bytes

    def begin(self) -> "PulledSlots":
        """Count rounds from here: a new call."""
        self._first = self._rounds
        return self

    def _number(self, index: int) -> int:
        return (self._first + index) % len(self._buffers)

    def view(self, index: int, shape: Shape, dtype: torch.dtype) -> Tensor:
        is_new = self._first + index == self._rounds
        if is_new and len(self._passed) == self._passed.maxlen:
            torch.cuda.current_stream().wait_event(self._passed[0])
        return view_as(self._buffers[self._number(index)][self._cp_rank], shape, dtype)

    def exchange(
        self, index: int, view: Tensor, gives: Sequence[Give], takes: Sequence[Take]
    ) -> UnderWay:
        number, done = self._number(index), []
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            self._barriers[number]()
            if len(self) > 1:
                self._record(self._passed)
            for take in takes:
                # the other rank's slot may have more rows than this one's, but rows as wide
                shape = (take.rows.stop, *view.shape[1:])
                theirs = view_as(self._buffers[number][take.peer], shape, view.dtype)
                take.target.copy_(theirs[take.rows], non_blocking=True)
            self._record(done)
            if len(self) == 1:
                self._barriers[number]()
                self._record(self._passed)
        self._rounds += 1
        return Pulled(done)

    def _record(self, events: list | deque) -> None:
        if self._stream:
            events.append(self._stream.record_event())


@dataclass(frozen=True, slots=True)
class Pulled:
    """Copies under way; on CPU none is."""

    done: Sequence[torch.cuda.Event]

    def wait(self) -> None:
        """Let the current stream wait until the copies are there."""
        for event in self.done:
            torch.cuda.current_stream().wait_event(event)


def view_as(buffer: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    """The first bytes of a flat buffer as a tensor."""
    return buffer[: size_in_bytes(shape, dtype)].view(dtype).view(shape)


def size_in_bytes(shape: Shape, dtype: torch.dtype) -> int:
    """Bytes of a dense tensor."""
    return prod(shape) * dtype.itemsize
