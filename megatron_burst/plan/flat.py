"""What a flat ring over several hosts costs beside nested rings."""

from dataclasses import dataclass

from megatron_burst.plan.cost import AttentionShape
from megatron_burst.plan.layout import Layout
from megatron_burst.plan.mask import Mask
from megatron_burst.plan.schedule import Direction
from megatron_burst.plan.topology import Link, Topology, topology_of
from megatron_burst.schedule.emitter import Spec
from megatron_burst.schedule.ring import ring

# Bytes are in proportion to tokens and key heads; these stand for any.
_SHAPE = AttentionShape(
    batch=1, tokens=1024, heads_q=1, heads_kv=1, dim_qk=128, dim_v=128, itemsize=2, stat_bytes=4,
    grad_bytes=4,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FlatCost:
    """Bytes that the busiest rank sends between hosts, forward and backward together.

    Attributes:
        flat: in the flat ring.
        nested: in nested rings over as many hosts with equally many ranks each.
    """

    flat: int
    nested: int

    def __str__(self) -> str:
        mib = 2**20
        return (
            f"for each key head and {_SHAPE.tokens} tokens of a rank (bf16, head dimension "
            f"{_SHAPE.dim_qk}, K and V circulate) its busiest rank sends {self.flat / mib:.3g} MiB "
            f"between hosts in forward and backward, nested rings {self.nested / mib:.3g} MiB"
        )


def flat_cost(topology: Topology) -> FlatCost:
    """The cost of a flat ring over several hosts, from its programs.

    Args:
        topology: one row of ranks, host by host.
    """
    ring, hosts = topology.grid[0], len(set(topology.host_of))
    # all ranks send to the next one, equally often: any of those at the end of a host will do
    end = next(
        a
        for a, b in zip(ring, (*ring[1:], ring[0]), strict=True)
        if topology.link(a, b) is Link.INTER
    )
    even = topology_of([host for host in range(hosts) for _ in range(len(ring) // hosts)])
    return FlatCost(flat=_inter_bytes(topology, end), nested=_inter_bytes(even, 0))


def _inter_bytes(topology: Topology, cp_rank: int) -> int:
    specs = (
        Spec(topology, cp_rank, direction, _SHAPE, Layout.ZIGZAG, Mask.CAUSAL)
        for direction in Direction
    )
    return sum(ring(spec).sent_bytes()[Link.INTER] for spec in specs)
