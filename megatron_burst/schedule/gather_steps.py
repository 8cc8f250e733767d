"""The steps of a gather: what a rank computes, reads from its peers, and sends to them, in each.

Keys are in sequence order, so what a chunk's queries see is one range of key rows:

    | before | own | after |      under a causal mask all of `before`, and of `own` the diagonal
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise

from megatron_burst.schedule.chunks import ChunkPairs, NeededBy, chunk_pairs, chunks_by_rank
from megatron_burst.schedule.inter_node import NodeStep
from megatron_burst.schedule.layout import Layout, chunks_held, chunks_of
from megatron_burst.schedule.mask import Mask, Positions, Span, Tile, merge_full_tiles, tile_between
from megatron_burst.schedule.node_shards import (
    NodeShards,
    ShardChunk,
    adjacent_runs,
    node_shards,
    queries_and_keys,
    tiles_between,
    tiles_over,
    union,
)
from megatron_burst.schedule.spec import Circulate, Spec


@dataclass(frozen=True, slots=True)
class StepTiles:
    """The tiles of a step, in the order of their kernels."""

    gathered: tuple[Tile, ...]  # over the gathered keys
    # over the rank's own shard, computed while the keys are in transit, or while the last gradients
    # of other nodes' keys are in transit inside the node
    before: tuple[Tile, ...] = ()
    # over the rank's own shard, computed while gradients are in transit
    after: tuple[Tile, ...] = ()

    @property
    def all_tiles(self) -> tuple[Tile, ...]:
        return (*self.before, *self.gathered, *self.after)


@dataclass(frozen=True, slots=True)
class _Tiling:
    """Makes the tiles of all ranks of a node."""

    spec: Spec
    own: NodeShards  # the node's shards

    @property
    def mask(self) -> Mask:
        return self.spec.mask

    def tiles(self, rank: int, shards: NodeShards, first: bool, last: bool) -> StepTiles:
        """A rank's tiles with a node's shards, in a step that may be the pass's first or last."""
        queries, keys = queries_and_keys(self.own, shards, self.spec.circulate)
        rank_queries = [query for query in queries if query[0].cp_rank == rank]
        if shards is self.own:
            return self._own_tiles([chunk for chunk, _ in rank_queries], first, last)
        return StepTiles(tiles_between(rank_queries, keys, self.mask))

    def _own_tiles(self, queries: Sequence[ShardChunk], first: bool, last: bool) -> StepTiles:
        """The tiles of a rank with its own node's keys."""
        keys = self.own.chunks
        if self.mask.full or (self.mask.causal and len(keys) == len(queries)):
            q, kv = Span(0, queries[-1].rows.stop), Span(0, keys[-1].node_rows.stop)
            runs = (_positions(queries), _positions(keys)) if self.mask.documents else None
            return StepTiles((Tile(q, kv, self.mask, runs),))
        if self.mask.windowed and self.mask.documents:  # a document may end inside a chunk
            return StepTiles(self._over(queries, lambda chunk: keys))
        diagonal = tuple(self._diagonal(chunk) for chunk in queries)
        before = diagonal if first else ()
        after = diagonal if last and self.spec.backward else ()
        if after and (before or self.spec.topology.inter_size > 1):
            # half of the tiles hide each direction; on several nodes, gradients of the keys of
            # other nodes are sent first
            half = (len(diagonal) + 1) // 2
            before, after = diagonal[:half], diagonal[half:]
        if before or after:
            return StepTiles(self._off_diagonal(queries), before, after)
        if self.spec.kernel.rectangular_causal or self.mask.windowed:
            return StepTiles(self._over(queries, lambda chunk: keys))
        over = zip(diagonal, queries, strict=True)
        gathered = (replace(tile, kv=chunk.node_rows) for tile, chunk in over)
        return StepTiles((*gathered, *self._off_diagonal(queries)))

    def _diagonal(self, chunk: ShardChunk) -> Tile:
        """A chunk's queries over its own keys, in the shard."""
        run = range(chunk.position, chunk.position + len(chunk.rows))
        tile = tile_between(run, run, self.mask)
        assert tile
        return replace(tile, q=chunk.rows, kv=chunk.rows)

    def _off_diagonal(self, queries: Sequence[ShardChunk]) -> tuple[Tile, ...]:
        """Tiles over the gathered keys before and after each chunk."""
        keys = self.own.chunks
        before = self._over(
            queries, lambda q: [k for k in keys if k.node_rows.stop <= q.node_rows.start]
        )
        if self.mask.right == 0:
            return before
        after = self._over(
            queries, lambda q: [k for k in keys if k.node_rows.start >= q.node_rows.stop]
        )
        return (*before, *after)

    def _over(
        self, queries: Sequence[ShardChunk], keys_of: Callable[[ShardChunk], Sequence[ShardChunk]]
    ) -> tuple[Tile, ...]:
        """Tiles of queries over the gathered keys that `keys_of` selects for each chunk."""
        if self.mask.positional:
            return merge_full_tiles(
                tile for chunk in queries for tile in tiles_over(chunk, keys_of(chunk), self.mask)
            )
        tiles = []
        for chunk in queries:
            keys = [k for k in keys_of(chunk) if k.node_rows.start <= chunk.node_rows.start]
            if keys:
                mask = Mask.CAUSAL if keys[-1] == chunk else Mask.FULL
                tiles.append(Tile(chunk.rows, Span(0, keys[-1].node_rows.stop), mask))
        return tuple(tiles)


