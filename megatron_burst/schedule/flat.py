"""The topology of given nodes."""

import warnings
from collections.abc import Hashable, Sequence

from megatron_burst.errors import BurstError
from megatron_burst.schedule.topology import Topology


def topology_of(nodes: Sequence[Hashable], places: Sequence | None = None) -> Topology:
    """The topology of a group whose cp rank i lives on `nodes[i]`.

    Ranks of a node need not be contiguous: rows are ordered by their first rank, and within a row
    by place, so that a ring between nodes joins GPUs of the same place, which share a network rail.
    Nodes with unequal numbers of ranks cannot form nested rings: they get one flat ring
    and a warning.

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
        f"ranks, whose slowest link sets the pace: between nodes its busiest rank sends "
        f"{len(nodes) - 1} shards instead of {len(sizes) - 1}; place equally many ranks of the "
        "group on each node",
        stacklevel=2,
    )
    return flat
