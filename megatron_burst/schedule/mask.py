"""Masks as data: which keys a query may see, and the tiles that queries and keys make."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from megatron_burst.errors import BurstError
from megatron_burst.schedule.layout import ChunkSegments, Layout, positions

WINDOWS, DOCUMENTS, SLICES = "windows", "packed documents", "slices"  # of kernels, in words
Positions = tuple[range, ...]  # positions in the sequence of consecutive rows
TilePositions = tuple[Positions, Positions] | ChunkSegments  # of a tile's queries and keys


@dataclass(frozen=True, slots=True)
class Band:
    """Which keys a query may see, by distance from the key level with it."""

    left: int | None = None  # how many keys before that key, 0 or more; None: all
    right: int | None = None  # how many keys after it; None: all

    @property
    def causal(self) -> bool:
        """Whether a query sees the key level with it and all before."""
        return self.left is None and self.right == 0

    @property
    def full(self) -> bool:
        """Whether a query sees all keys."""
        return self.left is None and self.right is None

    @property
    def windowed(self) -> bool:
        """Whether the band is neither causal nor full."""
        return not (self.causal or self.full)


@dataclass(frozen=True, slots=True)
class Mask(Band):
    """Which keys a query may see: a band of positions around its own.

    A tile's mask is relative to the corner: the last query row and the last key row are at the same
    position.
    """

    # whether the sample says more of what a query sees, when the call runs: its own document only,
    # or slices. So one program serves all samples
    documents: bool = False

    FULL: ClassVar["Mask"]
    CAUSAL: ClassVar["Mask"]

    @property
    def needs(self) -> frozenset[str]:
        """What a kernel must support, besides full and causal calls."""
        return frozenset([WINDOWS] * self.windowed + [DOCUMENTS] * self.documents)

    @property
    def positional(self) -> bool:
        """Whether tiles depend on where rows are in the sequence, not on their order alone."""
        return self.windowed or self.documents

    def __str__(self) -> str:
        word = "causal" if self.causal else "full"
        if self.windowed:
            word = f"window {_or_all(self.left)}/{_or_all(self.right)}"
        return f"{word} in documents" if self.documents else word


Mask.FULL, Mask.CAUSAL = Mask(), Mask(right=0)


def check_mask(mask: Mask, layout: Layout, mode: str, one_call: bool) -> None:
    """Refuse what a mode ("ring", "gather" or "a2a") cannot do.

    Args:
        one_call: whether a kernel sees all keys of a query in one call.

    Raises:
        BurstError: for documents in a layout whose shards are not contiguous chunks; for windows
            in documents where a kernel cannot see where documents end.
    """
    if not mask.documents:
        return
    if layout is Layout.STRIPED:
        raise BurstError(
            "burst attention: packed documents must be sharded in contiguous chunks, because "
            "kernels need a segment's rows to be adjacent; got layout striped; shard the tokens "
            "in zigzag or contiguous"
        )
    has_all = mode == "a2a" or (mode == "gather" and mask.right == 0)
    if mask.windowed and not (one_call and has_all):
        raise BurstError(
            "burst attention: windows in documents need all keys of a query in one kernel call, "
            f"because documents may end inside a tile; got {mask} with intra={mode}; pass "
            "intra='a2a' (--burst-intra a2a), on several nodes inter='a2a' (--burst-inter a2a)"
        )


def _or_all(bound: int | None) -> str:
    return "all" if bound is None else f"{bound}"


@dataclass(frozen=True, slots=True)
class Span:
    """Rows [start, stop) of a rank's shard."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def contains(self, span: "Span") -> bool:
        return self.start <= span.start and span.stop <= self.stop

    def intersection(self, span: "Span") -> "Span | None":
        """The intersection, if any."""
        start, stop = max(self.start, span.start), min(self.stop, span.stop)
        return Span(start, stop) if start < stop else None

    def shifted(self, by: int) -> "Span":
        return Span(self.start + by, self.stop + by)

    def scaled(self, unit: int) -> "Span":
        """The span in rows, if it counts units of `unit` rows."""
        return Span(self.start * unit, self.stop * unit)

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
    mask: Mask  # relative to the last row of both
    # of query rows and of key rows, if positions tell documents apart; or which chunks of every
    # document the rows are
    positions: TilePositions | None = None

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs in the tile, if all rows are of one document."""
        if isinstance(self.positions, ChunkSegments):
            return sum(segment.pairs for segment in self._segments(self.positions))
        num_q, num_kv = len(self.q), len(self.kv)
        stop = num_kv if self.mask.right is None else num_kv - num_q + self.mask.right + 1
        pairs = num_q * num_kv if self.mask.right is None else _clamped_sum(num_q, num_kv, stop)
        if self.mask.left is None:
            return pairs
        return pairs - _clamped_sum(num_q, num_kv, num_kv - num_q - self.mask.left)

    def _segments(self, segments: ChunkSegments) -> Iterator["Tile"]:
        """Tiles of the segments, if one document fills all rows."""
        row, chunk = 0, len(self.q) // sum(len(queries) for queries, _ in segments.pairs)
        for queries, keys in segments.pairs:
            stop = row + len(queries) * chunk
            yield Tile(Span(row, stop), Span(0, len(keys) * chunk), self.mask)
            row = stop


def _clamped_sum(rows: int, most: int, first: int) -> int:
    """Sum of `first`, `first` + 1, ... over `rows` rows, each clamped to [0, `most`]."""
    start = min(max(0, -first), rows)
    full = min(max(start, most - first), rows)
    count = full - start
    return count * (first + start) + count * (count - 1) // 2 + (rows - full) * most


def split_at_edges(spans: Iterable[Span], length: int) -> tuple[Span, ...]:
    """Rows [0, length) as adjacent spans, cut where any of `spans` begins or ends."""
    edges = {0, length}.union(*((span.start, span.stop) for span in spans))
    return tuple(Span(start, stop) for start, stop in pairwise(sorted(edges)))


def has_sole_rows(tile: Tile, tiles: Sequence[Tile]) -> bool:
    """Whether no other tile has any of this tile's query rows, so that nothing is added to them."""
    return not any(tile is not peer and tile.q.intersection(peer.q) for peer in tiles)


