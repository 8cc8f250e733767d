"""A program made ready to run (`Compiler`), at one length (`BoundProgram`), in one call (`Run`)."""

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

_SEPARATE = Space.CALL, Space.TEMP  # each field is a tensor; all other buffers are flat bytes
_ALIGNMENT = 512  # bytes, that of torch's allocator


@dataclass(frozen=True, slots=True)
class Step:
    """An operation, bound."""

    run: Callable[["Run"], Handle | None]  # a transfer returns its handle
    queue: Hashable | None  # where it runs; None: the queue of the call's kernels
    switches_queue: bool  # whether the previous operation is on another queue
    starts_queue: bool  # whether it is the first on its queue
    waits: tuple[int, ...]  # operations on other queues that must finish first
    opens: list[tuple[str, int]]  # slots that it is the first to touch: (use, number)
    is_transfer: bool  # whether it is a transfer
    has_waiters: bool  # whether another queue waits for it
    frees: tuple[str, ...]  # temps that no later operation reads


class Compiler:
    """Makes a rank's program ready to run at any length.

    Attributes:
        order: waits and lifetimes, derived from the program.
        names: integers for the keys of views, which a run looks up faster than the keys.
        orders: chunk orders that a run needs: (whether back, source blocks, destination chunks).
        steps: the bound operations; set by the executor.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.order = program, order(program)
        self.names: dict[Hashable, int] = {}
        ops = (op for op in program.ops if isinstance(op, Arrange))
        self.orders = {(isinstance(op, Restore), op.src_blocks, op.dst_chunks): None for op in ops}
        self.steps: tuple[Step, ...] = ()

    def name_of(self, key: Hashable) -> int:
        """An integer, the same for equal keys."""
        return self.names.setdefault(key, len(self.names))


@dataclass(frozen=True, eq=False)
class BoundProgram:
    """A rank's program at one length: its buffers, and what its operations call."""

    program: Program
    backend: Backend
    transport: Transport
    scale: float  # of the scores
    dtypes: Dtypes
    deterministic: bool  # whether gradients must be bitwise the same every time
    unit: int = 1  # how many rows one row of the program stands for
    softcap: float = 0.0  # of the scores; 0: none

    @cached_property
    def score_options(self) -> dict[str, float]:
        """What kernels must know of the scores besides their scale."""
        return {"softcap": self.softcap} if self.softcap else {}

    @cached_property
    def compiler(self) -> Compiler:
        """The program's compiler, which all lengths share."""
        raise NotImplementedError

    @cached_property
    def buffers(self) -> dict[str, Buffer]:
        """The program's buffers, with their actual rows."""
        buffers = self.program.buffers.items()
        return {name: replace(buffer, rows=buffer.rows * self.unit) for name, buffer in buffers}

    @cached_property
    def layouts(self) -> dict[str, ByteLayout]:
        """Byte layouts by buffer name, for buffers that are raw bytes."""
        return {
            name: ByteLayout.of(buffer, self.program.batch, self.dtypes)
            for name, buffer in self.buffers.items()
            if buffer.space not in _SEPARATE
        }

    @cached_property
    def uses(self) -> dict[tuple[Space, str], tuple[int, int]]:
        """How many buffers the group must have for each use, and their bytes."""
        layouts = self.layouts.items()
        return uses_of((self.buffers[name], layout.num_bytes) for name, layout in layouts)

    @cached_property
    def arena_offsets(self) -> tuple[dict[tuple[Space, str], int], int]:
        """By use, where its buffers begin in the group's memory; and the bytes of all. Slots are
        not in it, because other ranks read them."""
        begins, end = {}, 0
        for (space, use), (count, size) in self.uses.items():
            if space is not Space.SLOT:
                begins[space, use] = end
                end += count * _aligned(size)
        return begins, end

    @cached_property
    def events(self) -> list[Handle | None]:
        """Events of the previous run for each operation and for the start, to be reused."""
        return [None] * (len(self.program.ops) + 1)


class Run:
    """The tensors of one run of a program.

    Attributes:
        fields: tensors of the call's buffers and of temps, by buffer and field.
        saved: bytes of buffers that forward saves for backward.
        failure: the error of an operation, after which only transfers are made.
        slots: the call's slots, by use.
        views: views of buffers by the compiler's names; those of the group's memory and of slots
            are reused by the next run.
        sink: [h], attention sinks of the call's query heads.
        largest: [h], raised to the largest score of each query head; None if nobody asks.
    """

    def __init__(
        self, executor: BoundProgram, tensors: dict[str, Fields], saved: dict[str, Tensor],
        queues: OneQueue | Queues, sample_mask: SampleMask | None = None,
        sink: Tensor | None = None, largest: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.sink, self.largest = None if sink is None else sink.contiguous(), largest
        self.fields, self.saved, self.sample_mask = tensors, saved, sample_mask
        self.executor, self.queues, transport = executor, queues, executor.transport
        self.unit, self.failure = executor.unit, None
        self.slots = {
            use: transport.slots(use, count, size, queues.placement)
            for (space, use), (count, size) in executor.uses.items()
            if space is Space.SLOT
        }
        memory = transport.buffers("all", 1, executor.arena_offsets[1], queues.placement)
        self._flat = memory.flats[0]
        self._cached_views = {use: slots.views(executor) for use, slots in self.slots.items()}
        self._cached_views[None] = memory.views(executor)
        self.views: dict[int, Any] = {}
        for views in self._cached_views.values():
            self.views.update(views)
        for name in executor.program.saved:  # before the loop, on the compute stream
            if name not in saved:
                size = executor.layouts[name].num_bytes
                device = queues.placement.device
                saved[name] = torch.empty(size, dtype=torch.uint8, device=device)

    def prepare(self, results: Callable[[], dict[str, Fields]]) -> None:
        """Allocate results and indices before the loop, as they belong to the compute stream."""
        self.fields |= results()
        if (sample := self.sample_mask) is not None:
            for is_back, *chunks in self.executor.compiler.orders:
                (sample.restore_index if is_back else sample.arrange_index)(*chunks)

    def make(self, name: str) -> Fields:
        """Allocate a temp, or results, at first use in this run."""
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
            self._cached_views[buffer.use][name] = view
        elif buffer.space not in (*_SEPARATE, Space.SAVED):
            self._cached_views[None][name] = view
        return view

    def layout(self, buffer: Buffer) -> ByteLayout:
        return self.executor.layouts[buffer.name]

    def bytes_of(self, buffer: Buffer) -> Tensor:
        """All bytes of a buffer, uint8 [n]; not for temps and buffers of the call."""
        size = self.layout(buffer).num_bytes
        if buffer.space is Space.SLOT:
            return self.slots[buffer.use].flat(buffer.number)[:size]
        if buffer.space is Space.SAVED:
            return self.saved[buffer.name]
        number = buffer.number if buffer.space is Space.POOL else buffer.number % buffer.count
        use = buffer.space, buffer.use
        begin = self.executor.arena_offsets[0][use] + number * _aligned(self.executor.uses[use][1])
        return self._flat[begin : begin + size]


def of_heads(x: Tensor | None, heads: tuple[int, ...]) -> Tensor | None:
    """What a tensor [h] has for these heads; a view of it if they are neighbours."""
    if x is None or are_neighbours(heads):
        return None if x is None else x[heads[0] : heads[-1] + 1]
    return torch.stack([x[head] for head in heads])


def are_neighbours(heads: tuple[int, ...]) -> bool:
    """Whether heads follow each other, as they do but in some all-to-alls."""
    return not heads or heads[-1] - heads[0] == len(heads) - 1


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
