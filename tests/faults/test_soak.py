"""Many calls and many groups: every result is right, and a process holds no more than before.

SOAK=20000 makes so many calls, and a twentieth of them groups.
"""

import os
from statistics import median

import pytest

from tests.faults.soak import soak
from tests.faults.table import WORLD


@pytest.mark.whole
def test_calls_and_groups_leave_nothing_behind(tmp_path):
    calls = int(os.environ.get("SOAK", "600"))
    rows = soak(calls, max(20, calls // 20), tmp_path / "soak.csv")
    for of in ("calls", "groups"):
        for rank in range(WORLD):
            mine = [row for row in rows if row["of"] == of and row["rank"] == str(rank)]
            half = len(mine) // 2
            later = mine[half : half + half // 2], mine[half + half // 2 :]
            for what, most in (("threads", 6), ("descriptors", 6), ("rss_mib", 25)):
                before, after = (median(float(row[what]) for row in some) for some in later)
                assert after - before <= most, (of, rank, what, before, after)
