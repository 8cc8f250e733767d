"""What carries data between ranks: transfers, slots, and where work is queued.

In slots a rank lays what other ranks of its node are to have. Rows are sent by NCCL or gloo
(`SentSlots`), or the ranks who need them pull them through symmetric memory with the GPU's copy
engines, which takes no multiprocessor from the kernels (`PulledSlots`). What goes between two ranks
goes in the same order on both. With a single slot, a round's contents must have been used up before
the next round is filled.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from megatron_burst.schedule.call import Cargo
from megatron_burst.schedule.topology import Link

Parcels = Sequence[tuple[int, Tensor]]  # (the cp rank at the other end, what goes or comes)


class UnderWay(Protocol):
    """Something that was started."""

    def wait(self, stream: torch.cuda.Stream | None) -> None:
        """Let the current stream wait for it, which is given; None on a CPU."""


class Where(NamedTuple):
    """Where a call runs: calls of one stream have buffers of their own."""

    device: torch.device
    stream: int = 0  # the caller's; 0 on a CPU

    @classmethod
    def of(cls, x: Tensor) -> "Where":
        """Where a call on this tensor runs if it begins now."""
        on_gpu = x.device.type == "cuda"
        return cls(x.device, torch.cuda.current_stream(x.device).cuda_stream if on_gpu else 0)


@dataclass(frozen=True, slots=True)
class Give:
    """Rows of this rank's slot that another rank takes."""

    peer: int
    rows: slice


@dataclass(frozen=True, slots=True)
class Take:
    """Rows of another rank's slot."""

    peer: int
    rows: slice


class Views:
    """What programs have made of some memory: it stays from call to call, and goes with the memory
    when that is replaced, or with the program."""

    def __init__(self) -> None:
        self._made: WeakKeyDictionary[object, dict[int, dict]] = WeakKeyDictionary()

    def views(self, of: object, turn: int = 0) -> dict[Hashable, Any]:
        """Those of a program, by its own names; `turn`: of several sets."""
        sets = self._made.get(of)
        if sets is None:
            sets = self._made[of] = {}
        return sets.setdefault(turn, {})


class Memory(Views):
    """Flat byte buffers of one use.

    Args:
        flats: the buffers, equally large.
    """

    def __init__(self, flats: list[Tensor]) -> None:
        super().__init__()
        self.flats = flats


class SentSlots:
    """Slots of a call whose rows are sent to those who need them; two rounds may be under way.

    Args:
        memory: of the slots; it may have more, of calls before.
        count: how many slots the call's program takes in turn: its waits are for so many.
        send: (sends, recvs) -> transfer.
    """

    def __init__(
        self, memory: Memory, count: int, send: Callable[[Parcels, Parcels], UnderWay]
    ) -> None:
        self._memory, self._count, self._send = memory, count, send

    def views(self, of: object) -> dict[Hashable, Any]:
        """See `Views`."""
        return self._memory.views(of)

    def open(self, index: int, stream: torch.cuda.Stream | None) -> None:
        """Let the current stream write a round's slot from now on."""

    def flat(self, index: int) -> Tensor:
        """The bytes of a round's slot, of this rank."""
        return self._memory.flats[index % self._count]

    def ends(
        self, index: int, view: Tensor, gives: Sequence[Give], takes: Sequence[Take]
    ) -> tuple[Parcels, Sequence[int]]:
        """What a round's exchange needs of the slots; the same for equal views.

        Args:
            index: of the round.
            view: its slot as [rows, ...].
            gives: rows of it that others take.
            takes: rows of other ranks' slots.
        """
        return [(give.peer, view[give.rows]) for give in gives], [take.peer for take in takes]

    def exchange(
        self, index: int, ends: tuple[Parcels, Sequence[int]], targets: Sequence[Tensor],
        queues: "OneQueue | Queues",
    ) -> UnderWay:  # fmt: skip
        """Once the current stream has filled the slot, let everyone have what they take.

        Args:
            index: of the round.
            ends: as `ends` found them.
            targets: where each take goes.
            queues: of the call.
        """
        sends, peers = ends
        return self._send(sends, list(zip(peers, targets, strict=True)))


