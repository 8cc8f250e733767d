"""What rows of `benchmarks.frontier`, written by hand, come to: in figures, table and picture.

Guards against figures of other runs' rows, and settings that are compared in unequal memory.
"""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from benchmarks.frontier_cases import MODELS, Sample, columns_of
from benchmarks.frontier_table import (
    frontier_table,
    hull_of,
    in_equal_memory,
    points_of,
    runs_in,
    spread_of,
)
from benchmarks.rows import append, read
from benchmarks.sheets import FRONTIER_CSV, FrontierRow


def row(name: str, each: str, peak: float | None, **others) -> FrontierRow:
    """A setting's turn with times and a peak chosen by hand."""
    impl, _, setting = name.partition(":")
    facts = {"run": "then", "date": "then", "versions": "", "gpu": "NVIDIA H200; 1 MHz", "turn": 1}
    if each:
        facts |= {"ms": 1.0, "each": each, "peak_gib": peak, "loss": 12.0, "grad_norm": 2.0}
    else:
        facts |= {"status": "failed", "note": "out of memory"}
    sizes = columns_of(MODELS["qwen3-8b"], Sample(65536, "each-16K"))
    return FrontierRow(impl=impl, setting=setting, **sizes, **facts | others)


ROWS = [
    row("burst:off", "100 102", 60.0),
    row("megatron:off", "110 110", 60.0),
    row("megatron:full", "130 130", 20.0),
    row("megatron:mlp", "126 126", 40.0),  # above the line from full to off
    row("megatron:offload", "", None),
    row("burst:keep", "120 121", 22.0, host_gib=3.0),
    row("burst:full", "128 128", 20.05),
    row("burst:keep+fc1", "108 108", 41.0),
    row("burst:keep+fc1", "104 104", 41.0, turn=2, loss=12.003),
    row("burst:off", "101 140", 60.2, turn=2, grad_norm=1.98),
    row("burst:off", "90 90", 50.0, run="another run"),
]


def test_tokens_and_mfu_are_of_each_gpu():
    """MFU is of model FLOPs, at the median over turns, beside the preset's peak."""
    first = row("burst:off", "100 100", 60.0, tflops=247.25, ms=100.0)
    rows = [first, row("burst:off", "200 200", 60.0, turn=2)]
    (point,) = points_of([replace(one, ranks=2) for one in rows])
    assert point.ms == 150 and point.tokens_per_s == pytest.approx(65536 / 2 / 0.15)
    assert point.mfu == pytest.approx(0.25 / 1.5, rel=1e-3)
    assert points_of([row("burst:off", "100", 60.0, gpu="cpu", tflops=1.0)])[0].mfu is None


def test_what_the_rows_of_a_run_come_to():
    (_, rows), (_, other) = runs_in(ROWS)
    points = {point.name: point for point in points_of(rows)}
    off, kept = points["burst:off"], points["burst:keep+fc1"]
    assert (off.ms, off.ms_min, off.ms_max, off.steps) == (101.5, 100, 140, 4)
    assert (off.peak_gib, off.ratio, off.share) == (60.1, 1.0, 1.0)
    assert (kept.ms, kept.ratio) == (106, (108 / 102 + 104 / 101) / 2)  # step by step
    assert kept.share == pytest.approx(21 / 40.1)
    assert points["megatron:full"].share == 0.0 and points["burst:keep"].host_gib == 3.0
    assert points["megatron:offload"].ms is None
    assert [point.name for point in points_of(other)] == ["burst:off"]
    spread = spread_of(rows)
    assert spread == pytest.approx({"loss": 12.003 / 12 - 1, "grad_norm": 0.01})
    assert in_equal_memory(points_of(rows)) == {
        "megatron:off": (110 / 101.5, "burst:off"),  # 60.1 GiB count as no more
        "megatron:full": (130 / 128, "burst:full"), "megatron:mlp": (126 / 120.5, "burst:keep"),
    }  # fmt: skip


def test_memory_that_a_copy_still_reads_counts_where_it_was_measured():
    (point,) = points_of([row("burst:keep@host", "100", 22.0, active_gib=25.0)])
    assert point.peak_gib == 25.0


def test_the_hull_is_what_no_mixture_beats():
    points = points_of(ROWS[:-1])
    sides = [[x for x in points if x.is_burst is side] for side in (True, False)]
    assert [[x.name for x in hull_of(side)] for side in sides] == [
        ["burst:full", "burst:keep", "burst:keep+fc1", "burst:off"],
        ["megatron:full", "megatron:off"],
    ]
    assert hull_of([]) == []


def test_table_and_picture(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.frontier import app

    append(tmp_path / "a.csv", ROWS, FRONTIER_CSV)
    shown = CliRunner().invoke(app, ["table", str(tmp_path / "a.csv")])
    assert shown.exit_code == 0, shown.output
    assert shown.output.strip() == frontier_table(read([tmp_path / "a.csv"], FRONTIER_CSV))
    assert (
        "| burst:keep+fc1 | 106.0 (104.0-108.0) | 4 | 618264 | - | 1.044 | 41.00 | 0.52 | - | - |"
        in shown.output
    )
    assert "| megatron:offload | out of memory | - |" in shown.output
    assert "1.046 (burst:keep)" in shown.output and "loss 0.00025, grad_norm 0.01" in shown.output
    picture = tmp_path / "a.png"
    drawn = CliRunner().invoke(app, ["plot", str(picture), str(tmp_path / "a.csv")])
    assert drawn.exit_code == 0 and picture.stat().st_size > 20_000, drawn.output
    options = ["--run", ROWS[0].run]
    again = CliRunner().invoke(
        app, ["plot", str(tmp_path / "b.png"), str(tmp_path / "a.csv"), *options]
    )
    assert again.exit_code == 0 and (tmp_path / "b.png").read_bytes() == picture.read_bytes()
    wrong = CliRunner().invoke(
        app, ["plot", str(picture), str(tmp_path / "a.csv"), "--run", "2025"]
    )
    assert wrong.exit_code != 0 and "--run" in wrong.output


def test_names_of_points_cover_neither_lines_nor_each_other():
    """Also where several points are one; a name without room is left out."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from benchmarks.frontier_plot import name_points

    figure = Figure()
    axis = figure.subplots()
    line = [(0.0, 3.0), (1.0, 1.0), (3.0, 0.0)]
    axis.plot(*zip(*line, strict=True))
    axis.margins(0.2)
    figure.draw_without_rendering()
    points = [*line, (1.0, 1.0), (1.01, 1.0), (3.0, 0.1)]
    name_points(axis, [("offload+mlp", point, "black") for point in points], [line], 9)
    boxes = [text.get_window_extent() for text in axis.texts]
    assert len(boxes) == len(points)
    for n, box in enumerate(boxes):
        assert box.count_overlaps(boxes) == 1, n  # itself
        assert not box.count_contains(axis.transData.transform(line))
        starts, ends = line[:-1], line[1:]
        for start, end in zip(starts, ends, strict=True):
            middle = [(start[i] + end[i]) / 2 for i in (0, 1)]
            assert not box.count_contains(axis.transData.transform([middle]))
    assert all(axis.bbox.contains(*corner) for box in boxes for corner in box.get_points())
    name_points(axis, [("a name wider than the panel" * 9, points[0], "black")], [], 9)
    assert len(axis.texts) == len(points)
