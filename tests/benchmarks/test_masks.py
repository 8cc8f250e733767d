"""The benchmark of masks: what it counts as pairs, and that a run measures in turns."""

import csv

import torch
from typer import Typer
from typer.testing import CliRunner

from benchmarks.masks import cases, main
from megatron_burst.masks.slice_checks import counted_twice, sees_nothing
from tests.oracle import seen_by_slices


def test_pairs_are_those_of_the_masks():
    found = cases(2048, 4, torch.device("cpu"), torch.float32)
    assert len(found) == 11
    for name, case in found.items():
        seen = seen_by_slices(case.slices.tolist(), 2048)
        assert int(seen.sum()) == case.pairs, name
        assert counted_twice(case.slices.numpy()) is sees_nothing(case.slices.numpy()) is None
    window = seen_by_slices(found["window 128"].slices.tolist(), 2048)
    assert torch.equal(window, torch.ones(2048, 2048).tril().triu(-127).bool())
    share = found["a quarter of blocks of 128"].pairs / found["causal"].pairs
    assert 0.2 < share < 0.4  # the diagonal is alive


def rows_of(out, *options):
    app = Typer()
    app.command()(main)
    done = CliRunner().invoke(app, [str(out), *options])
    assert done.exit_code == 0, done.output
    return list(csv.DictReader(out.open()))


def test_a_run_measures_both_passes(tmp_path):
    sizes = ["--seq", "2K", "--heads", "2/1", "--dim", "8", "--only", "causal with,prefix"]
    rows = rows_of(tmp_path / "masks.csv", *sizes)
    assert [(row["mask"], row["pass"], row["beside"]) for row in rows] == [
        (mask, pass_, "causal")
        for mask in ("causal with sinks", "prefix")
        for pass_ in ("fwd", "bwd")
    ]
    assert all(float(row["ratio"]) > 0 and int(row["reps"]) == 7 for row in rows)
    assert all(len(row[name].split()) == 7 for row in rows for name in ("each", "each_beside"))


def test_a_tiny_run_measures_every_mask(tmp_path, monkeypatch):
    monkeypatch.setenv("TINY", "1")
    rows = rows_of(tmp_path / "masks.csv")
    every = cases(512, 2, torch.device("cpu"), torch.float32)
    asked = [(name, pass_) for name, case in every.items() if case.beside
             for pass_ in ("fwd", "bwd")]  # fmt: skip
    assert [(row["mask"], row["pass"]) for row in rows] == asked and len(asked) == 18
    assert {(row["seq"], row["heads_q"], row["dim"]) for row in rows} == {("512", "2", "8")}
