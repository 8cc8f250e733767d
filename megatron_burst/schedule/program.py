"""The program of a rank: a list of operations on named buffers.

A program reads as if its operations ran one after the other. Each operation names its stream and
what it reads and writes; `order` derives from that which operations wait for which, and all others
run concurrently. The list is also the issue order: with CUDA_DEVICE_MAX_CONNECTIONS=1 an operation
that waits blocks those issued after it, so a transfer that waits for other ranks is issued after
the kernels that hide it. Rows may be counted in units (`Spec.in_units`), so that one program serves
all lengths.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import prod

from megatron_burst.schedule.chunks import NeededBy
from megatron_burst.schedule.layout import Chunks
from megatron_burst.schedule.mask import Mask, Span, TilePositions
from megatron_burst.schedule.spec import AttentionShape, Cargo, Direction, Dtype
from megatron_burst.schedule.topology import Link, Topology


class Stream(StrEnum):
    """Where an operation is queued; each transfer has its own stream."""

    COMPUTE = "compute"
    SIDE = "side"

    @classmethod
    def side_if(cls, hidden: int) -> "Stream":
        """The stream of a copy: the side stream if kernels run meanwhile and hide it."""
        return cls.SIDE if hidden else cls.COMPUTE


@dataclass(frozen=True, slots=True)
class Ref:
    """Rows and heads of a buffer; None: all of them."""

    buffer: str
    rows: Span | None = None
    heads: Span | None = None

    def at(self, rows: Span) -> "Ref":
        """These rows of the ref, counted from its first row."""
        rows = rows if self.rows is None else rows.shifted(self.rows.start)
        return Ref(self.buffer, rows, self.heads)


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the sources' fields to the target's fields of the same names."""

    sources: tuple[Ref, ...]
    target: Ref
    stream: Stream = Stream.COMPUTE

    reads = property(lambda self: self.sources)
    writes = property(lambda self: (self.target,))


@dataclass(frozen=True, slots=True)
class Arrange:
    """Reorder chunks of every document. Where documents begin is known at run time only."""

    source: Ref
    target: Ref
    src_blocks: tuple[Chunks, ...]  # by block of the source
    dst_chunks: Chunks  # of the target; a chunk listed twice is copied twice
    stream: Stream = Stream.COMPUTE

    reads = property(lambda self: (self.source,))
    writes = property(lambda self: (self.target,))


@dataclass(frozen=True, slots=True)
class Restore(Arrange):
    """The inverse, from `dst_chunks` to `src_blocks`: sums copies; zeros for chunks left out."""


@dataclass(frozen=True, slots=True)
class ToRanks:
    """Shard heads: the target has all rows once for each of so many ranks, with its heads."""

    sources: tuple[Ref, ...]
    target: Ref
    ranks: int
    heads_kv: int  # KV heads of each rank
    # this many consecutive ranks have the same KV heads, and each an equal part of every KV head's
    # query heads
    copies: int = 1
    stream: Stream = Stream.COMPUTE

    reads = property(lambda self: self.sources)
    writes = property(lambda self: (self.target,))


@dataclass(frozen=True, slots=True)
class FromRanks:
    """The inverse of `ToRanks`; copies of KV heads are summed as in `Add`."""

    source: Ref
    targets: tuple[Ref, ...]
    ranks: int
    heads_kv: int
    copies: int = 1
    stream: Stream = Stream.COMPUTE

    reads = property(lambda self: (self.source,))
    writes = property(lambda self: self.targets)


@dataclass(frozen=True, slots=True)
class Fill:
    """Initialize to empty sums: zeros, and -inf for lse."""

    target: Ref
    stream: Stream = Stream.COMPUTE

    reads = property(lambda self: ())
    writes = property(lambda self: (self.target,))