class PulledSlots(Views):
    """Slots that other ranks read for themselves.

    Flow control is one barrier of the ranks a round, behind the kernels that fill the slot and
    before the copies that read it, all on the current stream. A slot is filled again once the
    barrier of a later round has shown that everyone's copies out of it are behind them; so there is
    one slot more than rounds under way, and numbers go on from call to call. A single slot has no
    later round to tell, and takes a second barrier behind the copies.

    Args:
        buffers: for each slot, flat bytes of every rank by cp rank.
        barriers: for each slot, what lets the current stream wait for that of all other ranks.
        cp_rank: this rank.
    """

    def __init__(
        self, buffers: Sequence[Mapping[int, Tensor]], barriers: Sequence[Callable[[], None]],
        cp_rank: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self._buffers, self._barriers, self._cp_rank = buffers, barriers, cp_rank
        self._rounds = self._first = 0  # since ever, and when this call began
        # by slot, when the barrier of its last round that frees another one was passed
        self._passed: list[UnderWay | None] = [None] * len(buffers)

    def __len__(self) -> int:
        return len(self._buffers)

    @property
    def slot_bytes(self) -> int:
        return self._buffers[0][self._cp_rank].numel()

    def begin(self) -> "PulledSlots":
        """Count rounds from here: a new call."""
        self._first = self._rounds
        return self

    def views(self, of: object, turn: int = 0) -> dict[Hashable, Any]:
        """See `Views`: another set for each slot that a call may begin with."""
        return super().views(of, self._number(turn))

    def _number(self, index: int) -> int:
        return (self._first + index) % len(self._buffers)

    def open(self, index: int, stream: torch.cuda.Stream | None) -> None:
        """As `SentSlots.open`."""
        # of the round that was as many rounds ago as there are other slots: of a single slot, 1
        passed = self._passed[self._number(index + 1)]
        if passed is not None and self._first + index == self._rounds:
            passed.wait(stream)

    def flat(self, index: int) -> Tensor:
        """As `SentSlots.flat`."""
        return self._buffers[self._number(index)][self._cp_rank]

    def ends(
        self, index: int, view: Tensor, gives: Sequence[Give], takes: Sequence[Take]
    ) -> "Pulls":
        """As `SentSlots.ends`."""
        of_rank, width = self._buffers[self._number(index)], prod(view.shape[1:])
        # the other rank's slot may have more rows than this one's, but rows as wide
        return Pulls([
            of_rank[take.peer].view(view.dtype)[: take.rows.stop * width]
            .view(-1, *view.shape[1:])[take.rows]
            for take in takes
        ])  # fmt: skip

    def exchange(
        self, index: int, ends: "Pulls", targets: Sequence[Tensor], queues: "OneQueue | Queues"
    ) -> UnderWay:
        """As `SentSlots.exchange`."""
        number = self._number(index)
        self._barriers[number]()
        if len(self) > 1:
            self._passed[number] = queues.mark(self._passed[number])
        for target, theirs in zip(targets, ends.sources, strict=True):
            target.copy_(theirs, non_blocking=True)
        done = ends.done = queues.mark(ends.done)
        if len(self) == 1:
            self._barriers[number]()
            self._passed[number] = queues.mark(self._passed[number])
        self._rounds += 1
        return done


@dataclass(slots=True)
class Pulls:
    """What an exchange copies, and when it was last done.

    Attributes:
        sources: rows of other ranks' slots.
        done: the mark of the last time, to be used again.
    """

    sources: Sequence[Tensor]
    done: UnderWay | None = None


Slots = SentSlots | PulledSlots  # of one call


class Over:
    """What is done by the time that it was started."""

    def wait(self, stream: torch.cuda.Stream | None) -> None:
        pass


OVER = Over()


class OneQueue:
    """Of a call on a CPU, or where nothing is to overlap: what was queued before is done before.

    Args:
        where: the call runs.
    """

    stream = None

    def __init__(self, where: Where) -> None:
        self.where = where

    def go(self, name: Hashable | None) -> None:
        """As `Queues.go`."""

    def mark(self, again: UnderWay | None = None) -> UnderWay:
        """As `Queues.mark`."""
        return OVER


class Queues:
    """Of a call on a GPU: the caller's stream, and others by name, the same ones in every call.

    Args:
        device: of the call.
        streams: by name; those that are missing are added.

    Attributes:
        where: the call runs.
        stream: the current one.
    """

    def __init__(self, device: torch.device, streams: dict[Hashable, torch.cuda.Stream]) -> None:
        self._caller = self.stream = torch.cuda.current_stream(device)
        self.where, self._streams = Where(device, self.stream.cuda_stream), streams

    def go(self, name: Hashable | None) -> None:
        """Let work go to the stream of that name from now on; None: to the caller's."""
        stream = self._caller if name is None else self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = torch.cuda.Stream(self.where.device, priority=-1)
        self.stream = stream
        torch.cuda.set_stream(stream)

    def mark(self, again: UnderWay | None = None) -> torch.cuda.Event:
        """What the current stream has been given so far; `again`: a mark that nobody will wait for
        any more, of a call that may have had one queue."""
        event = again if isinstance(again, torch.cuda.Event) else torch.cuda.Event()
        event.record(self.stream)
        return event


class Carrier(Protocol):
    """One rank's end of the wires: a `Communicator`, or a stand-in that joins simulated ranks."""

    cp_rank: int  # this rank
    overlaps: bool  # whether transfers run beside kernels

    def buffers(self, use: Hashable, count: int, num_bytes: int, where: Where) -> Memory:
        """At least so many buffers of at least so many bytes, the same ones in every call."""

    def slots(self, cargo: Cargo, count: int, num_bytes: int, where: Where) -> Slots:
        """Slots for a call, which this rank shares with the others of its node."""

    def send(self, link: Link, cargo: Cargo, sends: Parcels, recvs: Parcels) -> UnderWay:
        """Start behind what the current stream has queued; those between two ranks match in
        order."""

    def queues(self, device: torch.device) -> OneQueue | Queues:
        """Where the work of a call is queued."""

    def time_transfers(self) -> None:
        """Have NCCL note from now on how long its transfers take."""
