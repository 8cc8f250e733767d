"""Moves data between ranks: transfers, slots, and the queues of a call.

A slot holds rows for other ranks of the node. They are sent by NCCL or gloo (`SentSlots`), or the
ranks that need them pull them through symmetric memory with the GPU's copy engines, which takes no
multiprocessor from the kernels (`pulled.PulledSlots`). Two ranks issue the transfers between them
in the same order. With a single slot, a round must be consumed before the next round is written.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.schedule.spec import Cargo
from megatron_burst.schedule.topology import Link

if TYPE_CHECKING:
    from megatron_burst.schedule.program import Program

_LATEST = 256  # passes: a few steps of a model
Parcels = Sequence[tuple[int, Tensor]]  # (peer cp rank, tensor to send or receive)
SlotRows = Sequence[tuple[int, slice]]  # (peer cp rank, rows of a slot that one takes of the other)


class Handle(Protocol):
    """A handle of work that was started."""

    def wait(self, stream: torch.cuda.Stream | None) -> None:
        """Make the current stream, passed in, wait for it; None on CPU."""


class Placement(NamedTuple):
    """Where a call runs."""

    device: torch.device
    stream: int = 0  # the caller's; 0 on CPU

    @classmethod
    def of(cls, x: Tensor) -> "Placement":
        """Where a call on this tensor would run now."""
        on_gpu = x.device.type == "cuda"
        return cls(x.device, torch.cuda.current_stream(x.device).cuda_stream if on_gpu else 0)


class Views:
    """Views that programs made of some memory. They are reused from call to call, until the memory
    is replaced or the program is gone."""

    def __init__(self) -> None:
        self._made: WeakKeyDictionary[object, dict[int, dict]] = WeakKeyDictionary()

    def views(self, of: object, turn: int = 0) -> dict[Hashable, Any]:
        """The views of a program, by its own names; `turn` picks one of several sets."""
        return self._made.setdefault(of, {}).setdefault(turn, {})


class FlatBuffers(Views):
    """Flat byte buffers of one size for one use, and where the call ran that allocated them."""

    def __init__(self, flats: list[Tensor], where: Placement | None = None) -> None:
        super().__init__()
        self.flats, self.placement = flats, where


class BufferSize:
    """How many buffers are held, and of how many bytes: as the largest of the latest passes needs
    them. So one long sample does not take memory for good, and lengths that alternate allocate
    nothing. Ranks that make the same passes hold the same."""

    def __init__(self) -> None:
        self.size, self._most, self._passes = (0, 0), (0, 0), 0

    def changes(self, count: int, num_bytes: int) -> bool:
        """Note what a pass needs; returns whether `size` changes."""
        before = self.size
        self._most = _larger(self._most, count, num_bytes)
        self._passes += 1
        larger = _larger(before, count, num_bytes)
        if larger is not before:
            self.size = larger
        elif self._passes >= _LATEST:
            if 2 * prod(self._most) <= prod(before):
                self.size = self._most
            self._most, self._passes = (0, 0), 0
        return self.size != before


def _larger(size: tuple[int, int], count: int, num_bytes: int) -> tuple[int, int]:
    """A size that suffices for this need too: itself, if it does."""
    enough = count <= size[0] and num_bytes <= size[1]
    return size if enough else (max(size[0], count), max(size[1], num_bytes))


class SentSlots:
    """Slots of a call whose rows are sent to the ranks that need them; two rounds may be in flight.

    Args:
        memory: of the slots; it may have more slots, from earlier calls.
        count: how many slots the call's program cycles through; its waits assume this number.
        send: (sends, recvs) -> transfer.
    """

    def __init__(
        self, memory: FlatBuffers, count: int, send: Callable[[Parcels, Parcels], Handle]
    ) -> None:
        self._memory, self._count, self._send = memory, count, send

    def views(self, of: object) -> dict[Hashable, Any]:
        """See `Views`."""
        return self._memory.views(of)

    def open(self, index: int, stream: torch.cuda.Stream | None) -> None:
        """Allow the current stream to write a round's slot from now on."""

    def flat(self, index: int) -> Tensor:
        """The bytes of this rank's slot of a round."""
        return self._memory.flats[index % self._count]

    def prepare(
        self, index: int, view: Tensor, gives: SlotRows, takes: SlotRows
    ) -> tuple[Parcels, Sequence[int]]:
        """Prepare a round's exchange of rows of this rank's slot, `view` [rows, ...], and of other
        ranks' slots; the result can be reused for equal views."""
        return [(peer, view[rows]) for peer, rows in gives], [peer for peer, _ in takes]

    def transfer(
        self, index: int, ends: tuple[Parcels, Sequence[int]], targets: Sequence[Tensor],
        queues: "OneQueue | Queues",
    ) -> Handle:  # fmt: skip
        """Once the current stream has filled a round's slot, start the exchange that `ends`
        prepared; each take goes to its target."""
        sends, peers = ends
        return self._send(sends, list(zip(peers, targets, strict=True)))


