"""How the early half of a causal sequence is computed again, and by whom."""

from dataclasses import dataclass

from megatron_burst.plan.choose import Choice
from megatron_burst.plan.layout import Layout
from megatron_burst.plan.mask import Mask, Span


@dataclass(frozen=True, slots=True)
class Move:
    """Rows of the early half that one rank computes for another (or for itself).

    Attributes:
        source: rank that holds them.
        rows: of its shard.
        dest: rank that computes them.
        dest_rows: of the shard of the early half that it computes.
    """

    source: int
    rows: Span
    dest: int
    dest_rows: Span


@dataclass(frozen=True, slots=True)
class EarlyHalf:
    """The early half as a smaller causal problem of its own.

    Attributes:
        layout: of its tokens over the ranks while it is computed.
        early: the rows of every rank's shard that belong to it; the others are kept.
        moves: who computes whose rows; empty where everybody computes his own.
    """

    layout: Layout
    early: Span
    moves: tuple[Move, ...] = ()


def early_half(layout: Layout, cp_size: int, tokens: int, deal: bool) -> EarlyHalf:
    """The early half of a layout in which every rank holds early and late rows alike.

    In zigzag rank r holds chunk r of the early half's P: contiguous, so the last rank would pay
    (2P - 1)/(4P) of a forward. Dealt out anew, sub-chunk j of 2P goes to rank j or 2P-1-j, and all
    pay a quarter.

    Args:
        layout: zigzag or striped.
        cp_size: P.
        tokens: rows on a rank.
        deal: whether to deal out anew; zigzag only, and rows must be a multiple of 4.
    """
    early = Span(0, tokens // 2)
    if layout is Layout.STRIPED:
        return EarlyHalf(Layout.STRIPED, early)
    if not deal:
        return EarlyHalf(Layout.CONTIGUOUS, early)
    size = tokens // 4
    moves = []
    for piece in range(2 * cp_size):
        first = (piece % 2) * size
        front = piece < cp_size
        dest, at = (piece, 0) if front else (2 * cp_size - 1 - piece, size)
        moves.append(Move(piece // 2, Span(first, first + size), dest, Span(at, at + size)))
    return EarlyHalf(Layout.ZIGZAG, early, tuple(moves))


def choose_half(layout: Layout, mask: Mask, cp_size: int, tokens: int, hosts: int) -> Choice:
    """What keeping the later half comes to: "dealt", "plain", or "none" where it gains nothing.

    Args:
        layout: how tokens are dealt out.
        mask: which keys a query may see.
        cp_size: size of the group.
        tokens: rows on a rank.
        hosts: of the group.
    """
    if mask is not Mask.CAUSAL:
        return Choice("none", "without a causal mask half of the rows cost half of the time")
    if layout is Layout.CONTIGUOUS and cp_size > 1:
        return Choice("none", "contiguous: the later ranks would keep all of their rows")
    if tokens < 2:
        return Choice("none", "one row a rank cannot be halved")
    if layout is Layout.STRIPED or cp_size == 1:
        return Choice("plain", "the early rows are spread evenly")
    if tokens % 4:
        return Choice("plain", f"not dealt out anew: {tokens} rows a rank are no multiple of 4")
    if hosts > 1:
        return Choice("plain", "not dealt out anew: rows would have to pass between hosts")
    return Choice("dealt", "the early rows are dealt out anew, a quarter of a forward on each rank")


def replayed_share(layout: Layout, mask: Mask, cp_size: int, tokens: int, hosts: int) -> float:
    """Share of a forward that the slowest rank computes again if the later half is kept.

    Args: those of `choose_half`.
    """
    how = choose_half(layout, mask, cp_size, tokens, hosts).value
    if how == "none":
        return 1.0
    return (2 * cp_size - 1) / (4 * cp_size) if (how, layout) == ("plain", Layout.ZIGZAG) else 0.25
