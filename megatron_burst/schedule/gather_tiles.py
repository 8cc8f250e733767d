"""Tiles of a rank that gathers: over its own shard, and over the gathered keys."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_burst.schedule.mask import Mask, Places, Span, Tile, joined, meet
from megatron_burst.schedule.pieces import Piece, Visit, runs, sides, tiles_between, tiles_over
from megatron_burst.schedule.spec import Spec


@dataclass(frozen=True, slots=True)
class StepTiles:
    """The tiles of a step, in the order of their kernels.

    Attributes:
        before: over the rank's own shard, computed while the keys are in transit, or while the last
            gradients of other nodes' keys are, inside the node.
        gathered: over the gathered keys.
        after: over the rank's own shard, computed while gradients are in transit.
    """

    before: tuple[Tile, ...]
    gathered: tuple[Tile, ...]
    after: tuple[Tile, ...]

    @property
    def every(self) -> tuple[Tile, ...]:
        return (*self.before, *self.gathered, *self.after)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Makes the tiles of all ranks of a node.

    Attributes:
        spec: of the program; its `cp_rank` may be any of the node.
        here: the node's own shards.
        alone: whether it is the only node.
    """

    spec: Spec
    here: Visit
    alone: bool

    @property
    def mask(self) -> Mask:
        return self.spec.mask

    def tiles(self, rank: int, visit: Visit, first: bool, last: bool) -> StepTiles:
        """The tiles of a rank in a step.

        Args:
            rank: of the node.
            visit: the shards that the node works with.
            first: whether it is the first step of the pass.
            last: whether it is the last.
        """
        queries, keys = sides(self.here, visit, self.spec.circulate)
        own = [(piece, before) for piece, before in queries if piece.holder == rank]
        if visit is self.here:
            return StepTiles(*self._own_tiles([piece for piece, _ in own], first, last))
        rows = [(piece.rows, piece, before) for piece, before in own]
        return StepTiles((), tiles_between(rows, keys, self.mask), ())

    def _own_tiles(
        self, queries: Sequence[Piece], first: bool, last: bool
    ) -> tuple[tuple[Tile, ...], tuple[Tile, ...], tuple[Tile, ...]]:
        """Tiles of a rank with its own node's keys: before they arrive, over them, and after
        them."""
        keys = self.here.keys
        if self.mask.full or (self.mask.causal and len(keys) == len(queries)):
            every = Span(0, queries[-1].rows.stop), Span(0, keys[-1].whole.stop)
            places = (_places(queries), _places(keys)) if self.mask.documents else None
            return (), (Tile(*every, self.mask, places),), ()
        if self.mask.windowed and self.mask.documents:  # a document ends anywhere in a piece
            return (), self._over(queries, lambda piece: keys), ()
        diagonal = tuple(self._diagonal(piece) for piece in queries)
        before = diagonal if first else ()
        after = diagonal if last and self.spec.backward else ()
        if after and (before or not self.alone):
            # half of the tiles hide each direction; with other nodes, their remaining sums are sent
            # first
            half = (len(diagonal) + 1) // 2
            before, after = diagonal[:half], diagonal[half:]
        if before or after:
            return before, self._others(queries), after
        if self.spec.kernel.rectangular_causal or self.mask.windowed:
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
        every = self.here.keys
        before = self._over(queries, lambda p: [k for k in every if k.whole.stop <= p.whole.start])
        if self.mask.right == 0:
            return before
        behind = self._over(queries, lambda p: [k for k in every if k.whole.start >= p.whole.stop])
        return (*before, *behind)

    def _over(
        self, queries: Sequence[Piece], keys_of: Callable[[Piece], Sequence[Piece]]
    ) -> tuple[Tile, ...]:
        """Tiles of queries over some of the gathered keys."""
        if self.mask.placed:
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