def tile_between(q: range, kv: range, mask: Mask) -> Tile | None:
    """The tile of queries and keys at these positions, which have the same step: the query rows
    that see a key, and the key rows that a query sees, counted from the first of each."""
    offset, step = q.start - kv.start, q.step
    # key row j is seen by query row i if low <= j - i <= high
    high = len(kv) if mask.right is None else (mask.right + offset) // step
    low = -len(q) if mask.left is None else -((mask.left - offset) // step)
    rows = Span(max(0, -high), min(len(q), len(kv) - low))
    keys = Span(max(0, low), min(len(kv), len(q) + high))
    if rows.start >= rows.stop or keys.start >= keys.stop or low > high:
        return None
    corner = keys.stop - rows.stop
    right, left = high - corner, corner - low
    tile_mask = Mask(
        None if mask.left is None or left >= len(keys) - 1 else left,
        None if mask.right is None or right >= max(1, len(rows) - 1) else right,
        mask.documents,
    )
    ranges = ((q[rows.slice],), (kv[keys.slice],)) if mask.documents else None
    return Tile(rows, keys, tile_mask, ranges)


def tiles(
    layout: Layout, mask: Mask, q_owner: int, kv_owner: int, cp_size: int, tokens: int,
    keys: int | None = None,
) -> tuple[Tile, ...]:  # fmt: skip
    """The non-empty tiles of one rank's queries against one rank's keys.

    Args:
        tokens: rows on each rank.
        keys: rows of keys on each rank, if not as many: under a full mask.

    Raises:
        BurstError: if the layout cannot hold that many rows.
    """
    keys = keys or tokens
    q = positions(layout, q_owner, cp_size, tokens)
    kv = positions(layout, kv_owner, cp_size, keys)
    if mask.full or (mask.causal and q_owner == kv_owner):
        # in all layouts the rows of a shard are in sequence order
        return (Tile(Span(0, tokens), Span(0, keys), mask, (q, kv) if mask.documents else None),)
    return merge_full_tiles(
        Tile(tile.q.shifted(row), tile.kv.shifted(key_row), tile.mask, tile.positions)
        for row, queries in _with_first_row(q)
        for key_row, key_range in _with_first_row(kv)
        if (tile := tile_between(queries, key_range, mask))
    )


def _with_first_row(ranges: Positions) -> Iterator[tuple[int, range]]:
    """Each range of positions with its first row in the shard."""
    row = 0
    for run in ranges:
        yield row, run
        row += len(run)


def merge_full_tiles(tiles: Iterable[Tile]) -> tuple[Tile, ...]:
    """The same tiles, with adjacent full tiles merged."""
    merged: list[Tile] = []
    for tile in tiles:
        while merged and (union := _merge_full(merged[-1], tile)):
            tile = union
            merged.pop()
        merged.append(tile)
    return tuple(merged)


def _merge_full(first: Tile, second: Tile) -> Tile | None:
    """Two full tiles as one, if the second continues the first."""
    if not (first.mask.full and second.mask.full):
        return None
    if isinstance(first.positions, ChunkSegments) or isinstance(second.positions, ChunkSegments):
        return None
    q, kv = first.q, first.kv
    runs, more = first.positions, second.positions
    if q == second.q and kv.stop == second.kv.start:
        kv = Span(kv.start, second.kv.stop)
        runs = runs and more and (runs[0], runs[1] + more[1])
    elif kv == second.kv and q.stop == second.q.start:
        q = Span(q.start, second.q.stop)
        runs = runs and more and (runs[0] + more[0], runs[1])
    else:
        return None
    return Tile(q, kv, first.mask, runs)
