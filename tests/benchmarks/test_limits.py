"""What the hardware allows, in docs/benchmarks/comparison.md: sentences follow from the rows."""

import pytest
from typer.testing import CliRunner

from benchmarks import limits as gpu_limits
from benchmarks.compared import compare
from benchmarks.limits import FOUR, machine, sheet
from benchmarks.rows import read
from benchmarks.sheets import LIMITS_CSV
from benchmarks.show import ROOT
from benchmarks.tables import Ratio, share_of_peak, times_of

PAGE = ROOT / "docs" / "benchmarks" / "comparison.md"


@pytest.fixture(scope="module")
def text():
    return PAGE.read_text()


@pytest.fixture(scope="module")
def lines():
    head, *rows = machine()
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_sentences_follow_from_the_table(text, lines):
    square = next(row for row in lines if row["what"].startswith("matrix"))
    measured = float(square["measured"].split()[0])
    assert round(measured / float(square["data sheet"]), 1) == 0.8
    found = []
    for name in (FOUR, "attention_2xh200_one_node"):
        for one in compare(sheet(name)):
            of, row = one.problem, one.burst
            if of.pass_ == "fwd_bwd" and of.heads_kv == 8 and of.seq >= 64 << 10 and one.ceiling:
                share = share_of_peak(row.tflops_per_gpu, row.gpu)
                found.append((share, Ratio.of(row, one.ceiling).value))
    shares, alone = (f"{min(some):.2f} to {max(some):.2f}" for some in zip(*found, strict=True))
    assert f"reaches {shares} of it on one node, which is {alone} of the kernel alone" in text


def test_sentences_of_a_gpu_alone_follow_from_its_lines(text, lines):
    lines = {row["what"]: row for row in lines}
    reached = {
        what: float(row["measured"].split()[0]) / float(row["data sheet"])
        for what, row in lines.items() if "gpu_limits" in row["rows"]
    }  # fmt: skip
    copies = [share for what, share in reached.items() if what.startswith("copy")]
    assert len(copies) == 2 and len(reached) == 5
    side = reached["matrix product of side 16384, bf16, TFLOP/s"]
    assert f"one of side 16384 reaches {side:.2f}" in text


def test_the_lines_of_one_kernel_are_of_that_kernel(lines):
    """Guards against cuDNN's rows among FlashAttention-4's."""
    (line,) = (row for row in lines if "alone, causal, forward and" in row["what"])
    found = [
        row.tflops_per_gpu for row in sheet(FOUR)
        if row.impl == "ceiling" and row.pass_ == "fwd_bwd" and row.ms and "fa4" in row.note
    ]  # fmt: skip
    assert line["measured"].endswith(f"({min(found):.0f}-{max(found):.0f})")


def work_of(row):
    """GFLOP of a product, MB read and written by a copy: per ms TFLOP/s and GB/s."""
    return 2 * row.size**3 / 1e9 if row.what == "matmul" else 2 * row.size / 1e6


def test_a_rate_is_work_per_time(tmp_path):
    out = tmp_path / "limits.csv"
    done = CliRunner().invoke(gpu_limits.app, ["--out", f"{out}", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    product, copy = read([out], LIMITS_CSV)
    assert (product.what, copy.what) == ("matmul", "copy")
    for row in (product, copy):
        assert row.rate == pytest.approx(work_of(row) / row.ms, rel=1e-4)
        assert len(times_of(row)) == 10 and row.ms_min <= row.ms <= row.ms_max


def test_measured_rates_are_work_per_time():
    for row in sheet("gpu_limits_1xh200", LIMITS_CSV):
        assert row.rate == pytest.approx(work_of(row) / row.ms, rel=1e-4)
