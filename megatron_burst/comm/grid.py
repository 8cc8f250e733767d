"""A group's ranks as a table: a row a node, a column a rail (not on the reading path)."""

from collections.abc import Sequence
from itertools import zip_longest

from megatron_burst.schedule.topology import Topology

_MOST_NODES, _MOST_RAILS = 8, 16  # that are written out


def nodes_of(topology: Topology) -> tuple[tuple[int, ...], ...]:
    """cp ranks of each node, in the order in which rings visit them."""
    ring = [rank for row in topology.grid for rank in row]
    nodes = dict.fromkeys(topology.node_of[rank] for rank in ring)
    return tuple(tuple(rank for rank in ring if topology.node_of[rank] == node) for node in nodes)


def grid(topology: Topology, ranks: Sequence[int]) -> str:
    """The table as text, of few nodes and rails; `ranks`: the global rank of each cp rank.

    Rails are named where rings between nodes run along them.
    """
    rows = [[str(ranks[rank]) for rank in node] for node in nodes_of(topology)]
    lines = [(f"node {number}", *_few(row, _MOST_RAILS)) for number, row in enumerate(rows)]
    if topology.inter_size > 1:
        rails = [f"rail {column}" for column in range(topology.intra_size)]
        lines.insert(0, ("", *_few(rails, _MOST_RAILS)))
    lines = _few(lines, _MOST_NODES + 1)
    first, *widths = [max(map(len, column)) for column in zip_longest(*lines, fillvalue="")]
    rows = [[node.ljust(first), *map(str.rjust, cells, widths)] for node, *cells in lines]
    return "\n".join("  ".join(row).rstrip() for row in rows)


def _few(items: Sequence, most: int) -> list:
    """All of them, or the first ones, dots and the last."""
    if len(items) <= most:
        return list(items)
    dots = "..." if isinstance(items[0], str) else ("...",)
    return [*items[: most - 2], dots, items[-1]]
