"""The picture of one GPU's streams: what each is named for.

Guards against lanes with the name of one of their kernels.
"""

import csv
from pathlib import Path

import pytest
from typer.testing import CliRunner

timeline = pytest.importorskip("benchmarks.timeline", exc_type=ImportError)
RECORDED = Path(__file__).parents[2] / "benchmarks/results/timeline_4xh200_128k_32_32.csv"


def test_lanes_are_named_for_what_they_carry(tmp_path):
    with RECORDED.open() as file:
        rows = list(csv.DictReader(file))
    for mode in {row["mode"] for row in rows}:
        own = [row for row in rows if row["mode"] == mode]
        streams = dict.fromkeys(row["stream"] for row in own)
        lanes = [timeline.lane_of(own, stream) for stream in streams]
        assert lanes == ["kernels", "transfers of inputs", "transfers of gradients"], mode
    picture = tmp_path / "one.png"
    drawn = CliRunner().invoke(timeline.app, ["draw", f"{RECORDED}", f"{picture}"])
    assert drawn.exit_code == 2 and not picture.exists()  # a title is needed
