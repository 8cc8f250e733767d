"""Which ranks of a context-parallel group share a node, and how the rings run over them."""

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache

from megatron_burst.errors import BurstError


class Link(StrEnum):
    """A physical link, and the ring that uses it."""

    INTRA = "intra"  # inside a node (NVLink domain)
    INTER = "inter"  # between nodes


@dataclass(frozen=True)
class Topology:
    """A rectangular arrangement of the ranks of a context-parallel group.

    A group may have thousands of ranks, and its topology is looked up often, so whatever passes
    over all ranks is cached.
    """

    # one row of cp ranks per node; each row is an intra ring, each column an inter ring. A flat
    # ring is a grid of one row, even when its ranks live on several nodes
    grid: tuple[tuple[int, ...], ...]
    node_of: tuple[int, ...]  # index of the node of each cp rank; decides which link a hop takes

    @property
    def cp_size(self) -> int:
        return len(self.node_of)

    def row_peers(self, cp_rank: int) -> tuple[int, ...]:
        """The other ranks of a rank's row, from the next on: not all begin with the same peer."""
        row, column = self.coord(cp_rank)
        return (*self.grid[row][column + 1 :], *self.grid[row][:column])

    @property
    def inter_size(self) -> int:
        """Number of rows: the length of an inter ring."""
        return len(self.grid)

    @property
    def intra_size(self) -> int:
        """Ranks in a row: the length of an intra ring."""
        return len(self.grid[0])

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.grid, self.node_of))

    @cached_property
    def _coords(self) -> dict[int, tuple[int, int]]:
        rows = enumerate(self.grid)
        return {rank: (row, column) for row, ranks in rows for column, rank in enumerate(ranks)}

    def coord(self, cp_rank: int) -> tuple[int, int]:
        """Row and column of a rank."""
        if cp_rank not in self._coords:
            raise BurstError(
                f"topology: a rank must be one of the context-parallel group's {self.cp_size}; "
                f"got {cp_rank}; pass a cp rank, not a global one"
            )
        return self._coords[cp_rank]

    def rank_at(self, row: int, column: int) -> int:
        """The rank at a place of the grid; both indices wrap around."""
        return self.grid[row % self.inter_size][column % self.intra_size]

    def link(self, a: int, b: int) -> Link:
        """The link between two ranks."""
        return Link.INTRA if self.node_of[a] == self.node_of[b] else Link.INTER

    @cached_property
    def spans_nodes(self) -> bool:
        """Whether an intra ring runs over several nodes: a flat ring may."""
        return any(len({self.node_of[rank] for rank in row}) > 1 for row in self.grid)

    def flat(self) -> "Topology":
        """The same ranks and nodes as one flat ring, node by node."""
        return self._flat

    @cached_property
    def _flat(self) -> "Topology":
        if len(self.grid) == 1:
            return self
        return Topology((tuple(rank for row in self.grid for rank in row),), self.node_of)

    def __str__(self) -> str:
        nodes, ranks = len(set(self.node_of)), self.intra_size
        if self.inter_size == 1 and nodes > 1:
            return f"flat ring of {self.cp_size} ranks over {nodes} nodes"
        return f"{nodes} node{'s' * (nodes > 1)} x {ranks} rank{'s' * (ranks > 1)}"


@lru_cache(maxsize=256)
def pretend_nodes(cp_size: int, num_nodes: int) -> Topology:
    """The topology of a group split into `num_nodes` pretended nodes of contiguous ranks.

    Raises:
        BurstError: if the ranks do not divide evenly.
    """
    if num_nodes < 1 or cp_size % num_nodes:
        raise BurstError(
            "burst attention: the number of nodes must divide the context-parallel size, because "
            f"nested rings need equally many ranks on each node; got {num_nodes} nodes and context "
            f"parallel size {cp_size}; choose --burst-tune nodes=N among the divisors of {cp_size}"
        )
    row = cp_size // num_nodes
    grid = (tuple(range(first, first + row)) for first in range(0, cp_size, row))
    return Topology(tuple(grid), tuple(rank // row for rank in range(cp_size)))


def topology_of(nodes: Sequence[Hashable], places: Sequence | None = None) -> Topology:
    """The topology of a group whose cp rank i lives on `nodes[i]`.

    Ranks of a node need not be contiguous: rows are ordered by their first rank, and within a row
    by place, so that a ring between nodes joins GPUs of the same place, which share a network rail.
    Nodes with unequal numbers of ranks cannot form nested rings: they get one flat ring
    and a warning.

    Args:
        places: of each cp rank on its node, such as the GPU's index; sortable; None: the order of
            cp ranks.

    Raises:
        BurstError: if there are no ranks.
    """
    if not nodes:
        raise BurstError(
            "topology: a context-parallel group must have a rank, because a ring of no ranks sends "
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
        f"{sizes} ranks on {len(sizes)} nodes, so one flat ring runs over all {len(nodes)} ranks "
        f"at the pace of its slowest link, and its busiest rank sends {len(nodes) - 1} shards "
        f"between nodes instead of {len(sizes) - 1}; place equally many ranks of the group on each "
        "node",
        stacklevel=2,
    )
    return flat
