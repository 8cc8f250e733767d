"""Runs programs: one loop over bound operations.

What depends on shapes alone (waits, layouts of buffers, which part of a buffer is meant) is bound
once for each program and kept with it; a run looks up the call's own tensors and calls kernels.
"""

from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from megatron_burst.comm.carrier import Carrier
from megatron_burst.comm.slots import UnderWay
from megatron_burst.engine.documents import Documents
from megatron_burst.engine.memory import Dtypes, Fields, Layout, fields_at, shape_of
from megatron_burst.engine.operations import BIND
from megatron_burst.kernels.backends import Backend
from megatron_burst.schedule.order import Order, order
from megatron_burst.schedule.program import Buffer, Home, Program, Stream, Transfer


@dataclass(frozen=True)
class Executor:
    """A program with all that runs it.

    Attributes:
        program: of this rank.
        backend: computes the tiles.
        carrier: carries data between ranks.
        scale: of the scores before the softmax.
        dtypes: of elements.
        deterministic: whether gradients must be bitwise the same every time.
    """

    program: Program
    backend: Backend
    carrier: Carrier
    scale: float
    dtypes: Dtypes
    deterministic: bool

    @cached_property
    def order(self) -> Order:
        return order(self.program)

    @cached_property
    def steps(self) -> tuple["Step", ...]:
        """The operations, ready to run."""
        every = (*self.order.waits, self.order.joins)
        waited_for = {earlier for waits in every for earlier in waits}
        found = []
        for index, op in enumerate(self.program.ops):
            transfers = isinstance(op, Transfer)
            queue = (op.link, op.cargo) if transfers else op.stream
            found.append(
                Step(
                    BIND[type(op)](self, op),
                    None if queue is Stream.COMPUTE else queue,
                    self.order.waits[index],
                    transfers,
                    index in waited_for,
                    self.order.frees[index],
                )
            )
        return tuple(found)

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """How buffers lie in their bytes, by name; of those that are bytes."""
        program = self.program
        return {
            name: Layout.of(buffer, program.batch, self.dtypes)
            for name, buffer in program.buffers.items()
            if buffer.home not in (Home.CALL, Home.PART)
        }

    @cached_property
    def uses(self) -> dict[tuple[Home, str], tuple[int, int]]:
        """How many buffers of a use the group must have, and of how many bytes."""
        found: dict[tuple[Home, str], tuple[int, int]] = {}
        for name, layout in self.layouts.items():
            buffer = self.program.buffers[name]
            if buffer.home is not Home.LEFT:
                count = buffer.count if buffer.home is not Home.HOP else buffer.number + 1
                before = found.get((buffer.home, buffer.use), (0, 0))
                most = max(before[0], count), max(before[1], layout.num_bytes)
                found[buffer.home, buffer.use] = most
        return found

    def run(
        self, given: Mapping[str, Fields], left: Mapping[str, Tensor] | None = None,
        documents: Documents | None = None,
    ) -> "Run":  # fmt: skip
        """Run the program.

        Args:
            given: the call's own buffers: inputs, and outputs to be written.
            left: bytes of what forward has left.
            documents: of the sample, if the program's mask has any.
        """
        device = next(iter(next(iter(given.values())).values())).device
        run = Run(self, dict(given), dict(left or {}), device, documents)
        queues = _Queues(self.carrier, device)
        for index, step in enumerate(self.steps):
            with queues.of(step.queue):
                for earlier in step.waits:
                    queues.wait(earlier)
                under_way = step.run(run)
                if step.transfers:
                    queues.started(index, under_way)
                elif step.waited_for:
                    queues.mark(index)
            for name in step.frees:
                run.fields.pop(name, None)
        for earlier in self.order.joins:
            queues.wait(earlier)
        return run


