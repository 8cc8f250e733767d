"""Recomputation that keeps the later half of a causal sequence, as data: which rank recomputes
which early rows, and whether they are resharded for it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from megatron_burst.logs import Decision
from megatron_burst.schedule.layout import Layout, positions
from megatron_burst.schedule.mask import Span
from megatron_burst.schedule.spec import Spec


@dataclass(frozen=True, slots=True)
class RowMove:
    """Adjacent rows of one rank's shard, and the rank that computes them."""

    source: int  # rank that sends the rows
    rows: Span  # where they are in its tensors
    dest: int  # rank that receives them; it may be the source
    dest_rows: Span  # where they are in the tensors of that rank

    def reverse(self) -> "RowMove":
        """The return transfer, of what was computed for these rows."""
        return RowMove(self.dest, self.dest_rows, self.source, self.rows)


@dataclass(frozen=True, slots=True)
class EarlyRows:
    """The early half of a sequence as a smaller causal problem of its own."""

    layout: Layout  # of its rows over the ranks while they are computed
    tokens: int  # rows that each rank computes; it also has as many, the first of its shard
    moves: tuple[RowMove, ...] = ()  # which rank computes whose rows; empty: each its own


def early_rows(layout: Layout, cp_size: int, tokens: int, reshard: bool) -> EarlyRows:
    """The first half of each rank's rows, which together are the first half of the sequence.

    In zigzag each rank has one chunk of that half: contiguous, so the last of P ranks would compute
    (2P - 1)/(4P) of a forward. Resharded in zigzag, all compute a quarter; then `tokens`, the rows
    on each rank, is a multiple of 4. The whole sequence may be contiguous only on one rank, because
    elsewhere the first ranks have all of the first half.
    """
    early = _early_tokens(tokens)
    if not reshard:
        striped = layout is Layout.STRIPED
        return EarlyRows(Layout.STRIPED if striped else Layout.CONTIGUOUS, early)
    moves = tuple(
        RowMove(source, common.shifted(-source * early), dest, common.shifted(shift))
        for source, dest in product(range(cp_size), repeat=2)
        for chunk, shift in _chunks(dest, cp_size, early)
        if (common := chunk.intersection(Span(source * early, (source + 1) * early)))
    )
    return EarlyRows(Layout.ZIGZAG, early, moves)


def _early_tokens(tokens: int) -> int:
    """How many of a rank's rows are recomputed."""
    return round(tokens / 2)


def _chunks(rank: int, cp_size: int, tokens: int) -> Iterator[tuple[Span, int]]:
    """Positions of a rank's chunks in zigzag, and what is added to a position to get its row."""
    row = 0
    for chunk in positions(Layout.ZIGZAG, rank, cp_size, tokens):
        yield Span(chunk.start, chunk.stop), row - chunk.start
        row += len(chunk)


def _is_even(spec: Spec) -> bool:
    """Whether all ranks of a resolved spec have equal work on the early rows where they are."""
    if spec.topology.cp_size == 1 or spec.layout is Layout.STRIPED:
        return True
    return spec.intra == "a2a" and spec.layout is Layout.ZIGZAG


@lru_cache(maxsize=256)
def choose_later(spec: Spec) -> Decision:
    """How a resolved spec keeps the later half of its rows: "resharded" or "plain", by where the
    early rows are recomputed, or "none" if keeping half gains nothing."""
    tokens = spec.shape.tokens
    if spec.mask.documents or not spec.mask.causal:
        return Decision("none", "only for a single causal document does recomputing early rows "
                        "cost less than their share of the time")  # fmt: skip
    if tokens < 2:
        return Decision("none", "one row per rank cannot be halved")
    if _is_even(spec):
        return Decision("plain", "the early rows are spread evenly")
    if spec.layout is Layout.CONTIGUOUS:
        return Decision("none", "in the contiguous layout later ranks would keep all of their rows")
    if tokens % 4:
        return Decision("plain", f"not resharded: {tokens} rows per rank are not a multiple of 4")
    if len(set(spec.topology.node_of)) > 1:
        return Decision("plain", "not resharded: rows would go between nodes")
    return Decision("resharded", "the early rows are resharded, 0.25 of a forward on each rank")


def recomputed_share(spec: Spec) -> float:
    """Share of a forward that the slowest rank of a resolved spec recomputes if it keeps half."""
    choice, cp_size = choose_later(spec), spec.topology.cp_size
    if choice.value == "none":
        return 1.0
    if choice.value == "plain" and not _is_even(spec):
        return (2 * cp_size - 1) / (4 * cp_size)
    return (_early_tokens(spec.shape.tokens) / spec.shape.tokens) ** 2
