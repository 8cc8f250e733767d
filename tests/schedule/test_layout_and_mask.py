"""Layouts shard every position once; tiles cover exactly what the mask allows.

The reference is the mask over the whole sequence's positions, not our rules for pairs of ranks.
"""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_burst.errors import BurstError
from megatron_burst.schedule.layout import Layout, positions
from megatron_burst.schedule.mask import Mask, Tile, tiles
from tests.schedule.cases import LAYOUTS
from tests.schedule.strategies import layouts, masks


def flat_positions(layout, rank, size, tokens):
    return [p for span in positions(layout, rank, size, tokens) for p in span]


@st.composite
def shards(draw):
    layout, size = draw(layouts), draw(st.integers(1, 7))
    return layout, size, draw(st.integers(1, 5)) * (2 if layout is Layout.ZIGZAG else 1)


@given(shards())
def test_every_position_is_held_once(shard):
    layout, size, tokens = shard
    held = [flat_positions(layout, rank, size, tokens) for rank in range(size)]
    assert sorted(p for rows in held for p in rows) == list(range(size * tokens))
    assert all(len(rows) == tokens and rows == sorted(rows) for rows in held)


def test_zigzag_is_megatrons():
    """chunks (r, 2P-1-r) of 2P, as megatron/core/utils.py slices a batch"""
    assert flat_positions(Layout.ZIGZAG, 1, 4, 4) == [2, 3, 12, 13]


def pairs_of(tile: Tile, q_rows, kv_rows):
    """Every (query position, key position) that a tile computes."""
    for i, q in enumerate(q_rows[tile.q.slice]):
        for j, kv in enumerate(kv_rows[tile.kv.slice]):
            if tile.mask.full or j <= i:
                yield q, kv


@given(shards(), masks)
def test_each_query_meets_each_key_that_its_mask_allows_exactly_once(shard, mask):
    layout, size, tokens = shard
    met = Counter()
    for q_owner in range(size):
        for kv_owner in range(size):
            q_rows = flat_positions(layout, q_owner, size, tokens)
            kv_rows = flat_positions(layout, kv_owner, size, tokens)
            for tile in tiles(layout, mask, q_owner, kv_owner, size, tokens):
                pairs = list(pairs_of(tile, q_rows, kv_rows))
                assert len(pairs) == tile.pairs
                assert tile.mask.full or len(tile.q) == len(tile.kv)
                met.update(pairs)
    everything = range(size * tokens)
    allowed = {(q, k) for q in everything for k in everything if mask.full or k <= q}
    assert met == Counter(allowed)


def test_an_odd_shard_is_refused_in_zigzag_only():
    with pytest.raises(
        BurstError, match=r"of 2.*zigzag.*got 5 tokens.* of 8, such as 16 or 24 \(in Megatron"
    ):
        tiles(Layout.ZIGZAG, Mask.CAUSAL, 0, 0, 4, 5)
    assert positions(Layout.STRIPED, 1, 4, 5) == (range(1, 20, 4),)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_empty_shard_is_refused(layout):
    with pytest.raises(BurstError, match="at least one token.*got 0"):
        positions(layout, 0, 2, 0)
