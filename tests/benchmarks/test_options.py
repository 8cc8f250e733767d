"""Options become problems and implementations, or are refused in one sentence."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import attention, loss, recompute
from benchmarks.cases import PRESETS, Case, Grid, head_counts, head_dims, narrowed
from benchmarks.impls import TE_MODES as MODES
from benchmarks.impls import impls_of
from megatron_burst.config import BurstConfig, Force
from megatron_burst.errors import BurstError
from megatron_burst.tools.units import whole_numbers
from tests.sampling import whole

K = 1024
ROOT = Path(__file__).parents[2]
APPS = {"attention": attention.app, "loss": loss.app, "recompute": recompute.app}


def test_sizes_in_words():
    assert whole_numbers("64K,1m,7", "--seq", "bench") == (64 * K, K * K, 7)
    assert head_counts("32/32,8/1", "bench") == ((32, 32), (8, 1))
    assert head_dims("128") == (128, 128) and head_dims("192/128") == (192, 128)


def test_operations_of_both_masks_and_of_unequal_widths():
    case = Case(100, 3, 4, 2, 8, 8)
    assert case.flops("fwd") == 3 * 4 * 100**2 * 4 * 8 / 2
    assert case.flops("fwd_bwd") == 3.5 * case.flops("fwd")
    assert Case(100, 3, 4, 2, 12, 4, "full").flops("fwd") == 3 * 2 * 100**2 * 4 * (12 + 4)


def test_a_grid_is_the_product_of_its_lists_short_sequences_first():
    cases = Grid((64, 128), ((4, 4), (4, 2)), masks=("full",)).cases()
    assert [(case.seq, case.heads_kv) for case in cases] == [(64, 4), (64, 2), (128, 4), (128, 2)]
    assert {(case.batch, case.mask) for case in cases} == {(1, "full")}


def test_presets_hold_what_they_promise():
    lengths = [64 * K, 128 * K, 256 * K, 512 * K]
    one_node, _ = PRESETS["one-node"]
    assert sorted({case.seq for case in one_node}) == lengths and len(one_node) == 16
    seeds, impls = PRESETS["seeds"]
    assert {case.batch for case in seeds if case.seq == 64 * K} == {1, 2, 4, 8}
    assert {case.seq for case in seeds} == {*lengths, K * K}
    assert {(case.heads_q, case.heads_kv, case.mask) for case in seeds} == {
        (32, 32, "causal"),
        (32, 32, "full"),
    }
    assert "one-gpu" in impls
    for cases, impls in PRESETS.values():
        assert len(set(cases)) == len(cases)
        assert any(impl.name == "burst" for impl in impls_of(impls))
    only = narrowed(one_node, Grid(seqs=(64 * K,), heads=((8, 1),)), "a test")
    assert only == (Case(64 * K, 1, 8, 1),)


def test_implementations_by_name_and_burst_variants_by_field():
    impls = impls_of(("burst", "burst:ring", "te", "te:p2p", "ceiling", "one-gpu:flash"))
    assert [str(impl) for impl in impls] == [
        "burst:auto", "burst:ring", *(f"te:{mode}" for mode in MODES), "ceiling:auto",
        "one_gpu:flash",
    ]  # fmt: skip
    others = impls_of(("torch:alltoall", "ulysses", "yunchang:ring+fa4", "yunchang"))
    assert [str(impl) for impl in others] == [
        "torch:alltoall+cudnn", "torch:alltoall+flash", "ulysses:auto", "yunchang:ring+fa4",
        "yunchang:ring+auto", "yunchang:ulysses+auto", "yunchang:usp+auto",
    ]  # fmt: skip
    text = "intra=gather,backend=cudnn,deterministic=true,heads_per_round=2,timeout_s=1.5"
    (variant,) = impls_of((f"burst:{text}",))
    assert variant.mode == text
    assert variant.config == BurstConfig(
        intra="gather",
        backend="cudnn",
        deterministic=True,
        force=Force(heads_per_round=2),
        timeout_s=1.5,
    )


REFUSALS = {
    "torch's way": (["--impl", "torch:ring"], "got 'torch:ring'.*allgather\\|alltoall"),
    "torch's kernel": (["--impl", "torch:alltoall+fa4"], "must name an implementation.*efficient"),
    "burst field": (["--impl", "burst:intr=ring"], "fields of BurstConfig.*'intr=ring'.*intra"),
    "burst word": (["--impl", "burst:fast"], "given as FIELD=VALUE.*got 'fast'"),
    "burst value": (["--impl", "burst:intra=rign"], "intra must be one of auto, ring, gather"),
    "burst flag": (["--impl", "burst:deterministic=1"], "must be true or false.*got '1'"),
    "burst number": (["--impl", "burst:heads_per_round=x"], "must be a number.*got 'x'"),
    "impl": (["--impl", "ring"], "must name an implementation.*got 'ring'"),
    "te mode": (["--impl", "te:ring"], "must name an implementation.*got 'te:ring'"),
    "preset": (["--preset", "fast"], "--preset must be one that there is.*got 'fast'"),
    "narrowed away": (["--preset", "quick", "--seq", "7"], "options beside --preset must leave"),
    "sequence": (["--seq", "64k,x"], "--seq must be a positive whole number.*got 'x'"),
    "zero": (["--batch", "0"], "--batch must be a positive whole number.*got '0'"),
    "heads": (["--heads", "8/3"], "--heads must list query heads / KV heads.*got '8/3'"),
    "head dim": (["--head-dim", "8/8/8"], "--head-dim must be one width, or two"),
    "mask": (["--mask", "causal,window"], "--mask must list causal or full.*window"),
    "zigzag": (
        ["--seq", "63", "--device", "cpu"],
        "--seq must be a multiple of twice the ranks.*got 63 on 1 ranks; .* of 2, such as 62 or 64",
    ),
    "device": (["--device", "cuda"], "--device cuda must find a GPU"),
    "nodes": (
        ["--nodes", "2"],
        "attention: --nodes must divide the number.*got 2 nodes and 1 rank; choose 1, or start",
    ),
    "folder": (
        ["--device", "cpu", "--seq", "64", "--out", "nowhere/a.csv"],
        "attention: --out must name a writable file.*got nowhere/a.csv: its folder",
    ),
}


@pytest.mark.parametrize("options", REFUSALS.values(), ids=REFUSALS)
def test_a_bad_option_is_refused_in_one_sentence(options, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    arguments, words = options
    result = CliRunner().invoke(attention.app, arguments)
    assert result.exit_code == 2 and result.output.startswith("error: benchmarks.") is (
        "intra=rign" not in arguments[1]
    )
    with pytest.raises(BurstError, match=words):
        raise BurstError(result.output)


OTHER_COMMANDS = {
    "loss, tokens": (["loss", "--tokens", "x"], "benchmarks.loss: --tokens must be a .*got 'x'"),
    "loss, hidden": (["loss", "--hidden", "0"], "benchmarks.loss: --hidden must be a .*got '0'"),
    "loss, case": (["loss", "--case", "1,x,3"], "benchmarks.loss: --case must be a .*got 'x'"),
    "loss, folder": (
        ["loss", "--out", "no/a.csv"],
        "benchmarks.loss: --out must .*got no/a.csv: its",
    ),
    "sequence": (["recompute", "--seq", "x"], "benchmarks.recompute: --seq must be a .*got 'x'"),
    "heads": (
        ["recompute", "--heads", "8/3"],
        "benchmarks.recompute: --heads must list .*got '8/3'",
    ),
    "two pairs": (["recompute", "--heads", "8/2,4/2"], "recompute: --heads must be one pair"),
    "mode": (["recompute", "--mode", "foo"], "benchmarks.recompute: --mode must name .*got 'foo'"),
    "nodes": (["recompute", "--nodes", "3"], "benchmarks.recompute: --nodes must divide .*1 rank;"),
    "folder": (["recompute", "--out", "no/a.csv"], "recompute: --out must .*got no/a.csv: its"),
}


@pytest.mark.parametrize("options", OTHER_COMMANDS.values(), ids=OTHER_COMMANDS)
def test_other_commands_refuse_under_their_own_name(options, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    arguments, words = options
    name, *options = arguments
    done = CliRunner().invoke(APPS[name], options)
    assert done.exit_code == 2 and done.output.startswith("error: benchmarks.")
    assert re.search(words, done.output), done.output
    assert not list(tmp_path.iterdir())


BELOW = [
    *(["recompute", option, "-32"] for option in ("--hidden", "--ffn", "--head-dim", "--batch")),
    *(["recompute", option, "0"] for option in ("--layers", "--reps", "--nodes")),
    *([name, "--budget-s", "-1"] for name in ("attention", "recompute", "loss")),
    ["attention", "--nodes", "0"],
]


@pytest.mark.parametrize("options", BELOW, ids=" ".join)
def test_numbers_below_what_makes_sense_are_refused(options):
    name, *given = options
    done = CliRunner().invoke(APPS[name], given)
    assert done.exit_code == 2 and f"Invalid value for '{options[1]}'" in done.output


@pytest.mark.parametrize("options", ["--mode foo", *whole("--out no/a.csv")])
def test_recomputation_is_refused_before_megatron_is_loaded(options):
    """Guards against a message buried under Megatron's warnings."""
    command = [sys.executable, "-m", "benchmarks.recompute", "--device", "cpu", *options.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: benchmarks.recompute: --")
    assert done.stderr.count("\n") == 1


def test_one_process_alone_measures_and_shows_a_table(tmp_path):
    out = tmp_path / "alone.csv"
    options = ["--seq", "64", "--heads", "4/2", "--head-dim", "8", "--reps", "1", "--device", "cpu"]
    done = CliRunner().invoke(attention.app, [*options, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "1 of 1: " in done.stderr and "1 of 1: " not in done.stdout
    assert "burst / ceiling" in done.output and "te:p2p failed: TransformerEngine" in done.output
    assert len(out.read_text().splitlines()) == 1 + 2 * 6
