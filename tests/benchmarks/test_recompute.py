"""`benchmarks.recompute` on two CPU processes: rows, table, picture and refusals.

Guards against modes that do not run, are measured as another mode, or disappear where they cannot
run.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.rows import read
from benchmarks.sheets import RECOMPUTE_CSV
from benchmarks.steps_table import draw_trade, trade_table
from megatron_burst.errors import BurstError
from tests.ranks import preload, run_ranks

preload("megatron.core.models.gpt", "megatron_burst.mcore.launch")


def bench(rank: int, folder: str) -> tuple:
    """Rows at CP=2, and how often each burst mode called attention kernels."""
    from benchmarks.layers import Widths, modes_of
    from benchmarks.recompute import measure
    from benchmarks.runner import Plan
    from benchmarks.stack import Stack
    from megatron_burst.tools.world import world_of
    from tests.mcore.pipeline import counted

    world, said, calls = world_of("cpu"), [], {}
    widths = Widths(
        layers=2, hidden=32, ffn=48, heads_q=4, heads_kv=2, head_dim=8, seq=64, batch=1,
        dtype="float32",
    )  # fmt: skip
    plan = Plan([widths], modes_of(()), reps=2, out=Path(folder) / "recompute.csv")
    rows = measure(plan, world, said.append)
    once = measure(replace(plan, impls=modes_of(("burst:all",)), reps=1, out=None), world)
    assert all(row.ms and row.note.endswith(f"1 repetitions: {row.ms:.6g}") for row in once), once
    stack = Stack(widths, burst=True)
    for mode in plan.impls:
        if mode.impl == "burst":
            stack.use(mode)
            with counted() as count:
                stack.run()
            calls[mode.name] = count["kernels"], count["hops"]
    return rows, said, calls


def alone(rank: int) -> dict:
    """Megatron's own attention at CP=1: kernel calls by mode."""
    from benchmarks.layers import Widths, modes_of
    from benchmarks.stack import Stack, start
    from tests.mcore.pipeline import counted

    start(cpu=True, cp_size=1)
    widths = Widths(
        layers=2, hidden=32, ffn=48, heads_q=4, heads_kv=2, head_dim=8, seq=64, batch=1,
        dtype="float32",
    )  # fmt: skip
    stack, calls = Stack(widths, burst=False), {}
    for mode in modes_of(()):
        if mode.impl == "megatron":
            stack.use(mode)
            with counted() as count:
                stack.run()
            calls[mode.name] = count["kernels"]
    return calls


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    return run_ranks(bench, 2, str(folder)), folder / "recompute.csv"


def test_one_row_for_each_mode(results):
    from benchmarks.layers import MODES

    ((rows, said, _), _), path = results
    assert [f"{row.impl}:{row.mode}" for row in rows if row.pass_ == "fwd_bwd"] == list(MODES)
    (attention,) = (row for row in rows if row.pass_ == "fwd")  # alone; Megatron's cannot run
    assert (attention.impl, attention.mode) == ("burst", "attention")
    # 2 layers x 2 x 4 heads x 8 x 64 x 64 on 2 ranks: two products, half of them masked
    assert attention.tflops_per_gpu == pytest.approx(
        2 * 2 * 4 * 8 * 64 * 64 / 2 / attention.ms / 1e9
    )
    assert [row.mode for row in read([path], RECOMPUTE_CSV)] == [row.mode for row in rows]
    assert len(said) == 2
    for row in rows:
        if row is attention:
            continue
        if row.impl == "burst":
            assert row.status == "ok" and row.ms_min <= row.ms <= row.ms_max
            # 6 (2 layers (weights 32 8 (4 + 4 + 2 + 2) + 3 32 48) + 2 4 8 64) 64 FLOPs on 2 ranks
            flops = 6 * (2 * (32 * 8 * 12 + 3 * 32 * 48) + 2 * 4 * 8 * 64) * 64
            assert row.tflops_per_gpu == pytest.approx(flops / 2 / row.ms / 1e9)
        else:
            assert row.status == "failed" and "needs TransformerEngine, because" in row.note


def test_modes_recompute_as_much_attention_as_they_say(results):
    ((_, _, calls), _), _ = results
    kernels, hops = calls["off"]
    assert calls["none"] == calls["selective"] == (2 * kernels, hops + 2)
    assert calls["all"] == calls["all-offload"] == (kernels, hops)
    assert calls["all-half-layers"] == (kernels + kernels // 2, hops + 1)
    assert calls["half"][0] > kernels and calls["half"][1] > hops


def test_megatrons_own_modes_without_context_parallelism():
    (calls,) = run_ranks(alone, 1)
    assert calls == {"full": 4, "full-keep": 2, "selective": 4, "off": 2}


def test_table_and_picture(results, tmp_path):
    ((rows, _, _), _), _ = results
    lines = trade_table(rows).splitlines()
    assert len(lines) == 2 + len(rows) and lines[2].startswith("| 64 | burst:none | ")
    assert " | 1.000 | " in lines[2] and "failed: benchmarks.recompute: Megatron's own" in lines[-1]
    assert draw_trade(rows, tmp_path / "a") == []  # no memory is measured on CPU
    measured = [replace(row, peak_gib=1.5) for row in rows]
    (picture,) = draw_trade(measured, tmp_path / "a")
    assert picture.name == "a_trade.png" and picture.stat().st_size > 10_000


def test_refuses_a_mode_that_there_is_not():
    from benchmarks.layers import modes_of

    assert "burst:half" not in map(str, modes_of((), 1)) and len(modes_of((), 1)) == 10
    assert "burst:half" in map(str, modes_of((), 2))
    with pytest.raises(BurstError, match="burst:half must have 2 ranks.*got 1; start more"):
        modes_of(["burst:all", "burst:half"], 1)
    with pytest.raises(BurstError, match="got 'burst:some'; choose among burst:none, burst:half, "):
        modes_of(["burst:some"])
