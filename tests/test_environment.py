"""What the node and its container tell a process."""

import pytest

from megatron_burst.environment import available_host_bytes


@pytest.mark.parametrize(
    "files, expected",
    [
        ({}, 40),
        ({"memory.max": "max", "memory.current": "7"}, 40),
        ({"memory.max": "20480", "memory.current": "10240"}, 10),
        (
            {
                "memory.max": "20480",
                "memory.current": "20480",
                "memory.stat": "anon 5\ninactive_file 5120\n",
            },
            5,
        ),
        ({"memory/memory.limit_in_bytes": "20480", "memory/memory.usage_in_bytes": "4096"}, 16),
    ],
)
def test_host_memory_is_what_is_available_within_the_containers_bound(
    files, expected, tmp_path, monkeypatch
):
    """In KiB. Cached files can be evicted, so a machine that has read much is not full."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemFree: 3 kB\nMemAvailable:  40 kB\n")
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert available_host_bytes(tmp_path) == expected * 1024
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert available_host_bytes(tmp_path) == expected * 512
