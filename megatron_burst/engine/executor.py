"""Runs programs: one loop over bound operations.

What depends on the program alone (waits, parts of buffers) is bound once and serves all lengths, as
programs count rows in units. Buffer layouts are computed once per length. A run looks up the call's
own tensors and launches kernels.
"""

from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import pairwise
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
        return _binder_of(self.program)

    @cached_property
    def ranged(self) -> tuple[Step, ...]:
        """The steps wrapped in profiler ranges."""
        return with_ranges(self)

    def run(
        self, given: Mapping[str, Fields], left: Mapping[str, Tensor] | None = None,
        documents: SampleMask | None = None, results: Callable[[], dict[str, Fields]] = dict,
        begin: Callable[[], object] = dict, sink: Tensor | None = None,
    ) -> Run:  # fmt: skip
        """Run the program.

        If it fails after `begin`, this rank's other transfers are made nevertheless, as other ranks
        wait for them, and are over for the current stream when the exception leaves. What it sends
        from then on is NaN.

        Args:
            given: the call's own buffers: inputs, and outputs to write.
            left: bytes that forward saved.
            documents: of the sample, if the program's mask has documents.
            results: allocates the call's outputs that are not given.
            begin: called when all memory that other ranks write to is there.
            sink: [h], attention sinks of the call's query heads.
        """
        device = next(iter(next(iter(given.values())).values())).device
        queues = self.transport.queues(device)
        run = Run(self, dict(given), dict(left or {}), queues, documents, sink)
        begin()
        clock = METER.clock(self) if METER.on else None
        steps = self.ranged if profiled() else clock.steps if clock else self.compiler.steps
        over: list[Any] = [None] * len(steps)
        if clock:
            clock.begin(queues)
            over = clock.over(len(steps))
        self.transport.run(self.program, self.unit, over, self.compiler.order.waits)
        try:
            try:
                run.prepare(results)
            except Exception as error:
                run.failure = error
            self._issue(run, queues, steps, over)
            for earlier in self.compiler.order.joins:
                over[earlier].wait(queues.stream)
            if run.failure is not None:
                raise run.failure
        except Exception as error:
            with suppress(RuntimeError):  # if the GPU itself has failed
                queues.switch(Stream.SIDE)  # whose copies may use the call's tensors
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
                over.clear()  # on a CPU all is over
        if clock:
            clock.end()
        return run

    def _issue(
        self, run: Run, queues: OneQueue | Queues, steps: tuple[Step, ...], over: list[Any]
    ) -> None:
        """Launch all operations on their queues; after a failure, transfers only.

        `over`: gets completion handles, by operation, and of what came before.
        """
        marks, waits = self.events, not self.transport.overlaps
        # work of earlier calls is ordered before this call's kernels
        begin = marks[-1] = queues.record(marks[-1])
        over.append(begin)
        for index in range(len(steps)):
            step = steps[index] if run.failure is None else self.compiler.steps[index]
            if step.moves:
                queues.switch(step.queue)
                if step.begins:
                    begin.wait(queues.stream)
            for earlier in step.waits:
                over[earlier].wait(queues.stream)
            for use, number in step.opens:
                run.slots[use].open(number, queues.stream)
            if step.transfers:
                over[index] = step.run(run)
                if waits:
                    over[index].wait(queues.stream)
            elif run.failure is None:
                try:
                    step.run(run)
                except Exception as error:
                    run.failure = error
            if step.waited_for and not step.transfers:
                over[index] = marks[index] = queues.record(marks[index])
            for name in step.frees:
                run.fields.pop(name, None)
        queues.switch(None)


@lru_cache(maxsize=64)  # as many as there are programs
def _binder_of(program: Program) -> Compiler:
    binder = Compiler(program)
    binder.steps = _steps(binder)
    return binder


def _steps(binder: Compiler) -> tuple[Step, ...]:
    """Its operations, bound."""
    every = (*binder.order.waits, binder.order.joins)
    waited_for = {earlier for waits in every for earlier in waits}
    queues = [None, *map(_queue, binder.program.ops)]
    begun, opens, found = {None}, _opens(binder.program), []
    for index, (op, (before, queue)) in enumerate(
        zip(binder.program.ops, pairwise(queues), strict=True)
    ):
        found.append(
            Step(
                COMPILE[type(op)](binder, op), queue, queue != before, queue not in begun,
                binder.order.waits[index], opens[index], isinstance(op, Transfer),
                index in waited_for, binder.order.frees[index],
            )
        )  # fmt: skip
        begun.add(queue)
    return tuple(found)


def _opens(program: Program) -> list[list[tuple[str, int]]]:
    """The slots that each operation is the first to touch."""
    seen, found, buffers = set(), [], program.buffers
    for reads, writes in program.accesses:
        names = dict.fromkeys(ref.buffer for ref in (*reads, *writes))
        new = [n for n in names if n not in seen and buffers[n].space is Space.SLOT]
        seen.update(new)
        found.append([(buffers[name].use, buffers[name].number) for name in new])
    return found


def _queue(op: Op) -> Hashable | None:
    """The queue of an operation; None: the queue of the call's kernels."""
    if isinstance(op, Transfer):
        return op.link, op.cargo
    return None if op.stream is Stream.COMPUTE else op.stream
