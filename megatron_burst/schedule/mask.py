"""Masks as data: which tiles of (query shard, key shard) are alive."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from megatron_burst.schedule.layout import Layout, check_tokens


class Mask(StrEnum):
    """Which keys a query may see."""

    FULL = "full"
    CAUSAL = "causal"


@dataclass(frozen=True, slots=True)
class Span:
    """Rows [start, stop) of a rank's shard."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def holds(self, other: "Span") -> bool:
        """Whether all of the other's rows are among these."""
        return self.start <= other.start and other.stop <= self.stop

    def moved(self, by: int) -> "Span":
        """As many rows, further on."""
        return Span(self.start + by, self.stop + by)

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class Tile:
    """One call of an attention kernel.

    In a causal tile the last query row sees every key row, the one before it all but the last key
    row, and so on; it has at least as many key rows as query rows.
    """

    q: Span
    kv: Span
    mask: Mask

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs that the tile computes."""
        if self.mask is Mask.CAUSAL:
            return len(self.q) * (2 * len(self.kv) - len(self.q) + 1) // 2
        return len(self.q) * len(self.kv)


def cut(spans: Iterable[Span], length: int) -> tuple[Span, ...]:
    """Rows [0, length) in neighbouring spans; each given one holds or does not touch each."""
    edges = {0, length}.union(*((span.start, span.stop) for span in spans))
    return tuple(Span(start, stop) for start, stop in pairwise(sorted(edges)))


def is_alone(tile: Tile, tiles: Sequence[Tile]) -> bool:
    """Whether no other of the tiles has any of its query rows."""
    return not any(
        tile is not other and tile.q.start < other.q.stop and other.q.start < tile.q.stop
        for other in tiles
    )


def tiles(
    layout: Layout, mask: Mask, q_owner: int, kv_owner: int, cp_size: int, tokens: int
) -> tuple[Tile, ...]:
    """The live tiles of one rank's queries against one rank's keys.

    Args:
        layout: how tokens are dealt out.
        mask: which keys a query may see, by position in the whole sequence.
        q_owner: cp rank whose queries are meant.
        kv_owner: cp rank whose keys are meant.
        cp_size: size of the context-parallel group.
        tokens: rows on each rank.

    Raises:
        BurstError: if the layout cannot hold that many rows.
    """
    check_tokens(layout, cp_size, tokens)
    every = Span(0, tokens)
    if mask is Mask.FULL:
        return (Tile(every, every, Mask.FULL),)
    if q_owner == kv_owner:  # in all layouts the rows of a shard are in the order of positions
        return (Tile(every, every, Mask.CAUSAL),)
    earlier = kv_owner < q_owner
    match layout:
        case Layout.ZIGZAG:  # all of an earlier rank's late chunk lies ahead of all our rows
            half = tokens // 2
            if earlier:
                return (Tile(every, Span(0, half), Mask.FULL),)
            return (Tile(Span(half, tokens), every, Mask.FULL),)
        case Layout.CONTIGUOUS:
            return (Tile(every, every, Mask.FULL),) if earlier else ()
        case Layout.STRIPED:  # equal row numbers: visible from an earlier rank, hidden from a later
            if earlier:
                return (Tile(every, every, Mask.CAUSAL),)
            return (Tile(Span(1, tokens), Span(0, tokens - 1), Mask.CAUSAL),) if tokens > 1 else ()
