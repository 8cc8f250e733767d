"""Options become problems and implementations, or are refused in one sentence."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from megatron_burst.cli.cases import PRESETS, Case, Grid, counts, head_counts, head_dims
from megatron_burst.cli.impls import TE_MODES, impls_of
from megatron_burst.cli.main import app
from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError

K = 1024


def test_sizes_in_words():
    assert counts("64K,1m,7", "--seq") == (64 * K, K * K, 7)
    assert head_counts("32/32,8/1") == ((32, 32), (8, 1))
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
    one_host = PRESETS["one-host"]
    assert sorted({case.seq for case in one_host.cases}) == lengths and len(one_host.cases) == 16
    seeds = PRESETS["seeds"]
    assert {case.batch for case in seeds.cases if case.seq == 64 * K} == {1, 2, 4, 8}
    assert {case.seq for case in seeds.cases} == {*lengths, K * K}
    assert {(case.heads_q, case.heads_kv, case.mask) for case in seeds.cases} == {
        (32, 32, "causal"),
        (32, 32, "full"),
    }
    assert "one-gpu" in seeds.impls
    for preset in PRESETS.values():
        assert len(set(preset.cases)) == len(preset.cases)
        assert any(impl.name == "burst" for impl in impls_of(preset.impls))
    only = one_host.narrowed(Grid(seqs=(64 * K,), heads=((8, 1),)))
    assert only == (Case(64 * K, 1, 8, 1),)


def test_implementations_by_name_and_burst_variants_by_field():
    impls = impls_of(("burst", "burst:ring", "te", "te:p2p", "ceiling", "one-gpu:flash"))
    assert [str(impl) for impl in impls] == [
        "burst:auto", "burst:ring", *(f"te:{mode}" for mode in TE_MODES), "ceiling:auto",
        "one_gpu:flash",
    ]  # fmt: skip
    text = "intra=gather,backend=cudnn,deterministic=true,heads_per_round=2,timeout_s=1.5"
    (variant,) = impls_of((f"burst:{text}",))
    assert variant.mode == text
    assert variant.config == BurstConfig(
        intra="gather", backend="cudnn", deterministic=True, heads_per_round=2, timeout_s=1.5
    )


REFUSALS = {
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
    "heads": (["--heads", "8/3"], "--heads must list query heads / key heads.*got '8/3'"),
    "head dim": (["--head-dim", "8/8/8"], "--head-dim must be one width, or two"),
    "mask": (["--mask", "causal,window"], "--mask must list causal or full.*window"),
    "zigzag": (
        ["--seq", "63", "--device", "cpu"],
        "--seq must be a multiple of twice the ranks.*got 63 on 1 ranks; .* of 2, such as 62 or 64",
    ),
    "device": (["--device", "cuda"], "--device cuda must find a GPU"),
}


@pytest.mark.parametrize("options", REFUSALS.values(), ids=REFUSALS)
def test_a_bad_option_is_refused_in_one_sentence(options, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    arguments, words = options
    result = CliRunner().invoke(app, ["bench", "attention", *arguments])
    assert result.exit_code == 1 and result.output.startswith("error: bench") is (
        "intra=rign" not in arguments[1]
    )
    with pytest.raises(BurstError, match=words):
        raise BurstError(result.output)


def test_one_process_alone_measures_and_shows_a_table(tmp_path):
    out = tmp_path / "alone.csv"
    options = ["--seq", "64", "--heads", "4/2", "--head-dim", "8", "--reps", "1", "--device", "cpu"]
    done = CliRunner().invoke(app, ["bench", "attention", *options, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "burst / ceiling" in done.output and "te:p2p failed: TransformerEngine" in done.output
    assert len(out.read_text().splitlines()) == 1 + 2 * 6


def modules_after(statement):
    code = f"{statement}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_package_does_not_load_the_command_line_nor_that_torch():
    assert "megatron_burst.cli" not in modules_after("import megatron_burst")
    loaded = modules_after("import megatron_burst.cli.main")
    assert "megatron_burst.cli.bench" in loaded and not {"torch", "matplotlib"} & loaded
