"""The shards of a node as chunks in sequence order, and the tiles between two nodes' shards.

The rows of all shards of a node count in sequence order; so for 2 of 4 ranks, in zigzag:

    rank 0: | chunk 0 | chunk 7 |   rank 1: | chunk 1 | chunk 6 |
    node rows: | chunk 0 | chunk 1 | chunk 6 | chunk 7 |
"""

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
    """Rows of one rank's shard that are contiguous in the whole sequence."""

    cp_rank: int  # has the rows during the step
    rows: Span  # in the shard
    node_rows: Span
    position: int = 0  # of the first row, in the sequence

    def within(self, node_rows: Span) -> "ShardChunk | None":
        """The part of the chunk within these rows of the node, if any."""
        if not (part := self.node_rows.intersection(node_rows)):
            return None
        rows = part.shifted(self.rows.start - self.node_rows.start)
        position = self.position + part.start - self.node_rows.start
        return ShardChunk(self.cp_rank, rows, part, position)


@dataclass(frozen=True, slots=True, eq=False)
class NodeShards:
    """The shards of a node, which this node's ranks work with in a step."""

    chunks: tuple[ShardChunk, ...]  # in sequence order
    before: tuple[int, ...]  # for each chunk of this node, how many of `chunks` come before it
    own_before: tuple[int, ...]  # for each of `chunks`, how many chunks of this node come before it


@dataclass(frozen=True, slots=True)
class Halo:
    """Rows of a shard that ranks of other nodes read: what circulates between nodes."""

    spans: tuple[Span, ...]  # rows of the shard, ascending
    shard_rows: int  # number of rows of the shard

    @property
    def rows(self) -> int:
        return sum(map(len, self.spans))

    def circulating_parts(self, rows: Span) -> Iterator[tuple[Span, Span]]:
        """The parts within these rows: as rows of the shard, and of the piece that circulates."""
        start = 0
        for span in self.spans:
            if part := span.intersection(rows):
                yield part, part.shifted(start - span.start)
            start += len(span)


@lru_cache(maxsize=4096)
def halo(topology: Topology, layout: Layout, mask: Mask, tokens: int, owner: int) -> Halo:
    """The owner's keys that circulate: under a window those that queries of other nodes see."""
    if not mask.windowed or layout is Layout.DOCUMENTS:  # windows in documents need a single node
        return Halo((Span(0, tokens),), tokens)
    visible: list[Span] = []
    owner_row, _ = topology.coord(owner)
    for row, node_queries in enumerate(_node_positions(topology, layout, tokens)):
        if row == owner_row:
            continue
        first = 0
        for keys in positions(layout, owner, topology.cp_size, tokens):
            overlaps = (tile_between(queries, keys, mask) for queries in node_queries)
            visible += [tile.kv.shifted(first) for tile in overlaps if tile]
            first += len(keys)
    return Halo(tuple(union(visible)), tokens)


@lru_cache(maxsize=256)
def _node_positions(
    topology: Topology, layout: Layout, tokens: int
) -> tuple[tuple[range, ...], ...]:
    """Positions of the rows of each node, contiguous ranges merged."""
    nodes = []
    for ranks in topology.grid:
        runs = (run for rank in ranks for run in positions(layout, rank, topology.cp_size, tokens))
        merged = union(Span(run.start, run.stop) for run in runs)
        nodes.append(tuple(range(span.start, span.stop) for span in merged))
    return tuple(nodes)


