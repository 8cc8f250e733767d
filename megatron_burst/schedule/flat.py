"""The topology of given hosts, and what a flat ring over them costs beside nested rings."""

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from megatron_burst.errors import BurstError
from megatron_burst.schedule.call import AttentionShape, Direction
from megatron_burst.schedule.emitter import Spec
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.ring import ring
from megatron_burst.schedule.topology import Link, Topology

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


def topology_of(hosts: Sequence[Hashable], places: Sequence | None = None) -> Topology:
    """The topology of a group whose cp rank i lives on `hosts[i]`.

    Ranks of a host need not be contiguous: rows are ordered by their first rank, and within a row
    by place, so that a ring between hosts joins GPUs of the same place, which share a rail of the
    network. Hosts with unequal numbers of ranks cannot form nested rings: they get one flat ring
    and a warning with its cost.

    Args:
        hosts: of each cp rank; any values that compare.
        places: of each cp rank on its host, such as its GPU's index; any values that sort; None:
            the order of cp ranks.

    Raises:
        BurstError: if there is no rank at all.
    """
    if not hosts:
        raise BurstError(
            "topology: a context-parallel group must have a rank, because a ring of none sends "
            "nothing; got no hosts; pass the host of each cp rank"
        )
    rows: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(hosts):
        rows.setdefault(host, []).append(rank)
    index = {host: i for i, host in enumerate(rows)}
    if places is not None:
        rows = {host: sorted(row, key=lambda rank: places[rank]) for host, row in rows.items()}
    nested = Topology(
        tuple(tuple(row) for row in rows.values()), tuple(index[host] for host in hosts)
    )
    sizes = [len(row) for row in rows.values()]
    if len(set(sizes)) == 1:
        return nested
    flat = nested.flat()
    warnings.warn(
        "burst attention: nested rings need equally many ranks of the context-parallel group on "
        f"each host, because the ring between hosts joins equal places; got {sizes} ranks on "
        f"{len(sizes)} hosts, so one flat ring runs over all {len(hosts)} ranks and its slowest "
        f"link sets the pace: {flat_cost(flat)}; place equally many ranks of the group on each "
        "host",
        stacklevel=2,
    )
    return flat
