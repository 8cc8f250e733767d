"""The topology of given nodes, and the cost of a flat ring over them compared with nested rings."""

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from megatron_burst.errors import BurstError
from megatron_burst.schedule.call import AttentionShape, Direction
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.ring import ring
from megatron_burst.schedule.spec import Spec
from megatron_burst.schedule.topology import Link, Topology

# Bytes are proportional to tokens and KV heads, so any will do.
_SHAPE = AttentionShape(
    batch=1, tokens=1024, heads_q=1, heads_kv=1, dim_qk=128, dim_v=128, itemsize=2, stat_bytes=4,
    grad_bytes=4,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FlatCost:
    """Bytes that the busiest rank sends between nodes, forward and backward together.

    Attributes:
        flat: in the flat ring.
        nested: in nested rings over as many nodes with equally many ranks each.
    """

    flat: int
    nested: int

    def __str__(self) -> str:
        mib = 2**20
        return (
            f"for each KV head and {_SHAPE.tokens} tokens of a rank (bf16, head dimension "
            f"{_SHAPE.dim_qk}, K and V circulate) its busiest rank sends {self.flat / mib:.3g} MiB "
            f"between nodes in forward and backward, nested rings {self.nested / mib:.3g} MiB"
        )


def flat_cost(topology: Topology) -> FlatCost:
    """The cost of a flat ring over several nodes, from its programs.

    Args:
        topology: one row of ranks, node by node.
    """
    ring, nodes = topology.grid[0], len(set(topology.node_of))
    # all ranks send to the next one equally often: any rank at the end of a node will do
    end = next(
        a
        for a, b in zip(ring, (*ring[1:], ring[0]), strict=True)
        if topology.link(a, b) is Link.INTER
    )
    even = topology_of([node for node in range(nodes) for _ in range(len(ring) // nodes)])
    return FlatCost(flat=_inter_bytes(topology, end), nested=_inter_bytes(even, 0))


def _inter_bytes(topology: Topology, cp_rank: int) -> int:
    specs = (
        Spec(topology, cp_rank, direction, _SHAPE, Layout.ZIGZAG, Mask.CAUSAL)
        for direction in Direction
    )
    return sum(ring(spec).sent_bytes()[Link.INTER] for spec in specs)


def topology_of(nodes: Sequence[Hashable], places: Sequence | None = None) -> Topology:
    """The topology of a group whose cp rank i lives on `nodes[i]`.

    Ranks of a node need not be contiguous: rows are ordered by their first rank, and within a row
    by place, so that a ring between nodes joins GPUs of the same place, which share a network rail.
    Nodes with unequal numbers of ranks cannot form nested rings: they get one flat ring
    and a warning with its cost.

    Args:
        nodes: of each cp rank; any hashable values.
        places: of each cp rank on its node, such as its GPU's index; any sortable values; None: the
            order of cp ranks.

    Raises:
        BurstError: if there are no ranks.
    """
    if not nodes:
        raise BurstError(
            "topology: a context-parallel group must have a rank, because a ring of none sends "
            "nothing; got no nodes; pass the node of each cp rank"
        )
    rows: dict[Hashable, list[int]] = {}
    for rank, node in enumerate(nodes):
        rows.setdefault(node, []).append(rank)
    index = {node: i for i, node in enumerate(rows)}
    if places is not None:
        rows = {node: sorted(row, key=lambda rank: places[rank]) for node, row in rows.items()}
    nested = Topology(
        tuple(tuple(row) for row in rows.values()), tuple(index[node] for node in nodes)
    )
    sizes = [len(row) for row in rows.values()]
    if len(set(sizes)) == 1:
        return nested
    flat = nested.flat()
    warnings.warn(
        "burst attention: nested rings need equally many ranks of the context-parallel group on "
        "each node, because the ring between nodes connects ranks in the same position; got "
        f"{sizes} ranks on {len(sizes)} nodes, so one flat ring runs over all {len(nodes)} "
        f"ranks and its slowest link sets the pace: {flat_cost(flat)}; place equally many ranks "
        "of the group on each node",
        stacklevel=2,
    )
    return flat
