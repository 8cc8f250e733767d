"""docs/benchmarks/limits.md: its tables are those of the rows, and its sentences of the tables."""

import re

import pytest
from typer.testing import CliRunner

from benchmarks import limits as gpu_limits
from benchmarks.limits import FOUR, NVLINK_GBS, TABLES, rates, sheet
from benchmarks.planned import sent_by
from benchmarks.rows import read
from benchmarks.sheets import LIMITS_CSV
from benchmarks.show import ROOT, refreshed
from benchmarks.tables import Ratio, times_of
from megatron_burst.schedule.topology import Link

PAGE = ROOT / "docs" / "benchmarks" / "limits.md"


@pytest.fixture(scope="module")
def text():
    return PAGE.read_text()


def cells(name: str) -> list[dict[str, str]]:
    head, *rows = TABLES[name]()
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_tables_are_made_from_the_rows(text):
    assert refreshed(text) == text
    assert re.findall(r"<!-- benchmarks.show limits (\w+) -->", text) == list(TABLES)
    assert refreshed(text.replace("0.9", "0.8")) != text.replace("0.9", "0.8")


def test_sentences_follow_from_the_tables(text):
    square = next(row for row in cells("machine") if row["what"].startswith("matrix"))
    measured = float(square["measured"].split()[0])
    assert round(measured / float(square["data sheet"]), 1) == 0.8
    rows = [row for row in cells("attention") if "+" not in row["GPUs"]]
    shares = [float(row["ms of transfers inside nodes"]) / float(row["ms"]) for row in rows]
    assert f"{100 * min(shares):.1f} to {100 * max(shares):.0f} %" in text
    losses = [1 - float(row["of the kernel alone"]) for row in rows]
    assert f"{100 * min(losses):.0f} to {100 * max(losses):.0f} % of it" in text
    kept = [row for row in cells("steps") if row["what"] == "step, burst, attention kept"]
    assert all(0.6 < float(row["of the matrix product"]) < 0.7 for row in kept)


def test_sentences_of_a_gpu_alone_follow_from_its_lines(text):
    lines = {row["what"]: row for row in cells("machine")}
    reached = {
        what: float(row["measured"].split()[0]) / float(row["data sheet"])
        for what, row in lines.items() if "gpu_limits" in row["rows"]
    }  # fmt: skip
    copies = [share for what, share in reached.items() if what.startswith("copy")]
    assert len(copies) == 2 and len(reached) == 5
    assert f"reaches {min(copies):.2f} to {max(copies):.2f} of the data sheet's 4800 GB/s" in text
    side = reached["matrix product of side 16384, bf16, TFLOP/s"]
    assert f"one of side 16384 reaches {side:.2f}" in text


def test_sentences_between_nodes_follow_from_their_rows(text):
    two = {row["tokens"]: row for row in cells("attention") if "+" in row["GPUs"]}
    short = two.pop("64K")
    assert min(float(row["of the kernel alone"]) for row in two.values()) >= 0.87
    rows = [row for row in sheet("attention_2x2xh200") if row.ms]
    speeds = [(row.date[:10], rates(row)[0]) for row in rows]
    last = [speed for day, speed in speeds if day == "2026-11-27"]
    before = [speed for day, speed in speeds if day < "2026-11-27"]
    told = [
        f"{min(last):.2f} to {max(last):.2f} GB/s that day",
        f"{min(before):.1f} to {max(before):.1f} before",
        f"the transfers ({short['between nodes']} ms)",
        f"the pass takes {short['ms']} ms, so it reaches {short['of the kernel alone']}",
    ]
    te, hidden = [], []
    for day in ("2026-11-26", "2026-11-27"):
        run = {
            f"{row.impl}:{row.mode}": row for row in rows
            if (row.date[:10], row.seq, row.heads_q, row.heads_kv, row.pass_)
            == (day, 65536, 32, 8, "fwd_bwd")
        }  # fmt: skip
        te.append(min(row.ms for row in run.values() if row.impl == "te"))
        ours, alone = run["burst:auto"], run["ceiling:auto"]
        sent = sent_by(ours)
        moved = (sent[Link.INTER] / rates(ours)[0] + sent[Link.INTRA] / NVLINK_GBS) / 1e6
        hidden.append(f"{alone.ms + moved - ours.ms:.0f} ms")
        if day == "2026-11-26":
            told.append(f"{ours.ms:.1f} ms and reached {Ratio.of(ours, alone).value:.2f}")
    told += [f"the kernel alone ({alone.ms:.1f} ms)", f"from {te[0]:.1f} to {te[1]:.1f} ms"]
    told.append("{} of transfers were hidden then, and {} on 27 November".format(*hidden))
    assert [each for each in told if each not in text] == []


def test_the_lines_of_one_kernel_are_of_that_kernel():
    """Guards against cuDNN's rows among FlashAttention-4's."""
    (line,) = (row for row in cells("machine") if "alone, causal, forward and" in row["what"])
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
