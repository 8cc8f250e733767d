"""Measured micro-batches and steps beside the cost function: what is printed of them, and that they
run, tiny, on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.balance_measured import costs_in, table_of
from benchmarks.rows import append, read
from benchmarks.sheets import COSTS_CSV, STEPS_CSV, CostRow
from megatron_burst import burst_attention
from megatron_burst.balance import Costs

ROOT = Path(__file__).parents[2]
COSTS = Costs(1e-5, 1e-9, 0.002, {2: 1e-6})


def row(kind: str, tokens: int, area: int, cp: int, more: float = 1.0) -> CostRow:
    ms = 1e3 * COSTS.seconds(tokens, area, cp) * more
    return CostRow(
        run="1", date="", versions="", gpu="", gpus=1, how="group", model="m", layers=4, kind=kind,
        documents=1, tokens=tokens, ms=ms, ms_min=ms, ms_max=ms, reps=1, cp=cp, area=area,
    )  # fmt: skip


def test_errors_are_of_drawn_micro_batches_and_costs_of_the_others():
    regular = [row("fitted", n, a, cp) for cp in (1, 2)
               for n, a in ((100, 5000), (100, 500), (50, 400), (25, 100))]  # fmt: skip
    drawn = [row("sft", 80, 3000, 1, 1.25), row("sft", 90, 2000, 2, 0.98), row("sft", 90, 1, 2)]
    found = costs_in(regular + drawn)
    assert (found.token, found.transfer[2]) == pytest.approx((1e-5, 1e-6))
    cells = [[c.strip() for c in line.split("|")[3:8]] for line in
             table_of(regular + drawn).splitlines()[2:]]  # fmt: skip
    assert cells[0] == ["1", "1", "20.0%", "-20.0%", "sft: 1 documents, 80 tokens, CP 1"]
    assert [line[:4] for line in cells[1:]] == [
        ["2", "2", "1.0%", "+2.0%"],
        ["all", "3", "2.0%", "-20.0%"],
    ]


@pytest.mark.whole  # Megatron's import takes 10 s
def test_a_rank_s_part_has_the_mask_of_its_documents():
    """With one rank the part is all: guards against documents that see each other, whose area is
    not that of the row."""
    from benchmarks.one_rank import Silent
    from benchmarks.stack import Part, PartOfAttention

    q, k, v = torch.randn(3, 24, 2, 16).unbind()
    ends = torch.tensor([0, 10, 24], dtype=torch.int32)
    PartOfAttention.part = Part(ends, 1, Silent(0))
    expected = burst_attention(q[None], k[None], v[None], cu_seqlens=ends)[0].flatten(1)
    torch.testing.assert_close(PartOfAttention()(q, k, v), expected)


def measure(folder: Path, command: str, ranks: int = 0) -> None:
    """Tiny, on the CPU; 0 ranks: a process that no launcher started."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    words = f"benchmarks.balance_measured {command} --model tiny --tokens 128 --reps 1".split()
    subprocess.run(
        [sys.executable, "-m", *(launcher if ranks else []), *words], cwd=folder, check=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.whole  # so it does
def test_a_rank_s_part_of_each_size_is_measured(tmp_path):
    measure(tmp_path, "micro-batches out.csv --count 1")
    rows = read([tmp_path / "out.csv"], COSTS_CSV)
    assert {each.cp for each in rows} == {1, 2, 4, 8} and len(rows) == 4 * 6
    assert all(each.ms > 0 and each.tokens <= 128 * each.cp for each in rows)


@pytest.mark.whole
def test_steps_of_data_parallel_groups_are_measured(tmp_path):
    shapes = (100, 5000), (100, 500), (50, 400), (25, 100)
    fitted = [row("fitted", *each, cp) for cp in (1, 2) for each in shapes]
    append(tmp_path / "costs.csv", fitted, COSTS_CSV)
    measure(tmp_path, "steps out.csv --costs costs.csv --draws 1 --dp 2", ranks=4)
    rows = read([tmp_path / "out.csv"], STEPS_CSV)
    rules = "sequential", "default_dynamic_cp", "balanced", "balanced, changing CP"
    assert [each.rule for each in rows] == [*rules] * 3
    assert all((each.dp, each.gpus) == (2, 4) and each.ms > 0 for each in rows)
    simulated = [each.simulated_ms for each in rows]
    assert simulated[0] > simulated[2]
    for at in (0, 4, 8):
        assert simulated[at] >= simulated[at + 2] >= simulated[at + 3]
