"""The parts of benchmarks/kernels.py that run without a GPU."""

from dataclasses import replace
from pathlib import Path
from time import monotonic

import pytest
from typer.testing import CliRunner

from benchmarks.kernel_turns import Case, candidates, compile_all, save
from benchmarks.kernels import app, run_once, table
from benchmarks.sheets import KernelRow
from megatron_burst.kernels.backends import backends
from megatron_burst.kernels.triton_tiles import KernelPass

ROOT = Path(__file__).parents[2]


def test_processes_that_compile_say_why_a_package_cannot_be_used():
    """Guards against taking a reason for the function that it replaces."""
    lacking = {name: reason for name, each in backends().items() if (reason := each.missing())}
    if not lacking:
        pytest.skip("all packages are installed")
    case = Case(256, 4, 2, 64, True)
    failures = compile_all([(run_once, case, name) for name in lacking], monotonic() + 300)
    assert len(failures) == len(lacking)
    for name, reason in lacking.items():
        (said,) = [each for each in failures if f"'{name}'" in each]
        assert "RuntimeError" in said and reason.partition("\n")[0] in said


@pytest.mark.parametrize("dim", [64, 128])
def test_a_sweep_tries_each_kernel_and_nothing_twice(dim):
    tried = candidates(dim, tma=True)
    assert {which for which, _ in tried} == set(KernelPass)
    assert len(set(tried)) == len(tried)


def test_tables_take_the_newest_rows_and_leave_out_what_failed(tmp_path):
    about = dict(
        gpu="g", torch="2", heads_q=32, heads_kv=8, dim=64, causal=True, direction="forward"
    )
    standard = KernelRow(**about, seq=8, what="fa4", ms=1.0, tflops=700.0)
    standard = replace(standard, ratio=1.0, ratio_least=1.0, ratio_most=1.0)
    ours = replace(standard, what="triton", tflops=1.0, ratio=0.1, ratio_least=0.1, ratio_most=0.1)
    newer = replace(ours, tflops=300.0, ratio=0.5, ratio_least=0.4, ratio_most=0.6)
    longer = replace(newer, seq=16, tflops=500.0, ratio=0.7, ratio_most=0.8)
    failed = KernelRow(**about, seq=8, what="te", note="out of memory")
    save(tmp_path / "rows.csv", [standard, ours, failed, newer, longer])
    head, _, line = table(tmp_path / "rows.csv").splitlines()
    assert head == "| head dimension | mask | direction | `fa4` | `triton` |"
    assert line == "| 64 | causal | forward | 700 | 400, 0.60 (0.40-0.80) |"


def test_the_document_has_the_table_of_the_measured_rows():
    measured = table(ROOT / "benchmarks" / "results" / "kernels_h200.csv")
    assert measured in (ROOT / "docs" / "backends.md").read_text()


def test_a_csv_of_another_benchmark_is_refused_in_one_sentence(tmp_path):
    measured = ROOT / "benchmarks" / "results" / "attention_4xh200_one_node.csv"
    got = {
        tmp_path / "none.csv": "no such file",
        measured: "no column torch and 28 other differences; name",
    }
    for path, words in got.items():
        done = CliRunner().invoke(app, [str(path), "--table"])
        assert done.exit_code == 2 and not done.stdout
        assert done.stderr.startswith(
            f"error: benchmarks: {path} must be a CSV with the columns of "
        )
        assert f"got {words}" in done.stderr and done.stderr.count("\n") == 1
