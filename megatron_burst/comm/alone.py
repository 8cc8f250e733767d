"""What a process without torch.distributed needs: a group of itself, and whether it reports."""

import os
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_LIMIT = timedelta(minutes=10)  # nothing waits in a group of one


def is_alone() -> bool:
    """Whether this process was started by itself, and torch.distributed is not initialised."""
    return not dist.is_initialized() and os.environ.get("WORLD_SIZE", "1") == "1"


def is_first() -> bool:
    """Whether this rank reports to the user."""
    return not dist.is_initialized() or dist.get_rank() == 0


def alone() -> dist.ProcessGroup:
    """A group of this process, which leaves the default group to the user."""
    group = _made()
    # forgotten if torch.distributed was initialised and ended in between
    distributed_c10d._world.pg_group_ranks.setdefault(group, {0: 0})
    return group


@cache  # of this process
def _made() -> dist.ProcessGroup:
    store = dist.HashStore()
    group = dist.ProcessGroup(store, 0, 1)
    gloo, backend = dist.ProcessGroup.BackendType.GLOO, dist.ProcessGroupGloo(store, 0, 1, _LIMIT)
    group._register_backend(torch.device("cpu"), gloo, backend)
    group._set_default_backend(gloo)
    group._set_group_name("megatron_burst/alone")
    return group
