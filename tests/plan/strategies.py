"""Topologies and schedules for property tests."""

from hypothesis import strategies as st

from megatron_burst.plan.ring import ring_schedule
from megatron_burst.plan.schedule import Schedule
from megatron_burst.schedule.call import Circulate, Direction
from megatron_burst.schedule.flat import topology_of
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.topology import Topology

layouts = st.sampled_from(list(Layout))
masks = st.sampled_from(list(Mask))


@st.composite
def topologies(draw, max_side: int = 5) -> Topology:
    """Any hosts x ranks, the ranks of a host anywhere in the group."""
    hosts, ranks = draw(st.integers(1, max_side)), draw(st.integers(1, max_side))
    return topology_of(draw(st.permutations([host for host in range(hosts) for _ in range(ranks)])))


@st.composite
def ring_of_schedules(draw) -> list[Schedule]:
    """The schedules of all ranks for one topology, layout, mask, direction and circulation."""
    topology, layout = draw(topologies()), draw(layouts)
    if draw(st.booleans()):
        topology = topology.flat()
    direction = draw(st.sampled_from(list(Direction)))
    backward = direction is Direction.BACKWARD
    return schedules(
        topology,
        layout=layout,
        mask=draw(masks),
        tokens=draw(st.integers(1, 4)) * (2 if layout is Layout.ZIGZAG else 1),
        direction=direction,
        circulate=draw(st.sampled_from(list(Circulate))) if backward else Circulate.KV,
    )


def schedules(topology: Topology, **options) -> list[Schedule]:
    """The schedules of all ranks."""
    return [ring_schedule(topology, rank, **options) for rank in range(topology.cp_size)]
