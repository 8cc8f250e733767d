"""Packed samples and windows: lengths, areas, which rank has which rows, a run on real
processes."""

import re
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import packed
from benchmarks.documents import area, lengths_of
from benchmarks.impls import Impl
from benchmarks.packed_cases import PackedCase, PackedGrid, Problem, packed_problems
from benchmarks.packed_peers import PackedBurst, PackedCeiling, PackedTransformerEngine, Sample
from benchmarks.rows import read
from benchmarks.sheets import PACKED_CSV
from benchmarks.show import app as show
from megatron_burst.schedule.mask import Mask
from megatron_burst.tools.terminal import Progress
from tests.oracle import full_attention, seen_by
from tests.ranks import preload, run_ranks

preload("benchmarks.packed")
SMALL = {
    "seq": 512, "heads_q": 4, "heads_kv": 2, "head_dim_qk": 8, "head_dim_v": 8, "dtype": "float32",
}  # fmt: skip
DOCUMENTS, WINDOW = PackedCase(**SMALL, documents="half"), PackedCase(**SMALL, window=100)
TREE = PackedCase(**SMALL, documents="tree-3")
LENGTHS = (*[8] * 16, 256, *[8] * 16)
IMPLS = ("burst:auto", "burst:ring@zigzag", "burst:ring@zigzag-documents", "te:p2p", "ceiling")


def world(size, rank=0, device="cpu"):
    return SimpleNamespace(
        rank=rank, size=size, nodes=1, device=torch.device(device), group="the group"
    )


def seen(case):
    """[queries, keys], checked one by one."""
    mask = Mask(case.window, 0, bool(case.documents))
    return seen_by(mask, case.edges, case.seq, case.parents or ())


def test_drawn_samples_are_as_published():
    """64K tokens hold 39.5 documents covering 11.4 % of the causal area, averaged over the first
    20."""
    lengths = lengths_of("drawn", 65536, 42, 4)
    assert sum(lengths) == 65536 and max(lengths) == 65536 // 4
    assert len(lengths) == pytest.approx(39.5, abs=2)
    assert 2 * area(lengths) / 65536**2 == pytest.approx(0.114, abs=0.005)
    assert not any(length % 4 for length in lengths)
    short = [lengths_of("drawn", 4096, seed, 16) for seed in (42, 43)]
    assert short[0] != short[1] and {sum(each) for each in short} == {4096}
    assert not any(length % 16 for each in short for length in each)


def test_samples_that_are_made_up():
    assert DOCUMENTS.lengths == LENGTHS and sum(LENGTHS) == 512
    assert lengths_of("one", 512, 42, 4) == (512,)
    assert TREE.lengths == (256, 84, 84, 88) and TREE.parents == (-1, 0, 0, 0)
    assert lengths_of("each-150", 512, 42, 4) == (148, 152, 148, 64)


@pytest.mark.parametrize("case", [DOCUMENTS, WINDOW, TREE], ids=["documents", "window", "tree"])
def test_work_is_counted_by_the_keys_that_queries_see(case):
    pairs = int(seen(case).sum())
    if case.documents:  # half of each square, as is usual
        pairs -= 512 / 2
    assert case.area == pairs
    assert case.flops("fwd") == 4 * pairs * 4 * 8 and case.flops("fwd_bwd") == 3.5 * 4 * pairs * 32


def test_every_layout_shards_the_same_sample():
    whole = Sample(DOCUMENTS, world(1)).shard("zigzag")
    for layout in ("", "zigzag", "contiguous"):
        parts = [Sample(DOCUMENTS, world(2, rank)).shard(layout) for rank in range(2)]
        places = torch.cat([part.places for part in parts])
        assert sorted(places.tolist()) == list(range(512))
        for name in ("q", "k", "v", "dout"):
            rows = torch.cat([getattr(part, name) for part in parts])
            assert torch.equal(rows, getattr(whole, name)[places])
    first = Sample(DOCUMENTS, world(2)).shard("").places[:8].tolist()
    assert first == [0, 1, 6, 7, 8, 9, 14, 15]  # chunks 0 and 3 of the first two documents


@pytest.mark.parametrize("case", [DOCUMENTS, WINDOW, TREE], ids=["documents", "window", "tree"])
def test_the_ceiling_computes_what_queries_see(case):
    peer = PackedCeiling(Impl("ceiling", "auto"), world(2))
    peer.prepare(Sample(case, world(2)))
    q, k, v = (x.double().requires_grad_() for x in peer.tensors[:3])
    assert q.shape == (1, 512, 2, 8) and k.shape[2] == 1
    out = full_attention(q, k, v, False, 8**-0.5, seen(case))
    truth = (out, *torch.autograd.grad(out, (q, k, v), peer.tensors[3].double()))
    for ours, expected in zip(peer.run_forward_backward(), truth, strict=True):
        torch.testing.assert_close(ours.double(), expected, atol=1e-5, rtol=1e-5)


def test_transformer_engine_is_told_documents_or_the_window():
    peer = PackedTransformerEngine(Impl("te", "p2p"), world(2))
    calls = []
    peer.attention = lambda *tensors, **options: calls.append((tensors[0].dim(), options))
    for case in (DOCUMENTS, WINDOW):
        peer.shard = Sample(case, world(2)).shard("")
        peer.attend(peer.shard.q, peer.shard.k, peer.shard.v)
    (dims, options), windowed = calls
    edges = [0, *accumulate(LENGTHS)]
    assert dims == 3 and options["qkv_format"] == "thd" and options["max_seqlen_kv"] == 256
    assert options["attn_mask_type"] == "padding_causal"
    for name in ("q", "kv", "q_padded", "kv_padded"):
        assert options[f"cu_seqlens_{name}"].tolist() == edges
    assert windowed == (4, {"window_size": (100, 0)})


