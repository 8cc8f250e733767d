"""Many calls and many groups: every result is right, and a process holds no more than before.

SOAK=20000 makes so many calls, as many of a few kinds in turn, and a twentieth of them groups.
"""

import os
from statistics import median

import pytest

from tests.faults.soak import held, soak
from tests.faults.table import WORLD

# by which the last quarter may differ from the one before it; caches fill while kinds are random
MOST = {"threads": 6, "descriptors": 6, "rss_mib": 8}
MOST_OF = {"calls": MOST, "groups": MOST, "again": MOST | {"rss_mib": 2, "blocks": 1000}}


def test_what_is_kept_counts_and_what_is_free_does_not():
    """Between pieces that stay, the C library keeps what was freed, as much as the calls needed
    most."""
    size = 100_000
    before, pieces = held(), [b"." * size for _ in range(1000)]
    with_all, kept = held(), pieces[::2]
    del pieces
    with_half = held()
    assert with_half.free_mib > 40
    assert with_all.rss_mib - with_half.rss_mib > 40
    assert with_half.rss_mib - before.rss_mib > 40
    lists = [[] for _ in range(10_000)]
    assert 10_000 <= held().blocks - with_half.blocks < 15_000
    assert len(kept) + len(lists) == 10_500  # they lived until here


@pytest.mark.whole
def test_calls_and_groups_leave_nothing_behind(tmp_path):
    calls = int(os.environ.get("SOAK", "600"))
    counts = {"calls": calls, "again": calls, "groups": max(20, calls // 20)}
    rows = soak(counts, tmp_path / "soak.csv")
    for of, limits in MOST_OF.items():
        for rank in range(WORLD):
            mine = [row for row in rows if row["of"] == of and row["rank"] == str(rank)]
            half = len(mine) // 2
            later = mine[half : half + half // 2], mine[half + half // 2 :]
            for what, most in limits.items():
                before, after = (median(float(row[what]) for row in some) for some in later)
                assert after - before <= most, (of, rank, what, before, after)
