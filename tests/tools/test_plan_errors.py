"""The errors that `megatron-burst plan` prints beside its figures, from what was measured."""

import csv
from pathlib import Path

import pytest

from benchmarks.frontier_planned import compare, predicted_now
from benchmarks.planned import predict
from benchmarks.rows import read
from benchmarks.sheets import ANY_PACKED_CSV, FRONTIER_CSV
from megatron_burst.tools.hardware_file import preset
from megatron_burst.tools.plan_notes import (
    BETWEEN_ERROR,
    COPIES_ERROR,
    NARROW_TIMES,
    PACKED_TIMES,
    STEP_ERROR,
)
from tests.tools.planning import run

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(scope="module")
def steps():
    """Every measured step of burst's beside what is predicted now."""
    found = []
    for gpu in ("h100", "h200"):
        rows = read(sorted(RESULTS.glob(f"frontier_*x{gpu}.csv")), FRONTIER_CSV)
        found += compare(rows, predicted_now(rows, preset(gpu)))
    return [one for one in found if one.row.impl == "burst"]


def test_steps_of_dense_models_are_off_by_as_much_as_is_printed(steps):
    for copies, printed in ((False, STEP_ERROR), (True, COPIES_ERROR)):
        some = [
            abs(one.errors[0]) for one in steps
            if not one.row.experts and ("host" in one.row.setting) == copies
        ]  # fmt: skip
        assert len(some) > 10 and printed - 0.02 < max(some) <= printed


def test_narrow_experts_take_as_much_longer_as_is_printed(steps):
    times = [1 / (1 + one.errors[0]) for one in steps if one.row.experts]
    assert len(times) > 30
    assert (min(times), max(times)) == pytest.approx(NARROW_TIMES, abs=0.05)


def test_attention_between_nodes_is_off_by_as_much_as_is_printed():
    with (ROOT / "docs" / "planner_errors.csv").open() as file:
        errors = sorted(
            abs(float(row["error"].rstrip("%"))) / 100 for row in csv.DictReader(file)
            if (row["what"], row["variant"], row["nodes"]) == ("attention", "burst:auto", "2")
        )  # fmt: skip
    assert len(errors) > 80 and errors[int(0.9 * len(errors))] == pytest.approx(
        BETWEEN_ERROR, abs=0.005
    )


def test_packed_attention_between_nodes_takes_as_much_longer_as_is_printed():
    rows = read([RESULTS / "packed_2x1xh200.csv"], ANY_PACKED_CSV)
    times = [
        row.ms / found.ms for row in rows
        if (row.impl, row.mode, row.status) == ("burst", "auto", "ok") and (found := predict(row))
    ]  # fmt: skip
    assert max(times) == pytest.approx(PACKED_TIMES, abs=0.05)


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ("llama3-8b --gpus 8 --cp 8 --keep all", "MFU may be off by 10%, the largest error of a"),
        ("llama3-8b --gpus 8 --cp 8 --keep all --offload", "MFU may be off by 17%, the largest"),
        ("llama3-8b --gpus 16", "MFU may be off by 21%. On two emulated nodes, 9 of 10"),
        ("qwen3-30b-a3b --gpus 8", "MFU is too high: experts 768 wide are counted at the speed"),
        ("llama3-8b --gpus 8 --hardware b200", "MFU's error is not known: no step was measured on"),
    ],
)
def test_the_error_of_mfu_stands_beside_it(job, said):
    first, second, *_ = run(*job.split(), "--seq-length", "128k").splitlines()
    assert " MFU " in first and second.startswith(said)
    assert ("% (" in first) == ("may be off" in second)


@pytest.mark.parametrize(
    "job",
    [
        "llama3-8b --seq-length 1M",
        "llama3-8b --seq-length 1M --search",
        "qwen3-30b-a3b --seq-length 128k",
        "deepseek-v3 --seq-length 128k",
        "deepseek-v3 --seq-length 128k --search",
        "llama3-405b --seq-length 1M",
    ],
)
def test_a_plan_fits_a_terminal(job):
    lines = run(*job.split(), "--gpus", "64", COLUMNS="100", code=None).splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
