"""A call that a CUDA graph captures (not on the reading path).

A replay runs the kernels and transfers of a call again, but none of its Python code: nothing is
compared between ranks, and nothing is checked. So a captured call depends on no other call:

- Its buffers are the graph's own memory.
- Slots that other ranks read belong to graphs alone, from the first capture that needs them on.
- It begins with a barrier, because the call before it, which may be itself, has used these slots.
- Its barriers and sends follow each other. A graph keeps the order of streams and events alone, and
  ranks that wait for each other on two streams in different orders would wait forever.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import fields
from functools import partial
from typing import Any

import torch

from megatron_burst.comm.communicator import Communicator
from megatron_burst.comm.detector import PassAnnouncer
from megatron_burst.comm.transport import (
    FlatBuffers,
    OneQueue,
    Parcels,
    Placement,
    Queues,
    SendRecvs,
    Slots,
)
from megatron_burst.engine.executor import Executor
from megatron_burst.engine.passes import Passes
from megatron_burst.engine.ranges import METER
from megatron_burst.engine.run import Run
from megatron_burst.errors import Need, require
from megatron_burst.schedule.program import Program
from megatron_burst.schedule.spec import Cargo
from megatron_burst.schedule.topology import Link

_WHO = "burst attention"


class CapturedPasses(Passes):
    """Forward and backward of a call in a CUDA graph."""

    @property
    def _executor_type(self) -> type[Executor]:
        return CapturedExecutor


def captured(passes: Passes | None) -> Passes:
    """The passes of a call for the graph that is being captured; `passes`: what the call runs
    outside of graphs, None if it has never run.

    Raises:
        BurstError: if a graph cannot hold the call.
    """
    if isinstance(passes, CapturedPasses):
        return passes
    require(_WHO, _needs(passes))
    values = {field.name: getattr(passes, field.name) for field in fields(Passes)}
    announcer, recomputed = passes.announcer, passes.for_recompute
    # a rank that runs the call instead of capturing it would wait for the others
    terms = {**announcer.terms, "in a CUDA graph": "yes"}
    values["announcer"] = PassAnnouncer.of(announcer.log, terms)
    values["transport"] = CapturedTransport(passes.transport)
    values["for_recompute"] = recomputed and captured(recomputed)
    return CapturedPasses(**values)


def _needs(passes: Passes | None) -> Iterator[Need]:
    yield (passes is not None, "a call must have run once before a CUDA graph captures it, because "
           "ranks agree on it and allocate memory for each other then", "a call that has not run",
           "run it once, forward and backward, before the capture")  # fmt: skip
    for option, value in (("keep", passes.keep), ("check", passes.check),
                          ("nan_guard", passes.nan_guard)):  # fmt: skip
        yield (not value, f"{option} must be off while a CUDA graph is captured, because a replay "
               "does not run the Python code that keeps and compares results", f"{option} is on",
               f"leave {option} out of the call's BurstConfig")  # fmt: skip
    reads = passes.backend.capability.name == "reference" and passes.spec.mask.documents
    yield (not reads, "the backend must not be reference for packed samples while a CUDA graph is "
           "captured, because it reads boundaries on the CPU", "backend reference",
           "choose fa4 or triton")  # fmt: skip


class CapturedExecutor(Executor):
    """Runs a program into a graph."""

    def run(self, *args: Any, **options: Any) -> Run:
        metered, METER.on = METER.on, False  # events of a graph have no times
        try:
            run = super().run(*args, **options)
        finally:
            METER.on = metered
        self.transport.join(run.queues)
        return run


class LaunchOrder:
    """Lets work that waits for other ranks run one after the other, on whatever streams."""

    def __init__(self) -> None:
        self._latest: torch.cuda.Event | None = None

    def launch[T](self, work: Callable[[], T]) -> T:
        """Launch work on the current stream, once the work before it is done; returns its handle,
        if it has one."""
        stream = torch.cuda.current_stream()
        if self._latest is not None:
            stream.wait_event(self._latest)
        handle = work()
        if isinstance(handle, SendRecvs):
            handle.wait(stream)
        self._latest = stream.record_event()
        return handle


class CapturedTransport(Communicator):
    """The transfers of a captured call, over the groups of a communicator. A backward that is not
    captured, of a captured forward, runs as others do."""

    def __init__(self, communicator: Communicator) -> None:
        vars(self).update(vars(communicator))
        self._in_graph, self._order = True, LaunchOrder()  # of the latest call

    def buffers(self, use: Hashable, count: int, nbytes: int, placement: Placement) -> FlatBuffers:
        """New buffers, whose memory the graph's later calls use again."""
        if not self._in_graph:
            return super().buffers(use, count, nbytes, placement)
        empty = partial(torch.empty, nbytes, dtype=torch.uint8, device=placement.device)
        return FlatBuffers([empty() for _ in range(count)], placement)

    def queues(self, device: torch.device, follows: bool = False) -> OneQueue | Queues:
        """As `Transport.queues`; the calls of a graph follow each other already."""
        self._in_graph = torch.cuda.is_current_stream_capturing()
        self._order = LaunchOrder()
        return super().queues(device, follows or not self._in_graph)

    def slots(self, cargo: Cargo, count: int, nbytes: int, placement: Placement) -> Slots:
        """Slots of graphs, behind a barrier; or buffers to send from."""
        if self.transfer.value != "pull" or not self._in_graph:
            return super().slots(cargo, count, nbytes, placement)
        slots = self.pool.slots_of_graphs(cargo, count, nbytes, self._order.launch)
        require(_WHO, [
            (slots is not None, "memory that other ranks read must be there before a CUDA graph is "
             "captured, because all ranks allocate it together",
             f"a call that needs {count * nbytes / 2**20:.1f} MiB",
             "run it once, forward and backward, directly before the capture"),
        ])  # fmt: skip
        return slots

    def send(self, link: Link, cargo: Cargo, sends: Parcels, recvs: Parcels) -> SendRecvs:
        """As `Transport.send`."""
        send = partial(super().send, link, cargo, sends, recvs)
        return self._order.launch(send) if self._in_graph else send()

    def run(self, program: Program, unit: int, handles: list[Any], waits: Any) -> None:
        """Record nothing of a captured call, which has not run."""
        if not self._in_graph:
            super().run(program, unit, handles, waits)

    def join(self, queues: OneQueue | Queues) -> None:
        """Make the caller's stream wait for all others, as a capture must end on one stream."""
        for stream in queues.named.values() if isinstance(queues, Queues) else ():
            with torch.cuda.stream(stream):
                joins = torch.cuda.is_current_stream_capturing()
            if joins:
                queues.stream.wait_stream(stream)
