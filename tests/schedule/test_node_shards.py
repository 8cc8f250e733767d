"""Pieces of gathered keys: which rank's rows, where they are, in sequence order."""

import pytest

from megatron_burst.errors import BurstError
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.node_shards import node_shards
from megatron_burst.schedule.topology import pretend_nodes, topology_of


def test_pieces_are_the_sequence_in_order():
    (visit,) = node_shards(pretend_nodes(2, 1), 0, Layout.ZIGZAG, 4)
    pieces = visit.chunks
    assert [piece.cp_rank for piece in pieces] == [0, 1, 1, 0]
    assert [piece.node_rows.start for piece in pieces] == [0, 2, 4, 6]
    assert [piece.rows.start for piece in pieces] == [0, 0, 2, 2]


def test_pieces_of_another_node_are_its_rows_in_the_hands_of_this_one():
    own, visit = node_shards(pretend_nodes(4, 2), 0, Layout.ZIGZAG, 4)
    assert [piece.cp_rank for piece in visit.chunks] == [0, 1, 1, 0]
    assert [piece.node_rows.start for piece in visit.chunks] == [0, 2, 4, 6]
    assert (own.before, own.own_before) == ((0, 1, 2, 3), (0, 1, 2, 3))
    assert (visit.before, visit.own_before) == ((0, 0, 4, 4), (2, 2, 2, 2))


def test_nodes_on_one_side_visit_alike():
    """Of four nodes: the third itself, those before it, the one after it."""
    visits = node_shards(pretend_nodes(8, 4), 2, Layout.ZIGZAG, 2)
    assert len(set(visits)) == 3
    assert visits[1] is visits[2]
    assert visits[1].before == (2, 2, 2, 2)
    assert visits[3].before == (0, 0, 4, 4)


def test_nodes_whose_ranks_interleave_visit_each_in_its_way():
    visits = node_shards(topology_of([0, 1, 0, 1]), 0, Layout.CONTIGUOUS, 1)
    assert visits[1].before == (0, 1)
    assert visits[1].own_before == (1, 2)


def test_the_striped_layout_cannot_be_gathered():
    with pytest.raises(BurstError, match="in sequence order.*got layout striped; pass"):
        node_shards(pretend_nodes(2, 1), 0, Layout.STRIPED, 4)
