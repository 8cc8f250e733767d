"""Moves data between ranks: transfers, slots, and the queues (CUDA streams) of a call.

A slot holds rows for other ranks of the node. NCCL or gloo sends them (`SentSlots`), or the ranks
that need them read them through symmetric memory by copy engine, which takes no multiprocessor from
the kernels (`pulled.PulledSlots`). Two ranks issue the transfers between them in the same order.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.schedule.program import Program
from megatron_burst.schedule.spec import Cargo
from megatron_burst.schedule.topology import Link

_LATEST = 256  # passes: a few steps of a model
Parcels = Sequence[tuple[int, Tensor]]  # (peer cp rank, tensor to send or receive)
SlotRows = Sequence[tuple[int, slice]]  # (peer cp rank, rows of a slot that it reads or is read)


class Handle(Protocol):
    """A handle of work that was started."""

    def wait(self, stream: torch.cuda.Stream | None) -> None:
        """Make the current stream wait for the work; `stream` is that stream, None on CPU."""


class Placement(NamedTuple):
    """The device and the stream that a call runs on."""

    device: torch.device
    stream: int = 0  # the caller's; 0 on CPU

    @classmethod
    def of(cls, x: Tensor) -> "Placement":
        """The placement of a call on this tensor."""
        on_gpu = x.device.type == "cuda"
        return cls(x.device, torch.cuda.current_stream(x.device).cuda_stream if on_gpu else 0)


class Views:
    """Views of some memory by program, reused from call to call until one of them is gone."""

    def __init__(self) -> None:
        self._views: WeakKeyDictionary[object, dict[int, dict]] = WeakKeyDictionary()

    def views(self, program: object, slot: int = 0) -> dict[Hashable, Any]:
        """The views of a program, by its own names; one set for each slot."""
        return self._views.setdefault(program, {}).setdefault(slot, {})


class FlatBuffers(Views):
    """Flat byte buffers of one size for one use, and the placement that they were allocated for."""

    def __init__(self, flats: list[Tensor], placement: Placement | None = None) -> None:
        super().__init__()
        self.flats, self.placement = flats, placement


class BufferSize:
    """(count, bytes) of the buffers of one use: what the largest of the latest passes needs. So one
    long sample does not take memory for good, and lengths that alternate allocate nothing."""

    def __init__(self) -> None:
        self.size, self._most, self._passes = (0, 0), (0, 0), 0

    def changes(self, count: int, nbytes: int) -> bool:
        """Record what a pass needs; returns whether `size` changes."""
        before = self.size
        self._most = _larger(self._most, count, nbytes)
        self._passes += 1
        larger = _larger(before, count, nbytes)
        if larger is not before:
            self.size = larger
        elif self._passes >= _LATEST:
            if 2 * prod(self._most) <= prod(before):
                self.size = self._most
            self._most, self._passes = (0, 0), 0
        return self.size != before


def _larger(size: tuple[int, int], count: int, nbytes: int) -> tuple[int, int]:
    """A size that suffices for this need too; the same object if the size does already."""
    enough = count <= size[0] and nbytes <= size[1]
    return size if enough else (max(size[0], count), max(size[1], nbytes))


class SentSlots:
    """Slots of a call whose rows are sent to the ranks that need them; two rounds may be in flight.

    The program cycles through `count` slots; `memory` may have more, from earlier calls.
    """

    def __init__(
        self, memory: FlatBuffers, count: int, send: Callable[[Parcels, Parcels], Handle]
    ) -> None:
        self._memory, self._count, self._send = memory, count, send

    def views(self, program: object) -> dict[Hashable, Any]:
        return self._memory.views(program)

    def open(self, index: int, stream: torch.cuda.Stream | None) -> None:
        """Allow the current stream to write a round's slot from now on."""

    def flat(self, index: int) -> Tensor:
        """The bytes of this rank's slot of a round."""
        return self._memory.flats[index % self._count]

    def prepare(
        self, index: int, view: Tensor, sends: SlotRows, recvs: SlotRows
    ) -> tuple[Parcels, Sequence[int]]:
        """Prepare a round: rows of this rank's slot, `view` [rows, ...], to send, and rows of other
        ranks' slots to receive. The result can be reused for equal views."""
        return [(peer, view[rows]) for peer, rows in sends], [peer for peer, _ in recvs]

    def transfer(
        self, index: int, prepared: tuple[Parcels, Sequence[int]], targets: Sequence[Tensor],
        queues: "OneQueue | Queues",
    ) -> Handle:  # fmt: skip
        """Start a prepared round once the current stream has filled its slot; what is received goes
        to the targets, in the order of `recvs`."""
        sends, peers = prepared
        return self._send(sends, list(zip(peers, targets, strict=True)))