@dataclass(frozen=True, slots=True)
class Step:
    """An operation, bound.

    Attributes:
        run: does it; of a transfer, returns what is under way.
        queue: where; None: with the call's kernels.
        waits: operations on other queues that must be over before.
        transfers: whether it is a transfer.
        waited_for: whether another queue waits for it.
        frees: parts that nobody needs any more.
    """

    run: Callable[["Run"], UnderWay | None]
    queue: Hashable | None
    waits: tuple[int, ...]
    transfers: bool
    waited_for: bool
    frees: tuple[str, ...]


class Run:
    """One run of a program: its tensors.

    Attributes:
        fields: of buffers, by name.
        left: bytes of buffers that forward leaves for backward.
        slots: of this call, by use.
        documents: of the sample.
    """

    def __init__(
        self, executor: Executor, given: dict[str, Fields], left: dict[str, Tensor],
        device: torch.device, documents: Documents | None = None,
    ) -> None:  # fmt: skip
        self.fields, self.left, self.documents = given, left, documents
        self._executor, self._device = executor, device
        self._flat: dict[tuple, list[Tensor]] = {}
        self.slots: dict = {}
        for (home, use), (count, size) in executor.uses.items():
            if home is Home.SLOT:
                self.slots[use] = executor.carrier.slots(use, count, size, device)
            else:
                buffers = executor.carrier.buffers((home, use), count, size, device)
                self._flat[home, use] = buffers
        self._bytes: dict[str, Tensor] = {}
        for name in executor.program.left:  # here, as it is the compute stream's memory
            if name not in left:
                size = executor.layouts[name].num_bytes
                left[name] = torch.empty(size, dtype=torch.uint8, device=device)

    def make(self, buffer: Buffer) -> Fields:
        """The tensors of a buffer that is touched for the first time in this run."""
        if buffer.home in (Home.PART, Home.CALL):
            batch, dtypes = self._executor.program.batch, self._executor.dtypes
            fields = {
                field.name: torch.empty(
                    shape_of(field, batch, buffer.rows),
                    dtype=dtypes[field.dtype],
                    device=self._device,
                )
                for field in buffer.fields
            }
        else:
            fields = fields_at(self.bytes_of(buffer), self._executor.layouts[buffer.name].places)
        self.fields[buffer.name] = fields
        return fields

    def bytes_of(self, buffer: Buffer) -> Tensor:
        """A whole buffer that is none of the allocator's parts."""
        flat = self._bytes.get(buffer.name)
        if flat is None:
            flat = self._bytes[buffer.name] = self._find(buffer)
        return flat

    def _find(self, buffer: Buffer) -> Tensor:
        size = self._executor.layouts[buffer.name].num_bytes
        if buffer.home is Home.SLOT:  # once, by whoever fills it: who pulled from it must be done
            return self.slots[buffer.use].view(buffer.number, (size,), torch.uint8)
        if buffer.home is Home.LEFT:
            return self.left[buffer.name]
        number = buffer.number if buffer.home is Home.HOP else buffer.number % buffer.count
        return self._flat[buffer.home, buffer.use][number][:size]


class _Queues:
    """Which queue a step is given to, and how others wait for it."""

    def __init__(self, carrier: Carrier, device: torch.device) -> None:
        self._overlaps, self._queues = carrier.overlaps, carrier.queues(device)
        self._over: dict[int, Callable[[], None]] = {}
        self._begin = self._queues.mark()
        self._begun: set[Hashable] = set()

    def of(self, name: Hashable | None):
        """Within it, a step goes where it belongs."""
        if name is None:
            return _HERE
        if name not in self._begun:  # what the calls before left is behind the call's kernels
            self._begun.add(name)
            with self._queues.on(name):
                self._queues.wait(self._begin)
        return self._queues.on(name)

    def wait(self, earlier: int) -> None:
        """Let the current queue wait for an operation on another one."""
        self._over[earlier]()

    def started(self, index: int, under_way: UnderWay) -> None:
        """A transfer was started from the current queue."""
        self._over[index] = under_way.wait
        if not self._overlaps:
            under_way.wait()

    def mark(self, index: int) -> None:
        """An operation was given to the current queue."""
        self._over[index] = partial(self._queues.wait, self._queues.mark())


_HERE = nullcontext()
