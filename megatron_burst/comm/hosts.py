"""Which ranks of a group share a host, and that each of them has a GPU of its own."""

import json
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_burst.comm.watch import Board
from megatron_burst.config import BurstConfig, host_name
from megatron_burst.errors import BurstError
from megatron_burst.plan.topology import Topology, pretend_hosts, topology_of

_WHO = "burst attention"


def check_devices(group: dist.ProcessGroup, board: Board) -> None:
    """Make sure that no two ranks share a GPU: NCCL would fail or hang.

    Raises:
        BurstError: on all ranks, naming those that share one.
    """
    if dist.get_backend(group) != "nccl":
        return
    mine = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    ranks_of: dict[str, list[int]] = {}
    for cp_rank, uuid in enumerate(board.share(mine, _WHO)):
        ranks_of.setdefault(uuid, []).append(cp_rank)
    for uuid, cp_ranks in ranks_of.items():
        if len(cp_ranks) > 1:
            raise BurstError(
                f"{_WHO}: each rank must have a GPU of its own, because NCCL moves data between "
                f"GPUs; got cp ranks {cp_ranks} on GPU {uuid}; call torch.cuda.set_device("
                "LOCAL_RANK) before, and start no more processes than GPUs"
            )


def find_topology(
    group: dist.ProcessGroup,
    config: BurstConfig,
    board: Board,
    hcp_groups: Sequence[dist.ProcessGroup] | None,
) -> Topology:
    """The hosts of a group's ranks: pretended, from given sub-groups, or as the ranks say.

    Raises:
        BurstError: if the hosts do not fit, or the sub-groups do not tile the group.
    """
    if config.hosts is not None:
        return pretend_hosts(group.size(), config.hosts)
    if not hcp_groups:
        return topology_of(board.share(host_name(), _WHO))
    mine = [dist.get_process_group_ranks(sub_group) for sub_group in hcp_groups]
    given = [json.loads(text) for text in board.share(json.dumps(mine), _WHO)]
    return _topology_of_hcp(dist.get_process_group_ranks(group), given)


def _topology_of_hcp(ranks: list[int], given: list[list[list[int]]]) -> Topology:
    """The grid whose rows and columns are all ranks' [intra, inter] groups."""
    topology = topology_of([f"{intra}" for intra, _ in given])
    for cp_rank, (intra, inter) in enumerate(given):
        row, column = topology.coord(cp_rank)
        expected = (
            [ranks[rank] for rank in topology.grid[row]],
            [ranks[cp_ranks[column]] for cp_ranks in topology.grid],
        )
        if (intra, inter) != expected:
            raise BurstError(
                f"{_WHO}: hierarchical context-parallel groups must be the rows and columns of a "
                "grid over the context-parallel group, because the rings run along them; got "
                f"{intra} and {inter} for rank {ranks[cp_rank]} in {ranks}; pass "
                "--hierarchical-context-parallel-sizes INTRA INTER whose product is the context "
                "parallel size, or leave them out"
            )
    return topology
