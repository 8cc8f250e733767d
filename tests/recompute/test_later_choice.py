"""Whether rows are resharded in recomputation: layouts, masks, nodes.

Guards against rows that go between nodes, and shares other than what ranks compute.
"""

from dataclasses import replace

import pytest

from megatron_burst.recompute.later_plan import choose_later, recomputed_share
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.spec import AttentionShape, Spec
from megatron_burst.schedule.topology import pretend_nodes


def shape_of(tokens):
    """Llama-3-8B's heads in bf16."""
    return AttentionShape(1, tokens, 32, 8, 128, 128, 2, 4, 4)


CHOICES = [
    ((Layout.ZIGZAG, Mask.CAUSAL, 4, 1, 8), "resharded (the early rows are resharded"),
    ((Layout.ZIGZAG, Mask.CAUSAL, 4, 2, 8), "plain (not resharded: rows would go between nodes"),
    ((Layout.ZIGZAG, Mask.CAUSAL, 4, 1, 6), "plain (not resharded: 6 rows per rank are"),
    ((Layout.ZIGZAG, Mask.CAUSAL, 1, 1, 8), "plain (the early rows are spread evenly"),
    ((Layout.STRIPED, Mask.CAUSAL, 4, 2, 7), "plain (the early rows are spread evenly"),
    ((Layout.CONTIGUOUS, Mask.CAUSAL, 4, 1, 8), "none (in the contiguous layout later ranks would"),
    ((Layout.CONTIGUOUS, Mask.CAUSAL, 4, 2, 8), "none (in the contiguous layout later ranks would"),
    ((Layout.CONTIGUOUS, Mask.CAUSAL, 1, 1, 6), "plain (the early rows are spread evenly"),
    ((Layout.ZIGZAG, Mask.FULL, 4, 1, 8), "none (only for a single causal document does"),
    ((Layout.STRIPED, Mask.CAUSAL, 4, 1, 1), "none (one row per rank cannot be halved"),
]


@pytest.mark.parametrize("arguments, words", CHOICES)
def test_what_keeping_half_comes_to(arguments, words):
    layout, mask, size, nodes, tokens = arguments
    call = ring_of(layout, mask, pretend_nodes(size, nodes), shape_of(tokens))
    assert str(choose_later(call)).startswith(words)


def ring_of(layout, mask, topology, shape):
    return Spec(topology, shape, layout, mask, inter="ring", intra="ring")


def share(layout, size, nodes, mask=Mask.CAUSAL):
    return recomputed_share(ring_of(layout, mask, pretend_nodes(size, nodes), shape_of(4096)))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_share_that_is_computed_again(size):
    assert share(Layout.ZIGZAG, size, 1) == 0.25
    assert share(Layout.ZIGZAG, size, 2) == (2 * size - 1) / (4 * size)
    assert share(Layout.STRIPED, size, 2) == 0.25
    assert share(Layout.CONTIGUOUS, size, 1) == share(Layout.CONTIGUOUS, size, 2) == 1
    assert share(Layout.ZIGZAG, size, 1, Mask.FULL) == 1


def test_exchanged_heads_are_even_where_their_rows_are():
    """Every rank has all rows of some heads; rows of contiguous shards stay where they are."""
    for nodes in (1, 2):
        zigzag = Spec(pretend_nodes(4, nodes), shape_of(4096), inter="a2a", intra="a2a")
        assert choose_later(zigzag).value == "plain"
        assert recomputed_share(zigzag) == 0.25
        assert choose_later(replace(zigzag, layout=Layout.CONTIGUOUS)).value == "none"
