"""GPU streams running concurrently: any two uses of a buffer must be ordered.

Ranks are simulated; each keeps a clock per stream. A stream learns what happened on another once it
waits for it. Guards against side work that kernels do not wait for, and buffers that are refilled
while another stream may still read them. Accesses to other ranks' memory are not covered.
"""

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import count

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_burst.comm.transport import Placement
from megatron_burst.engine import run
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.order import order
from megatron_burst.schedule.spec import Circulate
from megatron_burst.schedule.topology import pretend_nodes
from tests.attention import simulated
from tests.attention.engine import Passes, Way, problem
from tests.oracle import rows_of


@cache
def touched(function):
    """Place, name and whether it is written of each argument of an operation that may be a tensor
    and is no mere view of one: reading a schema takes longer than most operations here."""
    arguments = enumerate(function._schema.arguments)
    return [
        (place, x.name, x.alias_info is not None) for place, x in arguments
        if "Tensor" in str(x.type) and (x.alias_info is None or x.alias_info.is_write)
    ]  # fmt: skip


class Streams(TorchDispatchMode):
    """A rank's streams: what each did to buffers, and what each knows of the others."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # nothing is compiled, and skipping takes as long as an operation

    def __init__(self):
        super().__init__()
        self.races, self._muted, self.placement = [], False, Placement(torch.device("cpu"))
        self.stream, self.name, self.current = "main", None, "main"
        self._clock, self._known = defaultdict(int), defaultdict(lambda: defaultdict(int))
        self._uses = {}  # by a buffer's address range
        self._alive = []  # nothing else may get a freed buffer's addresses

    def track(self, buffer):
        start = buffer.data_ptr()
        self._uses[start, start + buffer.nbytes] = {}
        self._alive.append(buffer)
        return buffer

    def here(self):
        """What the current stream has completed."""
        return {**self._known[self.current], self.current: self._clock[self.current]}

    def unfinished(self):
        """Streams whose last use the current one has not waited for."""
        here = self.here()
        return [stream for stream, time in self._clock.items() if here.get(stream, 0) < time]

    def wait(self, times):
        """Make the current stream wait for these times."""
        known = self._known[self.current]
        for stream, time in times.items():
            known[stream] = max(known[stream], time)

    def switch(self, name):
        self.stream = self.current = name or "main"
        self.name = name

    def record(self, reuse=None):
        if reuse is None:
            return Mark(self, self.here())
        reuse._times = self.here()  # like an event that is recorded again
        return reuse

    @contextmanager
    def on(self, stream):
        before, here = self.current, self.here()
        self.current = stream
        self.wait(here)
        yield
        self.current = before

    @contextmanager
    def muted(self):
        before, self._muted = self._muted, True
        yield
        self._muted = before

    def use(self, tensor, writes):
        if self._muted or not tensor.numel():
            return
        start = tensor.data_ptr()
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        stop = start + (1 + sum((n - 1) * step for n, step in steps)) * tensor.itemsize
        for (first, last), uses in self._uses.items():
            if first <= start < last:
                self._check(uses, start, stop, writes)

    def _check(self, uses, start, stop, writes):
        known = self._known[self.current]
        for (stream, other_start, other_stop, wrote), time in uses.items():
            apart = stop <= other_start or other_stop <= start
            if stream == self.current or apart or not (writes or wrote) or time <= known[stream]:
                continue
            self.races.append((stream, wrote, self.current, writes))
        self._clock[self.current] += 1
        # of a stream's equal uses the last is enough: who has waited for it has for all
        uses[self.current, start, stop, writes] = self._clock[self.current]

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.empty.memory_format and result.dtype is torch.uint8:
            self.track(result)  # what stays of an all-to-all
        for place, name, writes in touched(function):
            given = args[place] if place < len(args) else (kwargs or {}).get(name)
            for x in given if isinstance(given, list | tuple) else (given,):
                if isinstance(x, torch.Tensor):
                    self.use(x, writes)
        return result


class Mark:
    """What a stream had done when it was set; waiting for it passes that on, for a transfer once
    complete."""

    def __init__(self, streams, times, transfer=None):
        self._streams, self._times, self._transfer = streams, times, transfer

    def wait(self, stream):
        assert stream == self._streams.current
        with self._streams.muted():
            if self._transfer:
                self._transfer.wait(None)
        self._streams.wait(self._times)


class StreamCarrier(simulated.SimulatedCarrier):
    """A carrier whose transfers and side work have their own streams."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.streams = Streams()

    def buffers(self, *args):
        with self.streams.muted():
            return super().buffers(*args)

    def _room(self, *args):
        return self.streams.track(super()._room(*args))

    def queues(self, device):
        return self.streams

    def send(self, link, cargo, sends, recvs):
        with self.streams.on(f"{link} {cargo} data"):
            for _, x in sends:
                self.streams.use(x, writes=False)
            for _, x in recvs:
                self.streams.use(x, writes=True)
            done = self.streams.here()
        with self.streams.muted():
            transfer = super().send(link, cargo, sends, recvs)
        # an empty transfer orders nothing
        return Mark(self.streams, done if [*sends, *recvs] else {}, transfer)


