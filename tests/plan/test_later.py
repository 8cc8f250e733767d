"""The early rows of a sequence: which rank recomputes them, and at what cost.

Guards against rows that no rank or two ranks compute or keep, and uneven work or memory.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_burst.recompute.later_plan import early_rows
from megatron_burst.schedule.layout import Layout, positions
from megatron_burst.schedule.mask import Mask, tiles


@st.composite
def plans(draw):
    """(layout, ranks, rows of a rank, early rows, plan); halves need not be resharded in zigzag."""
    size, quarter = draw(st.integers(1, 7)), draw(st.integers(1, 5))
    tokens = 4 * quarter
    layout, reshard = draw(
        st.sampled_from([
            (Layout.ZIGZAG, True), (Layout.ZIGZAG, False), (Layout.STRIPED, False),
            (Layout.CONTIGUOUS, True),
        ])
    )  # fmt: skip
    half = layout is Layout.ZIGZAG and not reshard
    early = tokens // 2 if half else 2 * draw(st.integers(1, 2 * quarter - 1))
    return layout, size, tokens, early, early_rows(layout, size, tokens, early, reshard)


def flat(layout, rank, size, tokens):
    return [p for span in positions(layout, rank, size, tokens) for p in span]


@given(plans())
def test_the_early_rows_are_the_first_of_the_sequence(plan):
    layout, size, tokens, early, made = plan
    held = [
        p for rank in range(size) for p in flat(layout, rank, size, tokens)[made.early[rank].slice]
    ]
    assert sorted(held) == list(range(size * early))


@given(plans())
def test_each_row_is_computed_once_and_where_the_layout_of_the_early_rows_has_it(plan):
    layout, size, tokens, early, made = plan
    computed = {}
    for rank in range(size):
        own = flat(layout, rank, size, tokens)
        if not made.moves:
            computed |= {(rank, row): own[row] for row in range(early)}
        for move in (move for move in made.moves if move.source == rank):
            for row, dest_row in zip(
                range(move.rows.start, move.rows.stop),
                range(move.dest_rows.start, move.dest_rows.stop),
                strict=True,
            ):
                assert row < made.early[rank].stop and (move.dest, dest_row) not in computed
                computed[move.dest, dest_row] = own[row]
    assert made.tokens == early and len(computed) == size * early
    for rank in range(size):
        here = [computed[rank, row] for row in range(early)]
        assert here == flat(made.layout, rank, size, early)


@given(plans())
def test_each_later_row_is_kept_once_and_equally_many_by_each_rank(plan):
    _, size, tokens, early, made = plan
    kept = {rank: [] for rank in range(size)}
    held = {rank: [] for rank in range(size)}
    for move in made.kept:
        kept[move.dest] += range(move.dest_rows.start, move.dest_rows.stop)
        held[move.source] += range(move.rows.start, move.rows.stop)
    for rank in range(size):
        later = list(range(made.early[rank].stop, tokens))
        if not made.kept:
            assert len(later) == tokens - early
            continue
        assert sorted(kept[rank]) == list(range(tokens - early))
        assert sorted(held[rank]) == later


def test_as_many_rows_as_possible_stay_where_they_are():
    made = early_rows(Layout.ZIGZAG, 4, 64, 16, reshard=True)  # three quarters are kept
    assert [span.stop for span in made.early] == [32, 32, 0, 0]
    own, sent = (
        [move for move in made.kept if (move.source == move.dest) is same] for same in (True, False)
    )
    assert [len(move.rows) for move in own] == [32, 32, 48, 48]
    assert [(move.source, move.dest, len(move.rows)) for move in sent] == [(2, 0, 16), (3, 1, 16)]


def pairs(layout, size, tokens):
    """(query, key) pairs of a causal forward on each rank."""
    return [
        sum(
            tile.pairs
            for owner in range(size)
            for tile in tiles(layout, Mask.CAUSAL, rank, owner, size, tokens)
        )
        for rank in range(size)
    ]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("kept", [0.25, 0.5, 0.75])
def test_if_resharded_the_slowest_rank_pays_the_square_of_what_is_early(size, kept):
    tokens = 4096
    early = round(tokens * (1 - kept))
    whole = max(pairs(Layout.ZIGZAG, size, tokens))
    made = early_rows(Layout.ZIGZAG, size, tokens, early, reshard=True)
    cost = max(pairs(made.layout, size, made.tokens))
    assert cost / whole == pytest.approx((1 - kept) ** 2, abs=1e-3)
    striped = max(pairs(Layout.STRIPED, size, early)) / max(pairs(Layout.STRIPED, size, tokens))
    assert striped == pytest.approx((1 - kept) ** 2, abs=1e-3)
    half = early_rows(Layout.ZIGZAG, size, tokens, tokens // 2, reshard=False)
    plain = max(pairs(half.layout, size, half.tokens)) / whole
    assert plain == pytest.approx((2 * size - 1) / (4 * size), abs=1e-3)
