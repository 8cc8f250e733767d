"""Host memory that offloading may take."""

import os
from pathlib import Path

_CONTAINER_MEMORY = (  # cgroup v2 and v1: folder, limit, usage
    ("sys/fs/cgroup", "memory.max", "memory.current"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


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