def test_transformer_engine_is_left_out_of_trees_with_a_reason():
    peer = PackedTransformerEngine(Impl("te", "p2p"), world(2))
    assert peer.refusal(TREE) == "it has no prefix trees"


class Said(Progress):
    """Keeps what it would show."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def say(self, text):
        self.lines.append(text)


def bench(rank, folder):
    """Rows of a run, and the errors between implementations that it reported."""
    from megatron_burst.tools.world import world_of

    few = "burst:auto", "burst:a2a", "ceiling"
    problems = [Problem(DOCUMENTS, IMPLS), Problem(WINDOW, few), Problem(TREE, few)]
    plan = packed.plan_of(problems, reps=2, out=folder / "packed.csv")
    said = Said()
    return packed.measure(plan, replace(world_of("cpu"), progress=said)), said.lines


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    return run_ranks(bench, 2, folder), folder / "packed.csv"


def test_a_run_measures_documents_and_windows(results):
    _, path = results
    rows = read([path], PACKED_CSV)
    assert [(row.impl, row.mode) for row in rows[:5]] == [
        ("burst", "auto"), ("burst", "ring@zigzag"), ("burst", "ring@zigzag-documents"),
        ("te", "p2p"), ("ceiling", "auto"),
    ]  # fmt: skip
    assert [row.status for row in rows[:5]] == ["ok", "ok", "ok", "failed", "ok"]
    assert "TransformerEngine" in rows[3].note
    assert {row.status for row in rows[10:]} == {"ok"} and len(rows) == 2 * (5 + 3 + 3)
    cases = {"half": DOCUMENTS, "window-100": WINDOW, "tree-3": TREE}
    assert list(dict.fromkeys(row.mask for row in rows)) == list(cases)
    assert (rows[0].num_documents, rows[0].longest, rows[0].seed) == (33, 256, 42)
    for row in rows:
        case = cases[row.mask]
        if row.ms:
            expected = case.flops(row.pass_) / 2 / (row.ms / 1e3) / 1e12
            assert row.tflops_per_gpu == pytest.approx(expected, rel=1e-4)


def test_results_agree_in_every_layout_and_mode_before_times_are_told(results):
    """In float32, sums of at most 512 terms differ by less than 512 * 2**-24."""
    ((_, said), (_, other)), _ = results
    told = [line for line in said if "differs by" in line]
    assert [line.split(": differs")[0] for line in told] == [
        "burst:ring@zigzag", "burst:ring@zigzag-documents", "burst:a2a", "burst:a2a",
    ]  # fmt: skip
    for line in told:
        errors = [float(number) for number in re.findall(r"(?:out|dq|dk|dv) ([\d.e+-]+)", line)]
        assert len(errors) == 4 and max(errors) < 512 * 2**-24
    assert other == []


def test_the_table_names_the_best(results):
    _, path = results
    table = CliRunner().invoke(show, ["table", str(path)]).output
    assert "| half |" in table and "| window-100 |" in table


def test_presets_begin_with_drawn_documents_and_lists_narrow_them_down():
    every = packed_problems("one-node", PackedGrid(), ())
    assert every[0].case.documents == "drawn" and {64, 32} == {p.case.heads_q for p in every}
    assert {p.case.seq // 1024 for p in every if p.case.documents == "drawn"} == {32, 64, 128, 256}
    narrowed = packed_problems("one-node", PackedGrid(windows=(4096,)), ("burst:auto",))
    assert {p.case.window for p in narrowed} == {4096} and len(narrowed) == 4
    assert {p.impls for p in narrowed} == {("burst:auto",)}


REFUSALS = {
    "documents": (["--documents", "many"], "--documents must list drawn.*got 'many'"),
    "size": (["--documents", "each-x"], "each-N must be a positive whole number.*got 'x'"),
    "layout": (["--impl", "burst:auto@spiral"], "must name an.*got 'burst:auto@spiral'.*zigzag"),
    "te's layout": (["--impl", "te:p2p@zigzag"], "must name an implementation"),
    "one gpu": (["--impl", "one-gpu"], "must name an implementation.*got 'one-gpu'"),
    "preset": (["--preset", "fast"], "--preset must be one that there is.*got 'fast'"),
    "narrowed": (["--preset", "one-node", "--seq", "7"], "options beside --preset must leave"),
    "sequence": (["--seq", "66"], "--seq must be a multiple of 4.*got 66 on 1 ranks; .*64 or 68"),
    "window": (["--window", "x"], "--window must be a positive whole number.*got 'x'"),
}


@pytest.mark.parametrize("options", REFUSALS.values(), ids=REFUSALS)
def test_a_bad_option_is_refused_in_one_sentence(options):
    arguments, words = options
    result = CliRunner().invoke(packed.app, [*arguments, "--device", "cpu"])
    assert result.exit_code == 2 and result.output.startswith("error: benchmarks.packed: ")
    assert re.search(words, " ".join(result.output.split()))


def test_bursts_layout_is_behind_the_mode():
    (impl,) = packed.packed_impls(("burst:a2a@zigzag",))
    assert impl.mode == "a2a@zigzag" and impl.config.intra == "a2a"
    assert PackedBurst(impl, world(2)).layout == "zigzag"
