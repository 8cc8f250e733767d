"""Which ranks share a node. Guards against rings that leave a node by mistake or lose a rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_burst.errors import BurstError
from megatron_burst.schedule.topology import Link, pretend_nodes, topology_of
from tests.schedule.strategies import topologies


@given(topologies())
def test_the_grid_holds_every_rank_once_and_its_rows_are_nodes(topology):
    ranks = [rank for row in topology.grid for rank in row]
    assert sorted(ranks) == list(range(topology.cp_size))
    for row, members in enumerate(topology.grid):
        assert len({topology.node_of[rank] for rank in members}) == 1
        for column, rank in enumerate(members):
            assert topology.coord(rank) == (row, column)
            assert topology.rank_at(row, column) == rank
            assert topology.rank_at(row - topology.inter_size, column) == rank


@given(topologies(), st.data())
def test_links_follow_nodes(topology, data):
    ranks = st.integers(0, topology.cp_size - 1)
    a, b = data.draw(ranks), data.draw(ranks)
    same = topology.coord(a)[0] == topology.coord(b)[0]
    assert topology.link(a, b) is (Link.INTRA if same else Link.INTER)


def test_ranks_of_a_node_need_not_be_contiguous():
    assert topology_of(["x", "y", "x", "y"]).grid == ((0, 2), (1, 3))


def test_uneven_nodes_become_one_flat_ring_with_a_warning():
    with pytest.warns(UserWarning, match=r"got \[3, 1\] ranks on 2 nodes, so one flat ring"):
        topology = topology_of(["x", "x", "y", "x"])
    assert topology.grid == ((0, 1, 3, 2),)
    assert topology.link(0, 1) is Link.INTRA and topology.link(3, 2) is Link.INTER


@given(topologies())
def test_flat_keeps_ranks_and_nodes(topology):
    flat = topology.flat()
    assert flat.inter_size == 1 and flat.node_of == topology.node_of
    assert sorted(flat.grid[0]) == list(range(topology.cp_size))


def test_pretended_nodes_are_contiguous():
    assert pretend_nodes(6, 2).grid == ((0, 1, 2), (3, 4, 5))
    assert pretend_nodes(4, 4).grid == ((0,), (1,), (2,), (3,))


@pytest.mark.parametrize("nodes", [0, -1, 3, 8])
def test_nodes_that_do_not_divide_are_refused(nodes):
    with pytest.raises(BurstError, match="must divide the context-parallel size.*--burst-tune n"):
        pretend_nodes(4, nodes)


def test_an_empty_group_and_a_foreign_rank_are_refused():
    with pytest.raises(BurstError, match="must have a rank"):
        topology_of([])
    with pytest.raises(BurstError, match="must be one of the context-parallel group's 2; got 2"):
        topology_of(["x", "x"]).coord(2)


@pytest.mark.parametrize(
    "nodes, text",
    [("xx", "1 node x 2 ranks"), ("xy", "2 nodes x 1 rank"), ("xxyy", "2 nodes x 2 ranks")],
)
def test_a_topology_says_what_it_is(nodes, text):
    assert str(topology_of(nodes)) == text
    flat = topology_of("xxyy").flat()
    assert str(flat) == "flat ring of 4 ranks over 2 nodes"
