"""Gathering: the keys of all ranks of a host come together, a few heads at a time.

A round is a group of key heads. Its keys and values lie in the order of the whole sequence, so
whatever a rank's queries may see of them is one range of rows. While a round is computed, the next
one's keys arrive; the gradients of its keys leave for their owners while the next one is computed.
The first round has no round before it and, in backward, the last has none after it: there the
rank's own diagonal tiles, which need nobody, are computed meanwhile.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from megatron_burst.errors import BurstError
from megatron_burst.plan.layout import Layout, positions
from megatron_burst.plan.mask import Mask, Span, Tile
from megatron_burst.plan.schedule import Direction


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one rank's shard that are neighbours in the whole sequence.

    Attributes:
        owner: cp rank that holds them.
        rows: in the owner's shard.
        whole: in the whole sequence.
    """

    owner: int
    rows: Span
    whole: Span


@dataclass(frozen=True, slots=True)
class Round:
    """One group of key heads.

    Attributes:
        heads: key heads.
        before: tiles over the rank's own shard, computed while the keys are on their way.
        tiles: tiles over the gathered keys: key rows are rows of the whole sequence.
        after: tiles over the rank's own shard, computed while gradients are on their way.
    """

    heads: Span
    before: tuple[Tile, ...]
    tiles: tuple[Tile, ...]
    after: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class Leaf:
    """Key gradients that a rank computes for a piece of another rank.

    Attributes:
        rows: of the gradients of the round's tiles, laid one behind the other.
        piece: whose gradients they are.
    """

    rows: Span
    piece: Piece


@dataclass(frozen=True, slots=True)
class GatherSchedule:
    """What one rank does in one forward or backward pass that gathers.

    Attributes:
        cp_rank: whose schedule it is.
        pieces: all ranks' pieces, in the order of the whole sequence.
        rounds: in the order in which they run.
        reads: the other ranks' pieces that every rank needs, by round and rank.
        leaves: the gradients of others' keys that every rank computes, by round and rank.
        share_rows: key rows of a round's tiles together, at most on any rank.
    """

    cp_rank: int
    pieces: tuple[Piece, ...]
    rounds: tuple[Round, ...]
    reads: tuple[tuple[tuple[Piece, ...], ...], ...]
    leaves: tuple[tuple[tuple[Leaf, ...], ...], ...]
    share_rows: int

    @property
    def cp_size(self) -> int:
        return len(self.reads[0])

    @property
    def num_rows(self) -> int:
        """Rows of the whole sequence."""
        return self.pieces[-1].whole.stop

    def pieces_of(self, owner: int) -> tuple[Piece, ...]:
        """The pieces of one rank's shard."""
        return tuple(piece for piece in self.pieces if piece.owner == owner)


@lru_cache(maxsize=1024)
def gather_schedule(
    cp_rank: int,
    cp_size: int,
    *,
    layout: Layout,
    mask: Mask,
    tokens: int,
    heads_kv: int,
    heads_per_round: int,
    direction: Direction,
    rectangular_causal: bool,
) -> GatherSchedule:
    """The schedule of one rank that gathers keys from all ranks of its group.

    Args:
        cp_rank: rank in the context-parallel group.
        cp_size: size of that group.
        layout: how tokens are dealt out; not striped, whose keys interleave.
        mask: which keys a query may see.
        tokens: rows on each rank.
        heads_kv: key heads on a rank.
        heads_per_round: key heads of a round; the last round may have fewer.
        direction: forward or backward.
        rectangular_causal: whether the kernel does causal tiles with more keys than queries.

    Raises:
        BurstError: if the layout cannot be gathered or cannot hold that many rows.
    """
    pieces = pieces_of(layout, cp_size, tokens)
    groups = [
        Span(start, min(start + heads_per_round, heads_kv))
        for start in range(0, heads_kv, heads_per_round)
    ]
    of_all = [
        _rounds(pieces, rank, groups, mask, direction, rectangular_causal)
        for rank in range(cp_size)
    ]
    tiles = [[rounds[i].tiles for rounds in of_all] for i in range(len(groups))]
    return GatherSchedule(
        cp_rank,
        pieces,
        of_all[cp_rank],
        reads=_by_round_and_rank(tiles, partial(_needed, pieces)),
        leaves=_by_round_and_rank(tiles, partial(_leaving, pieces)),
        share_rows=max(sum(len(t.kv) for t in of_rank) for ranks in tiles for of_rank in ranks),
    )


