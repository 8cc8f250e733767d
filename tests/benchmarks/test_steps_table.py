"""Tables of whole steps, of rows written by hand: who is compared with whom."""

from dataclasses import replace

import pytest

from benchmarks.rows import append
from benchmarks.sheets import FRONTIER_CSV, SLICES_CSV, SliceRow
from benchmarks.steps_table import frontier_lines, job_lines, rate_lines, slice_lines
from megatron_burst.errors import BurstError
from tests.benchmarks.test_frontier_table import row

RUN = [
    row("burst:off", "100 100", 60.0),
    row("burst:full", "130 130", 20.0),
    row("burst:auto-2", "116 116", 25.0),
    row("burst:auto-7", "110 110", 39.0),
    row("megatron:off", "102 102", 60.0),
    row("megatron:mlp", "121 121", 40.0),
    row("megatron:offload", "", None),
]
COMMON = {
    "date": "then", "gpu": "NVIDIA H200; 1 MHz", "gpus": 2, "model": "8b", "layers": 2, "hidden": 1,
    "ffn": 1, "heads_q": 1, "heads_kv": 1, "vocab": 1, "documents": "",
}  # fmt: skip


@pytest.fixture
def frontier(tmp_path):
    rows = [*RUN, row("megatron:full", "145 145", 20.0, run="another run")]
    append(tmp_path / "a.csv", rows, FRONTIER_CSV)
    return tmp_path / "a.csv"


def test_a_runs_table_has_the_columns_that_were_measured(frontier):
    head, *lines = frontier_lines(frontier, ["then"])
    assert head == ["setting", "ms (min-max)", "steps", "tokens/s a GPU", "of nothing recomputed",
                    "GiB", "a", "burst in its memory"]  # fmt: skip
    tokens = f"{65536 / 0.116:.0f}"
    assert lines[2] == [
        "burst:auto-2", "116.0 (116.0-116.0)", "2", tokens, "1.160", "25.00", "0.12", "-",
    ]  # fmt: skip
    assert lines[-1] == ["megatron:offload", "out of memory", *"------"]
    with pytest.raises(BurstError, match="must have the runs that a page names.*; got 2025; name"):
        frontier_lines(frontier, ["2025"])


def test_jobs_compare_in_no_more_memory(frontier):
    """And nothing with what was not measured: full recomputation is of another run."""
    words = [str(frontier), "then"]
    _, line = job_lines(words)
    assert line == [
        "Qwen3-8B, 4 layers, 64K, packed, 1 H200", "-", "0.102, 60.0 (`off`)",
        "0.116, 25.0 (`auto-2`)", "0.100, 60.0 (`off`)", "-", "1.020", "then, 2 steps",
    ]  # fmt: skip
    append(frontier, [row("megatron:full", "145 145", 20.0)], FRONTIER_CSV)
    _, line = job_lines(words)
    assert (line[1], line[5]) == ("0.145, 20.0 (`full`)", "1.25")


def test_rates_are_of_the_settings_of_jobs(tmp_path):
    rows = [
        row(name, "200", gib, tflops=247.25)
        for name, gib in (("burst:keep", 20.0), ("megatron:off", 30.0))
    ]
    append(tmp_path / "a.csv", [replace(one, ms=200.0) for one in rows], FRONTIER_CSV)
    _, line = rate_lines([str(tmp_path / "a.csv"), "then"])
    assert line[1:] == ["-", *["327680, 25.0 %"] * 3]


def test_slices_stand_beside_bursts_last_run(tmp_path):
    def step(impl, ms, commit, seq=2**18):
        return SliceRow(
            **COMMON, seq=seq, impl=impl, versions=commit, ms=ms, ms_min=ms, ms_max=ms,
            tokens_per_s_per_gpu=1e6 / ms, tflops_per_gpu=494.5, peak_gib=50.0,
        )  # fmt: skip

    rows = [step("megatron", 9e3, "1"), step("burst", 7e3, "1"), step("megatron", 8e3, "2"),
            step("burst", 5e3, "2"), step("burst", 1.0, "2", 2**19)]  # fmt: skip
    append(tmp_path / "a.csv", rows, SLICES_CSV)
    _, *lines = slice_lines(tmp_path / "a.csv", ["256K"])
    assert [line[1].partition(",")[0] for line in lines] == ["burst", "Megatron", "Megatron"]
    assert [line[-1] for line in lines] == ["-", "1.80", "1.60"]
    assert lines[0][2:7] == ["5.00 (5.00-5.00)", "200", "494", "50.0 %", "50.0"]
