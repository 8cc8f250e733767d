"""Profiler ranges of passes and their operations.

They use torch's `record_function`: torch.profiler shows them directly; under
`torch.autograd.profiler.emit_nvtx`, which Megatron's --profile enters, they are NVTX ranges.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.autograd import profiler

from megatron_burst.plan.attention import AttentionCall
from megatron_burst.schedule.call import Direction
from megatron_burst.schedule.operations import Op, Ref, Transfer
from megatron_burst.schedule.program import Program
from megatron_burst.schedule.topology import Link

if TYPE_CHECKING:
    from megatron_burst.engine.executor import Executor, Run, Step

_NONE = nullcontext()


def profiled() -> bool:
    """Whether torch's profiler or its NVTX ranges are on in this process."""
    return profiler._is_profiler_enabled


def range_of(name: str) -> AbstractContextManager:
    """A range; a no-op unless profiling."""
    return profiler.record_function(name) if profiled() else _NONE


def range_of_pass(direction: Direction, layer: int, way: AttentionCall) -> AbstractContextManager:
    """A range around one pass of a call; `layer` 0: unknown."""
    if not profiled():
        return _NONE
    where = f", layer {layer}" if layer else ""
    return profiler.record_function(f"burst {direction}{where}, {way.mode}")


def with_ranges(executor: Executor) -> tuple[Step, ...]:
    """A program's steps, each in a range that names what it does."""

    def ranged(step: Step, op: Op) -> Step:
        name, work = _in_words(executor, op), step.run

        def run(of: Run) -> Any:
            with profiler.record_function(name):
                return work(of)

        return replace(step, run=run)

    steps, ops = executor.binder.steps, executor.program.ops
    return tuple(map(ranged, steps, ops))


def _in_words(executor: Executor, op: Op) -> str:
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
