"""What ranks of a node that gathers compute in each step, and what one takes and gives for it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_burst.schedule.call import Circulate, Direction
from megatron_burst.schedule.inter_node import Step
from megatron_burst.schedule.mask import Mask, Span, Tile
from megatron_burst.schedule.pieces import Piece, Visit, sides, tiles_between


@dataclass(frozen=True, slots=True)
class Leaf:
    """Key gradients that a rank computes for a piece that another rank holds.

    Attributes:
        rows: of the gradients of the step's tiles, laid one behind the other.
        piece: whose gradients they are.
    """

    rows: Span
    piece: Piece


@dataclass(frozen=True, slots=True, eq=False)
class Meeting:
    """What a rank does in a step, and what that has to do with the others of its node.

    Attributes:
        keys: the pieces of the gathered keys.
        tiles: of the rank, before the keys are there, over them, and after them.
        needed: pieces that it reads, and by rank those of its own that others read, in the order of
            the sequence.
        leaves: the gradients of others' keys that it computes, and by rank those of its own keys
            that others compute.
        share_rows: key rows of the tiles over gathered keys, at most on any rank.
    """

    keys: tuple[Piece, ...]
    tiles: tuple[tuple[Tile, ...], tuple[Tile, ...], tuple[Tile, ...]]
    needed: Mapping[int, tuple[Piece, ...]]
    leaves: Mapping[int, tuple[Leaf, ...]]
    share_rows: int


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tiles of the steps of a rank.

    Attributes:
        cp_rank: whose they are.
        ranks: of its node.
        visits: that the node works with, by how many nodes they have come.
        order: of the steps.
        mask: which keys a query may see.
        direction: forward or backward.
        rectangular_causal: whether the kernel does causal tiles with more keys than queries.
        circulate: what goes from node to node.
    """

    cp_rank: int
    ranks: tuple[int, ...]
    visits: tuple[Visit, ...]
    order: tuple[Step, ...]
    mask: Mask
    direction: Direction
    rectangular_causal: bool
    circulate: Circulate

    def meetings(self) -> tuple[Meeting, ...]:
        """What is done in each step; one object for steps that are alike."""
        alike: dict[tuple[Visit, bool, bool], Meeting] = {}
        found, last = [], len(self.order) - 1
        for index, step in enumerate(self.order):
            kind = self.visits[step.distance], index == 0, index == last
            if kind not in alike:
                alike[kind] = self._meeting(*kind)
            found.append(alike[kind])
        return tuple(found)

    def _meeting(self, visit: Visit, first: bool, last: bool) -> Meeting:
        here = self.visits[0]
        queries, keys = sides(here, visit, self.circulate)
        tiles: dict[int, tuple[tuple[Tile, ...], tuple[Tile, ...], tuple[Tile, ...]]] = {}
        for rank in self.ranks:
            of_rank = [(piece, before) for piece, before in queries if piece.holder == rank]
            if visit is here:
                own = [piece for piece, _ in of_rank]
                tiles[rank] = self._own_tiles(own, len(keys) == len(own), first, last)
            else:
                rows = [(piece.rows, before) for piece, before in of_rank]
                tiles[rank] = (), tiles_between(rows, keys, self.mask), ()
        gathered = {rank: over for rank, (_, over, _) in tiles.items()}
        held = tuple(piece for piece in keys if piece.holder == self.cp_rank)
        met = {rank: keys if rank == self.cp_rank else held for rank in self.ranks}
        return Meeting(
            keys,
            tiles[self.cp_rank],
            {rank: tuple(_needed(met[rank], rank, over)) for rank, over in gathered.items()},
            {rank: _leaving(met[rank], rank, over) for rank, over in gathered.items()},
            max(sum(len(tile.kv) for tile in over) for over in gathered.values()),
        )

    def _own_tiles(
        self, queries: Sequence[Piece], alone: bool, first: bool, last: bool
    ) -> tuple[tuple[Tile, ...], tuple[Tile, ...], tuple[Tile, ...]]:
        """Tiles of a rank with its own node's keys: before they are there, over and after them."""
        if self.mask is Mask.FULL or alone:
            every = Span(0, queries[-1].rows.stop), Span(0, self.visits[0].pieces[-1].whole.stop)
            return (), (Tile(*every, self.mask),), ()
        diagonal = tuple(Tile(piece.rows, piece.rows, Mask.CAUSAL) for piece in queries)
        before = diagonal if first else ()
        after = diagonal if last and self.direction is Direction.BACKWARD else ()
        if after and (before or len(self.visits) > 1):
            # half of the tiles hide each way: with other nodes what is left for them sets out first
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
