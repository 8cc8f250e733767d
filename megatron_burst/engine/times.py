"""Times of passes, of their waits (exposed communication) and of transfers, for logs.

Passes of the same program take the same time, so one of each is timed per step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isnan
from time import perf_counter
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch

from megatron_burst.comm.carrier import OneQueue, Queues, UnderWay
from megatron_burst.comm.groups import Transfer
from megatron_burst.engine.ranges import link_of, profiled
from megatron_burst.schedule import operations as ops
from megatron_burst.schedule.program import Program
from megatron_burst.schedule.topology import Link

if TYPE_CHECKING:
    from megatron_burst.engine.executor import Executor, Run, Step


@dataclass(slots=True)
class _Moved:
    """A transfer of a timed run."""

    link: Link
    under_way: Any
    began: Any
    ended: Any  # None: not yet


class Clock:
    """Times a run: in total, waits of the call's stream, and transfers.

    On GPUs these are events on the streams, read once the GPU has passed them, without
    synchronizing. NCCL times its own transfers. On CPU a transfer ends when its wait does.

    Args:
        executor: whose runs are timed, one at a time.
    """

    def __init__(self, executor: Executor) -> None:
        self._events: list[torch.cuda.Event] = []
        self._used, self._on_gpu = 0, False
        self._stream: torch.cuda.Stream | None = None
        self._whole: list[Any] = []
        self._waits: list[tuple[Any, Any]] = []
        self._moved: dict[int, _Moved] = {}
        pairs = enumerate(zip(executor.binder.steps, executor.program.ops, strict=True))
        self.steps = tuple(self._timed(executor.program, i, step, op) for i, (step, op) in pairs)
        self._carrier = executor.carrier

    def begin(self, queues: OneQueue | Queues) -> None:
        """Start timing a run, on the stream of the call."""
        self._clear()
        self._stream = queues.stream
        self._on_gpu = queues.where.device.type == "cuda"
        if self._on_gpu:
            self._carrier.time_transfers()
        self._whole.append(self._now())

    def end(self) -> None:
        """All of the run has been queued on the call's stream."""
        self._whole.append(self._now())

    def over(self, count: int) -> list[Any]:
        """A list for the run's handles; waits on them are timed."""
        return _Watched(self, count)

    def seconds(self) -> dict[str, float]:
        """Seconds of the run: "" in total, "exposed", "intra" and "inter", nan if unknown; empty if
        the run, or its work on the GPU, is not finished. Can be read once."""
        if len(self._whole) < 2 or (self._on_gpu and not self._whole[1].query()):
            return {}
        found = {"": self._between(*self._whole), "exposed": 0.0} | dict.fromkeys(Link, 0.0)
        for wait in self._waits:
            found["exposed"] += self._between(*wait)
        for moved in self._moved.values():
            own = isinstance(moved.under_way, Transfer) and self._on_gpu
            times = (moved.began, moved.ended)
            found[moved.link] += moved.under_way.seconds() if own else self._between(*times)
        self._clear()
        return {str(name): seconds for name, seconds in found.items()}

    def wait(self, index: int, what: UnderWay, stream: torch.cuda.Stream | None) -> None:
        """Wait for an operation as the run would; timed where its kernels wait."""
        if stream != self._stream:
            what.wait(stream)
            return
        began = self._now()
        what.wait(stream)
        ended = self._now()
        self._waits.append((began, ended))
        moved = self._moved.get(index)
        if moved and moved.ended is None:  # another operation may wait for it again
            moved.ended = ended

    def _clear(self) -> None:
        self._used = 0
        self._whole.clear()
        self._waits.clear()
        self._moved.clear()

    def _timed(self, program: Program, index: int, step: Step, op: ops.Op) -> Step:
        if isinstance(op, ops.Transfer):
            return replace(step, run=self._moving(index, link_of(program, op), step.run))
        if step.opens and step.queue is None:
            return replace(step, run=self._opening(step), opens=[])
        return step

    def _moving(self, index: int, link: Link, work: Callable[[Run], Any]) -> Callable[[Run], Any]:
        def run(of: Run) -> Any:
            began = self._now()
            under_way = work(of)
            ended = self._now() if self._on_gpu else None
            self._moved[index] = _Moved(link, under_way, began, ended)
            return under_way

        return run

    def _opening(self, step: Step) -> Callable[[Run], Any]:
        """The step with its wait for slots that other ranks may still read."""

        def run(of: Run) -> Any:
            began = self._now()
            for use, number in step.opens:
                of.slots[use].open(number, of.queues.stream)
            self._waits.append((began, self._now()))
            return step.run(of)

        return run

    def _now(self) -> Any:
        """Now, on the current stream if there is one."""
        if not self._on_gpu:
            return perf_counter()
        if self._used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        event = self._events[self._used]
        self._used += 1
        event.record()
        return event

    def _between(self, began: Any, ended: Any) -> float:
        return began.elapsed_time(ended) / 1e3 if self._on_gpu else ended - began


