"""Process groups as Megatron-Core hands them to core attention."""

from collections.abc import Sequence

import torch.distributed as dist

from megatron_burst.comm.groups import Communicator, communicator_of
from megatron_burst.config import BurstConfig


def cp_group_of(pg_collection) -> dist.ProcessGroup:
    """The context-parallel group, from Megatron's collection or from its global state."""
    if pg_collection is not None and pg_collection.cp is not None:
        return pg_collection.cp
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group()


def hcp_groups_of(pg_collection, config: BurstConfig) -> Sequence[dist.ProcessGroup] | None:
    """Megatron's hierarchical groups [intra, inter], if they tile the context-parallel group.

    They can be stale: `destroy_model_parallel` leaves them behind (core/parallel_state.py:2506).
    Then, and when hosts are pretended, burst makes its own.
    """
    hcp = None if pg_collection is None else pg_collection.hcp
    if not hcp or len(hcp) != 2 or config.tuning.hosts is not None:
        return None
    members = set(dist.get_process_group_ranks(cp_group_of(pg_collection)))
    ranks = [dist.get_process_group_ranks(group) for group in hcp]
    inside = all(members.issuperset(group_ranks) for group_ranks in ranks)
    return hcp if inside and len(ranks[0]) * len(ranks[1]) == len(members) else None


def communicator_for(pg_collection, config: BurstConfig) -> Communicator:
    """The communicator of core attention; all ranks of the group must ask for it together."""
    return communicator_of(cp_group_of(pg_collection), config, hcp_groups_of(pg_collection, config))
