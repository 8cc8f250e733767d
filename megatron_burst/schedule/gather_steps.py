"""The steps of a gather: what a rank computes, reads from others, and returns in each."""

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
    sides,
    tiles_between,
    tiles_over,
    union,
)
from megatron_burst.schedule.spec import Circulate, Spec


@dataclass(frozen=True, slots=True)
class StepTiles:
    """The tiles of a step, in the order of their kernels.

    Attributes:
        gathered: over the gathered keys.
        before: over the rank's own shard, computed while the keys are in transit, or while the last
            gradients of other nodes' keys are, inside the node.
        after: over the rank's own shard, computed while gradients are in transit.
    """

    gathered: tuple[Tile, ...]
    before: tuple[Tile, ...] = ()
    after: tuple[Tile, ...] = ()

    @property
    def all_tiles(self) -> tuple[Tile, ...]:
        return (*self.before, *self.gathered, *self.after)


@dataclass(frozen=True, slots=True)
class _Tiling:
    """Makes the tiles of all ranks of a node, whose own shards are `here`."""

    spec: Spec
    cp_rank: NodeShards

    @property
    def mask(self) -> Mask:
        return self.spec.mask

    def tiles(self, rank: int, visit: NodeShards, first: bool, last: bool) -> StepTiles:
        """The tiles of a rank in a step with some shards, maybe the first or last of the pass."""
        queries, keys = sides(self.cp_rank, visit, self.spec.circulate)
        own = [(piece, before) for piece, before in queries if piece.cp_rank == rank]
        if visit is self.cp_rank:
            return self._own_tiles([piece for piece, _ in own], first, last)
        rows = [(piece.rows, piece, before) for piece, before in own]
        return StepTiles(tiles_between(rows, keys, self.mask))

    def _own_tiles(self, queries: Sequence[ShardChunk], first: bool, last: bool) -> StepTiles:
        """The tiles of a rank with its own node's keys."""
        keys = self.cp_rank.chunks
        if self.mask.full or (self.mask.causal and len(keys) == len(queries)):
            every = Span(0, queries[-1].rows.stop), Span(0, keys[-1].node_rows.stop)
            places = (_positions(queries), _positions(keys)) if self.mask.documents else None
            return StepTiles((Tile(*every, self.mask, places),))
        if self.mask.windowed and self.mask.documents:  # a document ends anywhere in a piece
            return StepTiles(self._over(queries, lambda piece: keys))
        diagonal = tuple(self._diagonal(piece) for piece in queries)
        before = diagonal if first else ()
        after = diagonal if last and self.spec.backward else ()
        if after and (before or self.spec.topology.inter_size > 1):
            # half of the tiles hide each direction; with other nodes, their remaining sums are sent
            # first
            half = (len(diagonal) + 1) // 2
            before, after = diagonal[:half], diagonal[half:]
        if before or after:
            return StepTiles(self._others(queries), before, after)
        if self.spec.kernel.rectangular_causal or self.mask.windowed:
            return StepTiles(self._over(queries, lambda piece: keys))
        diagonal = tuple(
            replace(tile, kv=p.node_rows) for tile, p in zip(diagonal, queries, strict=True)
        )
        return StepTiles((*diagonal, *self._others(queries)))

    def _diagonal(self, piece: ShardChunk) -> Tile:
        """A piece's queries over its own keys, in the shard."""
        places = range(piece.position, piece.position + len(piece.rows))
        tile = tile_between(places, places, self.mask)
        assert tile
        return replace(tile, q=piece.rows, kv=piece.rows)

    def _others(self, queries: Sequence[ShardChunk]) -> tuple[Tile, ...]:
        """Tiles over the gathered keys before and after each piece."""
        every = self.cp_rank.chunks
        before = self._over(
            queries, lambda p: [k for k in every if k.node_rows.stop <= p.node_rows.start]
        )
        if self.mask.right == 0:
            return before
        behind = self._over(
            queries, lambda p: [k for k in every if k.node_rows.start >= p.node_rows.stop]
        )
        return (*before, *behind)

    def _over(
        self, queries: Sequence[ShardChunk], keys_of: Callable[[ShardChunk], Sequence[ShardChunk]]
    ) -> tuple[Tile, ...]:
        """Tiles of queries over some of the gathered keys."""
        if self.mask.positional:
            return merge_full_tiles(
                t for p in queries for t in tiles_over(p.rows, p, keys_of(p), self.mask)
            )
        prefixes = ((p, [key for key in keys_of(p) if key.node_rows.start <= p.node_rows.start])
                    for p in queries)  # fmt: skip
        return tuple(
            Tile(p.rows, Span(0, keys[-1].node_rows.stop),
                 Mask.CAUSAL if keys[-1] == p else Mask.FULL)
            for p, keys in prefixes if keys
        )  # fmt: skip