def _positions(chunks: Sequence[ShardChunk]) -> Positions:
    return tuple(run for run, _ in adjacent_runs(chunks))


@dataclass(frozen=True, slots=True)
class GradSend:
    """Key gradients that a rank computes for another rank's chunk."""

    rows: Span  # of the gradients of all tiles of a step, one tile after the other
    chunk: ShardChunk


@dataclass(frozen=True, slots=True, eq=False)
class GatherStep:
    """What a rank does in a step, and what its node's ranks send each other."""

    keys: tuple[ShardChunk, ...]  # the chunks of the gathered keys, in memory order
    tiles: StepTiles
    # the chunks that this rank reads; and, by peer, this rank's chunks that the peer reads
    reads: Mapping[int, tuple[ShardChunk, ...]]
    # the gradients of peers' keys that this rank computes; and, by peer, those of this rank's keys
    # that the peer computes
    grad_sends: Mapping[int, tuple[GradSend, ...]]
    grad_rows: int  # key rows of the tiles over gathered keys, at most on any rank
    # the one tile, if each rank has two chunks of every document. Then keys and gradients are sent
    # as whole shards, rank by rank
    chunk_pairs: ChunkPairs | None = None


@dataclass(frozen=True, slots=True)
class GatherSteps:
    """The steps of one rank in one pass that gathers."""

    steps: tuple[GatherStep, ...]  # in execution order; equal steps share one object
    gathers: tuple[int, ...]  # by step, the index of the gather whose keys it uses
    # by gather, what `GatherStep.reads` has for its steps together
    reads: tuple[Mapping[int, tuple[ShardChunk, ...]], ...]
    num_rows: int  # rows of a node's shards together
    grad_rows: int  # key rows of a step's tiles, at most on any rank of the node


def gather_steps(spec: Spec, order: Sequence[NodeStep]) -> GatherSteps:
    """The steps of one rank that gathers keys from all ranks of its node.

    Raises:
        BurstError: if the layout is striped, whose keys interleave, or cannot hold that many rows.
    """
    ranks = spec.topology.grid[spec.topology.coord(spec.cp_rank)[0]]
    make_steps = _steps_by_rank if spec.layout is Layout.DOCUMENTS else _steps_in_sequence
    steps = make_steps(spec, ranks, order)
    # each step gathers; if queries circulate, only the first step of a round
    begins = (spec.circulate is Circulate.KV or step.first for step in order)
    gathers = tuple(count - 1 for count in accumulate(begins))
    return GatherSteps(
        steps, gathers, _reads(ranks, gathers, steps),
        num_rows=steps[0].keys[-1].node_rows.stop,
        grad_rows=max(step.grad_rows for step in steps),
    )  # fmt: skip


def _steps_in_sequence(
    spec: Spec, ranks: Sequence[int], order: Sequence[NodeStep]
) -> tuple[GatherStep, ...]:
    """The steps with keys in sequence order."""
    topology, (row, _) = spec.topology, spec.topology.coord(spec.cp_rank)
    shards = node_shards(topology, row, spec.layout, spec.shape.tokens, spec.mask.positional)
    tiling = _Tiling(spec, shards[0])
    kinds = [(shards[step.node_offset], index == 0, index == len(order) - 1)
             for index, step in enumerate(order)]  # fmt: skip
    cached = {kind: _step(tiling, ranks, *kind) for kind in dict.fromkeys(kinds)}
    return tuple(cached[kind] for kind in kinds)


