"""Recomputation that keeps the later half of a causal sequence, as data: which ranks recompute the
early half, which keep the later one, and whether rows are resharded for it."""

from dataclasses import dataclass
from functools import lru_cache

from megatron_burst.say import Choice
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Span
from megatron_burst.schedule.spec import Spec


@dataclass(frozen=True, slots=True)
class Move:
    """Rows that one rank computes or keeps for another (or for itself)."""

    source: int  # rank that holds them
    rows: Span  # of its shard
    dest: int  # rank that computes or keeps them
    dest_rows: Span  # of the rows that rank computes or keeps

    @property
    def home(self) -> "Move":
        """The return transfer."""
        return Move(self.dest, self.dest_rows, self.source, self.rows)


@dataclass(frozen=True, slots=True)
class EarlyHalf:
    """The early half as a smaller causal problem of its own, half of a shard on every rank."""

    layout: Layout  # of its tokens over the ranks while it is computed
    early: tuple[Span, ...]  # by rank, rows of its shard that belong to it: the first, all or none
    moves: tuple[Move, ...] = ()  # which rank computes whose rows; empty: each its own
    kept: tuple[Move, ...] = ()  # which rank keeps whose later rows; empty: each its own


def early_half(layout: Layout, cp_size: int, tokens: int, reshard: bool) -> EarlyHalf:
    """The early half of a sequence.

    In zigzag every rank holds chunk r of the early half's P: contiguous, so the last rank would
    pay (2P - 1)/(4P) of a forward. Resharded, sub-chunk j of 2P goes to rank j or 2P-1-j, and
    all pay a quarter. In the contiguous layout the first ranks hold all of the early half, the last
    ones all of the later: both are resharded. To `reshard`, the `tokens` of a rank must be a
    multiple of 4; the contiguous layout of several ranks must be, striped rows need not.
    """
    halves = (Span(0, tokens // 2),) * cp_size
    if layout is Layout.STRIPED:
        return EarlyHalf(Layout.STRIPED, halves)
    if not reshard:
        return EarlyHalf(Layout.CONTIGUOUS, halves)
    if layout is Layout.ZIGZAG:
        return EarlyHalf(Layout.ZIGZAG, halves, _resharded(cp_size, tokens // 4, of_a_rank=2))
    rest = (cp_size * tokens // 2 - rank * tokens for rank in range(cp_size))
    early = tuple(Span(0, min(max(rows, 0), tokens)) for rows in rest)
    quarter = tokens // 4
    return EarlyHalf(
        Layout.ZIGZAG, early, _resharded(cp_size, quarter, of_a_rank=4), _shared(cp_size, quarter)
    )


def _resharded(cp_size: int, size: int, of_a_rank: int) -> tuple[Move, ...]:
    """The early half's 2P sub-chunks in zigzag; a rank holds `of_a_rank` of them."""
    moves = []
    for piece in range(2 * cp_size):
        front = piece < cp_size
        dest = piece if front else 2 * cp_size - 1 - piece
        source, place = divmod(piece, of_a_rank)
        moves.append(Move(source, _rows(place, size), dest, _rows(0 if front else 1, size)))
    return tuple(moves)


def _shared(cp_size: int, size: int) -> tuple[Move, ...]:
    """The later half's sub-chunks of the contiguous layout: two per rank; a rank that has four
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


def is_even(spec: Spec) -> bool:
    """Whether all ranks of a resolved spec have equal work on the early rows without resharding."""
    of_heads = spec.intra == "a2a" and spec.arranged.inter_size == 1
    over_all = of_heads and spec.layout is Layout.ZIGZAG
    return spec.layout is Layout.STRIPED or over_all or spec.topology.cp_size == 1


@lru_cache(maxsize=256)
def choose_half(spec: Spec) -> Choice:
    """How the later half of a resolved spec is kept: "resharded", "plain", or "none" if there is no
    gain."""
    tokens = spec.shape.tokens
    if spec.mask.documents or not spec.mask.causal:
        return Choice(
            "none",
            "only for a single causal document does recomputing half of the "
            "rows cost less than half of the time",
        )
    if tokens < 2:
        return Choice("none", "one row per rank cannot be halved")
    if is_even(spec):
        return Choice("plain", "the early rows are spread evenly")
    otherwise, loses = "plain", "not resharded"
    if spec.layout is Layout.CONTIGUOUS:
        otherwise, loses = "none", "later ranks would keep all of their rows"
    if tokens % 4:
        return Choice(otherwise, f"{loses}: {tokens} rows per rank are not a multiple of 4")
    if len(set(spec.topology.node_of)) > 1:
        return Choice(otherwise, f"{loses}: rows would go between nodes")
    return Choice("resharded", "the early rows are resharded, a quarter of a forward on each rank")


def recomputed_share(spec: Spec) -> float:
    """Share of a forward that the slowest rank recomputes if the later half is kept."""
    how = choose_half(spec).value
    return 0.25 if how == "plain" and is_even(spec) else _share(how, spec.topology.cp_size)


def _share(how: str, cp_size: int) -> float:
    return {"none": 1.0, "resharded": 0.25, "plain": (2 * cp_size - 1) / (4 * cp_size)}[how]
