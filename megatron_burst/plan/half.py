"""The early half of a causal sequence: who computes it again, who keeps the later one, as data."""

from dataclasses import dataclass

from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Span


@dataclass(frozen=True, slots=True)
class Move:
    """Rows that one rank takes care of for another (or for itself).

    Attributes:
        source: rank that holds them.
        rows: of its shard.
        dest: rank that computes or keeps them.
        dest_rows: of what that rank computes or keeps.
    """

    source: int
    rows: Span
    dest: int
    dest_rows: Span

    @property
    def home(self) -> "Move":
        """The way back."""
        return Move(self.dest, self.dest_rows, self.source, self.rows)


@dataclass(frozen=True, slots=True)
class EarlyHalf:
    """The early half as a smaller causal problem of its own, half of a shard on every rank.

    Attributes:
        layout: of its tokens over the ranks while it is computed.
        early: by rank, the rows of its shard that belong to it: the first ones, all or none.
        moves: who computes whose rows; empty where everybody computes his own.
        kept: who keeps whose later rows; empty where everybody keeps his own.
    """

    layout: Layout
    early: tuple[Span, ...]
    moves: tuple[Move, ...] = ()
    kept: tuple[Move, ...] = ()


def early_half(layout: Layout, cp_size: int, tokens: int, deal: bool) -> EarlyHalf:
    """The early half of a sequence.

    In zigzag every rank holds chunk r of the early half's P: contiguous, so the last rank would
    pay (2P - 1)/(4P) of a forward. Dealt out anew, sub-chunk j of 2P goes to rank j or 2P-1-j, and
    all pay a quarter. In the contiguous layout the first ranks hold all of the early half, the last
    ones all of the later: both are dealt out.

    Args:
        layout: of the whole sequence.
        cp_size: P.
        tokens: rows on a rank.
        deal: whether to deal out anew; rows must be a multiple of 4. The contiguous layout of
            several ranks must, striped rows need not.
    """
    halves = (Span(0, tokens // 2),) * cp_size
    if layout is Layout.STRIPED:
        return EarlyHalf(Layout.STRIPED, halves)
    if not deal:
        return EarlyHalf(Layout.CONTIGUOUS, halves)
    if layout is Layout.ZIGZAG:
        return EarlyHalf(Layout.ZIGZAG, halves, _dealt(cp_size, tokens // 4, of_a_rank=2))
    rest = (cp_size * tokens // 2 - rank * tokens for rank in range(cp_size))
    early = tuple(Span(0, min(max(rows, 0), tokens)) for rows in rest)
    quarter = tokens // 4
    return EarlyHalf(
        Layout.ZIGZAG, early, _dealt(cp_size, quarter, of_a_rank=4), _shared(cp_size, quarter)
    )


def _dealt(cp_size: int, size: int, of_a_rank: int) -> tuple[Move, ...]:
    """The early half's 2P sub-chunks, of which a rank holds so many, in zigzag."""
    moves = []
    for piece in range(2 * cp_size):
        front = piece < cp_size
        dest = piece if front else 2 * cp_size - 1 - piece
        source, place = divmod(piece, of_a_rank)
        moves.append(Move(source, _rows(place, size), dest, _rows(0 if front else 1, size)))
    return tuple(moves)


def _shared(cp_size: int, size: int) -> tuple[Move, ...]:
    """The later half's sub-chunks of the contiguous layout: two a rank; the rank that has four
    gives two to its mirror image, which has none."""
    moves = []
    for rank in range(cp_size):
        later = range(min(max(2 * cp_size - 4 * rank, 0), 4), 4)
        for place, piece in enumerate(later):
            dest = rank if place < 2 else cp_size - 1 - rank
            moves.append(Move(rank, _rows(piece, size), dest, _rows(place % 2, size)))
    return tuple(moves)


def _rows(piece: int, size: int) -> Span:
    return Span(piece * size, (piece + 1) * size)