def _steps_by_rank(
    spec: Spec, ranks: Sequence[int], order: Sequence[NodeStep]
) -> tuple[GatherStep, ...]:
    """The steps with two chunks of every document on each rank."""
    topology, this_rank, rows = spec.topology, spec.cp_rank, spec.shape.tokens
    (row, column), size = topology.coord(this_rank), topology.cp_size
    spans = consecutive_spans(rows for _ in ranks)
    keys = tuple(ShardChunk(r, Span(0, rows), span) for r, span in zip(ranks, spans, strict=True))
    reads = {this_rank: (*keys[column + 1 :], *keys[:column])}
    reads |= dict.fromkeys(topology.row_peers(this_rank), (keys[column],))
    sends = {r: tuple(GradSend(c.node_rows, c) for c in chunks) for r, chunks in reads.items()}
    steps = []
    for offset in range(topology.inter_size):
        remote = topology.grid[(row - offset) % topology.inter_size]
        queries_stay = spec.circulate is Circulate.KV
        q_owner, kv_owners = (this_rank, remote) if queries_stay else (remote[column], ranks)
        src_blocks = chunks_by_rank(kv_owners, size)
        pairs = chunk_pairs(chunks_of(q_owner, size), src_blocks, spec.mask, rows // 2)
        tiles = StepTiles((pairs.tile,))
        steps.append(GatherStep(keys, tiles, reads, sends, len(ranks) * rows, pairs))
    return tuple(steps[step.node_offset] for step in order)


def _step(
    tiling: _Tiling, ranks: Sequence[int], shards: NodeShards, first: bool, last: bool
) -> GatherStep:
    """What the rank does with the shards of a node."""
    spec, this_rank = tiling.spec, tiling.spec.cp_rank
    _, keys = queries_and_keys(tiling.own, shards, spec.circulate)
    own_keys = [chunk for chunk in keys if chunk.cp_rank == this_rank]
    reads, sends, grad_rows = {}, {}, 0
    for rank in ranks:
        tiles = tiling.tiles(rank, shards, first, last)
        if rank == this_rank:
            step_tiles = tiles
        peer_keys = [c for c in keys if c.cp_rank != rank] if rank == this_rank else own_keys
        reads[rank] = tuple(_rows_read(peer_keys, tiles.gathered))
        sends[rank] = _grad_sends(peer_keys, tiles.gathered)
        grad_rows = max(grad_rows, sum(len(tile.kv) for tile in tiles.gathered))
    return GatherStep(keys, step_tiles, reads, sends, grad_rows)


def _rows_read(keys: Iterable[ShardChunk], tiles: Sequence[Tile]) -> Iterator[ShardChunk]:
    """The key chunks that tiles read, cut to the rows that they read."""
    for chunk in keys:
        parts = [part for tile in tiles if (part := chunk.within(tile.kv))]
        for rows in union(part.node_rows for part in parts):
            part = chunk.within(rows)
            assert part
            yield part


def _grad_sends(keys: Sequence[ShardChunk], tiles: Sequence[Tile]) -> tuple[GradSend, ...]:
    """Which rows of the tiles' gradients belong to which key chunks."""
    starts = (span.start for span in consecutive_spans(len(tile.kv) for tile in tiles))
    return tuple(
        GradSend(part.node_rows.shifted(start - tile.kv.start), part)
        for tile, start in zip(tiles, starts, strict=True)
        for chunk in keys
        if (part := chunk.within(tile.kv))
    )


def _reads(
    ranks: Sequence[int], gathers: Sequence[int], steps: Sequence[GatherStep]
) -> tuple[Mapping[int, tuple[ShardChunk, ...]], ...]:
    """What each gather must send, by rank, for all steps that use it."""
    runs = groupby(zip(gathers, steps, strict=True), lambda pair: pair[0])
    users = [frozenset(step for _, step in run) for _, run in runs]
    cached = {key: {rank: _all_reads(key, rank) for rank in ranks} for key in {*users}}
    return tuple(cached[key] for key in users)


def _all_reads(steps: Iterable[GatherStep], rank: int) -> tuple[ShardChunk, ...]:
    """What a rank reads in these steps, in order, overlaps removed."""
    merged: list[ShardChunk] = []
    chunks = {chunk for step in steps for chunk in step.reads[rank]}
    for chunk in sorted(chunks, key=lambda chunk: chunk.node_rows.start):
        if merged and chunk.node_rows.start < merged[-1].node_rows.stop:
            last = merged[-1]
            more = max(0, chunk.node_rows.stop - last.node_rows.stop)
            rows = Span(last.rows.start, last.rows.stop + more)
            node_rows = Span(last.node_rows.start, last.node_rows.stop + more)
            merged[-1] = replace(last, rows=rows, node_rows=node_rows)
        else:
            merged.append(chunk)
    return tuple(merged)


def needed_by(
    spec: Spec, steps: Iterable[NodeStep], rank: int, chunk: ShardChunk
) -> NeededBy | None:
    """The condition for sending a chunk, or its gradients, between the chunk's rank and a rank of
    the node that computes with it in these steps."""
    topology, queries_stay = spec.topology, spec.queries_stay
    (row, column), (_, kv_column) = map(topology.coord, (rank, chunk.cp_rank))
    rows = [row - step.node_offset for step in steps]
    queries = (topology.rank_at(row if queries_stay else remote, column) for remote in rows)
    keys = (topology.rank_at(remote if queries_stay else row, kv_column) for remote in rows)
    needed = NeededBy.of_ranks(spec, queries, keys)
    if needed is None or spec.layout is Layout.DOCUMENTS:
        return needed
    num_chunks = len(chunks_held(spec.layout, chunk.cp_rank, topology.cp_size))
    return replace(needed, keys=(chunk.position * num_chunks // spec.shape.tokens,))


def consecutive_spans(lengths: Iterable[int]) -> list[Span]:
    """Spans of these lengths, one after the other."""
    return [Span(start, stop) for start, stop in pairwise(accumulate(lengths, initial=0))]