class _Watched(list):
    """Handles of a run by operation; the clock times waits on them."""

    def __init__(self, clock: Clock, count: int) -> None:
        super().__init__([None] * count)
        self._clock = clock

    def __setitem__(self, index, what) -> None:
        super().__setitem__(index, _Waited(self._clock, index, what))


@dataclass(frozen=True, slots=True)
class _Waited:
    clock: Clock
    index: int
    what: UnderWay

    def wait(self, stream: torch.cuda.Stream | None) -> None:
        self.clock.wait(self.index, self.what, stream)


class Meter:
    """Counts the passes of a step by program, and times one of each on request.

    The timed pass is the one in the middle of the step, by the count of the previous step: ranks
    are in step by then. If there are fewer, it is the first.

    Attributes:
        on: whether passes are being counted.
    """

    def __init__(self) -> None:
        self.on, self._timed = False, False
        self._before: WeakKeyDictionary[Executor, int] = WeakKeyDictionary()
        self._runs: Counter[Executor] = Counter()
        self._clocks: dict[Executor, Clock] = {}
        self._counted: list[tuple[Program, int, int, Callable[[], Clock | None]]] = []

    def begin_step(self, timed: bool) -> None:
        """Start counting; `timed`: time passes too."""
        self.on, self._timed = True, timed
        self._runs.clear()
        self._clocks.clear()
        self._counted.clear()

    def end_step(self) -> None:
        """Stop counting until the next step."""
        self.on = False
        for executor, runs in self._runs.items():
            clock = ref(self._clocks[executor]) if executor in self._clocks else lambda: None
            self._counted.append((executor.program, executor.unit, runs, clock))
        self._before = WeakKeyDictionary(self._runs)
        self._runs.clear()  # they hold the group's memory
        self._clocks.clear()

    def clock(self, executor: Executor) -> Clock | None:
        """Count a pass; returns the clock that times it, if any."""
        number, before = self._runs[executor], self._before.get(executor)
        self._runs[executor] += 1
        if not self._timed or before is None or profiled() or number not in (0, before // 2):
            return None
        return self._clocks.setdefault(executor, executor.clock)

    def seconds(self) -> dict[str, float]:
        """Seconds of all passes of the step (see `Clock.seconds`) without unknown ones; empty
        unless one of each kind was timed. Can be read once, when the GPU has finished the step."""
        found: Counter[str] = Counter()
        for _, _, runs, clock in self._counted:
            timed = clock()
            if not timed or not (seconds := timed.seconds()):
                return {}
            found.update({name: each * runs for name, each in seconds.items()})
        return {name: seconds for name, seconds in found.items() if not isnan(seconds)}

    def sent_bytes(self) -> dict[Link, int]:
        """Bytes that this rank sent, or others pulled from it, in all passes of the step."""
        found = dict.fromkeys(Link, 0)
        for program, unit, runs, _ in self._counted:
            for link, count in program.sent_bytes().items():
                found[link] += count * unit * runs
        return found


METER = Meter()  # of this process
