"""What the ranks of a gathering node compute in each step, and what they send and receive."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_burst.schedule.call import Circulate, Direction
from megatron_burst.schedule.inter_node import Step
from megatron_burst.schedule.mask import Mask, Places, Span, Tile, joined, meet
from megatron_burst.schedule.pieces import (
    Piece,
    Visit,
    runs,
    sides,
    tiles_between,
    tiles_over,
    union,
)


@dataclass(frozen=True, slots=True)
class Leaf:
    """Key gradients that a rank computes for another rank's piece.

    Attributes:
        rows: of the concatenated gradients of the step's tiles.
        piece: whose gradients they are.
    """

    rows: Span
    piece: Piece


@dataclass(frozen=True, slots=True, eq=False)
class Meeting:
    """What a rank does in a step, and what it trades with the others of its node.

    Attributes:
        keys: the pieces of the gathered keys.
        tiles: of the rank: before the keys arrive, over them, and after them.
        needed: pieces that it reads; and, by rank, its own pieces that others read, in sequence
            order.
        leaves: the gradients of other ranks' keys that it computes; and, by rank, the gradients of
            its own keys that others compute.
        share_rows: key rows of the tiles over gathered keys, at most on any rank.
    """

    keys: tuple[Piece, ...]
    tiles: tuple[tuple[Tile, ...], tuple[Tile, ...], tuple[Tile, ...]]
    needed: Mapping[int, tuple[Piece, ...]]
    leaves: Mapping[int, tuple[Leaf, ...]]
    share_rows: int


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tiles of all steps of a rank.

    Attributes:
        cp_rank: the rank.
        ranks: of its node.
        visits: what the node works with, by how many nodes away it is from.
        order: of the steps.
        mask: which keys a query may see.
        direction: forward or backward.
        rectangular_causal: whether the kernel supports causal tiles with more keys than queries.
        circulate: what circulates between nodes.
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
        """What is done in each step; equal steps share one object."""
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
                tiles[rank] = self._own_tiles([piece for piece, _ in of_rank], first, last)
            else:
                rows = [(piece.rows, piece, before) for piece, before in of_rank]
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
        self, queries: Sequence[Piece], first: bool, last: bool
    ) -> tuple[tuple[Tile, ...], tuple[Tile, ...], tuple[Tile, ...]]:
        """Tiles of a rank with its own node's keys: before they arrive, over them, and after
        them."""
        keys = self.visits[0].pieces
        if self.mask.full or (self.mask.causal and len(keys) == len(queries)):
            every = Span(0, queries[-1].rows.stop), Span(0, keys[-1].whole.stop)
            places = (_places(queries), _places(keys)) if self.mask.documents else None
            return (), (Tile(*every, self.mask, places),), ()
        if self.mask.windowed and self.mask.documents:  # a document ends anywhere in a piece
            return (), self._over(queries, lambda piece: keys), ()
        diagonal = tuple(self._diagonal(piece) for piece in queries)
        before = diagonal if first else ()
        after = diagonal if last and self.direction is Direction.BACKWARD else ()
        if after and (before or len(self.visits) > 1):
            # half of the tiles hide each direction; with other nodes, their remaining sums are sent
            # first
            half = (len(diagonal) + 1) // 2
            before, after = diagonal[:half], diagonal[half:]
        if before or after:
            return before, self._others(queries), after
        if self.rectangular_causal or self.mask.windowed:
            return (), self._over(queries, lambda piece: keys), ()
        diagonal = tuple(
            replace(tile, kv=p.whole) for tile, p in zip(diagonal, queries, strict=True)
        )
        return (), (*diagonal, *self._others(queries)), ()

    def _diagonal(self, piece: Piece) -> Tile:
        """A piece's queries over its own keys, in the shard."""
        places = range(piece.place, piece.place + len(piece.rows))
        tile = meet(places, places, self.mask)
        assert tile
        return replace(tile, q=piece.rows, kv=piece.rows)

    def _others(self, queries: Sequence[Piece]) -> tuple[Tile, ...]:
        """Tiles over the gathered keys before and after each piece."""
        every = self.visits[0].pieces
        before = self._over(queries, lambda p: [k for k in every if k.whole.stop <= p.whole.start])
        if self.mask.right == 0:
            return before
        behind = self._over(queries, lambda p: [k for k in every if k.whole.start >= p.whole.stop])
        return (*before, *behind)

    def _over(
        self, queries: Sequence[Piece], keys_of: Callable[[Piece], Sequence[Piece]]
    ) -> tuple[Tile, ...]:
        """Tiles of queries over some of the gathered keys."""
        if self.mask.windowed or self.mask.documents:
            return joined(t for p in queries for t in tiles_over(p.rows, p, keys_of(p), self.mask))
        prefixes = ((p, [key for key in keys_of(p) if key.whole.start <= p.whole.start])
                    for p in queries)  # fmt: skip
        return tuple(
            Tile(p.rows, Span(0, keys[-1].whole.stop),
                 Mask.CAUSAL if keys[-1] == p else Mask.FULL)
            for p, keys in prefixes if keys
        )  # fmt: skip


def _places(pieces: Sequence[Piece]) -> Places:
    return tuple(at for at, _ in runs(pieces))


def _needed(keys: Sequence[Piece], cp_rank: int, tiles: Sequence[Tile]) -> Iterator[Piece]:
    """Other ranks' rows that a rank's tiles read, cut to what is read."""
    for piece in keys:
        if piece.holder == cp_rank:
            continue
        parts = [part for tile in tiles if (part := piece.part(tile.kv))]
        for start, stop in union((part.whole.start, part.whole.stop) for part in parts):
            part = piece.part(Span(start, stop))
            assert part
            yield part


def _leaving(keys: Sequence[Piece], cp_rank: int, tiles: Sequence[Tile]) -> tuple[Leaf, ...]:
    """Which rows of a rank's shares belong to which rows of other ranks."""
    leaves, start = [], 0
    for tile in tiles:
        parts = (piece.part(tile.kv) for piece in keys if piece.holder != cp_rank)
        leaves += [Leaf(p.whole.moved(start - tile.kv.start), p) for p in parts if p]
        start += len(tile.kv)
    return tuple(leaves)
