"""Gathering: the keys of the ranks of a host come together, a few heads at a time.

A round is a group of key heads. Its keys and values lie in the order of the sequence, so whatever
a rank's queries may see of them is one range of rows. While a step is computed, the next one's
keys arrive; the gradients of its keys leave for the ranks that hold them while the next one is
computed. The first step has none before it and, in backward, the last has none after it: there the
rank's own diagonal tiles, which need nobody, are computed meanwhile.

On one host a round is one step. On several, the shards of the others come by, host after host
(`plan.relay`): keys and values, gathered inside the host in each step; or in backward queries,
which meet keys that are gathered once a round.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron_burst.plan.layout import Layout
from megatron_burst.plan.mask import Mask, Span, Tile
from megatron_burst.plan.pieces import Piece, host_pieces, tiles_between
from megatron_burst.plan.relay import Relay, relay
from megatron_burst.plan.schedule import Circulate, Direction
from megatron_burst.plan.topology import Topology


@dataclass(frozen=True, slots=True)
class Leaf:
    """Key gradients that a rank computes for a piece that another rank holds.

    Attributes:
        rows: of the gradients of the step's tiles, laid one behind the other.
        piece: whose gradients they are.
    """

    rows: Span
    piece: Piece


@dataclass(frozen=True, slots=True)
class GatherStep:
    """What a rank computes with the shards of one host, for one group of heads.

    Attributes:
        heads: key heads.
        gather: number of the gather whose keys are used.
        queries: the pieces of the shard whose queries are used.
        keys: the pieces of the gathered keys.
        before: tiles over the rank's own shard, computed while the keys are on their way.
        tiles: tiles over the gathered keys.
        after: tiles over the rank's own shard, computed while gradients are on their way.
        leaves: the gradients of others' keys that every rank of the host computes.
    """

    heads: Span
    gather: int
    queries: tuple[Piece, ...]
    keys: tuple[Piece, ...]
    before: tuple[Tile, ...]
    tiles: tuple[Tile, ...]
    after: tuple[Tile, ...]
    leaves: Mapping[int, tuple[Leaf, ...]]

    @property
    def every_tile(self) -> tuple[Tile, ...]:
        return (*self.before, *self.tiles, *self.after)


@dataclass(frozen=True, slots=True)
class GatherSchedule:
    """What one rank does in one forward or backward pass that gathers.

    Attributes:
        topology: of the group; ranks of a row gather.
        cp_rank: whose schedule it is.
        circulate: what goes from host to host.
        rounds: groups of key heads.
        steps: in the order in which they run.
        relay: what goes from host to host; its legs are the steps.
        reads: the pieces that every rank of the host needs of others, by gather.
        recalls: whether keys that have come from other hosts are those that forward has left.
        num_rows: of a host's shards together.
        share_rows: key rows of a step's tiles together, at most on any rank of the host.
    """

    topology: Topology
    cp_rank: int
    circulate: Circulate
    rounds: tuple[Span, ...]
    steps: tuple[GatherStep, ...]
    relay: Relay
    reads: tuple[Mapping[int, tuple[Piece, ...]], ...]
    recalls: bool
    num_rows: int
    share_rows: int

    @property
    def others(self) -> tuple[int, ...]:
        """The other ranks of the host, beginning after this one: not all turn to the same one."""
        row, column = self.topology.coord(self.cp_rank)
        ranks = self.topology.grid[row]
        return (*ranks[column + 1 :], *ranks[:column])

    def tiles_of_round(self, index: int) -> tuple[Tile, ...]:
        """All tiles of the round that a step belongs to."""
        round_ = self.relay.legs[index].round
        legs = zip(self.steps, self.relay.legs, strict=True)
        return tuple(tile for step, leg in legs if leg.round == round_ for tile in step.every_tile)


@lru_cache(maxsize=1024)
def gather_schedule(
    topology: Topology,
    cp_rank: int,
    *,
    layout: Layout,
    mask: Mask,
    tokens: int,
    heads_kv: int,
    heads_per_round: int,
    direction: Direction,
    rectangular_causal: bool,
    circulate: Circulate = Circulate.KV,
    recalls: bool = False,
) -> GatherSchedule:
    """The schedule of one rank that gathers keys from all ranks of its host.

    Args:
        topology: of the group; ranks of a row gather, rows pass pieces to each other.
        cp_rank: rank in the context-parallel group.
        layout: how tokens are dealt out; not striped, whose keys interleave.
        mask: which keys a query may see.
        tokens: rows on each rank.
        heads_kv: key heads on a rank.
        heads_per_round: key heads of a round; the last round may have fewer.
        direction: forward or backward.
        rectangular_causal: whether the kernel does causal tiles with more keys than queries.
        circulate: what goes from host to host; Q in backward only.
        recalls: of a backward in which K, V circulate: whether forward has left what came.

    Raises:
        BurstError: if the layout cannot be gathered or cannot hold that many rows.
    """
    rounds = heads_in_rounds(heads_kv, heads_per_round)
    legs = relay(topology, cp_rank, len(rounds), direction, recalls)
    row, _ = topology.coord(cp_rank)
    pieces = host_pieces(topology, row, layout, tokens)
    tiling = _Tiling(pieces, legs, mask, direction, rectangular_causal, circulate)
    ranks = topology.grid[row]
    steps, reads = [], []
    alike: dict[tuple, _Meeting] = {}  # steps of other rounds: there are thousands at a time
    for index, leg in enumerate(legs.legs):
        kind = leg.distance, index == 0, index == len(legs.legs) - 1
        if kind not in alike:
            alike[kind] = tiling.meeting(ranks, index)
        met = alike[kind]
        if circulate is Circulate.KV or legs.is_first(index):
            reads.append({rank: set() for rank in ranks})
        for rank in ranks:
            reads[-1][rank].update(met.needed[rank])
        keys, queries = tiling.keys(index), tiling.queries(cp_rank, index)
        steps.append(
            GatherStep(
                rounds[leg.round], len(reads) - 1, queries, keys, *met.tiles[cp_rank], met.leaves
            )
        )
    every = [tiles for met in alike.values() for _, tiles, _ in met.tiles.values()]
    return GatherSchedule(
        topology,
        cp_rank,
        circulate,
        rounds,
        tuple(steps),
        legs,
        reads=tuple({rank: _in_order(found) for rank, found in of.items()} for of in reads),
        recalls=recalls,
        num_rows=pieces[0][-1].whole.stop,
        share_rows=max(sum(len(tile.kv) for tile in tiles) for tiles in every),
    )


def heads_in_rounds(heads_kv: int, heads_per_round: int) -> tuple[Span, ...]:
    """Key heads in groups; the last may have fewer."""
    starts = range(0, heads_kv, heads_per_round)
    return tuple(Span(start, min(start + heads_per_round, heads_kv)) for start in starts)


@dataclass(frozen=True, slots=True)
class _Meeting:
    """What the ranks of a host do in a step.

    Attributes:
        tiles: of each rank, before the keys are there, over them, and after them.
        needed: pieces that each rank reads of others.
        leaves: the gradients of others' keys that each rank computes.
    """

    tiles: Mapping[int, tuple[tuple[Tile, ...], ...]]
    needed: Mapping[int, tuple[Piece, ...]]
    leaves: Mapping[int, tuple[Leaf, ...]]


@dataclass(frozen=True, slots=True)
class _Tiling:
    """The tiles of the steps of the ranks of one host.

    Attributes:
        pieces: that the host works with, by how many hosts they have come.
    """

    pieces: tuple[tuple[Piece, ...], ...]
    relay: Relay
    mask: Mask
    direction: Direction
    rectangular_causal: bool
    circulate: Circulate

    def meeting(self, ranks: Sequence[int], index: int) -> _Meeting:
        """What these ranks do in a step."""
        keys, tiles = self.keys(index), {rank: self.of(rank, index) for rank in ranks}
        return _Meeting(
            tiles,
            {rank: tuple(_needed(keys, rank, tiles[rank][1])) for rank in ranks},
            {rank: _leaving(keys, rank, tiles[rank][1]) for rank in ranks},
        )

    def keys(self, index: int) -> tuple[Piece, ...]:
        """The pieces of a step's gathered keys."""
        away = self.relay.legs[index].distance
        return self.pieces[0 if self.circulate is Circulate.Q else away]

    def queries(self, rank: int, index: int) -> tuple[Piece, ...]:
        """The pieces of a rank's queries in a step."""
        away = self.relay.legs[index].distance
        held = self.pieces[away if self.circulate is Circulate.Q else 0]
        return tuple(piece for piece in held if piece.holder == rank)

    def of(self, rank: int, index: int) -> tuple[tuple[Tile, ...], ...]:
        """Tiles of a rank before the keys are there, over them, and after them."""
        queries, keys = self.queries(rank, index), self.keys(index)
        if self.relay.legs[index].distance:
            rows = [(piece.rows, piece.position) for piece in queries]
            return (), tiles_between(rows, keys, self.mask), ()
        if self.mask is Mask.FULL or len(keys) == len(queries):
            every = Span(0, queries[-1].rows.stop), Span(0, keys[-1].whole.stop)
            return (), (Tile(*every, self.mask),), ()
        diagonal = tuple(Tile(piece.rows, piece.rows, Mask.CAUSAL) for piece in queries)
        last = len(self.relay.legs) - 1
        before = diagonal if index == 0 else ()
        after = diagonal if index == last and self.direction is Direction.BACKWARD else ()
        if before and after:  # one step only: half of the tiles hide each way
            half = (len(diagonal) + 1) // 2
            before, after = diagonal[:half], diagonal[half:]
        if before or after:
            return before, _earlier(queries), after
        return (), _all_visible(queries, self.rectangular_causal), ()


