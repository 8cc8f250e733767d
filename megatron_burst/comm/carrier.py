"""What carries data between ranks: transfers, slots, and where work is queued.

In slots a rank lays what other ranks of its node are to have. Rows are sent by NCCL or gloo
(`SentSlots`), or the ranks who need them pull them through symmetric memory with the GPU's copy
engines, which takes no multiprocessor from the kernels (`PulledSlots`). What goes between two ranks
goes in the same order on both. With a single slot, a round's contents must have been used up before
the next round is filled.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from megatron_burst.schedule.call import Cargo
from megatron_burst.schedule.topology import Link

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


@dataclass(frozen=True, slots=True)
class SentSlots:
    """Slots whose rows are sent to those who need them; two rounds may be under way."""

    buffers: Sequence[Tensor]  # flat bytes, one for each slot
    send: Callable[[Parcels, Parcels], UnderWay]  # (sends, recvs) -> transfer

    def __len__(self) -> int:
        return len(self.buffers)

    def view(self, index: int, shape: Shape, dtype: torch.dtype) -> Tensor:
        """A round's slot as [rows, ...]; the current stream may write it from now on."""
        return _view_as(self.buffers[index % len(self.buffers)], shape, dtype)

    def exchange(
        self, index: int, view: Tensor, gives: Sequence[Give], takes: Sequence[Take]
    ) -> UnderWay:
        """Once the current stream has filled the slot, let everyone have what they take."""
        sends = [(give.peer, view[give.rows]) for give in gives]
        return self.send(sends, [(take.peer, take.target) for take in takes])


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
        self, buffers: Sequence[Mapping[int, Tensor]], barriers: Sequence[Callable[[], None]],
        cp_rank: int, stream: torch.cuda.Stream | None,
    ) -> None:  # fmt: skip
        self._buffers, self._barriers, self._cp_rank = buffers, barriers, cp_rank
        self._stream = stream
        self._rounds = self._first = 0  # since ever, and when this call began
        self._passed: deque[torch.cuda.Event] = deque(maxlen=max(1, len(buffers) - 1))

    def __len__(self) -> int:
        return len(self._buffers)

    @property
    def slot_bytes(self) -> int:
        return self._buffers[0][self._cp_rank].numel()

    def begin(self) -> "PulledSlots":
        """Count rounds from here: a new call."""
        self._first = self._rounds
        return self

    def _number(self, index: int) -> int:
        return (self._first + index) % len(self._buffers)

    def view(self, index: int, shape: Shape, dtype: torch.dtype) -> Tensor:
        """As `SentSlots.view`."""
        is_new = self._first + index == self._rounds
        if is_new and len(self._passed) == self._passed.maxlen:
            torch.cuda.current_stream().wait_event(self._passed[0])
        return _view_as(self._buffers[self._number(index)][self._cp_rank], shape, dtype)

    def exchange(
        self, index: int, view: Tensor, gives: Sequence[Give], takes: Sequence[Take]
    ) -> "Pulled":
        """As `SentSlots.exchange`."""
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
                theirs = _view_as(self._buffers[number][take.peer], shape, view.dtype)
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


Slots = SentSlots | PulledSlots  # of one call


@dataclass(frozen=True, slots=True)
class Pulled:
    """Copies under way; on CPU none is."""

    done: Sequence[torch.cuda.Event]

    def wait(self) -> None:
        """Let the current stream wait until the copies are there."""
        for event in self.done:
            torch.cuda.current_stream().wait_event(event)


def _view_as(buffer: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    """The first bytes of a flat buffer as a tensor."""
    return buffer[: prod(shape) * dtype.itemsize].view(dtype).view(shape)


class OneQueue:
    """Of a CPU, or where nothing is to overlap: what was queued before is done before."""

    @contextmanager
    def on(self, name: Hashable) -> Iterator[None]:
        yield

    def mark(self) -> None:
        pass

    def wait(self, mark: object) -> None:
        pass


class Streams:
    """Of a GPU: the current stream, and others by name, the same ones in every call."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[Hashable, torch.cuda.Stream] = {}

    def on(self, name: Hashable) -> torch.cuda.StreamContext:
        """Within it, work goes to the stream of that name."""
        if name not in self._streams:
            self._streams[name] = torch.cuda.Stream(self._device, priority=-1)
        return torch.cuda.stream(self._streams[name])

    def mark(self) -> torch.cuda.Event:
        """What the current stream has been given so far."""
        return torch.cuda.current_stream(self._device).record_event()

    def wait(self, mark: torch.cuda.Event) -> None:
        """Let the current stream wait until that is done."""
        torch.cuda.current_stream(self._device).wait_event(mark)


class Carrier(Protocol):
    """One rank's end of the wires: a `Communicator`, or a stand-in that joins simulated ranks."""

    cp_rank: int  # this rank
    overlaps: bool  # whether transfers run beside kernels

    def buffers(
        self, use: Hashable, count: int, num_bytes: int, device: torch.device
    ) -> list[Tensor]:
        """Flat byte buffers, the same ones in every call."""

    def slots(self, cargo: Cargo, count: int, num_bytes: int, device: torch.device) -> Slots:
        """Slots for a call, which this rank shares with the others of its node."""

    def send(self, link: Link, cargo: Cargo, sends: Parcels, recvs: Parcels) -> UnderWay:
        """Start behind what the current stream has queued; those between two ranks match in
        order."""

    def queues(self, device: torch.device) -> OneQueue | Streams:
        """Where work of this carrier's calls is queued."""
