"""Simulated clusters: the topology of every context-parallel group of a run.

Guards against rings that leave a node needlessly, rails that cross, groups that lose a rank, and a
warning whose figures differ from the programs'. Groups are Megatron's, in its order tp-cp-dp-pp.
"""

import warnings
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_burst.schedule.ring import ring
from megatron_burst.schedule.spec import AttentionShape, Circulate, Direction, Spec
from megatron_burst.schedule.topology import Link, topology_of


def cp_groups(nodes, places, tp, cp):
    """Topologies of all groups by their global ranks; nodes, and places on them, by global rank."""
    groups = {}
    for start in range(0, len(nodes), tp * cp):
        for first in range(start, start + tp):
            ranks = range(first, start + tp * cp, tp)
            own = [nodes[rank] for rank in ranks], [places[rank] for rank in ranks]
            groups[tuple(ranks)] = topology_of(*own)
    return groups


def inter_bytes(topology, cp_rank):
    shape = AttentionShape(1, 1024, 1, 1, 128, 128, itemsize=2, stat_bytes=4, grad_bytes=4)
    specs = [
        Spec(topology, shape, circulate=Circulate.KV, cp_rank=cp_rank, direction=direction)
        for direction in Direction
    ]
    return sum(ring(spec).sent_bytes()[Link.INTER] for spec in specs)


@st.composite
def even_clusters(draw):
    """Nodes and places of global ranks, and sizes with TP inside a node; ranks may be shuffled in
    whole TP groups, as by launchers that fill nodes round-robin."""
    tp, intra, inter = (draw(st.integers(1, n)) for n in (3, 3, 4))
    copies = draw(st.integers(1, 3))  # other CP groups: data or pipeline parallel
    seats = [(node, slot) for node in range(inter) for slot in range(intra)]
    blocks = []
    for copy in range(copies):
        blocks += [((copy, node), slot) for node, slot in draw(st.permutations(seats))]
    nodes = [node for node, _ in blocks for _ in range(tp)]
    places = [slot * tp + place for _, slot in blocks for place in range(tp)]
    return nodes, places, (tp, intra * inter), (inter, intra)


@given(even_clusters())
def test_every_group_of_an_even_cluster_nests_on_its_nodes_and_rails(cluster):
    nodes, places, (tp, cp), (inter, intra) = cluster
    groups = cp_groups(nodes, places, tp, cp)
    assert sorted(rank for ranks in groups for rank in ranks) == list(range(len(nodes)))
    for ranks, topology in groups.items():
        strides = {b - a for a, b in pairwise(ranks)}
        assert strides <= {tp}
        assert (topology.inter_size, topology.intra_size) == (inter, intra)
        for row in topology.grid:
            assert len({nodes[ranks[rank]] for rank in row}) == 1
        for column in zip(*topology.grid, strict=True):  # one network rail
            assert len({places[ranks[rank]] for rank in column}) == 1


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_any_placement_makes_rings_that_cross_nodes_as_seldom_as_can_be(nodes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        topology = topology_of(nodes)
    assert sorted(rank for row in topology.grid for rank in row) == list(range(len(nodes)))
    counts = Counter(nodes)
    even = len(set(counts.values())) == 1
    assert topology.inter_size == (len(counts) if even else 1)
    if not even:
        row = topology.grid[0]
        crossings = sum(nodes[a] != nodes[b] for a, b in zip(row, (*row[1:], row[0]), strict=True))
        assert crossings == len(counts)


def test_a_flat_ring_is_said_to_send_more_between_nodes():
    with pytest.warns(UserWarning, match="its busiest rank sends 4 shards between nodes.*; place"):
        topology = topology_of("aaabb")
    hop = [rank for rank in range(5) if inter_bytes(topology, rank)]
    assert len(hop) == 2  # the last of each node
    even = topology_of("ab")
    ratio = inter_bytes(topology, hop[0]) / inter_bytes(even, 0)
    assert ratio == (5 - 1) / (2 - 1)


def test_tensor_parallelism_that_fills_a_node_leaves_one_rank_a_node():
    (topology, *_) = cp_groups("aabbcc", [0, 1] * 3, tp=2, cp=3).values()
    assert topology.grid == ((0,), (1,), (2,))
