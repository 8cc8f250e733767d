"""Which ranks of a context-parallel group share a host, and how the rings run over them."""

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache

from megatron_burst.errors import BurstError


class Link(StrEnum):
    """A physical link, and the ring that is meant for it."""

    INTRA = "intra"  # inside a host (NVLink domain)
    INTER = "inter"  # between hosts


@dataclass(frozen=True)
class Topology:
    """A rectangular arrangement of the ranks of a context-parallel group.

    It may have thousands of ranks and is looked up all the time: what it takes a pass over them to
    tell is told once.

    Attributes:
        grid: one row of cp ranks per host; each row is an intra ring, each column an inter ring.
            A flat ring is a grid of one row, even when its ranks live on several hosts.
        host_of: index of the host of each cp rank; decides which link a hop takes.
    """

    grid: tuple[tuple[int, ...], ...]
    host_of: tuple[int, ...]

    @property
    def cp_size(self) -> int:
        return len(self.host_of)

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
        return hash((self.grid, self.host_of))

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
        return Link.INTRA if self.host_of[a] == self.host_of[b] else Link.INTER

    @cached_property
    def spans_hosts(self) -> bool:
        """Whether an intra ring runs over several hosts: a flat ring may."""
        return any(len({self.host_of[rank] for rank in row}) > 1 for row in self.grid)

    def flat(self) -> "Topology":
        """The same ranks and hosts as one flat ring, host by host."""
        return Topology((tuple(rank for row in self.grid for rank in row),), self.host_of)

    def __str__(self) -> str:
        hosts = len(set(self.host_of))
        if self.inter_size == 1 and hosts > 1:
            return f"flat ring of {self.cp_size} ranks over {hosts} hosts"
        return f"{hosts} host{'s' * (hosts > 1)} x {self.intra_size} rank" + "s" * (
            self.intra_size > 1
        )


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
    from megatron_burst.plan.flat import flat_cost  # it is a layer on top of this module

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


@lru_cache(maxsize=256)
def pretend_hosts(cp_size: int, num_hosts: int) -> Topology:
    """The topology of a group split into `num_hosts` pretended hosts of contiguous ranks.

    Raises:
        BurstError: if the ranks do not divide evenly.
    """
    if num_hosts < 1 or cp_size % num_hosts:
        raise BurstError(
            "burst attention: the number of hosts must divide the context-parallel size, because "
            f"nested rings need equally many ranks on each; got {num_hosts} hosts and context "
            f"parallel size {cp_size}; choose --burst-tune hosts=N among the divisors of {cp_size}"
        )
    row = cp_size // num_hosts
    grid = (tuple(range(first, first + row)) for first in range(0, cp_size, row))
    return Topology(tuple(grid), tuple(rank // row for rank in range(cp_size)))