def union(spans: Iterable[Span]) -> list[Span]:
    """The union, as disjoint spans."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        if merged and span.start <= merged[-1].stop:
            merged[-1] = Span(merged[-1].start, max(merged[-1].stop, span.stop))
        else:
            merged.append(span)
    return merged


@lru_cache(maxsize=1024)
def node_shards(
    topology: Topology, row: int, layout: Layout, tokens: int, positional: bool = False
) -> tuple[NodeShards, ...]:
    """The shards that the ranks of a node work with, by how many nodes away their owners are.

    Equal ones share one object: in zigzag with contiguous ranks per node, one for all nodes before
    this node and one for all nodes after it. None are equal if `positional`, not of order alone.

    Raises:
        BurstError: if the layout is striped or cannot hold that many rows.
    """
    if layout is Layout.STRIPED:
        raise BurstError(
            "burst attention: gathered keys must be in sequence order, because each query must "
            "attend to a single range of them; got layout striped; pass intra='ring' "
            "(--burst-intra ring), or shard the tokens in zigzag"
        )
    cached: dict[tuple, NodeShards] = {}
    shards, own_starts = [], None
    for offset in range(topology.inter_size):
        owners = topology.grid[(row - offset) % topology.inter_size]
        chunks = _shard_chunks(layout, topology.cp_size, tokens, owners, topology.grid[row])
        starts = tuple(chunk.position for chunk in chunks)
        own_starts = own_starts or starts
        before = tuple(bisect_left(starts, start) for start in own_starts)
        own_before = tuple(bisect_left(own_starts, start) for start in starts)
        in_memory = tuple((chunk.cp_rank, chunk.rows.start) for chunk in chunks)
        key = in_memory, before, own_before, starts if positional else ()
        if key not in cached:
            cached[key] = NodeShards(chunks, before, own_before)
        shards.append(cached[key])
    return tuple(shards)


def _shard_chunks(
    layout: Layout, cp_size: int, tokens: int, owners: Sequence[int], holders: Sequence[int]
) -> tuple[ShardChunk, ...]:
    """The owners' shards in sequence order; the holder in the same place has each."""
    in_order = sorted(
        (span.start, holder, number, len(span))
        for owner, holder in zip(owners, holders, strict=True)
        for number, span in enumerate(positions(layout, owner, cp_size, tokens))
    )
    return tuple(
        ShardChunk(holder, Span(n * size, (n + 1) * size), Span(i * size, (i + 1) * size), position)
        for i, (position, holder, n, size) in enumerate(in_order)
    )


QueryChunk = tuple[ShardChunk, int]  # and how many chunks of the keys come before it


def queries_and_keys(
    own: NodeShards, remote: NodeShards, circulate: Circulate | None
) -> tuple[tuple[QueryChunk, ...], tuple[ShardChunk, ...]]:
    """The chunks of a step: queries and keys of this node and of a remote one."""
    if circulate is Circulate.Q:
        return tuple(zip(remote.chunks, remote.own_before, strict=True)), own.chunks
    return tuple(zip(own.chunks, remote.before, strict=True)), remote.chunks


def tiles_between(
    queries: Sequence[QueryChunk], keys: Sequence[ShardChunk], mask: Mask
) -> tuple[Tile, ...]:
    """Tiles of a rank's queries over the keys of another node. No query's position is within a
    chunk of the keys."""
    if mask.positional:
        return merge_full_tiles(
            tile for chunk, _ in queries for tile in tiles_over(chunk, keys, mask)
        )
    prefixes: list[tuple[Span, int]] = []  # query rows, and how many key rows they see
    for chunk, before in queries:
        num_visible = len(keys) if mask.full else before
        stop = keys[num_visible - 1].node_rows.stop if num_visible else 0
        if prefixes and prefixes[-1][1] == stop and prefixes[-1][0].stop == chunk.rows.start:
            prefixes[-1] = Span(prefixes[-1][0].start, chunk.rows.stop), stop
        else:
            prefixes.append((chunk.rows, stop))
    return tuple(Tile(rows, Span(0, stop), Mask.FULL) for rows, stop in prefixes if stop)


def tiles_over(queries: ShardChunk, keys: Iterable[ShardChunk], mask: Mask) -> Iterator[Tile]:
    """Tiles of a chunk's queries over keys of the node, which are in sequence order."""
    q_range = range(queries.position, queries.position + len(queries.rows))
    for kv_range, first_row in adjacent_runs(keys):
        if tile := tile_between(q_range, kv_range, mask):
            rows, key_rows = tile.q.shifted(queries.rows.start), tile.kv.shifted(first_row)
            yield Tile(rows, key_rows, tile.mask, tile.positions)


def adjacent_runs(chunks: Iterable[ShardChunk]) -> list[tuple[range, int]]:
    """Adjacent chunks merged: their positions, and their first row in the node."""
    runs: list[tuple[range, int]] = []
    for chunk in chunks:
        run = range(chunk.position, chunk.position + len(chunk.rows))
        if runs:
            last, first_row = runs[-1]
            if (last.stop, first_row + len(last)) == (run.start, chunk.node_rows.start):
                runs[-1] = range(last.start, run.stop), first_row
                continue
        runs.append((run, chunk.node_rows.start))
    return runs
