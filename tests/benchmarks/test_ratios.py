"""What "times as fast" means: pairs of repetitions where rows have them, else medians."""

from dataclasses import replace

import pytest

from benchmarks.compared import markdown_table
from benchmarks.tables import Ratio, origins, repetitions, times_of
from tests.benchmarks.rows import row
from tests.benchmarks.test_frontier_table import row as step

CODE = {
    "versions": "torch 2.11.0; commit 1a", "gpu": "NVIDIA H200; 1980 MHz, 42 C; machine 3c",
}  # fmt: skip
OURS, THEIRS = [10.0, 20.0, 40.0], [15.0, 22.0, 80.0]  # heat: both slow down


def pair(**others):
    """burst and a peer that took turns, the peer's row changed by others."""
    both = [
        row(name, (ms[1], ms[0], ms[2]), note=f"backend fa4; {repetitions(ms)}", **CODE)
        for name, ms in (("burst:auto", OURS), ("te:p2p", THEIRS))
    ]
    return both[0], replace(both[1], **others)


def test_repetitions_that_took_turns_are_compared_one_by_one():
    ours, theirs = pair(date="2026-01-02T03:04:07+00:00")  # two seconds later
    assert times_of(ours) == OURS
    assert Ratio.of(ours, theirs) == (1.5, 1.1, 2.0)
    assert "| 1.50 (1.10-2.00) |" in markdown_table([ours, theirs], "fwd_bwd")


def test_a_table_names_the_days_commits_and_machines_of_its_rows():
    first, _ = pair(date="")
    later = replace(first, date="2026-01-03", versions="commit 2b with changes", gpu="NVIDIA H200")
    plain = replace(first, date="2026-01-01", versions="torch 2.11.0", gpu="NVIDIA H200")
    table = markdown_table([first, replace(later, seq=1 << 17)], "fwd_bwd")
    day = first.date[:10]
    told = f"Rows: 2026-01-03, commit 2b with changes; {day}, commit 1a, machine 3c."
    assert table.splitlines()[-1] == told and "2026-01-01" <= day < "2026-01-03"
    assert origins([plain, plain]) == "Rows: 2026-01-01, no commit."


@pytest.mark.parametrize(
    "other",
    [
        {"note": "3 repetitions"},  # rows of before they had each time
        {"note": repetitions(THEIRS[:2])},
        {"versions": "torch 2.11.0; commit 2b"},
        {"gpu": "NVIDIA H200; 1980 MHz, 42 C; machine 4d"},
        {"date": "2026-01-02T03:05:07+00:00"},  # of another run
    ],
    ids=lambda other: next(iter(other)),
)
def test_other_rows_are_compared_by_medians(other):
    assert Ratio.of(*pair(**other)) == (22 / 20, 15 / 40, 80 / 10)


def test_what_was_not_measured_has_no_ratio():
    ours, _ = pair()
    assert Ratio.of(ours, None) is None and Ratio.of(ours, row("te:a2a")) is None


def test_settings_of_steps_are_compared_step_by_step_if_they_took_turns():
    from benchmarks.frontier_table import in_equal_memory, points_of

    turns = (("10 20", "15 22"), ("40", "80"))
    rows = [
        step(name, each, 20.0, turn=1 + turn)
        for turn, both in enumerate(turns)
        for name, each in zip(("burst:off", "megatron:off"), both, strict=True)
    ]
    of = "megatron:off"
    assert in_equal_memory(points_of(rows)) == {of: (1.5, "burst:off")}
    assert in_equal_memory(points_of(rows[:2])) == {of: (18.5 / 15, "burst:off")}
    assert in_equal_memory(points_of(rows[:-1])) == {of: (18.5 / 20, "burst:off")}
