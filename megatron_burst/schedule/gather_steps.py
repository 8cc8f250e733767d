"""The steps of a gather: what a rank reads from others, computes, and returns in each."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from megatron_burst.schedule.call import Circulate
from megatron_burst.schedule.gather_tiles import Leaf, Meeting, Tiling
from megatron_burst.schedule.inter_node import Step, heads_in_rounds, steps
from megatron_burst.schedule.mask import Span, Tile
from megatron_burst.schedule.pieces import Piece, node_visits
from megatron_burst.schedule.spec import Spec


@dataclass(frozen=True, slots=True)
class GatherStep:
    """A rank's work with the shards of one node, for one group of heads.

    Attributes:
        heads: KV heads.
        gather: index of the gather whose keys it uses.
        keys: the pieces of the gathered keys.
        before: tiles over the rank's own shard, computed while the keys are in transit, or while
            the last gradients of other nodes' keys are, inside the node.
        tiles: tiles over the gathered keys.
        after: tiles over the rank's own shard, computed while gradients are in transit.
        leaves: the gradients of other ranks' keys that this rank computes; and, by rank of the
            node, the gradients of its own keys that others compute.
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
class GatherSteps:
    """The steps of one rank in one pass that gathers.

    Attributes:
        cp_rank: whose steps.
        rounds: groups of KV heads.
        order: round and distance of each step.
        steps: in execution order.
        reads: by gather, the pieces that the rank needs from others; and, by rank of the node, its
            own pieces that others need.
        num_rows: total rows of a node's shards.
        share_rows: total key rows of a step's tiles, at most on any rank of the node.
    """

    cp_rank: int
    rounds: tuple[Span, ...]
    order: tuple[Step, ...]
    steps: tuple[GatherStep, ...]
    reads: tuple[Mapping[int, tuple[Piece, ...]], ...]
    num_rows: int
    share_rows: int

    def tiles_of_round(self, round_: int) -> tuple[Tile, ...]:
        """All tiles of a round."""
        found = zip(self.steps, self.order, strict=True)
        return tuple(tile for step, at in found if at.round == round_ for tile in step.every_tile)


@lru_cache(maxsize=1024)
def gather_steps(spec: Spec) -> GatherSteps:
    """The steps of one rank that gathers keys from all ranks of its node.

    Raises:
        BurstError: if the layout is striped, whose keys interleave, or cannot hold that many rows.
    """
    topology, cp_rank, circulate = spec.topology, spec.cp_rank, spec.circulate
    rounds = heads_in_rounds(spec.shape.heads_kv, spec.heads_per_round)
    order = steps(topology.inter_size, len(rounds), spec.backward, spec.left)
    row, _ = topology.coord(cp_rank)
    placed = spec.mask.windowed or spec.mask.documents
    ranks = topology.grid[row]
    visits = node_visits(topology, row, spec.layout, spec.shape.tokens, placed)
    tiling = Tiling(
        cp_rank, ranks, visits, order, spec.mask, spec.direction, spec.kernel.rectangular_causal,
        circulate,
    )  # fmt: skip
    meetings, gathers = tiling.meetings(), _gather_of_steps(order, circulate)
    arriving = {met: _arriving_rows(met, cp_rank) for met in set(meetings)}
    found = (
        GatherStep(rounds[at.round], gather, met.keys, *met.tiles, met.leaves, arriving[met])
        for at, gather, met in zip(order, gathers, meetings, strict=True)
    )
    return GatherSteps(
        cp_rank, rounds, order, tuple(found),
        reads=_reads(ranks, gathers, meetings),
        num_rows=visits[0].pieces[-1].whole.stop,
        share_rows=max(met.share_rows for met in meetings),
    )  # fmt: skip


def _gather_of_steps(order: Sequence[Step], circulate: Circulate) -> list[int]:
    """Index of each step's gather: its own, or its round's if queries circulate."""
    apart = circulate is Circulate.KV
    begins = (apart or step.first for step in order)
    return [count - 1 for count in accumulate(begins)]


def _reads(
    ranks: Sequence[int], gathers: Sequence[int], meetings: Sequence[Meeting]
) -> tuple[Mapping[int, tuple[Piece, ...]], ...]:
    """The pieces needed, by gather and rank, for all steps that use the gather."""
    users: list[set[Meeting]] = [set() for _ in range(gathers[-1] + 1)]
    for gather, met in zip(gathers, meetings, strict=True):
        users[gather].add(met)
    alike: dict[frozenset[Meeting], dict[int, tuple[Piece, ...]]] = {
        frozenset(some): {} for some in users
    }
    for some, reads in alike.items():
        for rank in ranks:
            reads[rank] = _each_once(piece for met in some for piece in met.needed[rank])
    return tuple(alike[frozenset(some)] for some in users)


def _each_once(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """The same rows in order, overlaps removed."""
    found: list[Piece] = []
    for piece in sorted(set(pieces), key=lambda piece: piece.whole.start):
        if found and piece.whole.start < found[-1].whole.stop:
            more = max(0, piece.whole.stop - found[-1].whole.stop)
            rows, whole = found[-1].rows, found[-1].whole
            longer = Span(rows.start, rows.stop + more), Span(whole.start, whole.stop + more)
            found[-1] = replace(found[-1], rows=longer[0], whole=longer[1])
        else:
            found.append(piece)
    return tuple(found)


def _arriving_rows(met: Meeting, cp_rank: int) -> int:
    others = (leaves for rank, leaves in met.leaves.items() if rank != cp_rank)
    return sum(len(leaf.rows) for leaves in others for leaf in leaves)
