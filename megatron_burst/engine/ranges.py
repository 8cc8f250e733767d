"""Profiler ranges of passes and their operations; counts and times of passes, for logs.

Ranges are torch's `record_function`, which torch.profiler shows; under
`torch.autograd.profiler.emit_nvtx`, which Megatron's --profile enters, they are NVTX ranges.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from torch.autograd import profiler

from megatron_burst.engine.run import BoundProgram, Run, Step
from megatron_burst.schedule.program import Op, Program, Ref, Transfer
from megatron_burst.schedule.spec import Direction, Spec
from megatron_burst.schedule.topology import Link

if TYPE_CHECKING:
    from megatron_burst.checks.clock import Clock

_NONE = nullcontext()


def profiled() -> bool:
    """Whether torch's profiler or its NVTX ranges are on in this process."""
    return profiler._is_profiler_enabled


def range_of(name: str) -> AbstractContextManager:
    """A range, if torch is profiling."""
    return profiler.record_function(name) if profiled() else _NONE


def range_of_pass(direction: Direction, layer: int, spec: Spec) -> AbstractContextManager:
    """A range around one pass of a call, named by the mode of the pass; `layer` 0: unknown."""
    if not profiled():
        return _NONE
    where = f", layer {layer}" if layer else ""
    mode = spec.program_spec(0, direction).intra  # backward may have another one than forward
    return profiler.record_function(f"burst {direction}{where}, {mode}")


def with_ranges(executor: BoundProgram) -> tuple[Step, ...]:
    """A program's steps, each in a range that names what it does."""

    def ranged(step: Step, op: Op) -> Step:
        name = _describe(executor, op)

        def in_range(run: Run) -> Any:
            with profiler.record_function(name):
                return step.run(run)

        return replace(step, run=in_range)

    return tuple(map(ranged, executor.compiler.steps, executor.program.ops))


def _describe(executor: BoundProgram, op: Op) -> str:
    if not isinstance(op, Transfer):
        return f"burst {type(op).__name__}: {_names(op.reads)} -> {_names(op.writes)}"
    received = dict.fromkeys(f"{recv.remote_rows.buffer} of {recv.peer}" for recv in op.recvs)
    sent = sum(executor.program.num_bytes(send.rows) for send in op.sends) * executor.unit
    link = link_of(executor.program, op)
    return f"burst Transfer {link} {op.cargo}: {_listed(received)}; {sent / 2**20:.3g} MiB sent"


def link_of(program: Program, op: Transfer) -> Link:
    """The slowest link that a transfer uses."""
    links = [program.topology.link(program.cp_rank, end.peer) for end in (*op.sends, *op.recvs)]
    return Link.INTER if Link.INTER in links else Link.INTRA


def _names(refs: Sequence[Ref]) -> str:
    return _listed(dict.fromkeys(ref.buffer for ref in refs))


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words) or "nothing"


class Meter:
    """Counts the passes of a step by program while it is `on`, and times one of each on request.

    The timed pass is the one in the middle of the step, by the count of the previous step: ranks
    are in step by then. If there are fewer, it is the first.
    """

    def __init__(self) -> None:
        self.on, self._timed = False, False
        self._before: WeakKeyDictionary[BoundProgram, int] = WeakKeyDictionary()
        self._runs: Counter[BoundProgram] = Counter()
        self._clocks: dict[BoundProgram, Clock] = {}
        # reused, because a clock has events
        self._cached_clocks: WeakKeyDictionary[BoundProgram, Clock] = WeakKeyDictionary()
        self._counted: list[tuple[Program, int, int, Callable[[], Clock | None]]] = []

    def begin_step(self, timed: bool) -> None:
        """Start counting, and timing if `timed`."""
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

    def clock(self, executor: BoundProgram) -> "Clock | None":
        """Count a pass; returns the clock that times it, if any."""
        number, before = self._runs[executor], self._before.get(executor)
        self._runs[executor] += 1
        if not self._timed or before is None or profiled() or number not in (0, before // 2):
            return None
        if executor not in self._cached_clocks:
            from megatron_burst.checks.clock import Clock

            self._cached_clocks[executor] = Clock(executor)
        return self._clocks.setdefault(executor, self._cached_clocks[executor])

    def seconds(self) -> dict[str, float]:
        """Seconds of all passes of the step (see `Clock.seconds`); empty unless one of each kind
        was timed. Can be read once, when the GPU has finished the step."""
        total: Counter[str] = Counter()
        for _, _, runs, clock in self._counted:
            timed = clock()
            if not timed or not (seconds := timed.seconds()):
                return {}
            total.update({name: value * runs for name, value in seconds.items()})
        return dict(total)

    def sent_bytes(self) -> dict[Link, int]:
        """Bytes that this rank sent, or others pulled from it, in all passes of the step."""
        sent = dict.fromkeys(Link, 0)
        for program, unit, runs, _ in self._counted:
            for link, count in program.sent_bytes().items():
                sent[link] += count * unit * runs
        return sent


METER = Meter()  # of this process
