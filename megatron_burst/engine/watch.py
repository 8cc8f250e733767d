"""Profiler ranges of passes and their operations; times of passes and of their waits, for logs.

They use torch's `record_function`: torch.profiler shows them directly; under
`torch.autograd.profiler.emit_nvtx`, which Megatron's --profile enters, they are NVTX ranges.

Passes of the same program take the same time, so one of each is timed per step.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.autograd import profiler

from megatron_burst.comm.carrier import OneQueue, Queues, UnderWay
from megatron_burst.engine.run import Bound, Run, Step
from megatron_burst.schedule.program import Op, Program, Ref, Transfer
from megatron_burst.schedule.spec import Direction
from megatron_burst.schedule.topology import Link

_NONE = nullcontext()


def profiled() -> bool:
    """Whether torch's profiler or its NVTX ranges are on in this process."""
    return profiler._is_profiler_enabled


def range_of(name: str) -> AbstractContextManager:
    """A range; a no-op unless profiling."""
    return profiler.record_function(name) if profiled() else _NONE


def range_of_pass(direction: Direction, layer: int, mode: str) -> AbstractContextManager:
    """A range around one pass of a call; `layer` 0: unknown."""
    if not profiled():
        return _NONE
    where = f", layer {layer}" if layer else ""
    return profiler.record_function(f"burst {direction}{where}, {mode}")


def with_ranges(executor: Bound) -> tuple[Step, ...]:
    """A program's steps, each in a range that names what it does."""

    def ranged(step: Step, op: Op) -> Step:
        name, work = _in_words(executor, op), step.run

        def run(of: Run) -> Any:
            with profiler.record_function(name):
                return work(of)

        return replace(step, run=run)

    steps, ops = executor.binder.steps, executor.program.ops
    return tuple(map(ranged, steps, ops))


def _in_words(executor: Bound, op: Op) -> str:
    if not isinstance(op, Transfer):
        return f"burst {type(op).__name__}: {_names(op.reads)} -> {_names(op.writes)}"
    came = dict.fromkeys(f"{take.theirs.buffer} of {take.peer}" for take in op.takes)
    sent = sum(executor.program.num_bytes(give.rows) for give in op.gives) * executor.unit
    link = link_of(executor.program, op)
    return f"burst Transfer {link} {op.cargo}: {_listed(came)}; {sent / 2**20:.3g} MiB sent"


def link_of(program: Program, op: Transfer) -> Link:
    """The slowest link that a transfer uses."""
    links = [program.topology.link(program.cp_rank, end.peer) for end in (*op.gives, *op.takes)]
    return Link.INTER if Link.INTER in links else Link.INTRA


def _names(refs: Sequence[Ref]) -> str:
    return _listed(dict.fromkeys(ref.buffer for ref in refs))


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words) or "nothing"


class Clock:
    """Times a run: in total, and waits of the call's stream for others.

    On GPUs these are events on the stream, read once the GPU has passed them, without
    synchronizing.

    Args:
        executor: whose runs are timed, one at a time.
    """

    def __init__(self, executor: Bound) -> None:
        self._events: list[torch.cuda.Event] = []
        self._used, self._on_gpu = 0, False
        self._stream: torch.cuda.Stream | None = None
        self._whole: list[Any] = []
        self._waits: list[tuple[Any, Any]] = []
        self.steps = tuple(map(self._timed, executor.binder.steps))

    def begin(self, queues: OneQueue | Queues) -> None:
        """Start timing a run, on the stream of the call."""
        self._clear()
        self._stream = queues.stream
        self._on_gpu = queues.where.device.type == "cuda"
        self._whole.append(self._now())

    def end(self) -> None:
        """All of the run has been queued on the call's stream."""
        self._whole.append(self._now())

    def over(self, count: int) -> list[Any]:
        """A list for the run's handles; waits on them are timed."""
        return _Watched(self, count)

    def seconds(self) -> dict[str, float]:
        """Seconds of the run: "" in total, "exposed"; empty if the run, or its work on the GPU, is
        not finished. Can be read once."""
        if len(self._whole) < 2 or (self._on_gpu and not self._whole[1].query()):
            return {}
        exposed = sum(self._between(*wait) for wait in self._waits)
        found = {"": self._between(*self._whole), "exposed": exposed}
        self._clear()
        return found

    def wait(self, what: UnderWay, stream: torch.cuda.Stream | None) -> None:
        """Wait for an operation as the run would; timed where its kernels wait."""
        if stream != self._stream:
            what.wait(stream)
            return
        began = self._now()
        what.wait(stream)
        self._waits.append((began, self._now()))

    def _clear(self) -> None:
        self._used = 0
        self._whole.clear()
        self._waits.clear()

    def _timed(self, step: Step) -> Step:
        if step.opens and step.queue is None:
            return replace(step, run=self._opening(step), opens=[])
        return step

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
        super().__setitem__(index, _Waited(self._clock, what))


@dataclass(frozen=True, slots=True)
class _Waited:
    clock: Clock
    what: UnderWay

    def wait(self, stream: torch.cuda.Stream | None) -> None:
        self.clock.wait(self.what, stream)


class Meter:
    """Counts the passes of a step by program, and times one of each on request.

    The timed pass is the one in the middle of the step, by the count of the previous step: ranks
    are in step by then. If there are fewer, it is the first.

    Attributes:
        on: whether passes are being counted.
    """

    def __init__(self) -> None:
        self.on, self._timed = False, False
        self._before: WeakKeyDictionary[Bound, int] = WeakKeyDictionary()
        self._runs: Counter[Bound] = Counter()
        self._clocks: dict[Bound, Clock] = {}
        self._made: WeakKeyDictionary[Bound, Clock] = (
            WeakKeyDictionary()
        )  # reused: they have events
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

    def clock(self, executor: Bound) -> Clock | None:
        """Count a pass; returns the clock that times it, if any."""
        number, before = self._runs[executor], self._before.get(executor)
        self._runs[executor] += 1
        if not self._timed or before is None or profiled() or number not in (0, before // 2):
            return None
        if executor not in self._made:
            self._made[executor] = Clock(executor)
        return self._clocks.setdefault(executor, self._made[executor])

    def seconds(self) -> dict[str, float]:
        """Seconds of all passes of the step (see `Clock.seconds`); empty unless one of each kind
        was timed. Can be read once, when the GPU has finished the step."""
        found: Counter[str] = Counter()
        for _, _, runs, clock in self._counted:
            timed = clock()
            if not timed or not (seconds := timed.seconds()):
                return {}
            found.update({name: each * runs for name, each in seconds.items()})
        return dict(found)

    def sent_bytes(self) -> dict[Link, int]:
        """Bytes that this rank sent, or others pulled from it, in all passes of the step."""
        found = dict.fromkeys(Link, 0)
        for program, unit, runs, _ in self._counted:
            for link, count in program.sent_bytes().items():
                found[link] += count * unit * runs
        return found


METER = Meter()  # of this process
