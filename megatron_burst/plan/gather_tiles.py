"""What the ranks of a host that gathers compute in each step, and which keys that takes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_burst.plan.mask import Mask, Span, Tile
from megatron_burst.plan.pieces import Piece, tiles_between
from megatron_burst.plan.relay import Relay
from megatron_burst.plan.schedule import Circulate, Direction


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
class Meeting:
    """What the ranks of a host do in a step.

    Attributes:
        tiles: of each rank, before the keys are there, over them, and after them.
        needed: pieces that each rank reads of others.
        leaves: the gradients of others' keys that each rank computes.
        share_rows: key rows of the tiles over gathered keys, at most on any rank.
    """

    tiles: Mapping[int, tuple[tuple[Tile, ...], ...]]
    needed: Mapping[int, tuple[Piece, ...]]
    leaves: Mapping[int, tuple[Leaf, ...]]
    share_rows: int


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tiles of the steps of the ranks of one host.

    Attributes:
        ranks: of the host.
        pieces: that the host works with, by how many hosts they have come.
        relay: its legs are the steps.
        mask: which keys a query may see.
        direction: forward or backward.
        rectangular_causal: whether the kernel does causal tiles with more keys than queries.
        circulate: what goes from host to host.
    """

    ranks: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    relay: Relay
    mask: Mask
    direction: Direction
    rectangular_causal: bool
    circulate: Circulate

    def meetings(self) -> tuple[Meeting, ...]:
        """What these ranks do in each step."""
        alike: dict[tuple, Meeting] = {}  # steps of other rounds: there are thousands at a time
        found, last = [], len(self.relay.legs) - 1
        for index, leg in enumerate(self.relay.legs):
            kind = leg.distance, index == 0, index == last
            if kind not in alike:
                alike[kind] = self._meeting(index)
            found.append(alike[kind])
        return tuple(found)

    def _meeting(self, index: int) -> Meeting:
        keys, tiles = self.keys(index), {rank: self._tiles(rank, index) for rank in self.ranks}
        gathered = {rank: over for rank, (_, over, _) in tiles.items()}
        return Meeting(
            tiles,
            {rank: tuple(_needed(keys, rank, over)) for rank, over in gathered.items()},
            {rank: _leaving(keys, rank, over) for rank, over in gathered.items()},
            max(sum(len(tile.kv) for tile in over) for over in gathered.values()),
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

    def _tiles(self, rank: int, index: int) -> tuple[tuple[Tile, ...], ...]:
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
        if after and (before or len(self.pieces) > 1):
            # half of the tiles hide each way: with other hosts what is left for them sets out first
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
