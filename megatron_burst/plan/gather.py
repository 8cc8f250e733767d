"""Gathering: the keys of the ranks of a host come together, a few heads at a time.

A round is a group of key heads. Its keys and values lie in the order of the sequence, so whatever
a rank's queries may see of them is one range of rows. While a step is computed, the next one's
keys arrive; the gradients of its keys leave for the ranks that hold them while the next one is
computed. The first step has none before it and, in backward, the last has none after it: there the
rank's own diagonal tiles, which need nobody, are computed meanwhile. Where gradients go on to other
hosts, half of the last step's diagonal tiles come first: behind them the last such sum sets out.

On one host a round is one step. On several, the shards of the others come by, host after host
(`plan.relay`): keys and values, gathered inside the host in each step; or in backward queries,
which meet keys that are gathered once a round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from megatron_burst.plan.relay import Relay, relay
from megatron_burst.schedule.call import Circulate, Direction
from megatron_burst.schedule.gather_tiles import Leaf, Meeting, Tiling
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask, Span, Tile
from megatron_burst.schedule.pieces import Piece, host_visits
from megatron_burst.schedule.topology import Topology


@dataclass(frozen=True, slots=True)
class GatherStep:
    """What a rank computes with the shards of one host, for one group of heads.

    Attributes:
        heads: key heads.
        gather: number of the gather whose keys are used.
        keys: the pieces of the gathered keys.
        before: tiles over the rank's own shard, computed while the keys are on their way, or the
            last gradients of other hosts' keys on theirs inside the host.
        tiles: tiles over the gathered keys.
        after: tiles over the rank's own shard, computed while gradients are on their way.
        leaves: the gradients of others' keys that the rank computes, and by rank of the host those
            of its own keys that others compute.
        arriving_rows: of the latter.
    """

    heads: Span
    gather: int
    keys: tuple[Piece, ...]
    before: tuple[Tile, ...]
    tiles: tuple[Tile, ...]
    after: tuple[Tile, ...]
    leaves: Mapping[int, tuple[Leaf, ...]]
    arriving_rows: int

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
        reads: by gather the pieces that the rank needs of others, and by rank of the host those of
            its own that others need.
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
    ranks, visits = topology.grid[row], host_visits(topology, row, layout, tokens)
    tiling = Tiling(cp_rank, ranks, visits, legs, mask, direction, rectangular_causal, circulate)
    meetings, gathers = tiling.meetings(), _gather_of_steps(legs, circulate)
    arriving = {met: _arriving_rows(met, cp_rank) for met in set(meetings)}
    steps = (
        GatherStep(
            rounds[leg.round], gather, met.keys, *met.tiles, met.leaves, arriving[met]
        )
        for leg, gather, met in zip(legs.legs, gathers, meetings, strict=True)
    )  # fmt: skip
    return GatherSchedule(
        topology, cp_rank, circulate, rounds, tuple(steps), legs,
        reads=_reads(ranks, gathers, meetings),
        recalls=recalls,
        num_rows=visits[0].pieces[-1].whole.stop,
        share_rows=max(met.share_rows for met in meetings),
    )  # fmt: skip


def _gather_of_steps(legs: Relay, circulate: Circulate) -> list[int]:
    """Number of the gather whose keys a step uses: its own, or its round's if queries circulate."""
    apart = circulate is Circulate.KV
    begins = (apart or legs.is_first(index) for index in range(len(legs.legs)))
    return [count - 1 for count in accumulate(begins)]


def _reads(
    ranks: Sequence[int], gathers: Sequence[int], meetings: Sequence[Meeting]
) -> tuple[Mapping[int, tuple[Piece, ...]], ...]:
    """The pieces that are needed, by gather and rank: for all steps that use it."""
    users: list[set[Meeting]] = [set() for _ in range(gathers[-1] + 1)]
    for gather, met in zip(gathers, meetings, strict=True):
        users[gather].add(met)
    alike: dict[frozenset[Meeting], dict[int, tuple[Piece, ...]]] = {
        frozenset(some): {} for some in users
    }
    for some, reads in alike.items():
        for rank in ranks:
            pieces = {piece for met in some for piece in met.needed[rank]}
            reads[rank] = tuple(sorted(pieces, key=lambda piece: piece.whole.start))
    return tuple(alike[frozenset(some)] for some in users)


def _arriving_rows(met: Meeting, cp_rank: int) -> int:
    others = (leaves for rank, leaves in met.leaves.items() if rank != cp_rank)
    return sum(len(leaf.rows) for leaves in others for leaf in leaves)


def heads_in_rounds(heads_kv: int, heads_per_round: int) -> tuple[Span, ...]:
    """Key heads in groups; the last may have fewer."""
    starts = range(0, heads_kv, heads_per_round)
    return tuple(Span(start, min(start + heads_per_round, heads_kv)) for start in starts)