@dataclass(frozen=True, slots=True)
class Attend:
    """One forward kernel: out and lse, in one buffer or two, of the queries over the keys and
    values; `mask` and `positions` as in `mask.Tile`.
    """

    q: Ref
    kv: Ref
    mask: Mask
    into: tuple[Ref, ...]
    positions: TilePositions | None = None
    heads: tuple[int, ...] = ()  # the query heads, as the call counts them
    # whether their attention sinks join in this kernel; for each row they join in one
    joins_sinks: bool = False
    stream: Stream = Stream.COMPUTE

    reads = property(lambda self: (self.q, self.kv))
    writes = property(lambda self: self.into)


@dataclass(frozen=True, slots=True)
class AttendBackward:
    """One backward kernel; `sides` have q, dout, lse and delta or out (or a surrogate)."""

    sides: tuple[Ref, ...]
    kv: Ref
    mask: Mask
    dq: Ref
    dkv: Ref
    positions: TilePositions | None = None
    stream: Stream = Stream.COMPUTE

    reads = property(lambda self: (*self.sides, self.kv))
    writes = property(lambda self: (self.dq, self.dkv))


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge results over disjoint keys; the target may be among the parts."""

    parts: tuple[Ref, ...]
    into: tuple[Ref, ...]
    stream: Stream = Stream.COMPUTE

    reads = property(lambda self: self.parts)
    writes = property(lambda self: self.into)


@dataclass(frozen=True, slots=True)
class Add:
    """Sum in the accumulation dtype, rounded once; the target may be among the parts."""

    parts: tuple[Ref, ...]
    into: Ref
    stream: Stream = Stream.COMPUTE

    reads = property(lambda self: self.parts)
    writes = property(lambda self: (self.into,))


@dataclass(frozen=True, slots=True)
class Delta:
    """delta = rowsum(dO O) of a query side that has `dout` and `out`."""

    side: Ref
    into: Ref
    stream: Stream = Stream.COMPUTE

    reads = property(lambda self: (self.side,))
    writes = property(lambda self: (self.into,))


@dataclass(frozen=True, slots=True)
class SurrogateOut:
    """An output that has the same delta, for kernels that want an output."""

    sides: tuple[Ref, ...]
    into: Ref
    stream: Stream = Stream.COMPUTE

    reads = property(lambda self: self.sides)
    writes = property(lambda self: (self.into,))


@dataclass(frozen=True, slots=True)
class Send:
    """Rows that another rank receives, if the sample has pairs of `needed_by` (None: always)."""

    peer: int
    rows: Ref
    needed_by: NeededBy | None = None


@dataclass(frozen=True, slots=True)
class Recv:
    """The peer's rows, and where this rank receives them; `needed_by` as in the peer's `Send`."""

    peer: int
    remote_rows: Ref
    rows: Ref
    needed_by: NeededBy | None = None


@dataclass(frozen=True, slots=True)
class Transfer:
    """Sends to and receives from other ranks; complete once both are done."""

    link: Link  # with the cargo, the communicators that carry the transfer
    cargo: Cargo
    sends: tuple[Send, ...]  # what this rank sends, or other ranks pull
    recvs: tuple[Recv, ...]  # what this rank receives, or pulls
    # the buffer of what this rank sends, if ranks of a node share their slots
    slot: Ref | None = None
    pulled: bool = False  # whether ranks read each other's slots by copy engine, instead of sending

    @property
    def reads(self) -> tuple[Ref, ...]:
        sent = tuple(send.rows for send in self.sends)
        return (*sent, self.slot) if self.slot else sent

    writes = property(lambda self: tuple(recv.rows for recv in self.recvs))


Op = (
    Copy | Arrange | Restore | ToRanks | FromRanks | Fill | Attend | AttendBackward | Merge | Add
    | Delta | SurrogateOut | Transfer
)  # fmt: skip


class Space(StrEnum):
    """Where a buffer lives."""

    CALL = "call"  # an argument of the call, or a result
    SAVED = "saved"  # written by forward, read by the backward that follows
    TEMP = "temp"  # allocated by the operation that writes it first
    POOL = "pool"  # memory of the group, reused by every call; assigned by lifetime
    SLOT = "slot"  # likewise, numbered; other ranks of the node read its rows, or are sent them
    STAGING = "staging"  # likewise, numbered; receives rows for this rank
    SUM = "sum"  # likewise, numbered; sums that stay on the rank


NUMBERED = (Space.SLOT, Space.STAGING, Space.SUM)


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a buffer: [batch, rows, heads, dim], or [batch, heads, rows] if dim is 0."""

    name: str
    heads: int
    dim: int
    dtype: Dtype = Dtype.INPUT

    @property
    def elements(self) -> int:
        """Elements per row."""
        return self.heads * max(self.dim, 1)


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory with a name; `rows` rows of each field."""

    name: str
    space: Space
    rows: int
    fields: tuple[Field, ...]
    use: str = ""  # buffers of one use share memory, according to their numbers
    number: int = 0  # of slots, staging and sums; `order.assign_buffers` sets that of the pool's
    count: int = 1  # after how many numbers memory is reused
    # whether the fields are side by side in each row, so that rows can be sent; else each is dense
    interleaved: bool = False

    @property
    def storage(self) -> tuple:
        """A key for its memory: buffers with equal keys overlap."""
        if self.space is Space.POOL:
            return self.space, self.use, self.number
        shared = self.space in NUMBERED
        return (self.space, self.use, self.number % self.count) if shared else (self.name,)


@dataclass(frozen=True, eq=False)
class Program:
    """What one rank does in one pass of one call. Compares by identity, to be a cache key."""

    topology: Topology
    cp_rank: int
    direction: Direction
    batch: int  # sequences
    widths: Mapping[Dtype, int]  # bytes of an element
    buffers: Mapping[str, Buffer]  # by name
    ops: tuple[Op, ...]  # in issue order

    @cached_property
    def accesses(self) -> tuple[tuple[tuple[Ref, ...], tuple[Ref, ...]], ...]:
        """What each operation reads and writes."""
        return tuple((op.reads, op.writes) for op in self.ops)

    def num_bytes(self, ref: Ref) -> int:
        """Bytes of a ref's rows and heads, without padding."""
        buffer = self.buffers[ref.buffer]
        rows = buffer.rows if ref.rows is None else len(ref.rows)
        share = 1.0 if ref.heads is None else len(ref.heads) / buffer.fields[0].heads
        width = sum(field.elements * self.widths[field.dtype] for field in buffer.fields)
        return round(prod((rows, self.batch, width)) * share)

    @cached_property
    def saved(self) -> tuple[str, ...]:
        """Names of buffers that forward saves for backward."""
        return tuple(b.name for b in self.buffers.values() if b.space is Space.SAVED)

    def sent_bytes(self) -> dict[Link, int]:
        """Bytes that the rank sends, or other ranks pull, by link."""
        sent = dict.fromkeys(Link, 0)
        for op in self.ops:
            for send in op.sends if isinstance(op, Transfer) else ():
                sent[self.topology.link(self.cp_rank, send.peer)] += self.num_bytes(send.rows)
        return sent


def uses_of(sizes: Iterable[tuple[Buffer, int]]) -> dict[tuple[Space, str], tuple[int, int]]:
    """How many buffers the group must have for each use, and bytes of one; from each one's."""
    uses: dict[tuple[Space, str], tuple[int, int]] = {}
    for buffer, size in sizes:
        if buffer.space is Space.POOL or buffer.space in NUMBERED:
            count = buffer.count if buffer.space is not Space.POOL else buffer.number + 1
            most, largest = uses.get((buffer.space, buffer.use), (0, 0))
            uses[buffer.space, buffer.use] = max(most, count), max(largest, size)
    return uses


def widths_of(shape: AttentionShape) -> dict[Dtype, int]:
    """Bytes of an element, by dtype."""
    return {Dtype.INPUT: shape.itemsize, Dtype.SUM: shape.stat_bytes, Dtype.WIRE: shape.grad_bytes}
