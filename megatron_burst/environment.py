"""What the launcher, the node and the container tell a process: names, places, memory, caches."""

import os
import socket
from pathlib import Path

_CONTAINER_MEMORY = (  # of control groups 2 and 1: folder, bound, use
    ("sys/fs/cgroup", "memory.max", "memory.current"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def host_name() -> str:
    """What tells this process's node from others.

    As NCCL has it: NCCL_HOSTID where set, else the host name and the boot of its kernel, because
    containers on different machines may share a name. Where the boot is not to be read, the
    launcher's number of the node stands in.
    """
    named = os.environ.get("NCCL_HOSTID")
    if named:
        return named
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = f"node {_node()}"
    return f"{socket.gethostname()} {boot}"


def _node() -> int:
    """The node that a launcher put this process on; 0 without one."""
    given = os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID")
    if given:
        return int(given)
    return int(os.environ.get("RANK", "0")) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def local_rank() -> int:
    """This process's place on its node: what a launcher says, else 0."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0")


def spans_nodes() -> bool:
    """Whether NVLink may join machines: NCCL's own switches count."""
    return not os.environ.get("NCCL_HOSTID") and os.environ.get("NCCL_MNNVL_ENABLE") != "0"


def share_kernel_cache() -> None:
    """Have FlashAttention-4 keep compiled kernels on disk, where all ranks find them.

    Must be called before it is imported. Its own variables, where set, count.
    """
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")


def available_host_bytes(root: Path = Path("/")) -> int:
    """Host memory that this rank may take: what is available, shared by the ranks of the node.

    A container's bound counts; what files occupy only until others need it does not.

    Args:
        root: where proc and sys are.
    """
    free = [_number(root / "proc/meminfo", after="MemAvailable:") * 1024]
    for folder, bound, used in _CONTAINER_MEMORY:
        if most := _number(root / folder / bound):
            files = _number(root / folder / "memory.stat", after="inactive_file")
            free.append(max(0, most - _number(root / folder / used) + files))
    return min(free) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _number(path: Path, after: str | None = None) -> int:
    """The first number of a file, or the one after a word; 0 if there is none."""
    words = path.read_text().split() if path.is_file() else []
    place = words.index(after) + 1 if after in words else 0
    found = words[place : place + 1] if after is None or place else []
    return int(found[0]) if found and found[0].isdigit() else 0
