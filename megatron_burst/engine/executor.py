"""Runs programs: one loop over bound operations.

What depends on the program alone (waits, parts of buffers) is bound once and serves all lengths, as
programs count rows in units. Buffer layouts are computed once per length. A run looks up the call's
own tensors and launches kernels.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megatron_burst.comm.carrier import Carrier, OneQueue, Queues, UnderWay
from megatron_burst.engine.documents import Documents
from megatron_burst.engine.memory import ByteLayout, Dtypes, Fields, shape_of
from megatron_burst.engine.operations import BIND
from megatron_burst.engine.watch import METER, Clock, profiled, with_ranges
from megatron_burst.kernels.backends import Backend
from megatron_burst.schedule.order import order
from megatron_burst.schedule.program import (
    Arrange,
    Buffer,
    Home,
    Op,
    Program,
    Restore,
    Stream,
    Transfer,
)

_OWN = Home.CALL, Home.PART  # tensors of their own; all other buffers are raw bytes
_APART = 512  # bytes to whose multiples buffers are aligned, as torch's allocator does


class Binder:
    """Makes a program ready to run at any length.

    Attributes:
        program: of one rank.
        order: of its operations.
        names: short names for what runs look up: views of buffers.
        orders: chunk orders that a run needs: direction (arrange or restore), from which to which.
        steps: the operations.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.order = program, order(program)
        self.names: dict[Hashable, int] = {}
        ops = (op for op in program.ops if isinstance(op, Arrange | Restore))
        self.orders = {(isinstance(op, Restore), op.lies, op.numbers): None for op in ops}
        self.steps = self._steps()

    def name_of(self, what: Hashable) -> int:
        """A short name, the same for equal keys."""
        return self.names.setdefault(what, len(self.names))

    def _steps(self) -> tuple["Step", ...]:
        every = (*self.order.waits, self.order.joins)
        waited_for = {earlier for waits in every for earlier in waits}
        queues = [None, *map(_queue, self.program.ops)]
        begun, opens, found = {None}, self._opens, []
        for index, (op, (before, queue)) in enumerate(
            zip(self.program.ops, pairwise(queues), strict=True)
        ):
            found.append(
                Step(
                    BIND[type(op)](self, op), queue, queue != before, queue not in begun,
                    self.order.waits[index], opens[index], isinstance(op, Transfer),
                    index in waited_for, self.order.frees[index],
                )
            )  # fmt: skip
            begun.add(queue)
        return tuple(found)

    @property
    def _opens(self) -> list[list[tuple[str, int]]]:
        """The slots that each operation is the first to touch."""
        seen, found, buffers = set(), [], self.program.buffers
        for reads, writes in self.program.accesses:
            names = dict.fromkeys(ref.buffer for ref in (*reads, *writes))
            new = [n for n in names if n not in seen and buffers[n].home is Home.SLOT]
            seen.update(new)
            found.append([(buffers[name].use, buffers[name].number) for name in new])
        return found


_binder_of = lru_cache(maxsize=64)(Binder)  # as many as there are programs