Slots = Any  # of one call: SentSlots, or PulledSlots, which has the same methods


class DoneHandle(Handle):
    """A handle of work that is already done: to wait for it does nothing."""

    def query(self) -> bool:
        return True


DONE = DoneHandle()


@dataclass(slots=True)
class SendRecvs:
    """Sends and receives in flight."""

    works: Sequence[dist.Work]  # that nothing has waited for yet
    peers: Sequence[int]  # on CPUs, the cp rank of each
    timeout_s: float | None  # of each wait; None on GPUs, where such a wait would block the CPU
    # a weak reference, as the pass log holds transfers: torch's exception -> BurstError
    error_of: Callable[[], Callable[[Exception], Exception]]
    waiting_for: int | None = None  # on CPUs, the cp rank that this process waits for

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Make the current stream (on a CPU this thread) wait for all of them."""
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
        """Whether nothing waits for them any more: on a CPU this process, on a GPU a stream."""
        if self.timeout_s is not None:
            return self.waiting_for is None
        return all(work.is_completed() for work in self.works)


class OneQueue:
    """The queue of a call on CPU, or without overlap: work runs in the order it is queued."""

    stream = name = None

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def switch(self, name: Hashable | None) -> None:
        """As `Queues.switch`."""

    def record(self, event: Handle | None = None) -> Handle:
        """As `Queues.record`."""
        return DONE


class Queues:
    """The queues of a call on a GPU: the caller's stream (name None), and named ones that all calls
    share, `named`. `stream` is the current one, and `name` its name."""

    def __init__(self, device: torch.device, streams: dict[Hashable, torch.cuda.Stream]) -> None:
        self._caller = self.stream = torch.cuda.current_stream(device)
        self.name: Hashable | None = None
        self.placement, self.named = Placement(device, self.stream.cuda_stream), streams

    def switch(self, name: Hashable | None) -> None:
        """Switch to a queue, whose stream is made at first use."""
        stream = self._caller if name is None else self.named.get(name)
        if stream is None:
            stream = self.named[name] = torch.cuda.Stream(self.placement.device, priority=-1)
        self.stream, self.name = stream, name
        torch.cuda.set_stream(stream)

    def record(self, event: Handle | None = None) -> torch.cuda.Event:
        """Record an event on the current stream. `event` is reused, if it is one; nothing may wait
        for it any more."""
        handle = event if isinstance(event, torch.cuda.Event) else torch.cuda.Event()
        handle.record(self.stream)
        return handle


class Transport(Protocol):
    """One rank's end of all transfers: a `Communicator`, or a substitute for simulated ranks."""

    cp_rank: int  # this rank
    overlaps: bool  # whether transfers overlap with kernels

    def buffers(self, use: Hashable, count: int, nbytes: int, placement: Placement) -> FlatBuffers:
        """At least `count` buffers of at least `nbytes`, which the group's calls use one after
        the other."""

    def slots(self, cargo: Cargo, count: int, nbytes: int, placement: Placement) -> Slots:
        """Slots for a call, which this rank shares with the other ranks of its node."""

    def send(self, link: Link, cargo: Cargo, sends: Parcels, recvs: Parcels) -> Handle:
        """Start after the work queued on the current stream. Sends and receives between two ranks
        match in order."""

    def queues(self, device: torch.device) -> OneQueue | Queues:
        """The queues of a call, which starts after the group's previous call."""

    def run(self, program: Program, unit: int, handles: list[Any], waits: Any) -> None:
        """Record that a pass launches its operations; arguments as in `stamps.RunningPass`."""
