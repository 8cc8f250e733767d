"""Tables of whole steps, of rows written by hand: who is compared with whom."""

import pytest

from benchmarks.rows import append
from benchmarks.sheets import FRONTIER_CSV, SLICES_CSV, SliceRow
from benchmarks.steps_table import frontier_lines, overview_lines, slice_lines
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


def test_the_overview_compares_in_no_more_memory(frontier):
    """And nothing with what was not measured: full recomputation is of another run."""
    _, line = overview_lines(frontier, ["then"])
    assert line == [
        "Qwen3-8B, 4 layers, 64K, packed", "-", "116 ms, 25.0 GiB (`auto-2`)", "-",
        "121 ms, 40.0 GiB (`mlp`)", "110 ms, 39.0 GiB (`auto-7`)", "1.100",
    ]  # fmt: skip
    append(frontier, [row("megatron:full", "145 145", 20.0)], FRONTIER_CSV)
    assert overview_lines(frontier, ["then"])[1][1:4] == [
        "145 ms, 20.0 GiB", "116 ms, 25.0 GiB (`auto-2`)", "1.25",
    ]  # fmt: skip


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
