"""Recomputation that keeps the later rows of a causal sequence, as data: which ranks recompute the
early rows, which keep the later ones, and whether rows are resharded for it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron_burst.errors import BurstError
from megatron_burst.say import Choice
from megatron_burst.schedule.layout import Layout, positions
from megatron_burst.schedule.mask import Span
from megatron_burst.schedule.spec import Spec

_HALF = 0.5


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
class EarlyRows:
    """The early rows as a smaller causal problem of its own, equally many on every rank."""

    layout: Layout  # of its tokens over the ranks while it is computed
    tokens: int  # that each rank computes
    early: tuple[Span, ...]  # by rank, rows of its shard that belong to it: the first, all or none
    moves: tuple[Move, ...] = ()  # which rank computes whose rows; empty: each its own
    kept: tuple[Move, ...] = ()  # which rank keeps whose later rows; empty: each its own


def early_rows(layout: Layout, cp_size: int, tokens: int, early: int, reshard: bool) -> EarlyRows:
    """The first `early * cp_size` rows of a sequence.

    In zigzag every rank holds one chunk of the early half's P: contiguous, so the last rank would
    pay (2P - 1)/(4P) of a forward. Resharded in zigzag, all pay alike. Of any other share, or in
    the contiguous layout, ranks hold unequal numbers of early rows: they are resharded, and ranks
    with many later rows give some to those with few, so that all keep equally many.

    Args:
        layout: of the sequence; striped rows are even as they are.
        cp_size: ranks.
        tokens: rows on each of them.
        early: rows that each of them recomputes, an even number if they are resharded.
        reshard: whether rows go to other ranks; if not, ranks must hold equally many early ones.
    """
    if layout is Layout.STRIPED:
        return EarlyRows(Layout.STRIPED, early, (Span(0, early),) * cp_size)
    ranks, first = range(cp_size), Span(0, cp_size * early)
    held = {rank: list(_runs(layout, rank, cp_size, tokens)) for rank in ranks}
    counts = [sum(len(run.both(first) or ()) for run, _ in held[rank]) for rank in ranks]
    spans = tuple(Span(0, count) for count in counts)
    if not reshard:
        return EarlyRows(Layout.CONTIGUOUS, early, spans)
    moves = tuple(
        Move(source, both.moved(row), dest, both.moved(place))
        for source in ranks
        for run, row in held[source]
        for dest in ranks
        for there, place in _runs(Layout.ZIGZAG, dest, cp_size, early)
        if (both := run.both(there))
    )
    own = all(count == early for count in counts)
    kept = () if own else tuple(_shared(counts, tokens, early))
    return EarlyRows(Layout.ZIGZAG, early, spans, moves, kept)


def _runs(layout: Layout, rank: int, cp_size: int, tokens: int) -> Iterator[tuple[Span, int]]:
    """The positions of a rank's rows in runs, and what turns these positions into its rows."""
    row = 0
    for run in positions(layout, rank, cp_size, tokens):
        yield Span(run.start, run.stop), row - run.start
        row += len(run)


def _shared(counts: Sequence[int], tokens: int, early: int) -> Iterator[Move]:
    """Who keeps whose later rows, so that each keeps equally many, its own first.

    Args:
        counts: early rows of each rank; its later ones are the rest.
        tokens: rows of each.
        early: how many each recomputes; it keeps the rest.
    """
    rooms = []
    for rank, count in enumerate(counts):
        own = min(tokens - count, tokens - early)
        if own:
            yield Move(rank, Span(count, count + own), rank, Span(0, own))
        rooms.append([own, count + own])  # the next row to keep, and to give
    dest = 0
    for source, (_, start) in enumerate(rooms):
        while start < tokens:
            while rooms[dest][0] == tokens - early:
                dest += 1
            place = rooms[dest][0]
            size = min(tokens - start, tokens - early - place)
            yield Move(source, Span(start, start + size), dest, Span(place, place + size))
            start, rooms[dest][0] = start + size, place + size


def kept_share(keep: str | float) -> float:
    """Share of the rows whose results are kept, the later ones; of "auto" 0."""
    return {"half": 0.5, "all": 1.0}.get(keep, 0.0) if isinstance(keep, str) else keep


def early_tokens(spec: Spec, share: float) -> int:
    """Rows that each rank recomputes if it keeps a share of them: an even number, except of halves
    and of rows that need not be resharded."""
    early = round(spec.shape.tokens * (1 - share))
    return early if share == _HALF or _is_even(spec, share) else early - early % 2


def _is_even(spec: Spec, share: float) -> bool:
    """Whether all ranks of a resolved spec have equal work on the early rows without resharding."""
    if spec.topology.cp_size == 1 or spec.layout is Layout.STRIPED:
        return True
    of_heads = spec.intra == "a2a" and spec.arranged.inter_size == 1
    return of_heads and spec.layout is Layout.ZIGZAG and share == _HALF


@lru_cache(maxsize=256)
def choose_later(spec: Spec, share: float = _HALF) -> Choice:
    """How a share of the rows of a resolved spec is kept, the later ones: "resharded", "plain", or
    "none" if there is no gain.

    Raises:
        BurstError: if rows would go between nodes; halves need not.
    """
    tokens, early = spec.shape.tokens, early_tokens(spec, share)
    if spec.mask.documents or not spec.mask.causal:
        return Choice(
            "none",
            "only for a single causal document does recomputing early rows cost less than their "
            "share of the time",
        )
    if not 0 < early < tokens:
        return Choice("none", f"{tokens} rows per rank cannot be divided so")
    if _is_even(spec, share):
        return Choice("plain", "the early rows are spread evenly")
    if len(set(spec.topology.node_of)) > 1 and share != _HALF:
        raise BurstError(
            "burst keep: ranks that keep a share of the rows, other than a half, must be in one "
            f"node, because rows are resharded; got keep={share} and {spec.topology}; pass "
            "--burst-keep half or all"
        )
    otherwise, loses = "plain", "not resharded"
    if spec.layout is Layout.CONTIGUOUS:
        otherwise, loses = "none", "later ranks would keep all of their rows"
    if early % 2 or (share == _HALF and tokens % 4):
        return Choice(otherwise, f"{loses}: {tokens} rows per rank are not a multiple of 4")
    if len(set(spec.topology.node_of)) > 1:
        return Choice(otherwise, f"{loses}: rows would go between nodes")
    part = early / tokens
    return Choice(
        "resharded", f"the early rows are resharded, {part**2:.3g} of a forward on each rank"
    )


def recomputed_share(spec: Spec, share: float = _HALF) -> float:
    """Share of a forward that the slowest rank recomputes if it keeps a share of the rows."""
    how, size = choose_later(spec, share).value, spec.topology.cp_size
    if how == "none":
        return 1.0
    if how == "plain" and not _is_even(spec, share):
        return (2 * size - 1) / (4 * size)
    return (early_tokens(spec, share) / spec.shape.tokens) ** 2
