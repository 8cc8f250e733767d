"""The smoke's ratios are those of its CSVs, beside what is expected; a rank computes its share."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
    from benchmarks import show as smoke

    said = measured(tmp_path, "rank")
    rows = list(csv.DictReader((tmp_path / "rank.csv").open()))
    assert [(row["ranks"], row["what"]) for row in rows] == [
        (size, what) for size in "248" for what in ("rank", "kernel")
    ]
    for row in rows[::2]:
        assert f"{float(row['ratio']):7.3f}         -   a rank of {row['ranks']} / the" in said
    monkeypatch.setattr(smoke, "EXPECTED", tmp_path / "expected.csv")
    smoke.smoke(tmp_path, keep=True)
    kept = list(csv.DictReader((tmp_path / "expected.csv").open()))
    assert [row["ratio"] for row in kept] == [row["ratio"] for row in rows[::2]]


def test_a_ratio_far_from_the_expected_one_is_marked(tmp_path, monkeypatch, capsys):
    from benchmarks import show as smoke

    found = {"a step": (0.9, "H100", "now"), "a rank": (1.01, "H100", "now")}
    monkeypatch.setattr(smoke, "ratios", lambda folder: found)
    monkeypatch.setattr(smoke, "EXPECTED", tmp_path / "expected.csv")
    rows = [["what", "ratio", "gpu", "date", "versions"]]
    rows += [[what, "1.0", "H100", "then", "then"] for what in ("a step", "a rank", "a kernel")]
    csv.writer((tmp_path / "expected.csv").open("w")).writerows(rows)
    smoke.smoke(tmp_path)
    said = capsys.readouterr().out
    assert "  0.900     1.000 ! a step" in said and "  1.010     1.000   a rank" in said
    assert "not measured: a kernel" in said


def test_a_step_is_compared_with_megatrons_of_the_same_sample(tmp_path):
    from benchmarks import show as smoke
    from benchmarks.frontier_cases import MODELS, Sample, columns_of
    from benchmarks.rows import append
    from benchmarks.sheets import FRONTIER_CSV, FrontierRow

    times = {("", "burst", "off"): 4.0, ("", "megatron", "off"): 5.0,
             ("drawn", "burst", "keep"): 2.0, ("drawn", "megatron", "full"): 3.0,
             ("drawn", "burst", "off"): None, ("drawn", "megatron", "off"): 1.0}  # fmt: skip
    for (documents, impl, setting), ms in times.items():
        same = columns_of(MODELS["tiny"], Sample(64, documents))
        facts = {"run": "now", "date": "now", "versions": "v", "gpu": "H100", "turn": 1}
        row = FrontierRow(**facts, **same, impl=impl, setting=setting, ms=ms)
        append(tmp_path / "steps.csv", [row], FRONTIER_CSV)
    found = smoke.ratios(tmp_path)
    assert {what.partition("tokens, ")[2]: ratio for what, (ratio, *_) in found.items()} == {
        "one document, burst:off / megatron:off": 1.25,
        "packed documents, burst:keep / megatron:full": 1.5,
    }


def test_settings_that_are_measured_exist():
    """The names of settings in smoke.sh."""
    from benchmarks.frontier_cases import MODELS, chosen

    found = re.findall(r"settings=(\S+)", (ROOT / "benchmarks" / "smoke.sh").read_text())
    assert len(found) == 2
    for names in found:
        settings = chosen(MODELS["qwen3-8b"], names)
        assert {str(one) for one in settings} == set(names.split(","))
