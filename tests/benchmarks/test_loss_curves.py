"""Runs on real text and their loss curves: data, rows written as steps end, final figures.

Guards against runs that see different batches or weights, rows that are written only at the end,
and final figures from the wrong part of the curve.
"""

import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from benchmarks import loss_curves, show
from benchmarks.loss_curves import TINY, curves_table, flags_of, overlays, runs
from benchmarks.rows import append, read
from benchmarks.sheets import CURVES_CSV, CurveRow
from tests.mcore.pretraining import EXAMPLES, pretrain

STEPS = 10
# float32: about 1e-7 per rounding, over two layers, the loss and ten optimizer steps, which do not
# multiply it: see tests/mcore/pretraining.py
TOLERANCE = 2e-5
ADAM = " --lr 0.1 --min-lr 0.01 --adam-eps 1 --weight-decay 0"
RUNS = {str(run): run for run in runs("burst-plain")}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A data set of 200 documents of 20 to 1,015 bytes: enough that no part of
    Megatron's split is empty, which would hang it."""
    prefix = tmp_path_factory.mktemp("text") / "text"
    sys.path.insert(0, str(EXAMPLES))
    import data

    # every batch is as hard as the others, so that losses fall if the model learns
    source = "Pack my box with five dozen liquor jugs. How vexingly quick daft zebras jump! " * 300
    starts = [n * 977 % 20_000 for n in range(200)]
    texts = [source[start : start + 20 + 5 * n] for n, start in enumerate(starts)]
    documents = data.token_documents(texts, 4)
    assert all(len(document) % 4 == 0 and document[-1] == 256 for document in documents)
    data.write(prefix, documents)
    return prefix


def losses(folder, name, text, ranks=2):
    flags = flags_of(RUNS[name], TINY, STEPS, text)
    flags += f"--context-parallel-size {ranks} --num-workers 0 --init-method-std 0.3{ADAM}".split()
    return [step["lm loss"] for step in pretrain(folder, ranks, " ".join(flags)).steps]


@pytest.mark.whole
def test_runs_see_the_same_batches_and_another_order_sees_others(tmp_path, text):
    names = "packed:burst-plain", "packed:burst", "packed:burst-plain-other", "whole:burst"
    plain, burst, other, whole = (losses(tmp_path / f"{n}", n, text) for n in names)
    half = STEPS // 2
    assert len(plain) == STEPS and sum(plain[half:]) < sum(plain[:half])  # it learns
    assert burst == pytest.approx(plain, rel=TOLERANCE)
    for different in (other, whole):  # the first sample may be a single document
        assert different != pytest.approx(plain, rel=100 * TOLERANCE)


WRITER = """
import json, sys, time
for n in range(1, 4):
    step = {"iteration": n, "lm loss": 1 / n, "grad norm": 1.0, "seconds": 0.1}
    with open(sys.argv[1], "a") as file:
        file.write(json.dumps(step) + chr(10))
if len(sys.argv) > 2:
    time.sleep(600)
print("ValueError: no more text")
"""


@pytest.mark.parametrize("more", [[], ["stay"]], ids=["ends", "is ended"])
def test_rows_of_a_run_that_does_not_reach_its_end(tmp_path, monkeypatch, more):
    out, run = tmp_path / "curves.csv", RUNS["whole:burst"]
    monkeypatch.setattr(
        loss_curves, "training",
        lambda gpus, flags, log: [sys.executable, "-c", WRITER, str(log), *more],
    )  # fmt: skip
    told = loss_curves.train(run, TINY, 2, STEPS, tmp_path / "text", out, 3)
    rows = read([out], CURVES_CSV)
    assert [row.step for row in rows] == [1, 2, 3, 0] and told.startswith("whole:burst: 3 steps")
    assert rows[0].versions and not rows[1].versions
    assert more or "no more text" in rows[-1].note


def test_all_is_measured_and_appended(tmp_path, monkeypatch):
    """Run the command, with a program that writes a log instead of training."""
    out = tmp_path / "curves.csv"
    monkeypatch.setattr(loss_curves, "text_files", lambda: sorted(EXAMPLES.glob("*.py"))[:3])
    monkeypatch.setattr(
        loss_curves, "training",
        lambda gpus, flags, log: [sys.executable, "-c", WRITER.replace("4)", "11)"), str(log)],
    )  # fmt: skip
    loss_curves.main(out, 2, STEPS, ["packed:burst", "whole:burst"], True, 60, None)
    rows = read([out], CURVES_CSV)
    assert [row.step for row in rows] == 2 * [*range(1, 11)]
    assert [row.sample for row in rows] == 10 * ["packed"] + 10 * ["whole"]


def rows_of(sample, impl, order, losses):
    row = CurveRow(date="", gpus=2, sample=sample, impl=impl, order=order, step=0)
    return [replace(row, step=n, loss=loss) for n, loss in enumerate(losses, 1)]


def test_the_end_is_the_last_tenth_and_both_differences_are_told(tmp_path):
    base = [5.0] * 18 + [2.0, 2.0]
    rows = [
        *rows_of("packed", "megatron", "same", base),
        *rows_of("packed", "burst", "same", [4.0] * 18 + [2.02, 1.99]),
        *rows_of("packed", "megatron", "other", [4.0] * 18 + [2.5, 2.1]),
        *rows_of("whole", "megatron", "same", base),
        *rows_of("whole", "burst", "same", base),  # no other order to compare with
    ]
    (overlay,) = overlays(rows)
    assert overlay.at_the_end(overlay.burst) == pytest.approx((0.015, 0.005))
    assert overlay.at_the_end(overlay.other) == pytest.approx((0.3, 0.3))
    lines = curves_table(rows).splitlines()
    assert [line.split(" | ")[-1] for line in lines[2:]] == ["0.05 |", "0.017 |"]
    assert " | - | 0.015 | " in lines[2]
    rows += rows_of("packed", "megatron", "again", [*base[:-1], 2.01])
    line = curves_table(rows).splitlines()[2]
    assert " | 0.005 | 0.015 | " in line
    csv = tmp_path / "curves.csv"
    append(csv, rows, CURVES_CSV)
    done = CliRunner().invoke(show.app, ["curves", str(csv)])
    assert done.exit_code == 0 and line in done.output, done.output
    assert (tmp_path / "curves.png").stat().st_size > 10_000