@dataclass(frozen=True, eq=False)
class Executor:
    """A program at one length, with everything needed to run it.

    Attributes:
        program: of this rank.
        backend: computes the tiles.
        carrier: moves data between ranks.
        scale: softmax scale.
        dtypes: element types.
        deterministic: whether gradients must be bitwise the same every time.
        unit: how many rows one row of the program stands for.
    """

    program: Program
    backend: Backend
    carrier: Carrier
    scale: float
    dtypes: Dtypes
    deterministic: bool
    unit: int = 1

    @cached_property
    def binder(self) -> Binder:
        return _binder_of(self.program)

    @cached_property
    def buffers(self) -> dict[str, Buffer]:
        """The program's buffers, with their actual rows."""
        every = self.program.buffers.items()
        return {name: replace(buffer, rows=buffer.rows * self.unit) for name, buffer in every}

    @cached_property
    def layouts(self) -> dict[str, ByteLayout]:
        """Byte layouts by buffer name, for buffers that are raw bytes."""
        return {
            name: ByteLayout.of(buffer, self.program.batch, self.dtypes)
            for name, buffer in self.buffers.items()
            if buffer.home not in _OWN
        }

    @cached_property
    def uses(self) -> dict[tuple[Home, str], tuple[int, int]]:
        """How many buffers the group must have for each use, and their bytes."""
        found: dict[tuple[Home, str], tuple[int, int]] = {}
        for name, layout in self.layouts.items():
            buffer = self.buffers[name]
            if buffer.home is not Home.LEFT:
                count = buffer.count if buffer.home is not Home.HOP else buffer.number + 1
                before = found.get((buffer.home, buffer.use), (0, 0))
                most = max(before[0], count), max(before[1], layout.num_bytes)
                found[buffer.home, buffer.use] = most
        return found

    @cached_property
    def places(self) -> tuple[dict[tuple[Home, str], int], int]:
        """By use, where its buffers begin in the group's memory; how many bytes that needs. Other
        ranks read slots, so these have memory of their own."""
        begins, end = {}, 0
        for (home, use), (count, size) in self.uses.items():
            if home is not Home.SLOT:
                begins[home, use] = end
                end += count * _aligned(size)
        return begins, end

    @cached_property
    def marks(self) -> list[UnderWay | None]:
        """The previous run's mark for each operation and for the start, to be reused."""
        return [None] * (len(self.program.ops) + 1)

    @cached_property
    def clock(self) -> Clock:
        """Times runs on request."""
        return Clock(self)

    @cached_property
    def ranged(self) -> tuple["Step", ...]:
        """The steps wrapped in profiler ranges."""
        return with_ranges(self)

    def run(
        self, given: Mapping[str, Fields], left: Mapping[str, Tensor] | None = None,
        documents: Documents | None = None, results: Callable[[], dict[str, Fields]] = dict,
        begin: Callable[[], object] = dict,
    ) -> "Run":  # fmt: skip
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
        """
        device = next(iter(next(iter(given.values())).values())).device
        queues = self.carrier.queues(device)
        run = Run(self, dict(given), dict(left or {}), queues, documents)
        begin()
        clock = METER.clock(self) if METER.on else None
        steps = self.ranged if profiled() else clock.steps if clock else self.binder.steps
        over: list[Any] = [None] * len(steps)
        if clock:
            clock.begin(queues)
            over = clock.over(len(steps))
        try:
            run.attempt(run.prepare, results)
            self._issue(run, queues, steps, over)
            for earlier in self.binder.order.joins:
                over[earlier].wait(queues.stream)
            if run.failure is not None:
                raise run.failure
        except Exception as error:
            if run.failure is None or error is run.failure:
                raise
            raise error from run.failure  # transfers failed too
        finally:
            queues.go(None)
            run.failure = None  # its frames hold the run, and so all tensors
        if clock:
            clock.end()
        return run

    def _issue(
        self, run: "Run", queues: OneQueue | Queues, steps: tuple["Step", ...], over: list[Any]
    ) -> None:
        """Launch all operations on their queues; after a failure, transfers only.

        `over`: completion handles, by operation.
        """
        marks, waits = self.marks, not self.carrier.overlaps
        # work of earlier calls is ordered before this call's kernels
        begin = marks[-1] = queues.mark(marks[-1])
        for index in range(len(steps)):
            step = steps[index] if run.failure is None else self.binder.steps[index]
            if step.moves:
                queues.go(step.queue)
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
                run.attempt(step.run, run)
            if step.waited_for and not step.transfers:
                over[index] = marks[index] = queues.mark(marks[index])
            for name in step.frees:
                run.fields.pop(name, None)
        queues.go(None)


def _aligned(size: int) -> int:
    return -(-size // _APART) * _APART


def _queue(op: Op) -> Hashable | None:
    """The queue of an operation; None: the queue of the call's kernels."""
    if isinstance(op, Transfer):
        return op.link, op.cargo
    return None if op.stream is Stream.COMPUTE else op.stream


