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
    """Which keys a query may see, by distance from the key level with it.

    Attributes:
        left: how many before that, 0 or more; None: all.
        right: how many after it; None: all.
    """

    left: int | None = None
    right: int | None = None

    @property
    def causal(self) -> bool:
        """Whether a query sees the key level with it and all before."""
        return self.left is None and self.right == 0

    @property
    def full(self) -> bool:
        """Whether it sees all."""
        return self.left is None and self.right is None

    @property
    def windowed(self) -> bool:
        """Whether it is neither."""
        return not (self.causal or self.full)


@dataclass(frozen=True, slots=True)
class Mask(Band):
    """Which keys a query may see: a band of positions around its own.

    In a tile it is relative to the corner: the last query row and the last key row are at the same
    position.

    Attributes:
        documents: whether a query sees keys of its own document only; where documents begin is
            passed at run time, so that one program serves all samples.
    """

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
    """Refuse what a mode cannot do.

    Args:
        mask: of the sequence.
        layout: of the tokens.
        mode: "ring", "gather" or "a2a".
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

    def contains(self, other: "Span") -> bool:
        """Whether all of the other's rows are among these."""
        return self.start <= other.start and other.stop <= self.stop

    def intersection(self, other: "Span") -> "Span | None":
        """The intersection, if any."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Span(start, stop) if start < stop else None

    def shifted(self, by: int) -> "Span":
        """The span shifted by `by` rows."""
        return Span(self.start + by, self.stop + by)

    def scaled(self, unit: int) -> "Span":
        """The span in rows, given a span in units of `unit` rows."""
        return Span(self.start * unit, self.stop * unit)

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class Tile:
    """One call of an attention kernel.

    In a causal tile the last query row sees every key row, the one before it all but the last key
    row, and so on; it has at least as many key rows as query rows.

    Attributes:
        q: query rows.
        kv: key rows.
        mask: relative to the last row of both.
        places: positions of its query rows and of its key rows, if documents are told apart by
            position; or which chunks of every document they are.
    """

    q: Span
    kv: Span
    mask: Mask
    positions: TilePositions | None = None

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs in the tile, if it is all one document."""
        if isinstance(self.positions, ChunkSegments):
            return sum(segment.pairs for segment in self._segments(self.positions))
        num_q, num_kv = len(self.q), len(self.kv)
        stop = num_kv if self.mask.right is None else num_kv - num_q + self.mask.right + 1
        seen = num_q * num_kv if self.mask.right is None else _clamped_sum(num_q, num_kv, stop)
        if self.mask.left is None:
            return seen
        return seen - _clamped_sum(num_q, num_kv, num_kv - num_q - self.mask.left)

    def _segments(self, runs: ChunkSegments) -> Iterator["Tile"]:
        """Tiles of the segments, if one document fills all rows."""
        row, chunk = 0, len(self.q) // sum(len(queries) for queries, _ in runs.pairs)
        for queries, keys in runs.pairs:
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
    """Rows [0, length) as adjacent spans, cut at the ends of all given spans."""
    edges = {0, length}.union(*((span.start, span.stop) for span in spans))
    return tuple(Span(start, stop) for start, stop in pairwise(sorted(edges)))


def covers_its_rows(tile: Tile, tiles: Sequence[Tile]) -> bool:
    """Whether no other tile has any of its query rows."""
    return not any(tile is not other and tile.q.intersection(other.q) for other in tiles)


def tile_between(q: range, kv: range, mask: Mask) -> Tile | None:
    """The tile of queries and keys at these positions: the rows of each that meet any of the other,
    counted from the first of each.

    Args:
        q: positions of the queries.
        kv: positions of the keys; same step.
        mask: by position.
    """
    away, step = q.start - kv.start, q.step
    # key row j is seen by query row i if low <= j - i <= high
    high = len(kv) if mask.right is None else (mask.right + away) // step
    low = -len(q) if mask.left is None else -((mask.left - away) // step)
    rows = Span(max(0, -high), min(len(q), len(kv) - low))
    keys = Span(max(0, low), min(len(kv), len(q) + high))
    if rows.start >= rows.stop or keys.start >= keys.stop or low > high:
        return None
    corner = keys.stop - rows.stop
    right, left = high - corner, corner - low
    near = Mask(
        None if mask.left is None or left >= len(keys) - 1 else left,
        None if mask.right is None or right >= max(1, len(rows) - 1) else right,
        mask.documents,
    )
    return Tile(
        rows, keys, near, (((q[rows.slice],), (kv[keys.slice],)) if mask.documents else None)
    )


def tiles(
    layout: Layout, mask: Mask, q_owner: int, kv_owner: int, cp_size: int, tokens: int,
    keys: int | None = None,
) -> tuple[Tile, ...]:  # fmt: skip
    """The non-empty tiles of one rank's queries against one rank's keys.

    Args:
        layout: how tokens are sharded.
        mask: which keys a query may see, by position in the whole sequence.
        q_owner: cp rank of the queries.
        kv_owner: cp rank of the keys.
        cp_size: size of the context-parallel group.
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
        tile for row, some in _in_shard(q) for tile in _tiles_over_keys(row, some, kv, mask)
    )


def _in_shard(places: Positions) -> Iterator[tuple[int, range]]:
    """Each range with its first row in the shard."""
    row = 0
    for some in places:
        yield row, some
        row += len(some)


def _tiles_over_keys(row: int, q: range, kv: Positions, mask: Mask) -> Iterator[Tile]:
    """Tiles of queries, which begin at a row of their shard, over all keys of a shard."""
    for key_row, some in _in_shard(kv):
        if found := tile_between(q, some, mask):
            rows, keys = found.q.shifted(row), found.kv.shifted(key_row)
            yield Tile(rows, keys, found.mask, found.positions)


def merge_full_tiles(tiles: Iterable[Tile]) -> tuple[Tile, ...]:
    """The same tiles, with adjacent full tiles joined."""
    found: list[Tile] = []
    for tile in tiles:
        while found and (both := _merged(found[-1], tile)):
            tile = both
            found.pop()
        found.append(tile)
    return tuple(found)


def _merged(one: Tile, other: Tile) -> Tile | None:
    """Two full tiles as one, if the second continues the first."""
    if not (one.mask.full and other.mask.full):
        return None
    if isinstance(one.positions, ChunkSegments) or isinstance(other.positions, ChunkSegments):
        return None
    q, kv, places = one.q, one.kv, one.positions
    if q == other.q and kv.stop == other.kv.start:
        kv = Span(kv.start, other.kv.stop)
        places = places and other.positions and (places[0], places[1] + other.positions[1])
    elif kv == other.kv and q.stop == other.q.start:
        q = Span(q.start, other.q.stop)
        places = places and other.positions and (places[0] + other.positions[0], places[1])
    else:
        return None
    return Tile(q, kv, one.mask, places)
