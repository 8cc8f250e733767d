"""The process group of a call; for a process without torch.distributed, a group of itself."""

import os
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_burst.errors import BurstError

type Ranks = dist.ProcessGroup | dist.DeviceMesh | None  # as users pass them
_LIMIT = timedelta(minutes=10)  # nothing waits in a group of one


def is_alone() -> bool:
    """Whether this process runs without others, and torch.distributed is not initialised."""
    return not dist.is_initialized() and os.environ.get("WORLD_SIZE", "1") == "1"


def is_first() -> bool:
    """Whether this rank logs for the user."""
    return not dist.is_initialized() or dist.get_rank() == 0


def alone() -> dist.ProcessGroup:
    """A group of this process, which leaves the default group to the user."""
    group = _make_group()
    # torch drops the ranks when torch.distributed is destroyed
    distributed_c10d._world.pg_group_ranks.setdefault(group, {0: 0})
    return group


@cache  # of this process
def _make_group() -> dist.ProcessGroup:
    store = dist.HashStore()
    group = dist.ProcessGroup(store, 0, 1)
    gloo, backend = dist.ProcessGroup.BackendType.GLOO, dist.ProcessGroupGloo(store, 0, 1, _LIMIT)
    group._register_backend(torch.device("cpu"), gloo, backend)
    group._set_default_backend(gloo)
    group._set_group_name("megatron_burst/alone")
    return group


def group_or_default(group: Ranks, caller: str) -> dist.ProcessGroup:
    """The group; for None the default group, or this process alone. `caller` begins an error."""
    if isinstance(group, dist.DeviceMesh) and group.ndim == 1:
        group = group.get_group()
    if group is None and is_alone():
        return alone()
    outside = dist.GroupMember.NON_GROUP_MEMBER
    if group not in (None, outside) and not isinstance(group, dist.ProcessGroup):
        raise BurstError(
            f"{caller}: group must be a process group, because ranks exchange shards in it; got a "
            f"{type(group).__name__}; pass a process group, or a DeviceMesh of one dimension"
        )
    if not dist.is_initialized():
        raise BurstError(
            f"{caller}: torch.distributed must be initialised, because the sequence is sharded "
            f"over a process group; got no default group in one of {os.environ.get('WORLD_SIZE')} "
            "processes; call init_process_group"
        )
    group = group or dist.group.WORLD
    try:
        rank = dist.get_rank(group)
    except ValueError as error:
        raise BurstError(
            f"{caller}: the group must exist, because ranks exchange shards in it; got a group "
            "that was destroyed; pass a new group"
        ) from error
    if rank < 0:
        raise BurstError(
            f"{caller}: the calling rank must belong to the group, because each rank passes its "
            f"own rows; got global rank {dist.get_rank()} outside of it; call it only on the "
            "group's ranks"
        )
    return group
