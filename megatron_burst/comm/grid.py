"""A group's ranks as a table: a row a node, a column a rail (not on the reading path)."""

from collections.abc import Sequence

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
    widths = [max(len(line[place]) for line in lines if place < len(line))
              for place in range(max(map(len, lines)))]  # fmt: skip
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=False))
        ).rstrip()
        for line in lines
    )


def _few(items: Sequence, most: int) -> list:
    """All of them, or the first ones, dots and the last."""
    if len(items) <= most:
        return list(items)
    dots = "..." if isinstance(items[0], str) else ("...",)
    return [*items[: most - 2], dots, items[-1]]
