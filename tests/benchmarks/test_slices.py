"""Whole training steps on packed documents, tiny, on CPU processes, and their rows.

Guards against a sample that is sharded or described differently than in Megatron, documents that
see each other, and rows compared with another slice's.
"""

from dataclasses import replace
from math import log

import pytest
from typer.testing import CliRunner

from benchmarks.rows import read
from benchmarks.sheets import SLICES_CSV
from benchmarks.slice_cases import TINY_RUNS, beside_megatron, flags_of, row_of
from benchmarks.slices import app
from tests.mcore.pretraining import pretrain

PACKED = TINY_RUNS[-1][0]
# float32: about 1e-7 per rounding, over two layers, the loss and six optimizer steps, which do not
# multiply it: see tests/mcore/pretraining.py
TOLERANCE = 2e-5
FACTS = {"versions": "", "gpu": ""}


@pytest.mark.whole
def test_a_packed_slice_is_measured(tmp_path):
    out = tmp_path / "slices.csv"
    command = ["measure", str(out), "--gpus", "2", "--tiny", "--only"]
    result = CliRunner().invoke(app, [*command, "tiny-packed-256:burst-recompute"])
    assert result.exit_code == 0, result.output
    (row,) = read([out], SLICES_CSV)
    assert row.status == "ok", row.note
    assert row.documents == f"drawn-42: {len(PACKED.lengths(2))}"
    assert row.ms and abs(row.loss - log(PACKED.vocab)) < 0.1  # labels are random


def losses(folder, ranks, lengths):
    """Loss of each step; weights are large enough for attention to matter."""
    folder.mkdir()
    (folder / "lengths.txt").write_text(",".join(map(str, lengths)))
    flags = [*PACKED.flags, *flags_of("burst", ranks), "--context-parallel-size", str(ranks)]
    flags += "--distributed-backend gloo --num-workers 0 --init-method-std 0.3".split()
    flags += "--lr 0.1 --min-lr 0".split()
    run = pretrain(folder, ranks, " ".join([*flags, "--document-lengths lengths.txt"]))
    return [step["lm loss"] for step in run.steps]


def test_documents_are_the_same_on_any_number_of_ranks(tmp_path):
    lengths = PACKED.lengths(2)
    assert len(lengths) > 2
    one, two = (losses(tmp_path / f"{ranks}", ranks, lengths) for ranks in (1, 2))
    assert len(one) == 6 and two == pytest.approx(one, rel=TOLERANCE)
    unpacked = losses(tmp_path / "unpacked", 1, [PACKED.seq])
    assert unpacked != pytest.approx(one, rel=100 * TOLERANCE)


def test_operations_of_attention_are_those_of_each_document():
    """4 q k d per visible query-key pair and layer, times three with backward."""
    row, whole = (
        row_of(replace(PACKED, documents=kind), "burst", 2, [1e3], **FACTS)
        for kind in ("each-64", "")
    )
    attention = 3 * 2 * 4 * 4 * 16 * (256**2 / 2 - 4 * 64**2 / 2)
    assert abs(whole.tflops_per_gpu - row.tflops_per_gpu - attention / 2e12) < 1e-15


def test_a_row_is_compared_with_megatrons_fastest_of_the_same_slice():
    other = replace(PACKED, name="other")
    before = [
        row_of(PACKED, "megatron", 2, [100.0], loss=5.0, **FACTS),
        row_of(PACKED, "megatron-a2a", 2, [80.0], loss=4.0, **FACTS),
        row_of(PACKED, "megatron-keep", 2, [], loss=None, status="failed", **FACTS),
        row_of(other, "megatron", 2, [10.0], loss=1.0, **FACTS),
    ]
    row = beside_megatron(row_of(PACKED, "burst", 2, [40.0], loss=4.04, **FACTS), before)
    assert (row.speedup, round(row.loss_difference, 9)) == (2.0, 0.01)
    assert (
        beside_megatron(row_of(PACKED, "burst", 2, [40.0], loss=4.0, **FACTS), []).speedup is None
    )
