"""The loss's benchmark on two processes: rows, agreement with float64, table and picture."""

import csv
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import loss_heads as loss_peers
from benchmarks.loss_heads import PEERS, LossCase, cases_of, listed_cases, peers_of, usual_peers
from benchmarks.loss_table import draw_loss, loss_table, native_of
from benchmarks.rows import read
from benchmarks.sheets import LOSS_CSV, LossRow, columns_of
from benchmarks.show import ROOT
from benchmarks.tables import Ratio
from megatron_burst.errors import BurstError
from megatron_burst.tools.terminal import Progress
from tests.ranks import preload, run_ranks

preload("benchmarks.loss")
CASES = (LossCase(96, 32, 64, "float32"), LossCase(40, 32, 64, "bfloat16"))
NAMES = (
    "burst:recompute", "burst:forward", "burst:plain", "megatron:unfused", "torch", "liger",
)  # fmt: skip


def bench(rank, folder):
    """Rows of a run, of one without timing, and of one with a wrong implementation."""
    from benchmarks.loss import measure
    from benchmarks.runner import Plan
    from megatron_burst.tools.world import world_of

    world, out = world_of("cpu"), folder / "loss.csv"
    rows = measure(Plan(CASES, peers_of(NAMES), reps=2, out=out), world, lambda text: None)
    none = measure(Plan(CASES, peers_of(NAMES), budget_s=-1.0), world, lambda text: None)
    (right,) = peers_of(["burst:recompute"])
    wrong = replace(right, mean=lambda x: 1.2 * right.mean(x))
    (bad,) = measure(Plan(CASES[:1], [wrong], reps=1), world, lambda text: None)
    return rows, none, bad


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def results(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("loss")
    return run_ranks(bench, request.param, folder), folder / "loss.csv", request.param


def test_a_row_for_each_implementation_and_head(results):
    _, path, ranks = results
    with path.open() as file:
        assert tuple(next(csv.reader(file))) == columns_of(LossRow)
    rows = read([path], LOSS_CSV)
    assert [row.impl for row in rows] == [*NAMES, *NAMES]
    assert {row.ranks for row in rows} == {ranks}
    failed = {row.impl: row.note for row in rows if row.status == "failed"}
    assert "liger_kernel is not installed" in failed.pop("liger")
    if ranks > 1:
        assert "wants the whole vocabulary on one rank" in failed.pop("torch")
    assert not failed


def test_speed_and_errors(results):
    _, path, ranks = results
    for row in read([path], LOSS_CSV):
        if row.status != "ok":
            continue
        flops = 6 * row.tokens * row.hidden * row.vocab / ranks
        expected = flops / (row.ms / 1e3) / (row.matmul_tflops * 1e12)
        assert row.gemm_efficiency == pytest.approx(expected, rel=1e-3)
        assert 0 < row.ms_min <= row.ms <= row.ms_max
        bound = 1e-5 if row.dtype == "float32" else 2e-2
        assert max(row.error_loss, row.error_dhidden, row.error_dweight) < bound
        assert row.peak_gib is None  # CPU memory is not measured


def test_a_wrong_result_is_no_peer_and_time_ends_a_run(results):
    for rows, none, bad in results[0]:
        assert none == [] and len(rows) == 12
        assert bad.status == "failed" and "results are wrong" in bad.note
        assert bad.error_loss == pytest.approx(0.2, rel=1e-3)


def test_table_and_picture(results, tmp_path):
    rows = read([results[1]], LOSS_CSV)
    text = loss_table(rows)
    assert text.count("\n") == 1 + len(rows) and "| 96 | 32 x 64 |" in text
    (picture,) = draw_loss(rows, tmp_path / "a")
    assert picture.stat().st_size > 10_000
    (wider,) = draw_loss([replace(row, peak_gib=1.0) for row in rows], tmp_path / "b")
    alone, beside = (int.from_bytes(path.read_bytes()[16:20]) for path in (picture, wider))
    assert beside > alone  # no memory panel where none was measured


def test_without_names_what_can_run_is_measured(monkeypatch, capsys):
    """The others are named once, with the reason."""
    monkeypatch.setattr(loss_peers, "find_spec", lambda name: name == "megatron" or None)
    for ranks, left_out in ((1, 9), (2, 11)):
        world = SimpleNamespace(size=ranks, progress=Progress(talks=True))
        usual = [peer.name for peer in usual_peers(world)]
        said = capsys.readouterr().err
        assert len(usual) == len(PEERS) - left_out and "burst:recompute" in usual
        assert "liger (liger_kernel is not installed)" in said and said.count("\n") == 1


def test_unknown_implementations_are_refused():
    with pytest.raises(BurstError, match="got 'ligre'; choose among burst:recompute,"):
        peers_of(["ligre"])


def test_cases_come_in_the_order_in_which_they_are_named():
    listed = listed_cases(["32K,4096,128K", "8K,64,1M"], "bfloat16")
    assert listed == [
        LossCase(32 << 10, 4096, 128 << 10, "bfloat16"), LossCase(8 << 10, 64, 1 << 20, "bfloat16")
    ]  # fmt: skip
    with pytest.raises(BurstError, match="--case must name tokens, width and classes.*'32K,4096'"):
        listed_cases(["32K,4096"], "bfloat16")
    crossed = cases_of("quick", "2K,1K", "", "8,16", "float32")
    assert [(x.tokens, x.hidden, x.vocab) for x in crossed] == [
        (2048, 4096, 8), (2048, 4096, 16), (1024, 4096, 8), (1024, 4096, 16)
    ]  # fmt: skip


def test_logits_of_the_drawn_head_are_of_order_one():
    from benchmarks.loss_heads import draw

    group = SimpleNamespace(size=lambda: 2)
    x = draw(LossCase(64, 256, 128, "float32"), 1, torch.device("cpu"), group)
    assert x.weight.shape == (64, 256)
    assert 0.8 < float((x.hidden @ x.weight.t()).detach().std()) < 1.2


MEASURED = read([ROOT / "benchmarks" / "results" / "loss_h200.csv"], LOSS_CSV)
PAGE = ROOT / "docs" / "benchmarks" / "loss.md"


def test_the_picture_names_what_never_ran(monkeypatch, tmp_path):
    """Guards against crosses in a colour that the legend does not name, and a mode that is gone."""
    shown = []
    monkeypatch.setattr("benchmarks.style.legend_below", shown.append)
    draw_loss(MEASURED, tmp_path / "a")
    named = {name for axis in shown[0].axes for name in axis.get_legend_handles_labels()[1]}
    assert named == {*(row.impl for row in MEASURED), "not possible"} - {"burst:auto"}


def test_a_run_is_compared_with_megatron_of_its_day():
    alone = [replace(row, date="2026-11-20" + row.date[10:]) if row.impl == "liger" else row
             for row in MEASURED]  # fmt: skip
    lines = [line for line in loss_table(alone).splitlines() if "| liger |" in line]
    assert len(lines) > 10 and {line.split(" | ")[5] for line in lines} == {"-"}


def test_of_several_runs_of_a_day_the_nearest_in_time_counts():
    native = next(row for row in MEASURED if row.impl == "megatron:fused" and row.ms)
    early, late, row = (
        replace(native, date=f"2026-11-20T{hour:02}:00:00+00:00", ms=ms, impl=impl)
        for hour, ms, impl in ((1, 2.0, native.impl), (9, 3.0, native.impl), (8, 1.0, "liger"))
    )
    assert native_of(row, [early, late, row]) is late


def test_sentences_of_the_page_follow_from_the_rows():
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    heads, spans = {}, {}
    for row in MEASURED:
        if (row.hidden, row.vocab) == (4096, 131072):
            heads.setdefault((row.date[:10], row.ranks, row.tokens >> 10), {})[row.impl] = row
    for (_, _, tokens), head in heads.items():
        for impl in ("burst:recompute", "burst:forward"):
            if ratio := Ratio.of(head.get("megatron:fused"), head.get(impl)):
                spans.setdefault((tokens == 8, impl), []).append(ratio.value)
    told = {key: f"{min(found):.2f} to {max(found):.2f}" for key, found in spans.items()}
    for short, words in ((True, "8K tokens"), (False, "32K tokens and more")):
        cells = " | ".join(told[short, impl] for impl in ("burst:recompute", "burst:forward"))
        assert f"| 4096 x 128K, {words} | {cells} |" in text
    short, middle, long = (heads["2026-11-27", 1, tokens] for tokens in (8, 32, 128))
    ours, fast, liger = (middle[of] for of in ("burst:recompute", "burst:forward", "liger"))
    native, unfused = middle["megatron:fused"], middle["megatron:unfused"]
    assert liger.ms < fast.ms and long["quack"].ms < long["burst:forward"].ms
    older = heads["2026-11-21", 1, 256]
    most = max(one["burst:forward"].ms / one["liger"].ms for one in (long, older))
    for figure in (
        f"{Ratio.of(native, ours).value:.2f} times as long as Megatron's fused loss, in "
        f"{ours.peak_gib:.2f} instead of {native.peak_gib:.2f} GiB",
        f"it takes {liger.ms:.0f} ms where `burst:recompute` takes {ours.ms:.0f}",
        f"up to {100 * (most - 1):.0f} % faster than `burst:forward`",
        f"{short['liger'].ms / short['burst:forward'].ms:.2f} times as long as `burst:forward`",
        f"{unfused.ms:.0f} ms and {unfused.peak_gib:.2f} GiB at 32K tokens",
    ):
        assert figure in text
