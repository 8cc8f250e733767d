"""What the launcher and the node say: ranks, host names and memory of the host."""

import os
import socket
from pathlib import Path

_CONTAINER_MEMORY = (  # cgroup v2 and v1: folder, limit, usage
    ("sys/fs/cgroup", "memory.max", "memory.current"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def host_name() -> str:
    """Identifies this process's node, as NCCL does: NCCL_HOSTID if set, else host name and kernel
    boot ID, because containers on different machines may share a host name. If the boot ID is
    unreadable, the launcher's node rank replaces it."""
    if host_id := os.environ.get("NCCL_HOSTID"):
        return host_id
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = f"node {_node()}"
    return f"{socket.gethostname()} {boot}"


def _node() -> int:
    """This process's node rank from the launcher; 0 without a launcher."""
    if node_rank := os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID"):
        return int(node_rank)
    return int(os.environ.get("RANK", "0")) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def local_rank() -> int:
    """This process's local rank from the launcher; 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0")


def spans_nodes() -> bool:
    """Whether NVLink may span machines, by NCCL's own switches."""
    return not os.environ.get("NCCL_HOSTID") and os.environ.get("NCCL_MNNVL_ENABLE") != "0"


def available_host_bytes(root: Path = Path("/")) -> int:
    """Host memory that this rank may take, in bytes: its share of what is available on the node, or
    to the container. Reclaimable page cache counts as free. `root`: the folder with proc and sys.
    """
    free = [_number(root / "proc/meminfo", after="MemAvailable:") * 1024]
    for folder, bound, used in _CONTAINER_MEMORY:
        if limit := _number(root / folder / bound):
            cached = _number(root / folder / "memory.stat", after="inactive_file")
            free.append(max(0, limit - _number(root / folder / used) + cached))
    return min(free) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _number(path: Path, after: str | None = None) -> int:
    """The first number of a file, or the one after a word; 0 if there is none."""
    words = path.read_text().split() if path.is_file() else []
    start = words.index(after) + 1 if after in words else 0
    numbers = words[start : start + 1] if after is None or start else []
    return int(numbers[0]) if numbers and numbers[0].isdigit() else 0
