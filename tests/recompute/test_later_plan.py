"""The early half of a sequence: which rank recomputes its rows, and at what cost.

Guards against rows that no rank or two ranks compute, and uneven work.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_burst.recompute.later_plan import early_rows
from megatron_burst.schedule.layout import Layout, positions
from megatron_burst.schedule.mask import Mask, tiles


@st.composite
def plans(draw):
    """(layout, ranks, rows of a rank, plan)."""
    size, tokens = draw(st.integers(1, 7)), 4 * draw(st.integers(1, 5))
    layout, reshard = draw(
        st.sampled_from([(Layout.ZIGZAG, True), (Layout.ZIGZAG, False), (Layout.STRIPED, False)])
    )
    return layout, size, tokens, early_rows(layout, size, tokens, reshard)


def flat(layout, rank, size, tokens):
    return [p for span in positions(layout, rank, size, tokens) for p in span]


@given(plans())
def test_the_early_rows_are_the_first_of_the_sequence(plan):
    layout, size, tokens, half = plan
    held = [p for rank in range(size) for p in flat(layout, rank, size, tokens)[: half.tokens]]
    assert 2 * half.tokens == tokens and sorted(held) == list(range(size * half.tokens))


@given(plans())
def test_each_row_is_computed_once_and_where_the_layout_of_the_early_rows_has_it(plan):
    layout, size, tokens, half = plan
    computed = {}
    for rank in range(size):
        own = flat(layout, rank, size, tokens)
        if not half.moves:
            computed |= {(rank, row): own[row] for row in range(half.tokens)}
        for move in (move for move in half.moves if move.source == rank):
            for row, dest_row in zip(
                range(move.rows.start, move.rows.stop),
                range(move.dest_rows.start, move.dest_rows.stop),
                strict=True,
            ):
                assert row < half.tokens and (move.dest, dest_row) not in computed
                computed[move.dest, dest_row] = own[row]
    assert len(computed) == size * half.tokens
    for rank in range(size):
        rows = [computed[rank, row] for row in range(half.tokens)]
        assert rows == flat(half.layout, rank, size, half.tokens)


@given(plans())
def test_results_return_to_the_rows_that_were_sent(plan):
    *_, half = plan
    for move in half.moves:
        back = move.reverse()
        assert (back.source, back.rows) == (move.dest, move.dest_rows)
        assert (back.dest, back.dest_rows) == (move.source, move.rows)


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
def test_if_resharded_the_slowest_rank_computes_a_quarter(size):
    tokens = 4096
    causal = max(pairs(Layout.ZIGZAG, size, tokens))
    resharded = early_rows(Layout.ZIGZAG, size, tokens, reshard=True)
    cost = max(pairs(resharded.layout, size, resharded.tokens))
    assert cost / causal == pytest.approx(0.25, abs=1e-3)
    striped = max(pairs(Layout.STRIPED, size, tokens // 2))
    assert striped / max(pairs(Layout.STRIPED, size, tokens)) == pytest.approx(0.25, abs=1e-3)
    plain = early_rows(Layout.ZIGZAG, size, tokens, reshard=False)
    cost = max(pairs(plain.layout, size, plain.tokens))
    assert cost / causal == pytest.approx((2 * size - 1) / (4 * size), abs=1e-3)
