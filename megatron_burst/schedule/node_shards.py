"""Pieces of shards in sequence order, and the tiles between two sets of them."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron_burst.errors import BurstError
from megatron_burst.schedule.layout import Layout, positions
from megatron_burst.schedule.mask import Mask, Span, Tile, merge_full_tiles, tile_between
from megatron_burst.schedule.spec import Circulate
from megatron_burst.schedule.topology import Topology


@dataclass(frozen=True, slots=True)
class ShardChunk:
    """Rows of one rank's shard that are contiguous in the whole sequence.

    Attributes:
        holder: cp rank that has them during the step.
        rows: in the shard.
        whole: among all rows of a node's shards, in sequence order.
        place: position of the first row in the sequence.
    """

    cp_rank: int
    rows: Span
    node_rows: Span
    position: int = 0

    def within(self, whole: Span) -> "ShardChunk | None":
        """Its rows within this span of the whole, if any."""
        if not (both := self.node_rows.intersection(whole)):
            return None
        by = self.rows.start - self.node_rows.start
        place = self.position + both.start - self.node_rows.start
        return ShardChunk(self.cp_rank, both.shifted(by), both, place)


@dataclass(frozen=True, slots=True, eq=False)
class NodeShards:
    """The shards of a node, held by the ranks of another or of its own.

    Attributes:
        pieces: in sequence order.
        before: for each of the working node's own pieces, how many of these come before it.
        after: for each of these, how many of the working node's own come before it.
    """

    chunks: tuple[ShardChunk, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Halo:
    """Rows of a shard that ranks of other nodes read: what circulates between nodes.

    Attributes:
        spans: of the shard, in order.
        of: rows of the shard.
    """

    spans: tuple[Span, ...]
    shard_rows: int

    @property
    def rows(self) -> int:
        return sum(map(len, self.spans))

    def circulating_parts(self, rows: Span) -> Iterator[tuple[Span, Span]]:
        """Those within some rows: in the shard, and in what circulates."""
        start = 0
        for span in self.spans:
            if both := span.intersection(rows):
                yield both, both.shifted(start - span.start)
            start += len(span)


@lru_cache(maxsize=4096)
def halo(topology: Topology, layout: Layout, mask: Mask, tokens: int, owner: int) -> Halo:
    """The part of a rank's keys that circulates: under a window, what queries of other nodes see.

    Args:
        topology: of the group.
        layout: how tokens are sharded.
        mask: by position.
        tokens: rows on each rank.
        owner: cp rank.
    """
    if not mask.windowed or layout is Layout.DOCUMENTS:  # there, a window needs a single node
        return Halo((Span(0, tokens),), tokens)
    found, (home, _) = [], topology.coord(owner)
    for queries in (places for row, places in enumerate(_node_positions(topology, layout, tokens))
                    if row != home):  # fmt: skip
        first = 0
        for keys in positions(layout, owner, topology.cp_size, tokens):
            met = (tile_between(places, keys, mask) for places in queries)
            found += [tile.kv.shifted(first) for tile in met if tile]
            first += len(keys)
    return Halo(tuple(Span(*edges) for edges in union((s.start, s.stop) for s in found)), tokens)


@lru_cache(maxsize=256)
def _node_positions(
    topology: Topology, layout: Layout, tokens: int
) -> tuple[tuple[range, ...], ...]:
    """Positions of the rows of each node, contiguous ones joined."""
    found = []
    for ranks in topology.grid:
        each = (at for rank in ranks for at in positions(layout, rank, topology.cp_size, tokens))
        together = union((at.start, at.stop) for at in each)
        found.append(tuple(range(start, stop) for start, stop in together))
    return tuple(found)


def union(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union, as disjoint spans."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


@lru_cache(maxsize=1024)
def node_shards(
    topology: Topology, row: int, layout: Layout, tokens: int, placed: bool = False
) -> tuple[NodeShards, ...]:
    """What the ranks of a node work with, by how many nodes away it is from; first their own
    shards.

    Equal visits share one object: in zigzag with contiguous ranks per node, one for all nodes
    before this one and one for all after it.

    Args:
        topology: of the group.
        row: of the node.
        layout: how tokens are sharded.
        tokens: rows on each rank.
        placed: whether positions matter, not only their order: then no two visits are equal.

    Raises:
        BurstError: if the layout is striped or cannot hold that many rows.
    """
    if layout is Layout.STRIPED:
        raise BurstError(
            "burst attention: gathered keys must be in sequence order, because each query must "
            "attend to a single range of them; got layout striped; pass intra='ring' "
            "(--burst-intra ring), or shard the tokens in zigzag"
        )
    alike: dict[tuple, NodeShards] = {}
    visits, own = [], None
    for away in range(topology.inter_size):
        terms = topology.grid[(row - away) % topology.inter_size], topology.grid[row]
        pieces = _shard_chunks(layout, topology.cp_size, tokens, *terms)
        starts = tuple(piece.position for piece in pieces)
        own = own or starts
        before = tuple(bisect_left(starts, start) for start in own)
        after = tuple(bisect_left(own, start) for start in starts)
        lie = tuple((piece.cp_rank, piece.rows.start) for piece in pieces)
        kind = lie, before, after, starts if placed else ()
        if kind not in alike:
            alike[kind] = NodeShards(pieces, before, after)
        visits.append(alike[kind])
    return tuple(visits)


def _shard_chunks(
    layout: Layout, cp_size: int, tokens: int, owners: Sequence[int], holders: Sequence[int]
) -> tuple[ShardChunk, ...]:
    """The shards of some ranks in sequence order, held by others."""
    found: list[ShardChunk] = []
    laid = (
        (span.start, holder, number, len(span))
        for owner, holder in zip(owners, holders, strict=True)
        for number, span in enumerate(positions(layout, owner, cp_size, tokens))
    )
    for i, (place, holder, number, size) in enumerate(sorted(laid)):
        rows, whole = (Span(n * size, (n + 1) * size) for n in (number, i))
        found.append(ShardChunk(holder, rows, whole, place))
    return tuple(found)


def sides(
    here: NodeShards, visit: NodeShards, circulate: Circulate | None
) -> tuple[tuple[tuple[ShardChunk, int], ...], tuple[ShardChunk, ...]]:
    """The query pieces, each with how many key pieces come before it, and the key pieces.

    Args:
        here: the node's own shards.
        visit: the shards they meet.
        circulate: what circulates.
    """
    if circulate is Circulate.Q:
        return tuple(zip(visit.chunks, visit.after, strict=True)), here.chunks
    return tuple(zip(here.chunks, visit.before, strict=True)), visit.chunks


def tiles_between(
    queries: Sequence[tuple[Span, ShardChunk, int]], keys: Sequence[ShardChunk], mask: Mask
) -> tuple[Tile, ...]:
    """Tiles of query rows over the keys of another node.

    Args:
        queries: in order: rows of the query tensor, their piece, and how many key pieces come
            before.
        keys: of the other node; no query is within a piece's range of positions.
        mask: which keys a query may see.
    """
    if mask.positional:
        return merge_full_tiles(
            tile for rows, piece, _ in queries for tile in tiles_over(rows, piece, keys, mask)
        )
    found: list[tuple[Span, int]] = []
    for rows, _, before in queries:
        seen = len(keys) if mask.full else before
        stop = keys[seen - 1].node_rows.stop if seen else 0
        if found and found[-1][1] == stop and found[-1][0].stop == rows.start:
            found[-1] = Span(found[-1][0].start, rows.stop), stop
        else:
            found.append((rows, stop))
    return tuple(Tile(rows, Span(0, stop), Mask.FULL) for rows, stop in found if stop)


def tiles_over(
    rows: Span, queries: ShardChunk, keys: Iterable[ShardChunk], mask: Mask
) -> Iterator[Tile]:
    """Tiles of a piece's queries over keys, whose rows count in the whole.

    Args:
        rows: of the query tensor.
        queries: their piece.
        keys: in the order of the sequence.
        mask: by position.
    """
    places = range(queries.position, queries.position + len(rows))
    for keys_at, whole in adjacent_runs(keys):
        if tile := tile_between(places, keys_at, mask):
            by = rows.start, whole
            yield Tile(tile.q.shifted(by[0]), tile.kv.shifted(by[1]), tile.mask, tile.positions)


def adjacent_runs(pieces: Iterable[ShardChunk]) -> list[tuple[range, int]]:
    """Adjacent pieces joined: their positions, and their first row in the whole."""
    found: list[tuple[range, int]] = []
    for piece in pieces:
        stop = piece.position + len(piece.rows)
        if found and (found[-1][0].stop, _stop(found[-1])) == (
            piece.position,
            piece.node_rows.start,
        ):
            found[-1] = range(found[-1][0].start, stop), found[-1][1]
        else:
            found.append((range(piece.position, stop), piece.node_rows.start))
    return found


def _stop(run: tuple[range, int]) -> int:
    return run[1] + len(run[0])