def _earlier(queries: Sequence[Piece]) -> tuple[Tile, ...]:
    """Tiles over the gathered keys before each piece."""
    return tuple(
        Tile(piece.rows, Span(0, piece.whole.start), Mask.FULL)
        for piece in queries
        if piece.whole.start
    )


def _all_visible(queries: Sequence[Piece], rectangular_causal: bool) -> tuple[Tile, ...]:
    """Tiles of a rank's queries over all gathered keys that they may see, its own included."""
    if rectangular_causal:
        return tuple(Tile(p.rows, Span(0, p.whole.stop), Mask.CAUSAL) for p in queries)
    diagonal = [Tile(p.rows, p.whole, Mask.CAUSAL) for p in queries]
    return (*diagonal, *_earlier(queries))


def _needed(keys: Sequence[Piece], cp_rank: int, tiles: Sequence[Tile]) -> Iterable[Piece]:
    """Other ranks' pieces that a rank's tiles read: under a causal mask not all of them."""
    return (
        piece
        for piece in keys
        if piece.holder != cp_rank and any(tile.kv.holds(piece.whole) for tile in tiles)
    )


def _in_order(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    return tuple(sorted(pieces, key=lambda piece: piece.position))


def _leaving(keys: Sequence[Piece], cp_rank: int, tiles: Sequence[Tile]) -> tuple[Leaf, ...]:
    """Which rows of a rank's shares belong to which piece of another rank."""
    leaves, start = [], 0
    for tile in tiles:
        leaves += [
            Leaf(piece.whole.moved(start - tile.kv.start), piece)
            for piece in keys
            if piece.holder != cp_rank and tile.kv.holds(piece.whole)
        ]
        start += len(tile.kv)
    return tuple(leaves)
