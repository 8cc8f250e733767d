"""Programs whose tiles are checked for NaN; loaded if `BurstConfig.nan_guard` asks for it.

Each check waits for the GPU, so it is for finding an error.
"""

from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any

from megatron_burst.engine.executor import Executor
from megatron_burst.engine.operations import GetFields, ref_fields
from megatron_burst.engine.run import Compiler, Run, Step
from megatron_burst.errors import BurstError
from megatron_burst.schedule import program as ops

type Positions = list[tuple[ops.Ref, str]]  # fields of rows of buffers
_RESULTS, _KEYS = ("out", "lse"), ("k", "v")


class GuardedExecutor(Executor):
    """Runs a program and raises an error after the first operation that gives NaN."""

    @cached_property
    def compiler(self) -> Compiler:
        """The program's compiler with steps that check what they wrote."""
        compiler = copy(super().compiler)  # other executors share it
        steps = enumerate(zip(compiler.steps, self.program.ops, strict=True), 1)
        compiler.steps = tuple(_guarded(compiler, step, op, number) for number, (step, op) in steps)
        return compiler


def _guarded(compiler: Compiler, step: Step, op: ops.Op, number: int) -> Step:
    places = _accessed(op, compiler.program)
    if places is None:
        return step
    writes, reads = ([(ref, name, ref_fields(compiler, ref)) for ref, name in dict.fromkeys(refs)]
                     for refs in places)  # fmt: skip
    total, direction = len(compiler.program.ops), compiler.program.direction

    def run(of: Run) -> Any:
        done = step.run(of)
        if wrong := _first_nan(of, writes):
            before = _first_nan(of, reads)
            tiles = ", ".join(_tile(ref, of.unit) for ref in op.reads)
            origin = f"as {before} had before" if before else "although the inputs had none"
            raise BurstError("burst attention: with nan_guard results must not be NaN, because "
                             f"training continues with them; got NaN in {wrong}, {origin}, after "
                             f"{type(op).__name__} of {tiles}, step {number} of {total}, "
                             f"{direction}; look at these inputs, or try another "
                             "--burst-backend")  # fmt: skip
        return done

    return replace(step, run=run)


def _accessed(op: ops.Op, program: ops.Program) -> tuple[Positions, Positions] | None:
    """Fields that an operation writes, and that it reads; None if it is not checked. Other fields
    of the same rows may not be written yet: their memory may hold NaN."""
    fields = {name: [f.name for f in buffer.fields] for name, buffer in program.buffers.items()}

    def first(refs: Iterable[ops.Ref], names: Iterable[str]) -> Positions:
        """Of several buffers each field is in the first that has it, as in `first_of`."""
        first_with = {name: ref for ref in reversed([*refs]) for name in fields[ref.buffer]}
        return [(first_with[name], name) for name in names if name in first_with]

    match op:
        case ops.Attend():
            return first(op.into, _RESULTS), first((op.q,), ("q",)) + first((op.kv,), _KEYS)
        case ops.AttendBackward():
            sides = first(op.sides, ("q", "dout", "lse", "delta", "out"))
            grads = first((op.dq,), ("dq",)) + first((op.dkv,), ("dk", "dv"))
            return grads, sides + first((op.kv,), _KEYS)
        case ops.Merge():
            return first(op.into, _RESULTS), [(ref, x) for ref in op.parts for x in _RESULTS]
        case ops.Add():
            names = [x for x in fields[op.into.buffer]
                     if all(x in fields[ref.buffer] for ref in op.parts)]  # fmt: skip
            return first((op.into,), names), [(ref, x) for ref in op.parts for x in names]
        case ops.FromRanks() | ops.Restore():
            names = [x for ref in op.writes for x in fields[ref.buffer]]
            return first(op.writes, names), first((op.source,), names)
    return None


def _first_nan(run: Run, parts: list[tuple[ops.Ref, str, GetFields]]) -> str:
    """The first field with a NaN, in words; "" if none has any."""
    for ref, name, of in parts:
        x = of(run).get(name)  # a call omits tensors that no operation reads
        if x is not None and x.isnan().any():
            return f"{name} of {_tile(ref, run.unit)}"
    return ""


def _tile(ref: ops.Ref, unit: int) -> str:
    rows = f" rows {ref.rows.start * unit} to {ref.rows.stop * unit - 1}" if ref.rows else ""
    heads = f" heads {ref.heads.start} to {ref.heads.stop - 1}" if ref.heads else ""
    return f"{ref.buffer!r}{rows}{heads}"
