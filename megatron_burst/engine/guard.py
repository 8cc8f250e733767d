"""Programs whose tiles are checked for NaN; loaded if `BurstConfig.nan_guard` asks for it.

Each check waits for the GPU, so it is for finding an error.
"""

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any

from megatron_burst.engine.executor import Executor
from megatron_burst.engine.operations import part
from megatron_burst.engine.run import Binder, Run, Step
from megatron_burst.errors import BurstError
from megatron_burst.schedule.program import Add, Attend, AttendBackward, Merge, Op, Ref

_CHECKED = Attend, AttendBackward, Merge, Add


class GuardedExecutor(Executor):
    """Runs a program and raises an error after the first operation that gives NaN."""

    @cached_property
    def binder(self) -> Binder:
        """The program's binder with steps that check what they wrote."""
        binder = copy(super().binder)  # other executors share it
        steps = enumerate(zip(binder.steps, self.program.ops, strict=True), 1)
        binder.steps = tuple(_guarded(binder, step, op, number) for number, (step, op) in steps)
        return binder


def _guarded(binder: Binder, step: Step, op: Op, number: int) -> Step:
    if not isinstance(op, _CHECKED):
        return step
    writes, reads = _parts(binder, op.writes), _parts(binder, op.reads)
    total, direction = len(binder.program.ops), binder.program.direction

    def run(of: Run) -> Any:
        done = step.run(of)
        if wrong := _first_nan(of, writes):
            came = _first_nan(of, reads)
            tiles = ", ".join(_tile(ref, of.unit) for ref in op.reads)
            origin = f"which {came} had before" if came else "which the inputs had not"
            raise BurstError(
                "burst attention: with nan_guard results must not be NaN, because training "
                f"continues with them; got NaN in {wrong}, {origin}, after {type(op).__name__} of "
                f"{tiles}, step {number} of {total}, {direction}; "
                "look at these inputs, or try another --burst-backend"
            )
        return done

    return replace(step, run=run)


def _parts(binder: Binder, refs: Iterable[Ref]) -> list[tuple[Ref, Callable]]:
    return [(ref, part(binder, ref)) for ref in dict.fromkeys(refs)]


def _first_nan(run: Run, parts: list[tuple[Ref, Callable]]) -> str:
    """The first field with a NaN, in words; "" if none has any."""
    for ref, of in parts:
        for name, x in of(run).items():
            if x.isnan().any():
                return f"{name} of {_tile(ref, run.unit)}"
    return ""


def _tile(ref: Ref, unit: int) -> str:
    rows = f" rows {ref.rows.start * unit} to {ref.rows.stop * unit - 1}" if ref.rows else ""
    heads = f" heads {ref.heads.start} to {ref.heads.stop - 1}" if ref.heads else ""
    return f"{ref.buffer!r}{rows}{heads}"
