"""The early half of a sequence: which rank recomputes it, and at what cost.

Guards against rows that no rank or two ranks compute, and uneven work.
"""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_burst.recompute.half_plan import early_half
from megatron_burst.schedule.layout import Layout, positions
from megatron_burst.schedule.mask import Mask, tiles

sizes, quarters = st.integers(1, 7), st.integers(1, 5)
plans = st.sampled_from(
    [
        (Layout.ZIGZAG, True),
        (Layout.ZIGZAG, False),
        (Layout.STRIPED, False),
        (Layout.CONTIGUOUS, True),
    ]
)


def flat(layout, rank, size, tokens):
    return [p for span in positions(layout, rank, size, tokens) for p in span]


@given(plans, sizes, quarters)
def test_the_early_rows_are_the_first_half_of_the_sequence(plan, size, quarter):
    layout, reshard = plan
    tokens = 4 * quarter
    half = early_half(layout, size, tokens, reshard)
    held = [
        p for rank in range(size) for p in flat(layout, rank, size, tokens)[half.early[rank].slice]
    ]
    assert sorted(held) == list(range(size * tokens // 2))


@given(plans, sizes, quarters)
def test_each_row_is_computed_once_and_where_the_layout_of_the_early_half_has_it(
    plan, size, quarter
):
    layout, reshard = plan
    tokens = 4 * quarter
    half = early_half(layout, size, tokens, reshard)
    n = tokens // 2
    computed = {}
    for rank in range(size):
        own, early = flat(layout, rank, size, tokens), half.early[rank]
        if not half.moves:
            computed |= {(rank, row): own[row] for row in range(n)}
        for move in (move for move in half.moves if move.source == rank):
            for row, dest_row in zip(
                range(move.rows.start, move.rows.stop),
                range(move.dest_rows.start, move.dest_rows.stop),
                strict=True,
            ):
                assert row < early.stop and (move.dest, dest_row) not in computed
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
def test_if_resharded_the_slowest_rank_pays_a_quarter_of_a_forward(size):
    tokens = 4096
    whole = max(pairs(Layout.ZIGZAG, size, tokens))
    cost = {
        reshard: max(
            pairs(early_half(Layout.ZIGZAG, size, tokens, reshard).layout, size, tokens // 2)
        )
        for reshard in (True, False)
    }
    assert cost[True] / whole == pytest.approx(0.25, abs=1e-3)
    assert cost[False] / whole == pytest.approx((2 * size - 1) / (4 * size), abs=1e-3)
    striped = max(pairs(Layout.STRIPED, size, tokens // 2)) / max(
        pairs(Layout.STRIPED, size, tokens)
    )
    assert striped == pytest.approx(0.25, abs=1e-3)


@given(sizes, quarters)
def test_later_rows_that_others_keep_are_kept_once_and_half_a_shard_by_each(size, quarter):
    tokens = 4 * quarter
    half = early_half(Layout.CONTIGUOUS, size, tokens, reshard=True)
    kept = {rank: [] for rank in range(size)}
    held = {rank: [] for rank in range(size)}
    for move in half.kept:
        kept[move.dest] += range(move.dest_rows.start, move.dest_rows.stop)
        held[move.source] += range(move.rows.start, move.rows.stop)
    for rank in range(size):
        assert sorted(kept[rank]) == list(range(tokens // 2))
        assert sorted(held[rank]) == list(range(half.early[rank].stop, tokens))


@given(plans, sizes, quarters)
def test_no_rank_gives_more_than_its_early_rows_or_takes_more_than_half_a_shard(
    plan, size, quarter
):
    half = early_half(plan[0], size, 4 * quarter, plan[1])
    given_away, taken = Counter(), Counter()
    for move in half.moves:
        given_away[move.source] += len(move.rows)
        taken[move.dest] += len(move.dest_rows)
    for rank in range(size if half.moves else 0):
        assert given_away[rank] == len(half.early[rank]) and taken[rank] == 2 * quarter