@dataclass(frozen=True, slots=True)
class Step:
    """An operation, bound.

    Attributes:
        run: does it; a transfer returns its handle.
        queue: where it runs; None: the queue of the call's kernels.
        moves: whether the previous operation is on another queue.
        begins: whether it is the first on its queue.
        waits: operations on other queues that must finish first.
        opens: slots that it is the first to touch: (use, number).
        transfers: whether it is a transfer.
        waited_for: whether another queue waits for it.
        frees: parts that are no longer needed.
    """

    run: Callable[["Run"], UnderWay | None]
    queue: Hashable | None
    moves: bool
    begins: bool
    waits: tuple[int, ...]
    opens: list[tuple[str, int]]
    transfers: bool
    waited_for: bool
    frees: tuple[str, ...]


class Run:
    """One run of a program: its tensors.

    Attributes:
        fields: of the call's buffers and of parts, by name.
        left: bytes of buffers that forward saves for backward.
        failure: of an operation, or None so far; from then on only transfers are made.
        slots: of this call, by use.
        views: of buffers that live as long as the run, by the executor's names; those of the
            group's memory are reused from the previous run.
        executor: of the program.
        unit: how many rows one row of the program stands for.
        queues: of the call.
        documents: of the sample.
    """

    def __init__(
        self, executor: Executor, given: dict[str, Fields], left: dict[str, Tensor],
        queues: OneQueue | Queues, documents: Documents | None = None,
    ) -> None:  # fmt: skip
        self.fields, self.left, self.documents = given, left, documents
        self.executor, self.queues, carrier = executor, queues, executor.carrier
        self.unit, self.failure = executor.unit, None
        self.slots = {
            use: carrier.slots(use, count, size, queues.where)
            for (home, use), (count, size) in executor.uses.items()
            if home is Home.SLOT
        }
        memory = carrier.buffers("all", 1, executor.places[1], queues.where)
        self._flat = memory.flats[0]
        self._kept = {use: slots.views(executor) for use, slots in self.slots.items()}
        self._kept[None] = memory.views(executor)
        self.views: dict[int, Any] = {}
        for kept in self._kept.values():
            self.views.update(kept)
        for name in executor.program.left:  # here, because it is allocated on the compute stream
            if name not in left:
                size = executor.layouts[name].num_bytes
                device = queues.where.device
                left[name] = torch.empty(size, dtype=torch.uint8, device=device)

    def attempt(self, work: Callable[..., object], *args: Any) -> None:
        """Do some work; if it fails, note why."""
        try:
            work(*args)
        except Exception as error:
            self.failure = error

    def prepare(self, results: Callable[[], dict[str, Fields]]) -> None:
        """Allocate results and indices, before the loop, because they belong to the compute
        stream."""
        self.fields |= results()
        if self.documents is not None:
            for back, *chunks in self.executor.binder.orders:
                (self.documents.restored if back else self.documents.arranged)(*chunks)

    def make(self, name: str) -> Fields:
        """Allocate a part, or results, at first use in this run."""
        batch, dtypes = self.executor.program.batch, self.executor.dtypes
        device, buffer = self.queues.where.device, self.executor.buffers[name]
        fields = self.fields[name] = {
            field.name: torch.empty(
                shape_of(field, batch, buffer.rows), dtype=dtypes[field.dtype], device=device
            )
            for field in buffer.fields
        }
        return fields

    def keep(self, name: int, buffer: Buffer, view: Any) -> Any:
        """Cache a view of a buffer for as long as its memory lives."""
        self.views[name] = view
        if buffer.home is Home.SLOT:
            self._kept[buffer.use][name] = view
        elif buffer.home not in (*_OWN, Home.LEFT):
            self._kept[None][name] = view
        return view

    def layout(self, buffer: Buffer) -> ByteLayout:
        """The byte layout of a buffer."""
        return self.executor.layouts[buffer.name]

    def bytes_of(self, buffer: Buffer) -> Tensor:
        """The bytes of a whole buffer that is not a part."""
        size = self.layout(buffer).num_bytes
        if buffer.home is Home.SLOT:
            return self.slots[buffer.use].flat(buffer.number)[:size]
        if buffer.home is Home.LEFT:
            return self.left[buffer.name]
        number = buffer.number if buffer.home is Home.HOP else buffer.number % buffer.count
        use = buffer.home, buffer.use
        begin = self.executor.places[0][use] + number * _aligned(self.executor.uses[use][1])
        return self._flat[begin : begin + size]
