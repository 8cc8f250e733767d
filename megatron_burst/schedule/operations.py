"""The operations of a program: each names its stream, and what it reads and writes."""

from dataclasses import dataclass
from enum import StrEnum

from megatron_burst.schedule.call import Cargo
from megatron_burst.schedule.layout import Numbers, Runs
from megatron_burst.schedule.mask import Mask, Places, Span
from megatron_burst.schedule.topology import Link


class Stream(StrEnum):
    """Where an operation is queued; each transfer has its own stream."""

    COMPUTE = "compute"
    SIDE = "side"


@dataclass(frozen=True, slots=True)
class Ref:
    """Rows and heads of a buffer; None: all of them."""

    buffer: str
    rows: Span | None = None
    heads: Span | None = None

    def at(self, rows: Span) -> "Ref":
        """These rows of it, relative to its first."""
        return Ref(
            self.buffer, rows if self.rows is None else rows.moved(self.rows.start), self.heads
        )


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
    """Reorder chunks of every document. Where documents begin is known at run time only.

    Attributes:
        source: its rows are in blocks.
        target: gets the chunks `numbers` of each document; a chunk listed twice is copied twice.
        lies: by block, the chunks of every document in the source.
        numbers: of the target.
    """

    source: Ref
    target: Ref
    lies: tuple[Numbers, ...]
    numbers: Numbers
    stream: Stream = Stream.COMPUTE

    reads = property(lambda self: (self.source,))
    writes = property(lambda self: (self.target,))


@dataclass(frozen=True, slots=True)
class Restore:
    """The inverse of `Arrange`, from `numbers` to `lies`: sums the copies; zeros for chunks that
    were left out."""

    source: Ref
    target: Ref
    lies: tuple[Numbers, ...]
    numbers: Numbers
    stream: Stream = Stream.COMPUTE

    reads = property(lambda self: (self.source,))
    writes = property(lambda self: (self.target,))


@dataclass(frozen=True, slots=True)
class ToRanks:
    """Shard heads: the target has all rows once for each of `ranks`, with that rank's heads.

    Attributes:
        sources: of all heads.
        target: of the heads of each rank.
        ranks: in the order of the heads.
        heads_kv: KV heads that each of them has.
        copies: this many consecutive ranks have the same KV heads, and each an equal part of every
            KV head's query heads.
    """

    sources: tuple[Ref, ...]
    target: Ref
    ranks: int
    heads_kv: int
    copies: int = 1
    stream: Stream = Stream.COMPUTE

    reads = property(lambda self: self.sources)
    writes = property(lambda self: (self.target,))


@dataclass(frozen=True, slots=True)
class FromRanks:
    """The inverse of `ToRanks`; copies of KV heads are summed, in the accumulation dtype and
    rounded once."""

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
    """One forward kernel: out and lse of the queries over the keys and values, which may go into
    two buffers; `places` as in `mask.Tile`."""

    q: Ref
    kv: Ref
    mask: Mask
    into: tuple[Ref, ...]
    places: tuple[Places, Places] | Runs | None = None
    stream: Stream = Stream.COMPUTE

    reads = property(lambda self: (self.q, self.kv))
    writes = property(lambda self: self.into)


@dataclass(frozen=True, slots=True)
class AttendBackward:
    """One backward kernel; `sides` have q, dout, lse and delta or out (or a stand-in)."""

    sides: tuple[Ref, ...]
    kv: Ref
    mask: Mask
    dq: Ref
    dkv: Ref
    places: tuple[Places, Places] | Runs | None = None
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
class StandIn:
    """An output that has the same delta, for kernels that want an output."""

    sides: tuple[Ref, ...]
    into: Ref
    stream: Stream = Stream.COMPUTE

    reads = property(lambda self: self.sides)
    writes = property(lambda self: (self.into,))


@dataclass(frozen=True, slots=True)
class Give:
    """What another rank receives."""

    peer: int
    rows: Ref


@dataclass(frozen=True, slots=True)
class Take:
    """What is received from another rank: its rows there, and where they go here."""

    peer: int
    theirs: Ref
    rows: Ref


@dataclass(frozen=True, slots=True)
class Transfer:
    """Sends to and receives from other ranks; complete once both are done.

    Attributes:
        link: whose communicators carry it.
        cargo: data to read, or gradients.
        gives: what this rank sends, or others pull.
        takes: what it receives, or pulls.
        slot: of this rank, if ranks of a node share theirs; it holds what this rank gives.
        pulled: whether it reads the others' slots by copy engine, instead of sending.
    """

    link: Link
    cargo: Cargo
    gives: tuple[Give, ...]
    takes: tuple[Take, ...]
    slot: Ref | None = None
    pulled: bool = False

    @property
    def reads(self) -> tuple[Ref, ...]:
        given = tuple(give.rows for give in self.gives)
        return (*given, self.slot) if self.slot else given

    writes = property(lambda self: tuple(take.rows for take in self.takes))


Op = (
    Copy | Arrange | Restore | ToRanks | FromRanks | Fill | Attend | AttendBackward | Merge | Add
    | Delta | StandIn | Transfer
)  # fmt: skip
