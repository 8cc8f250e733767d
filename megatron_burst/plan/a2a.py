"""Exchanging heads: each rank of a host computes all rows of the host for some heads.

A round is a group of key heads with the query heads that use them, dealt out over the ranks. Their
queries, keys and values travel to the rank that computes them, and results travel back. While a
round is computed, the next one's tensors come and the last one's results leave. Every pair of
ranks exchanges 1/L of a shard, so fewer bytes travel than with gathered keys unless heads are
grouped; kernels have the longest calls that there are, and no gradient is a sum over ranks.

On several hosts what has been exchanged goes on from host to host (`plan.relay`): the keys and
values of a rank's heads, or in backward its queries. Over a flat topology all ranks exchange with
each other and nothing circulates.

Source: Ulysses (arXiv 2309.14509), here in rounds.
"""

from dataclasses import dataclass
from functools import lru_cache

from megatron_burst.errors import BurstError
from megatron_burst.plan.gather import heads_in_rounds
from megatron_burst.plan.relay import Relay, relay
from megatron_burst.schedule.call import Circulate, Direction
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask, Span, Tile
from megatron_burst.schedule.pieces import Piece, Visit, host_visits, sides, tiles_between
from megatron_burst.schedule.topology import Topology


@dataclass(frozen=True, slots=True)
class A2ASchedule:
    """What one rank does in one forward or backward pass that exchanges heads.

    Attributes:
        topology: of the group; ranks of a row exchange.
        cp_rank: whose schedule it is.
        direction: forward or backward.
        circulate: what goes from host to host.
        pieces: of the host's shards, in the order of the sequence.
        rounds: key heads of all ranks together in each round; the rank in column c computes the
            c-th part.
        relay: what goes from host to host.
        tiles: of each of its legs: rows are those of a host's shards together.
    """

    topology: Topology
    cp_rank: int
    direction: Direction
    circulate: Circulate
    pieces: tuple[Piece, ...]
    rounds: tuple[Span, ...]
    relay: Relay
    tiles: tuple[tuple[Tile, ...], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that exchange, by column."""
        return self.topology.grid[self.topology.coord(self.cp_rank)[0]]

    @property
    def num_rows(self) -> int:
        """Rows of the host's shards together."""
        return self.pieces[-1].whole.stop

    @property
    def tokens(self) -> int:
        """Rows of a rank's shard."""
        return self.num_rows // len(self.ranks)

    def tiles_of_round(self, index: int) -> tuple[Tile, ...]:
        """All tiles of the round that a step belongs to."""
        round_ = self.relay.legs[index].round
        legs = zip(self.tiles, self.relay.legs, strict=True)
        return tuple(tile for tiles, leg in legs if leg.round == round_ for tile in tiles)


@lru_cache(maxsize=1024)
def a2a_schedule(
    topology: Topology,
    cp_rank: int,
    *,
    layout: Layout,
    mask: Mask,
    tokens: int,
    heads_kv: int,
    heads_per_round: int,
    direction: Direction,
    circulate: Circulate = Circulate.KV,
) -> A2ASchedule:
    """The schedule of one rank that exchanges heads with all ranks of its host.

    Args:
        topology: of the group; ranks of a row exchange, their number divides heads_kv.
        cp_rank: rank in the context-parallel group.
        layout: how tokens are dealt out; not striped, whose rows interleave.
        mask: which keys a query may see.
        tokens: rows on each rank.
        heads_kv: key heads.
        heads_per_round: key heads that a rank computes in a round; the last may have fewer.
        direction: forward or backward.
        circulate: what goes from host to host; Q in backward only.

    Raises:
        BurstError: if the heads cannot be dealt out evenly, or the layout is striped.
    """
    ranks = topology.intra_size
    if heads_kv % ranks:
        raise BurstError(
            "burst attention: to exchange heads, the ranks must divide the key heads, because "
            f"each computes equally many; got {heads_kv} key heads on {ranks} ranks; pass "
            "--burst-intra gather (intra='gather') or auto, and no --burst-inter a2a"
        )
    rounds = heads_in_rounds(heads_kv, heads_per_round * ranks)
    legs = relay(topology, cp_rank, len(rounds), direction)
    visits = host_visits(topology, topology.coord(cp_rank)[0], layout, tokens)
    alike = {visit: _tiles(visits[0], visit, mask, circulate) for visit in set(visits)}
    tiles = tuple(alike[visits[leg.distance]] for leg in legs.legs)
    pieces = visits[0].pieces
    return A2ASchedule(topology, cp_rank, direction, circulate, pieces, rounds, legs, tiles)


def _tiles(here: Visit, visit: Visit, mask: Mask, circulate: Circulate) -> tuple[Tile, ...]:
    """Tiles of a host's rows and those that have come from another, or its own."""
    if visit is here:
        every = Span(0, here.pieces[-1].whole.stop)
        return (Tile(every, every, mask),)
    queries, keys = sides(here, visit, circulate)
    return tiles_between([(piece.whole, before) for piece, before in queries], keys, mask)
