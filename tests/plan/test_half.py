"""The early half of a sequence: who computes it again, and at what cost.

Catches rows that nobody computes, or two ranks, and work that is spread unevenly.
"""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_burst.plan.half import choose_half, early_half, replayed_share
from megatron_burst.plan.layout import Layout, positions
from megatron_burst.plan.mask import Mask, tiles

sizes, quarters = st.integers(1, 7), st.integers(1, 5)
plans = st.sampled_from([(Layout.ZIGZAG, True), (Layout.ZIGZAG, False), (Layout.STRIPED, False)])


def flat(layout, rank, size, tokens):
    return [p for span in positions(layout, rank, size, tokens) for p in span]


@given(plans, sizes, quarters)
def test_the_early_rows_are_the_first_half_of_the_sequence(plan, size, quarter):
    layout, deal = plan
    tokens = 4 * quarter
    half = early_half(layout, size, tokens, deal)
    held = [p for rank in range(size) for p in flat(layout, rank, size, tokens)[half.early.slice]]
    assert sorted(held) == list(range(size * tokens // 2))


@given(plans, sizes, quarters)
def test_each_row_is_computed_once_and_where_the_layout_of_the_early_half_has_it(
    plan, size, quarter
):
    layout, deal = plan
    tokens = 4 * quarter
    half = early_half(layout, size, tokens, deal)
    n = len(half.early)
    computed = {}
    for rank in range(size):
        own = flat(layout, rank, size, tokens)
        if not half.moves:
            computed |= {(rank, row): own[row] for row in range(n)}
        for move in (move for move in half.moves if move.source == rank):
            for row, dest_row in zip(
                range(move.rows.start, move.rows.stop),
                range(move.dest_rows.start, move.dest_rows.stop),
                strict=True,
            ):
                assert row < n and (move.dest, dest_row) not in computed
                computed[move.dest, dest_row] = own[row]
    for rank in range(size):
        assert [computed[rank, row] for row in range(n)] == flat(half.layout, rank, size, n)


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
def test_dealt_out_anew_the_slowest_rank_pays_a_quarter_of_a_forward(size):
    tokens = 4096
    whole = max(pairs(Layout.ZIGZAG, size, tokens))
    cost = {
        deal: max(pairs(early_half(Layout.ZIGZAG, size, tokens, deal).layout, size, tokens // 2))
        for deal in (True, False)
    }
    assert cost[True] / whole == pytest.approx(0.25, abs=1e-3)
    assert cost[False] / whole == pytest.approx((2 * size - 1) / (4 * size), abs=1e-3)
    striped = max(pairs(Layout.STRIPED, size, tokens // 2)) / max(
        pairs(Layout.STRIPED, size, tokens)
    )
    assert striped == pytest.approx(0.25, abs=1e-3)
    shape = Mask.CAUSAL, size, tokens
    assert replayed_share(Layout.ZIGZAG, *shape, hosts=1) == pytest.approx(
        cost[True] / whole, abs=1e-3
    )
    assert replayed_share(Layout.ZIGZAG, *shape, hosts=2) == pytest.approx(
        cost[False] / whole, abs=1e-3
    )
    assert replayed_share(Layout.STRIPED, *shape, hosts=2) == 0.25
    assert replayed_share(Layout.ZIGZAG, Mask.FULL, size, tokens, hosts=1) == 1


@given(sizes, quarters)
def test_no_rank_sends_or_receives_more_than_its_early_rows(size, quarter):
    half = early_half(Layout.ZIGZAG, size, 4 * quarter, deal=True)
    sent = Counter({m.source: 0 for m in half.moves})
    for move in half.moves:
        sent[move.source] += len(move.rows)
    assert set(sent.values()) == {2 * quarter}


CHOICES = [
    ((Layout.ZIGZAG, Mask.CAUSAL, 4, 8, 1), "dealt (the early rows are dealt out anew"),
    ((Layout.ZIGZAG, Mask.CAUSAL, 4, 8, 2), "plain (not dealt out anew: rows would have to pass"),
    ((Layout.ZIGZAG, Mask.CAUSAL, 4, 6, 1), "plain (not dealt out anew: 6 rows a rank are no mul"),
    ((Layout.ZIGZAG, Mask.CAUSAL, 1, 8, 1), "plain (the early rows are spread evenly"),
    ((Layout.STRIPED, Mask.CAUSAL, 4, 7, 2), "plain (the early rows are spread evenly"),
    ((Layout.CONTIGUOUS, Mask.CAUSAL, 4, 8, 1), "none (contiguous: the later ranks would keep al"),
    ((Layout.ZIGZAG, Mask.FULL, 4, 8, 1), "none (without a causal mask half of the rows cost ha"),
    ((Layout.STRIPED, Mask.CAUSAL, 4, 1, 1), "none (one row a rank cannot be halved"),
]


@pytest.mark.parametrize("arguments, choice", CHOICES)
def test_what_keeping_half_comes_to(arguments, choice):
    assert str(choose_half(*arguments)).startswith(choice)
