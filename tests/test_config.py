"""Options that contradict each other are refused where they are given."""

import pytest

from megatron_burst.config import BurstConfig, available_host_bytes
from megatron_burst.errors import BurstError

REFUSALS = {
    "a2a around a ring": (
        {"inter": "a2a", "intra": "ring"},
        "must be a2a or auto.*intra=ring",
    ),
    "a2a around gather": ({"inter": "a2a", "intra": "gather"}, "intra must be a2a or auto"),
    "flat around gather": ({"inter": "flat", "intra": "gather"}, "intra must be ring or auto"),
    "no pieces, some heads": ({"pieces": False, "heads_per_round": 2}, "must not come together"),
    "unknown": ({"inter": "exchange"}, "inter must be one of auto, ring, a2a, flat"),
}


@pytest.mark.parametrize("options, words", REFUSALS.values(), ids=REFUSALS)
def test_contradictions_are_refused(options, words):
    with pytest.raises(BurstError, match=words):
        BurstConfig(**options)


@pytest.mark.parametrize("intra", ["auto", "ring", "gather", "a2a"])
def test_a_ring_between_hosts_goes_around_anything(intra):
    assert BurstConfig(inter="ring", intra=intra).intra == intra


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
    """In KiB. Files that are cached make room, so a machine that has read much is not full."""
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