def _positions(pieces: Sequence[ShardChunk]) -> Positions:
    return tuple(at for at, _ in adjacent_runs(pieces))


@dataclass(frozen=True, slots=True)
class GradSend:
    """Key gradients that a rank computes for another rank's piece.

    Attributes:
        rows: of the concatenated gradients of the step's tiles.
        piece: whose gradients they are.
    """

    rows: Span
    piece: ShardChunk


@dataclass(frozen=True, slots=True, eq=False)
class GatherStep:
    """What a rank does in a step, and what it trades with the others of its node.

    Attributes:
        keys: the pieces of the gathered keys, as these lie.
        tiles: of the rank.
        needed: pieces that it reads; and, by rank, its own pieces that others read.
        leaves: the gradients of other ranks' keys that it computes; and, by rank, the gradients of
            its own keys that others compute.
        share_rows: key rows of the tiles over gathered keys, at most on any rank.
        met: for documents of which each rank has two chunks: how these meet, in one tile. Then
            keys and leaves are whole shards, rank by rank.
    """

    keys: tuple[ShardChunk, ...]
    tiles: StepTiles
    needed: Mapping[int, tuple[ShardChunk, ...]]
    leaves: Mapping[int, tuple[GradSend, ...]]
    share_rows: int
    chunk_pairs: ChunkPairs | None = None


@dataclass(frozen=True, slots=True)
class GatherSteps:
    """The steps of one rank in one pass that gathers.

    Attributes:
        steps: in execution order; equal steps share one object.
        gathers: by step, the index of the gather whose keys it uses.
        reads: by gather, the pieces that the rank needs from others; and, by rank of the node, its
            own pieces that others need.
        num_rows: total rows of a node's shards.
        share_rows: total key rows of a step's tiles, at most on any rank of the node.
    """

    steps: tuple[GatherStep, ...]
    gathers: tuple[int, ...]
    reads: tuple[Mapping[int, tuple[ShardChunk, ...]], ...]
    num_rows: int
    share_rows: int


def gather_steps(spec: Spec, order: Sequence[NodeStep]) -> GatherSteps:
    """The steps of one rank that gathers keys from all ranks of its node.

    Args:
        spec: of the program.
        order: round and distance of each step.

    Raises:
        BurstError: if the layout is striped, whose keys interleave, or cannot hold that many rows.
    """
    ranks = spec.topology.grid[spec.topology.coord(spec.cp_rank)[0]]
    found = (_steps_by_rank if spec.layout is Layout.DOCUMENTS else _steps)(spec, ranks, order)
    # a step has its own gather, or its round's if queries circulate
    begins = (spec.circulate is Circulate.KV or step.first for step in order)
    gathers = tuple(count - 1 for count in accumulate(begins))
    return GatherSteps(
        found, gathers, _reads(ranks, gathers, found),
        num_rows=found[0].keys[-1].node_rows.stop,
        share_rows=max(step.share_rows for step in found),
    )  # fmt: skip


def _steps(spec: Spec, ranks: Sequence[int], order: Sequence[NodeStep]) -> tuple[GatherStep, ...]:
    """With keys in sequence order."""
    topology, (row, _) = spec.topology, spec.topology.coord(spec.cp_rank)
    terms = topology, row, spec.layout
    visits = node_shards(*terms, spec.shape.tokens, spec.mask.positional)
    tiling = _Tiling(spec, visits[0])
    kinds = [(visits[step.node_offset], index == 0, index == len(order) - 1)
             for index, step in enumerate(order)]  # fmt: skip
    alike = {kind: _step(tiling, ranks, *kind) for kind in dict.fromkeys(kinds)}
    return tuple(alike[kind] for kind in kinds)


def _steps_by_rank(
    spec: Spec, ranks: Sequence[int], order: Sequence[NodeStep]
) -> tuple[GatherStep, ...]:
    """With two chunks of every document on each rank."""
    topology, mine, rows = spec.topology, spec.cp_rank, spec.shape.tokens
    (row, column), size = topology.coord(mine), topology.cp_size
    shards = zip(ranks, consecutive_spans(rows for _ in ranks), strict=True)
    keys = tuple(ShardChunk(rank, Span(0, rows), whole) for rank, whole in shards)
    needed = {mine: (*keys[column + 1 :], *keys[:column])}
    needed |= dict.fromkeys(topology.others(mine), (keys[column],))
    leaves = {rank: tuple(GradSend(p.node_rows, p) for p in some) for rank, some in needed.items()}
    alike = []
    for away in range(topology.inter_size):
        there = topology.grid[(row - away) % topology.inter_size]
        keys_come = spec.circulate is Circulate.KV
        queries, owners = (mine, there) if keys_come else (there[column], ranks)
        met = chunk_pairs(
            chunks_of(queries, size), chunks_by_rank(owners, size), spec.mask, rows // 2
        )
        tiles = StepTiles((met.tile,))
        alike.append(GatherStep(keys, tiles, needed, leaves, len(ranks) * rows, met))
    return tuple(alike[turn.node_offset] for turn in order)


