"""Nodes of a context-parallel group, and groups inside and between (not on the reading path)."""

from dataclasses import dataclass

import torch.distributed as dist

from megatron_burst.comm.alone import group_or_default
from megatron_burst.comm.communicator import communicator_of
from megatron_burst.comm.grid import grid, nodes_of
from megatron_burst.config import BurstConfig
from megatron_burst.schedule.spec import Cargo
from megatron_burst.schedule.topology import Link, Topology

Ranks = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class CPGroups:
    """Where the ranks of a context-parallel group are, and this rank's two groups of them.

    `print` shows a table: a row for each node, a column for each rail. All ranks are global ones.

    Attributes:
        ranks: of the group, by cp rank.
        topology: of its cp ranks.
        intra: the process group of this rank's row; None if the row has no other rank.
        inter: the process group of this rank's column; None if the column has no other rank.
    """

    ranks: tuple[int, ...]
    topology: Topology
    intra: dist.ProcessGroup | None
    inter: dist.ProcessGroup | None

    @property
    def nodes(self) -> Ranks:
        """Ranks of each node, by the index of their GPUs."""
        return self._named(nodes_of(self.topology))

    @property
    def rows(self) -> Ranks:
        """Ranks of each ring inside a node: `nodes`, or one ring over all ranks if nodes have
        unequal numbers of them."""
        return self._named(self.topology.grid)

    @property
    def columns(self) -> Ranks:
        """Ranks of each ring between nodes: those with the same place in each row, which share a
        network rail."""
        return self._named(tuple(zip(*self.topology.grid, strict=True)))

    def _named(self, cp_ranks: Ranks) -> Ranks:
        return tuple(tuple(self.ranks[rank] for rank in row) for row in cp_ranks)

    def __str__(self) -> str:
        return f"{self.topology}\n{grid(self.topology, self.ranks)}"


def cp_groups(
    group: dist.ProcessGroup | None = None, config: BurstConfig | None = None
) -> CPGroups:
    """Find the nodes of a context-parallel group, and make its intra and inter groups.

    Ranks tell each other their node (host name, NVLink domain or NCCL_HOSTID) and the index of
    their GPU. These are the groups that `burst_attention` sends K and V through under the same
    options. They are made once, and live as long as `group`: do not destroy them. In a process
    group ranks ascend, as in all of torch's; rings visit them in the order of `rows` and `columns`.

    Args:
        group: the context-parallel group; None is the default group, or this process alone if there
            is none. All its ranks call this together.
        config: as for `burst_attention`; `nodes` pretends nodes of contiguous ranks.

    Returns:
        the nodes, and this rank's groups.

    Raises:
        BurstError: if the group is no process group of this rank's, if ranks share a GPU, if they
            pass different options, or if the number of pretended nodes does not divide the ranks.
    """
    group = group_or_default(group, "cp_groups")
    transport = communicator_of(group, config or BurstConfig())
    intra, inter = (transport.groups.get((link, Cargo.READ)) for link in (Link.INTRA, Link.INTER))
    return CPGroups(tuple(transport.ranks), transport.topology, intra, inter)