def races(monkeypatch, nodes, ranks, way):
    """Unordered uses in two back-to-back calls on each rank."""
    monkeypatch.setattr(simulated, "SimulatedCarrier", StreamCarrier)
    topology, tokens = pretend_nodes(nodes * ranks, nodes), 8
    heads = (12, 12) if topology.cp_size == 6 else (8, 4)
    tensors = problem(topology.cp_size, tokens, heads, (4, 4), 0)

    def one(rank, carrier):
        rows = rows_of(Layout.ZIGZAG, rank, topology.cp_size, tokens)
        shard = [x[:, rows] for x in tensors]
        passes = Passes(way, topology, shard, carrier)
        with carrier.streams:
            for _ in range(2):
                passes.both(*shard)
        return carrier.streams.races, carrier.streams.unfinished()

    return simulated.run_simulated(one, topology.cp_size, pulls=way.pulls)[0]


@pytest.fixture(scope="module", autouse=True)
def operations_are_known():
    """At its first dispatch to a mode torch keeps a handle of an operation, which fails in two
    threads at once (c10/core/PyHandleCache.h)."""
    with pytest.MonkeyPatch.context() as patch:
        races(patch, 1, 1, Way("ring"))


GRIDS = [(1, 2), (2, 1), (3, 2)]  # nodes, ranks on each


@pytest.mark.parametrize("circulate", list(Circulate))
@pytest.mark.parametrize("left", [False, True], ids=["", "left"])
@pytest.mark.parametrize("mode", ["ring", "gather", "a2a"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_two_uses_of_a_buffer_are_ordered(monkeypatch, grid, mode, left, circulate):
    if left and (mode == "ring" or (mode, circulate) == ("gather", Circulate.Q)):
        pytest.skip("nothing is left")
    several = (False, True, "one slot") if grid == (1, 2) else (True,)  # slots alike on all grids
    for pulls in several if grid[1] > 1 and mode != "ring" else (False,):
        way = Way(mode, circulate, 2 if mode == "gather" else 1, left=left, pulls=pulls)
        for found, unfinished in races(monkeypatch, *grid, way):
            assert found == [] and unfinished == []


def test_a_wait_that_is_left_out_is_found(monkeypatch):
    """The check can fail: without the waits of one kind of operation there are races."""
    none = lambda program: replace(order(program), waits=((),) * len(program.ops))  # noqa: E731
    monkeypatch.setattr(run, "order", none)
    found = races(monkeypatch, 1, 2, Way("gather"))
    assert any(of_rank for of_rank, _ in found)


@pytest.mark.parametrize("at", [2, 3, 4])
def test_copies_beside_kernels_are_over_when_a_transfer_fails(monkeypatch, at):
    """They may use the call's tensors, which are freed then. The failed transfer itself is not."""
    monkeypatch.setattr(simulated, "SimulatedCarrier", StreamCarrier)
    topology, way = pretend_nodes(2, 1), Way("a2a", heads_per_round=1)
    tensors = problem(2, 4, (6, 6), (4, 4), 0)

    def one(rank, carrier):
        shard = [x[:, rows_of(Layout.ZIGZAG, rank, 2, 4)] for x in tensors]
        passes, numbers, send = Passes(way, topology, shard, carrier), count(1), carrier.send

        def failing(*args):
            if next(numbers) == at:
                raise ConnectionError
            return send(*args)

        carrier.send = failing
        with carrier.streams, pytest.raises(ConnectionError):
            passes.forward(*shard[:3])
        return carrier.streams.unfinished()

    for unfinished in simulated.run_simulated(one, 2)[0]:
        assert all(name.endswith("data") for name in unfinished)
