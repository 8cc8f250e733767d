"""The smoke's ratios are those of its CSVs, beside what is expected; a rank computes its share."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]


def measured(folder: Path, *parts: str) -> str:
    """What smoke.sh prints for small sizes."""
    environment = os.environ | {"TINY": "1", "PYTHON": sys.executable}
    done = subprocess.run(
        [ROOT / "benchmarks" / "smoke.sh", folder, *parts],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_a_rank_computes_is_measured_beside_the_kernel(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from benchmarks import smoke

    said = measured(tmp_path, "rank")
    rows = list(csv.DictReader((tmp_path / "rank.csv").open()))
    assert [(row["ranks"], row["what"]) for row in rows] == [
        (size, what) for size in "248" for what in ("rank", "kernel")
    ]
    for row in rows[::2]:
        assert f"{float(row['ratio']):7.3f}         -   a rank of {row['ranks']} / the" in said
    monkeypatch.setattr(smoke, "EXPECTED", tmp_path / "expected.csv")
    smoke.main(tmp_path, keep=True)
    kept = list(csv.DictReader((tmp_path / "expected.csv").open()))
    assert [row["ratio"] for row in kept] == [row["ratio"] for row in rows[::2]]


def test_a_ratio_far_from_the_expected_one_is_marked(tmp_path, monkeypatch, capsys):
    from benchmarks import smoke

    found = {"a step": (0.9, "H100", "now"), "a rank": (1.01, "H100", "now")}
    monkeypatch.setattr(smoke, "ratios", lambda folder: found)
    monkeypatch.setattr(smoke, "EXPECTED", tmp_path / "expected.csv")
    rows = [["what", "ratio", "gpu", "date", "versions"]]
    rows += [[what, "1.0", "H100", "then", "then"] for what in ("a step", "a rank", "a kernel")]
    csv.writer((tmp_path / "expected.csv").open("w")).writerows(rows)
    smoke.main(tmp_path)
    said = capsys.readouterr().out
    assert "  0.900     1.000 ! a step" in said and "  1.010     1.000   a rank" in said
    assert "not measured: a kernel" in said


def test_runs_that_are_measured_exist():
    """The names of runs in smoke.sh."""
    from benchmarks.slices import app

    words = (ROOT / "benchmarks" / "smoke.sh").read_text().split()
    names = [words[at + 1].strip('")') for at, word in enumerate(words) if "--only" in word]
    assert len(names) == 4
    refused = CliRunner().invoke(app, ["measure", "x.csv", "--only", "none"])
    assert all(name in refused.output.replace("\n", "") for name in names)
