"""Whether rows are resharded in recomputation: layouts, masks, nodes and their links.

Guards against resharding that costs more than it saves, and shares other than what ranks compute.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_burst.plan.half import (
    HalfCall,
    Rates,
    choose_half,
    early_half,
    recomputed_share,
    rows_between_nodes,
)
from megatron_burst.plan.hardware_file import hardware
from megatron_burst.schedule.call import AttentionShape
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.topology import pretend_nodes

FAST, SLOW = Rates(700, 1e6, "fast"), Rates(700, 1e-6, "slow")


def shape_of(tokens):
    """Llama-3-8B's heads in bf16."""
    return AttentionShape(1, tokens, 32, 8, 128, 128, 2, 4, 4)


CHOICES = [
    ((Layout.ZIGZAG, Mask.CAUSAL, 4, 1, 8, SLOW), "resharded (the early rows are resharded"),
    ((Layout.ZIGZAG, Mask.CAUSAL, 4, 2, 8, FAST), "resharded (the early rows are resharded"),
    ((Layout.ZIGZAG, Mask.CAUSAL, 4, 2, 8, SLOW), "plain (not resharded: .* ms between nodes"),
    ((Layout.ZIGZAG, Mask.CAUSAL, 4, 1, 6, FAST), "plain (not resharded: 6 rows per rank are"),
    ((Layout.ZIGZAG, Mask.CAUSAL, 1, 1, 8, FAST), "plain (the early rows are spread evenly"),
    ((Layout.STRIPED, Mask.CAUSAL, 4, 2, 7, SLOW), "plain (the early rows are spread evenly"),
    ((Layout.CONTIGUOUS, Mask.CAUSAL, 4, 1, 8, SLOW), "resharded (the early rows are resharded"),
    ((Layout.CONTIGUOUS, Mask.CAUSAL, 4, 2, 8, FAST), "resharded (the early rows are resharded"),
    ((Layout.CONTIGUOUS, Mask.CAUSAL, 4, 2, 8, SLOW), "none (later ranks would keep all of th"),
    ((Layout.CONTIGUOUS, Mask.CAUSAL, 4, 1, 6, FAST), "none (later ranks would keep all of th"),
    ((Layout.CONTIGUOUS, Mask.CAUSAL, 1, 1, 6, FAST), "plain (the early rows are spread evenly"),
    (
        (Layout.ZIGZAG, Mask.FULL, 4, 1, 8, FAST),
        "none (only for a single causal document does",
    ),
    ((Layout.STRIPED, Mask.CAUSAL, 4, 1, 1, FAST), "none (one row per rank cannot be halved"),
]


@pytest.mark.parametrize("arguments, words", CHOICES)
def test_what_keeping_half_comes_to(arguments, words):
    layout, mask, size, nodes, tokens, rates = arguments
    call = HalfCall(layout, mask, pretend_nodes(size, nodes), shape_of(tokens), rates)
    choice = str(choose_half(call))
    start, _, rest = words.partition(".* ")
    assert choice.startswith(start) and rest in choice


def share(layout, size, nodes, rates, mask=Mask.CAUSAL):
    return recomputed_share(
        HalfCall(layout, mask, pretend_nodes(size, nodes), shape_of(4096), rates)
    )


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_share_that_is_computed_again(size):
    assert share(Layout.ZIGZAG, size, 1, SLOW) == share(Layout.ZIGZAG, size, 2, FAST) == 0.25
    assert share(Layout.ZIGZAG, size, 2, SLOW) == (2 * size - 1) / (4 * size)
    assert share(Layout.STRIPED, size, 2, SLOW) == 0.25
    assert share(Layout.CONTIGUOUS, size, 2, FAST) == 0.25
    assert share(Layout.CONTIGUOUS, size, 2, SLOW) == 1
    assert share(Layout.ZIGZAG, size, 1, FAST, Mask.FULL) == 1


def test_exchanged_heads_are_even_where_their_rows_are():
    """Every rank has all rows of some heads; contiguous shards are resharded."""
    for nodes in (1, 2):
        where = Mask.CAUSAL, pretend_nodes(4, nodes), shape_of(4096), FAST
        zigzag = HalfCall(Layout.ZIGZAG, *where, over_all=True)
        assert choose_half(zigzag).value == "plain"
        assert recomputed_share(zigzag) == 0.25
        assert choose_half(replace(zigzag, layout=Layout.CONTIGUOUS)).value == "resharded"


def test_bytes_and_seconds_between_two_nodes_of_two():
    """Sub-chunks 0 to 7 of 4 rows lie in pairs; in zigzag rank 0 gets 0 and 7, 1: 1 and 6, 2: 2 and
    5, 3: 3 and 4. Rank 0 sends 1 to its neighbour, rank 1 sends 2 and 3, rank 2 sends 4 to its
    neighbour and keeps 5, rank 3 sends 6 and 7."""
    topology, shape = pretend_nodes(4, 2), shape_of(16)
    half = early_half(Layout.ZIGZAG, 4, 16, reshard=True)
    assert rows_between_nodes(half.moves, topology) == 8
    assert rows_between_nodes(half.moves, pretend_nodes(4, 1)) == 0
    row = 2 * (32 + 16 + 32) * 128 + 4 * 32
    call = HalfCall(Layout.ZIGZAG, Mask.CAUSAL, topology, shape, Rates(tflops=1, gbs=1))
    assert call.reshard_seconds == pytest.approx(8 * row * 1e-9)
    flops = 2 * 2 * 128 * 32 * 16 * 64 / 2
    assert call.forward_seconds == pytest.approx(flops * 1e-12)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(6, 16), st.sampled_from([0.1, 5, 50]))
def test_dealing_takes_less_than_it_saves(nodes, per_node, power, gbs):
    size = nodes * per_node
    topology, shape, rates = pretend_nodes(size, nodes), shape_of(1 << power), Rates(gbs=gbs)
    call = HalfCall(Layout.ZIGZAG, Mask.CAUSAL, topology, shape, rates)
    if size > 1:
        saved = ((2 * size - 1) / (4 * size) - 0.25) * call.forward_seconds
        gains = nodes == 1 or call.reshard_seconds < saved
        assert (choose_half(call).value == "resharded") == gains


def test_a_machine_that_is_known_has_its_own_links():
    known = Rates.of(hardware("h200"))
    assert known.source == "h200" and known.gbs > 5 and 600 < known.tflops < 750
    topology, shape = pretend_nodes(16, 2), shape_of(8192)
    how = [
        choose_half(HalfCall(Layout.ZIGZAG, Mask.CAUSAL, topology, shape, rates))
        for rates in (Rates(), known, replace(known, gbs=0.5))
    ]
    assert [choice.value for choice in how] == ["plain", "resharded", "plain"]
    assert "pass --burst-hardware" in how[0].reason
