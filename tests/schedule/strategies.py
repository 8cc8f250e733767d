"""Topologies, layouts and masks for property tests."""

from hypothesis import strategies as st

from megatron_burst.schedule.topology import Topology, topology_of
from tests.schedule.cases import LAYOUTS, MASKS

layouts = st.sampled_from(LAYOUTS)
masks = st.sampled_from(MASKS)


@st.composite
def topologies(draw, max_side: int = 5) -> Topology:
    """Any nodes x ranks, with a node's ranks anywhere in the group."""
    nodes, ranks = draw(st.integers(1, max_side)), draw(st.integers(1, max_side))
    return topology_of(draw(st.permutations([node for node in range(nodes) for _ in range(ranks)])))