Slots = Any  # of one call: SentSlots, or PulledSlots, which has the same methods


class DoneHandle:
    """A handle of work that is already done."""

    def wait(self, stream: torch.cuda.Stream | None) -> None:
        pass

    def query(self) -> bool:
        """Whether it is done, as torch's events say it."""
        return True


DONE = DoneHandle()


@dataclass(slots=True)
class SendRecvs:
    """Sends and receives in flight.

    Attributes:
        works: torch's handles of those that nothing has waited for.
        peers: the cp rank of each; on CPUs only, where each is waited for by itself.
        timeout_s: for each wait; None on GPUs, where a wait with one would block the CPU.
        lost: what turns torch's exception into ours: a weak reference, as a log holds transfers.
        awaited: the rank that this process waits for, on a CPU.
    """

    works: Sequence[dist.Work]
    peers: Sequence[int]
    timeout_s: float | None
    error_of: Callable[[], Callable[[Exception], Exception]]
    waiting_for: int | None = None

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Make the current stream (on CPU: this thread) wait until all are complete."""
        try:
            if self.timeout_s is None:
                for work in self.works:
                    work.wait()
                return
            works, self.works, limit = self.works, (), timedelta(seconds=self.timeout_s)
            for work, peer in zip(works, self.peers, strict=False):
                self.waiting_for = peer
                work.wait(limit)  # only once: gloo hangs when waited on twice
            self.waiting_for = None
        except RuntimeError as error:
            raise self.error_of()(error) from error

    def query(self) -> bool:
        """Whether nothing waits for them: on a CPU this process, on a GPU a stream."""
        if self.timeout_s is not None:
            return self.waiting_for is None
        return all(work.is_completed() for work in self.works)


class OneQueue:
    """The queue of a call on CPU, or without overlap: work runs in the order it is queued."""

    stream = name = None

    def __init__(self, where: Placement) -> None:
        self.placement = where

    def switch(self, name: Hashable | None) -> None:
        """As `Queues.go`."""

    def record(self, again: Handle | None = None) -> Handle:
        """As `Queues.mark`."""
        return DONE


class Queues:
    """The queues of a call on a GPU: the caller's stream, and named ones, reused by every call;
    missing ones are added. `stream` is the current one, and `name` its name."""

    def __init__(self, device: torch.device, streams: dict[Hashable, torch.cuda.Stream]) -> None:
        self._caller = self.stream = torch.cuda.current_stream(device)
        self.name: Hashable | None = None
        self.placement, self._streams = Placement(device, self.stream.cuda_stream), streams

    def switch(self, name: Hashable | None) -> None:
        """Switch to the stream of that name; None: to the caller's."""
        stream = self._caller if name is None else self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = torch.cuda.Stream(self.placement.device, priority=-1)
        self.stream, self.name = stream, name
        torch.cuda.set_stream(stream)

    def record(self, again: Handle | None = None) -> torch.cuda.Event:
        """Mark all work queued on the current stream so far; `again`: a mark to reuse, which
        nothing waits for any more; it may be from a call with one queue."""
        event = again if isinstance(again, torch.cuda.Event) else torch.cuda.Event()
        event.record(self.stream)
        return event


class Transport(Protocol):
    """One rank's end of all transfers: a `Communicator`, or a substitute for simulated ranks."""

    cp_rank: int  # this rank
    overlaps: bool  # whether transfers overlap with kernels

    def buffers(self, use: Hashable, count: int, num_bytes: int, where: Placement) -> FlatBuffers:
        """At least `count` buffers of at least `num_bytes`, the same ones in every call of the
        group; calls use them one after the other."""

    def slots(self, cargo: Cargo, count: int, num_bytes: int, where: Placement) -> Slots:
        """Slots for a call, which this rank shares with the others of its node."""

    def send(self, link: Link, cargo: Cargo, sends: Parcels, recvs: Parcels) -> Handle:
        """Start after the work queued on the current stream; sends and receives between two ranks
        match in order."""

    def queues(self, device: torch.device) -> OneQueue | Queues:
        """The queues of a call, which begins when the group's call before it is over."""

    def run(self, program: "Program", unit: int, over: list[Any], waits: Any) -> None:
        """Note that a pass issues its operations; arguments as in `stamps.RunningPass`."""
