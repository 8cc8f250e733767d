"""Runs of the papers' sweeps: weak and strong scaling by their rows, nodes that are emulated.

Guards against rows of one kind in the other's panel, planned rows drawn as measured ones, and
ranks of a run on another node than NCCL is told.
"""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.rows import append, read
from benchmarks.scaling import app, lines_of, runs_of
from benchmarks.sheets import SLICES_CSV
from benchmarks.slice_cases import PER_GPU, SEEDS, STRONG, TINY_RUNS, row_of
from benchmarks.slices import app as slices
from benchmarks.slices import reason_in, training
from megatron_burst.tools.hardware_file import preset

FACTS = {"versions": "", "gpu": ""}
BIG, SMALL = SEEDS


def row(what, seq, gpus, ms):
    return row_of(replace(what, seq=seq), "burst", gpus, ms, **FACTS)


def test_rows_of_each_kind_are_told_by_their_tokens():
    rows = [
        row(BIG, PER_GPU, 1, [100.0]), row(BIG, 2 * PER_GPU, 2, [300.0]),
        row(BIG, 2 * PER_GPU, 2, [200.0]), row(BIG, STRONG, 8, [900.0]),
        row(SMALL, STRONG, 2, [5000.0]), row(BIG, 4 * PER_GPU, 2, [1.0]),
        row(BIG, STRONG, 4, []), row(TINY_RUNS[0][0], PER_GPU, 1, [1.0]),
    ]  # fmt: skip
    flops = [replace(BIG, seq=n * PER_GPU).model.flops_per_token(n * PER_GPU) for n in (1, 2, 8)]
    seconds = (0.1, 0.2, 0.9)
    rates = [PER_GPU * work / s / 1e12 for work, s in zip(flops, seconds, strict=True)]
    (weak,) = lines_of(rows, "weak").values()
    assert [gpus for gpus, _ in weak] == [1, 2, 8]
    assert [rate for _, rate in weak] == pytest.approx(rates)
    strong = {"burstengine-14b burst": [(8, 0.9)], "burstengine-7b burst": [(2, 5.0)]}
    assert lines_of(rows, "strong") == strong


def test_runs_that_are_planned_fit_their_nodes():
    runs = list(runs_of((8, 16), preset("h200")))
    assert {impl for _, impl, gpus in runs if gpus == 16} == {"burst"}  # TP stays inside a node
    assert len(runs) == 2 * (1 * 2 + 2 * 1)  # at 8 GPUs both kinds are the same run
    assert len(set(runs)) == len(runs)


def test_planned_and_measured_rows_are_drawn_in_one_picture(tmp_path):
    planned, measured = tmp_path / "planned.csv", tmp_path / "measured.csv"
    run = CliRunner().invoke
    done = run(app, ["plan", str(planned), "--gpus", "8"])
    assert done.exit_code == 0, done.output
    rows = read([planned], SLICES_CSV)
    assert {(one.gpu, one.impl) for one in rows} == {
        ("predicted for h200", "burst"), ("predicted for h200", "tp"),
    }  # fmt: skip
    options = ["draw", str(tmp_path / "a.png"), "--measured", str(measured), "--planned"]
    append(measured, [row(TINY_RUNS[0][0], 256, 1, [1.0])], SLICES_CSV)
    refused = run(app, [*options[:-1]])
    assert refused.exit_code == 2 and "must have rows of burstengine-14b" in refused.output
    append(measured, [row(BIG, STRONG, 8, [900.0])], SLICES_CSV)
    done = run(app, [*options, str(planned)])
    assert done.exit_code == 0 and (tmp_path / "a.png").stat().st_size > 10_000, done.output


@pytest.mark.parametrize(
    "output, reason",
    [
        ("begin\ntorch.OutOfMemoryError: CUDA\n  exitcode  : 1 (pid: 9)\n====\n",
         "torch.OutOfMemoryError: CUDA"),
        ("begin\n  exitcode  : -9 (pid: 9)\n  traceback : see elsewhere\n=====\n",
         "exitcode  : -9 (pid: 9)"),
        ("terminate called\n  what():  CUDA error\n  exitcode  : -6 (pid: 9)\n====\n",
         "what():  CUDA error"),
        ("begin\nthe last words\n-----\n", "the last words"),
        ("", "it said nothing"),
    ],
)  # fmt: skip
def test_why_a_run_failed_is_found_in_what_it_said(tmp_path, output, reason):
    (tmp_path / "output.txt").write_text(output)
    assert reason_in(tmp_path / "output.txt") == reason


def test_a_slice_leaves_fused_rope_out_where_its_offsets_would_overflow():
    what = replace(SEEDS[0], seq=256 << 10)  # 15,360 elements a token: 139,810 tokens
    assert what.rope(1) == ["--no-rope-fusion"] and what.rope(2) == []


def test_each_part_of_the_ranks_is_a_node_to_nccl():
    command = training(4, ["--bf16"], Path("log"), nodes=2)
    shell = command[command.index("bash") : command.index("-") + 1]
    named = [
        subprocess.run(
            [*shell, "printenv", "NCCL_HOSTID"], env=os.environ | {"LOCAL_RANK": f"{rank}"},
            capture_output=True, text=True, check=True,
        ).stdout
        for rank in range(4)
    ]  # fmt: skip
    assert named == [f"pretended-{node}\n" for node in (0, 0, 1, 1)]
    assert "bash" not in training(4, ["--bf16"], Path("log"))
    refused = CliRunner().invoke(slices, ["measure", "x.csv", "--gpus", "3", "--nodes", "2"])
    assert refused.exit_code == 2 and "--nodes must divide --gpus" in refused.output