def pieces_of(layout: Layout, cp_size: int, tokens: int) -> tuple[Piece, ...]:
    """All ranks' pieces in the order of the whole sequence.

    Raises:
        BurstError: if the layout is striped or cannot hold that many rows.
    """
    if layout is Layout.STRIPED:
        raise BurstError(
            "burst attention: gathered keys must lie in the order of the sequence, because a "
            "query then sees one range of them; got layout striped; pass intra='ring' "
            "(--burst-intra ring), or deal tokens out in zigzag"
        )
    pieces = []
    for owner in range(cp_size):
        start = 0
        for span in positions(layout, owner, cp_size, tokens):
            rows = Span(start, start + len(span))
            pieces.append(Piece(owner, rows, Span(span.start, span.stop)))
            start = rows.stop
    return tuple(sorted(pieces, key=lambda piece: piece.whole.start))


def _rounds(
    pieces: Sequence[Piece],
    cp_rank: int,
    groups: Sequence[Span],
    mask: Mask,
    direction: Direction,
    rectangular_causal: bool,
) -> tuple[Round, ...]:
    own = [piece for piece in pieces if piece.owner == cp_rank]
    if mask is Mask.FULL or len(pieces) == len(own):
        every = Span(0, own[-1].rows.stop), Span(0, pieces[-1].whole.stop)
        return tuple(Round(heads, (), (Tile(*every, mask),), ()) for heads in groups)
    diagonal = tuple(Tile(piece.rows, piece.rows, Mask.CAUSAL) for piece in own)
    earlier = tuple(
        Tile(piece.rows, Span(0, piece.whole.start), Mask.FULL)
        for piece in own
        if piece.whole.start
    )
    last = len(groups) - 1
    rounds = []
    for index, heads in enumerate(groups):
        before = diagonal if index == 0 else ()
        after = diagonal if index == last and direction is Direction.BACKWARD else ()
        if before and after:  # one round only: half of the tiles hide each way
            half = (len(diagonal) + 1) // 2
            before, after = diagonal[:half], diagonal[half:]
        tiles = earlier if before or after else _all_visible(own, rectangular_causal)
        rounds.append(Round(heads, before, tiles, after))
    return tuple(rounds)


def _by_round_and_rank(tiles: Sequence, of: Callable) -> tuple:
    return tuple(tuple(of(rank, its) for rank, its in enumerate(ranks)) for ranks in tiles)


def _needed(pieces: Sequence[Piece], cp_rank: int, tiles: Sequence[Tile]) -> tuple[Piece, ...]:
    """Other ranks' pieces that a rank's tiles read: under a causal mask not all of them."""
    return tuple(
        piece
        for piece in pieces
        if piece.owner != cp_rank and any(tile.kv.holds(piece.whole) for tile in tiles)
    )


def _leaving(pieces: Sequence[Piece], cp_rank: int, tiles: Sequence[Tile]) -> tuple[Leaf, ...]:
    """Which rows of a rank's shares belong to which piece of another rank."""
    leaves, start = [], 0
    for tile in tiles:
        leaves += [
            Leaf(piece.whole.moved(start - tile.kv.start), piece)
            for piece in pieces
            if piece.owner != cp_rank and tile.kv.holds(piece.whole)
        ]
        start += len(tile.kv)
    return tuple(leaves)


def _all_visible(own: Sequence[Piece], rectangular_causal: bool) -> tuple[Tile, ...]:
    """Tiles of a rank's queries over all gathered keys that they may see, its own included."""
    if rectangular_causal:
        return tuple(Tile(p.rows, Span(0, p.whole.stop), Mask.CAUSAL) for p in own)
    diagonal = [Tile(p.rows, p.whole, Mask.CAUSAL) for p in own]
    earlier = [Tile(p.rows, Span(0, p.whole.start), Mask.FULL) for p in own if p.whole.start]
    return (*diagonal, *earlier)