def _step(
    tiling: _Tiling, ranks: Sequence[int], visit: NodeShards, first: bool, last: bool
) -> GatherStep:
    """What the rank does with the shards of a node."""
    spec, mine = tiling.spec, tiling.spec.cp_rank
    _, keys = sides(tiling.cp_rank, visit, spec.circulate)
    tiles = {rank: tiling.tiles(rank, visit, first, last) for rank in ranks}
    held = tuple(piece for piece in keys if piece.cp_rank == mine)
    met = {rank: keys if rank == mine else held for rank in ranks}
    over = {rank: of.gathered for rank, of in tiles.items()}
    return GatherStep(
        keys,
        tiles[mine],
        {rank: tuple(_needed(met[rank], rank, some)) for rank, some in over.items()},
        {rank: _leaving(met[rank], rank, some) for rank, some in over.items()},
        max(sum(len(tile.kv) for tile in some) for some in over.values()),
    )


def _needed(
    keys: Sequence[ShardChunk], cp_rank: int, tiles: Sequence[Tile]
) -> Iterator[ShardChunk]:
    """Other ranks' rows that a rank's tiles read, cut to what is read."""
    for piece in keys:
        if piece.cp_rank == cp_rank:
            continue
        parts = [part for tile in tiles if (part := piece.within(tile.kv))]
        for start, stop in union((part.node_rows.start, part.node_rows.stop) for part in parts):
            part = piece.within(Span(start, stop))
            assert part
            yield part


def _leaving(
    keys: Sequence[ShardChunk], cp_rank: int, tiles: Sequence[Tile]
) -> tuple[GradSend, ...]:
    """Which rows of a rank's shares belong to which rows of other ranks."""
    starts = (span.start for span in consecutive_spans(len(tile.kv) for tile in tiles))
    return tuple(
        GradSend(part.node_rows.shifted(start - tile.kv.start), part)
        for tile, start in zip(tiles, starts, strict=True)
        for piece in keys
        if piece.cp_rank != cp_rank and (part := piece.within(tile.kv))
    )


def _reads(
    ranks: Sequence[int], gathers: Sequence[int], steps: Sequence[GatherStep]
) -> tuple[Mapping[int, tuple[ShardChunk, ...]], ...]:
    """The pieces needed, by gather and rank, for all steps that use the gather."""
    runs_of = groupby(zip(gathers, steps, strict=True), lambda pair: pair[0])
    users = [frozenset(step for _, step in run) for _, run in runs_of]
    alike = {some: {rank: _all_needed(some, rank) for rank in ranks} for some in {*users}}
    return tuple(alike[some] for some in users)


def _all_needed(steps: Iterable[GatherStep], rank: int) -> tuple[ShardChunk, ...]:
    """What a rank reads in some steps, in order, overlaps removed."""
    found: list[ShardChunk] = []
    pieces = {piece for step in steps for piece in step.needed[rank]}
    for piece in sorted(pieces, key=lambda piece: piece.node_rows.start):
        if found and piece.node_rows.start < found[-1].node_rows.stop:
            more = max(0, piece.node_rows.stop - found[-1].node_rows.stop)
            rows, whole = found[-1].rows, found[-1].node_rows
            longer = Span(rows.start, rows.stop + more), Span(whole.start, whole.stop + more)
            found[-1] = replace(found[-1], rows=longer[0], node_rows=longer[1])
        else:
            found.append(piece)
    return tuple(found)


def needed_by(
    spec: Spec, turns: Iterable[NodeStep], computing: int, piece: ShardChunk
) -> NeededBy | None:
    """What a piece, or its gradients, are sent for between its holder and a rank of the node that
    computes in some steps."""
    topology, travel = spec.topology, spec.kv_circulates
    (row, column), (_, place) = map(topology.coord, (computing, piece.cp_rank))
    away = [turn.node_offset for turn in turns]
    queries = (topology.rank_at(row - (0 if travel else n), column) for n in away)
    keys = (topology.rank_at(row - (n if travel else 0), place) for n in away)
    found = NeededBy.of_ranks(spec, queries, keys)
    if found is None or spec.layout is Layout.DOCUMENTS:
        return found
    chunks = len(chunks_held(spec.layout, piece.cp_rank, topology.cp_size))
    return replace(found, keys=(piece.position * chunks // spec.shape.tokens,))


def consecutive_spans(lengths: Iterable[int]) -> list[Span]:
    """Spans of these lengths, one after the other."""
    return [Span(start, stop) for start, stop in pairwise(accumulate(lengths, initial=0))]
