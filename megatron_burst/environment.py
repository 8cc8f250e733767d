"""What the launcher and the node say: ranks and host names."""

import os
import socket
from pathlib import Path


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
