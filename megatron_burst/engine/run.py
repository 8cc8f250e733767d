"""What a run of a program holds: the program at one length, and the call's own tensors."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_burst.comm.transport import Handle, OneQueue, Queues, Transport
from megatron_burst.engine.memory import ByteLayout, Dtypes, Fields, shape_of
from megatron_burst.engine.sample_mask import SampleMask
from megatron_burst.kernels.interface import Backend
from megatron_burst.schedule.order import order
from megatron_burst.schedule.program import Arrange, Buffer, Program, Restore, Space, uses_of

_OWN = Space.CALL, Space.TEMP  # tensors of their own; all other buffers are raw bytes
_ALIGNMENT = 512  # bytes to whose multiples buffers are aligned, as torch's allocator does


@dataclass(frozen=True, slots=True)
class Step:
    """An operation, bound."""

    run: Callable[["Run"], Handle | None]  # a transfer returns its handle
    queue: Hashable | None  # where it runs; None: the queue of the call's kernels
    moves: bool  # whether the previous operation is on another queue
    begins: bool  # whether it is the first on its queue
    waits: tuple[int, ...]  # operations on other queues that must finish first
    opens: list[tuple[str, int]]  # slots that it is the first to touch: (use, number)
    transfers: bool  # whether it is a transfer
    waited_for: bool  # whether another queue waits for it
    frees: tuple[str, ...]  # parts that are no longer needed


class Compiler:
    """Makes a program ready to run at any length.

    Attributes:
        program: of one rank.
        order: of its operations.
        names: short names for what runs look up: views of buffers.
        orders: chunk orders that a run needs: direction (arrange or restore), from which to which.
        steps: the operations, set by the executor.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.order = program, order(program)
        self.names: dict[Hashable, int] = {}
        ops = (op for op in program.ops if isinstance(op, Arrange))
        self.orders = {(isinstance(op, Restore), op.src_blocks, op.dst_chunks): None for op in ops}
        self.steps: tuple[Step, ...] = ()

    def name_of(self, what: Hashable) -> int:
        """A short name, the same for equal keys."""
        return self.names.setdefault(what, len(self.names))


@dataclass(frozen=True, eq=False)
class BoundProgram:
    """A program at one length: its buffers, and what its operations call."""

    program: Program  # of this rank
    backend: Backend  # computes the tiles
    transport: Transport  # moves data between ranks
    scale: float  # of the scores
    dtypes: Dtypes
    deterministic: bool  # whether gradients must be bitwise the same every time
    unit: int = 1  # how many rows one row of the program stands for

    @cached_property
    def compiler(self) -> Compiler:
        """The program's binder, which all lengths share."""
        raise NotImplementedError

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
            if buffer.space not in _OWN
        }

    @cached_property
    def uses(self) -> dict[tuple[Space, str], tuple[int, int]]:
        """How many buffers the group must have for each use, and their bytes."""
        layouts = self.layouts.items()
        return uses_of((self.buffers[name], layout.num_bytes) for name, layout in layouts)

    @cached_property
    def arena_offsets(self) -> tuple[dict[tuple[Space, str], int], int]:
        """By use, where its buffers begin in the group's memory; how many bytes that needs. Other
        ranks read slots, so these have memory of their own."""
        begins, end = {}, 0
        for (home, use), (count, size) in self.uses.items():
            if home is not Space.SLOT:
                begins[home, use] = end
                end += count * _aligned(size)
        return begins, end

    @cached_property
    def events(self) -> list[Handle | None]:
        """The previous run's mark for each operation and for the start, to be reused."""
        return [None] * (len(self.program.ops) + 1)


class Run:
    """One run of a program: its tensors.

    Attributes:
        fields: of the call's buffers and of parts, by name.
        left: bytes of buffers that forward saves for backward.
        failure: of an operation, or None so far; from then on only transfers are made.
        slots: of this call, by use.
        views: of buffers that live as long as the run, by the executor's names; those of the
            group's memory are reused from the previous run.
        sink: [h], attention sinks of the call's query heads.
    """

    def __init__(
        self, executor: BoundProgram, given: dict[str, Fields], left: dict[str, Tensor],
        queues: OneQueue | Queues, documents: SampleMask | None = None,
        sink: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.sink = None if sink is None else sink.contiguous()
        self.fields, self.saved, self.documents = given, left, documents
        self.executor, self.queues, carrier = executor, queues, executor.transport
        self.unit, self.failure = executor.unit, None
        self.slots = {
            use: carrier.slots(use, count, size, queues.placement)
            for (home, use), (count, size) in executor.uses.items()
            if home is Space.SLOT
        }
        memory = carrier.buffers("all", 1, executor.arena_offsets[1], queues.placement)
        self._flat = memory.flats[0]
        self._kept = {use: slots.views(executor) for use, slots in self.slots.items()}
        self._kept[None] = memory.views(executor)
        self.views: dict[int, Any] = {}
        for kept in self._kept.values():
            self.views.update(kept)
        for name in executor.program.saved:  # here, because it is allocated on the compute stream
            if name not in left:
                size = executor.layouts[name].num_bytes
                device = queues.placement.device
                left[name] = torch.empty(size, dtype=torch.uint8, device=device)

    def prepare(self, results: Callable[[], dict[str, Fields]]) -> None:
        """Allocate results and indices before the loop, as they belong to the compute stream."""
        self.fields |= results()
        if self.documents is not None:
            for back, *chunks in self.executor.compiler.orders:
                (self.documents.restore_index if back else self.documents.arrange_index)(*chunks)

    def sink_of(self, heads: tuple[int, ...]) -> Tensor | None:
        """Sinks of some heads that follow each other in groups; None if none join."""
        if self.sink is None or not heads:
            return None
        if heads[-1] - heads[0] == len(heads) - 1:
            return self.sink[heads[0] : heads[-1] + 1]
        return torch.stack([self.sink[head] for head in heads])

    def make(self, name: str) -> Fields:
        """Allocate a part, or results, at first use in this run."""
        batch, dtypes = self.executor.program.batch, self.executor.dtypes
        device, buffer = self.queues.placement.device, self.executor.buffers[name]
        fields = self.fields[name] = {
            field.name: torch.empty(
                shape_of(field, batch, buffer.rows), dtype=dtypes[field.dtype], device=device
            )
            for field in buffer.fields
        }
        return fields

    def cache_view(self, name: int, buffer: Buffer, view: Any) -> Any:
        """Cache a view of a buffer for as long as its memory lives."""
        self.views[name] = view
        if buffer.space is Space.SLOT:
            self._kept[buffer.use][name] = view
        elif buffer.space not in (*_OWN, Space.SAVED):
            self._kept[None][name] = view
        return view

    def layout(self, buffer: Buffer) -> ByteLayout:
        """The byte layout of a buffer."""
        return self.executor.layouts[buffer.name]

    def bytes_of(self, buffer: Buffer) -> Tensor:
        """The bytes of a whole buffer that is not a part."""
        size = self.layout(buffer).num_bytes
        if buffer.space is Space.SLOT:
            return self.slots[buffer.use].flat(buffer.number)[:size]
        if buffer.space is Space.SAVED:
            return self.saved[buffer.name]
        number = buffer.number if buffer.space is Space.RING else buffer.number % buffer.count
        use = buffer.space, buffer.use
        begin = self.executor.arena_offsets[0][use] + number * _aligned(self.executor.uses[use][1])
        return self._flat[begin : begin + size]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
