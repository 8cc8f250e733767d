"""Runs programs: one loop over bound operations.

    for each operation: switch to its queue, wait for earlier operations, launch it, record an event

Waits and operations are bound once per program, for all lengths, as programs count rows in units.
Buffer layouts are computed once per length. A run finds the call's tensors and launches kernels.
"""

from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import Any

from torch import Tensor

from megatron_burst.comm.transport import OneQueue, Queues
from megatron_burst.engine.memory import Fields
from megatron_burst.engine.operations import COMPILE
from megatron_burst.engine.ranges import METER, profiled, with_ranges
from megatron_burst.engine.run import BoundProgram, Compiler, Run, Step
from megatron_burst.engine.sample_mask import SampleMask
from megatron_burst.schedule.program import Op, Program, Space, Stream, Transfer


class Executor(BoundProgram):
    """Runs a program at one length."""

    @cached_property
    def compiler(self) -> Compiler:
        return _compiler_of(self.program)

    @cached_property
    def ranged(self) -> tuple[Step, ...]:
        """The steps wrapped in profiler ranges."""
        return with_ranges(self)

    def run(
        self, tensors: Mapping[str, Fields], saved: Mapping[str, Tensor] | None = None,
        sample_mask: SampleMask | None = None, results: Callable[[], dict[str, Fields]] = dict,
        begin: Callable[[], object] = dict, sink: Tensor | None = None,
        largest: Tensor | None = None,
    ) -> Run:  # fmt: skip
        """Run the program.

        If an operation fails after `begin`, this rank still makes its transfers, because other
        ranks wait for them, but sends NaN; the current stream has waited for them when this raises.

        Args:
            tensors: the call's inputs by buffer, and outputs to write.
            saved: bytes of buffers that forward saved.
            sample_mask: documents or slices, if the program's mask has some.
            results: allocates the outputs that are not in `tensors`.
            begin: called when all memory that other ranks write to is allocated.
            sink: [h], attention sinks of the call's query heads.
            largest: [h], raised to the largest score of each query head.
        """
        device = next(iter(next(iter(tensors.values())).values())).device
        queues = self.transport.queues(device)
        run = Run(self, dict(tensors), dict(saved or {}), queues, sample_mask, sink, largest)
        begin()
        clock = METER.clock(self) if METER.on else None
        steps = self.ranged if profiled() else clock.steps if clock else self.compiler.steps
        handles: list[Any] = [None] * len(steps)
        if clock:
            clock.begin(queues)
            handles = clock.handles(len(steps))
        self.transport.run(self.program, self.unit, handles, self.compiler.order.waits)
        try:
            try:
                run.prepare(results)
            except Exception as error:
                run.failure = error
            self._issue(run, queues, steps, handles)
            for earlier in self.compiler.order.joins:
                handles[earlier].wait(queues.stream)
            if run.failure is not None:
                raise run.failure
        except Exception as error:
            with suppress(RuntimeError):  # if the GPU itself has failed
                queues.switch(Stream.SIDE)  # its copies may use the call's tensors
                side = queues.record()
                queues.switch(None)
                side.wait(queues.stream)
            if run.failure is None or error is run.failure:
                raise
            raise error from run.failure  # transfers failed too
        finally:
            queues.switch(None)
            run.failure = None  # its frames hold the run, and so all tensors
            if queues.stream is None:
                handles.clear()  # on a CPU all work is done
        if clock:
            clock.end()
        return run

    def _issue(
        self, run: Run, queues: OneQueue | Queues, steps: tuple[Step, ...], handles: list[Any]
    ) -> None:
        """Launch all operations on their queues; after a failure, transfers only.

        Puts the handle of each operation into `handles`, and last that of the work before them.
        """
        events, waits = self.events, not self.transport.overlaps
        # kernels of the call run after the work of earlier calls
        begin = events[-1] = queues.record(events[-1])
        handles.append(begin)
        for index in range(len(steps)):
            step = steps[index] if run.failure is None else self.compiler.steps[index]
            if step.switches_queue:
                queues.switch(step.queue)
                if step.starts_queue:
                    begin.wait(queues.stream)
            for earlier in step.waits:
                handles[earlier].wait(queues.stream)
            for use, number in step.opens:
                run.slots[use].open(number, queues.stream)
            if step.is_transfer:
                handles[index] = step.run(run)
                if waits:
                    handles[index].wait(queues.stream)
            elif run.failure is None:
                try:
                    step.run(run)
                except Exception as error:
                    run.failure = error
            if step.has_waiters and not step.is_transfer:
                handles[index] = events[index] = queues.record(events[index])
            for name in step.frees:
                run.fields.pop(name, None)
        queues.switch(None)


@lru_cache(maxsize=64)  # as many as there are programs
def _compiler_of(program: Program) -> Compiler:
    compiler = Compiler(program)
    compiler.steps = _steps(compiler)
    return compiler


def _steps(compiler: Compiler) -> tuple[Step, ...]:
    order, opens = compiler.order, _opens(compiler.program)
    waited_for = {earlier for waits in (*order.waits, order.joins) for earlier in waits}
    steps, previous, started = [], None, {None}
    for index, op in enumerate(compiler.program.ops):
        queue = _queue(op)
        step = Step(
            COMPILE[type(op)](compiler, op), queue, queue != previous, queue not in started,
            order.waits[index], opens[index], isinstance(op, Transfer), index in waited_for,
            order.frees[index],
        )  # fmt: skip
        steps.append(step)
        previous = queue
        started.add(queue)
    return tuple(steps)


def _opens(program: Program) -> list[list[tuple[str, int]]]:
    """The slots that each operation is the first to touch: (use, number)."""
    seen, opens, buffers = set(), [], program.buffers
    for reads, writes in program.accesses:
        names = dict.fromkeys(ref.buffer for ref in (*reads, *writes))
        new = [n for n in names if n not in seen and buffers[n].space is Space.SLOT]
        seen.update(new)
        opens.append([(buffers[name].use, buffers[name].number) for name in new])
    return opens


def _queue(op: Op) -> Hashable | None:
    """The queue of an operation; None: the queue of the call's kernels."""
    if isinstance(op, Transfer):
        return op.link, op.cargo
    return None if op.stream is Stream.COMPUTE else op.stream
