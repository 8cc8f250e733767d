"""Keeping under Megatron's recomputation, schedules and multi-token prediction.

Every gradient is compared with that of the same model without recomputation, which sums in the same
order. Guards against results that reach another layer or micro-batch, recomputation with needless
compute or communication, and layers that keep when they should not.
"""

import gc
from dataclasses import dataclass, replace

import pytest

from megatron_burst.config import BurstConfig, Force
from tests.mcore import pipeline
from tests.mcore.gpt import BLOCK_RECOMPUTE, FULL_RECOMPUTE, SELECTIVE_RECOMPUTE
from tests.mcore.lacking import why_not
from tests.mcore.pipeline import (
    LAYERS,
    Setting,
    build,
    config_for,
    kept_recordings,
    relative_error,
    run_step,
)
from tests.ranks import run_ranks
from tests.sampling import whole

# three micro-batches: the first stage of 1F1B has warm-up, steady state and cool-down
HAS_MTP = not (why_not("MTP") or why_not("recomputed MTP"))
MTP = Setting(pp=2, cp=2, mtp=HAS_MTP, micro_batches=3)
VPP = Setting(pp=2, vp=2, cp=2, mtp=HAS_MTP)
TWO = Setting(
    pp=2, cp=2, micro_batches=3
)  # for two layers a checkpoint: layers of MTP are recomputed alone
PAIRS, BOTH_BLOCK = (
    options | dict(recompute_num_layers=2) for options in (FULL_RECOMPUTE, BLOCK_RECOMPUTE)
)
ALL, HALF = BurstConfig(keep="all"), BurstConfig(keep="half")
MODULES = BurstConfig(keep="all", keep_modules=("linear_qkv", "linear_proj", "linear_fc1"))
AUTO = dict(keep="auto", keep_budget_gib=1.0, keep_host_gib=1.0)


@dataclass(frozen=True)
class Case:
    """A case of keeping, and how many attention calls recomputation then makes per step.

    Attributes:
        burst: options.
        recompute: Megatron's options.
        recomputed: layers of a stage whose attention is computed again, MTP's not counted; with
            chunks of two layers (1F1B) and of one (interleaved).
        mtp_recomputed: the same of MTP's layer.
    """

    burst: BurstConfig
    recompute: tuple = tuple(FULL_RECOMPUTE.items())
    recomputed: tuple[int, int] = (0, 0)
    mtp_recomputed: int = 0


def recompute(options: dict) -> tuple:
    return tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in options.items())


BOTH, ONE = dict(recomputed=(2, 2), mtp_recomputed=1), dict(recomputed=(1, 1), mtp_recomputed=1)
OFFLOAD, FIRST = (
    BurstConfig(keep="all", keep_offload="results"),
    BurstConfig(keep="all", keep_layers=1),
)
CASES = {
    "none": Case(BurstConfig(), **BOTH),
    "none, block": Case(BurstConfig(), recompute(BLOCK_RECOMPUTE), (1, 2)),
    "all": Case(ALL),
    "all, two layers a checkpoint": Case(ALL, recompute(PAIRS)),
    "all, block": Case(ALL, recompute(BLOCK_RECOMPUTE)),
    "all, selective": Case(ALL, recompute(SELECTIVE_RECOMPUTE)),
    "all, q circulates": Case(BurstConfig(keep="all", force=Force(circulate="q"))),
    "all, offload, debug": Case(replace(OFFLOAD, keep_debug=True)),
    "all, offload, two": Case(OFFLOAD, recompute(PAIRS)),
    "all, no room on the host": Case(replace(OFFLOAD, keep_host_gib=1e-5)),
    "all, modules": Case(MODULES),
    "all, modules, block": Case(MODULES, recompute(BLOCK_RECOMPUTE)),
    "all, modules, offload, debug": Case(replace(MODULES, keep_offload="results", keep_debug=True)),
    "all, modules, two layers a checkpoint": Case(MODULES, recompute(PAIRS)),
    "all, modules of one layer": Case(replace(MODULES, keep_layers=1), **ONE),
    "half, modules": Case(replace(MODULES, keep="half"), **BOTH),
    "all of one layer": Case(FIRST, **ONE),
    "auto": Case(BurstConfig(**AUTO)),
    "half": Case(HALF, **BOTH),
    "half, offload": Case(BurstConfig(keep="half", keep_offload="results"), **BOTH),
    "half of one layer": Case(BurstConfig(keep="half", keep_layers=1), **BOTH),
    "all, inputs on the host too": Case(replace(OFFLOAD, keep_offload="both")),  # stays on
    "none, inputs on the host": Case(BurstConfig(keep_offload="inputs", keep_host_gib=1.0), **BOTH),
    "all, two layers, inputs on the host": Case(OFFLOAD, recompute(PAIRS)),
    "all of one layer of two": Case(FIRST, recompute(PAIRS), (1, 1)),
    "all of one layer, block of two": Case(FIRST, recompute(BOTH_BLOCK), (1, 1)),
    "half of one layer of two": Case(
        BurstConfig(keep="half", keep_layers=1), recompute(PAIRS), (2, 2)
    ),
}
# what depends on the chunk, or on the order in which chunks take turns
INTERLEAVED = (
    "none, block", "all, block", "all, modules", "all, offload, debug", "all of one layer", "half",
)  # fmt: skip
# parts that other cases have too, in another combination; with --all only
SELDOM = (
    "all, modules, block", "all, modules, offload, debug", "all, offload, two", "half, modules",
    "half, offload", "half of one layer", "all, two layers, inputs on the host",
    "all, inputs on the host too",
)  # fmt: skip
RUNS = [
    (setting, name)
    for setting in (MTP, VPP, TWO)
    for name, case in CASES.items()
    if (setting is TWO) == (("recompute_num_layers", 2) in case.recompute)
]
USUAL = [
    (setting, name)
    for setting, name in RUNS
    if (name in INTERLEAVED if setting == VPP else name not in SELDOM)
]
PARAMETERS = [*USUAL, *whole(*(run for run in RUNS if run not in USUAL))]
EXACT = [name for name in CASES if not name.startswith("half")]


def compare_all(rank: int, runs: list) -> dict:
    """By setting and case: error; kernel calls beyond those without recomputation, those of one
    attention call, and hops beyond those without."""
    found = {}
    for setting in dict.fromkeys((MTP, VPP, TWO)):
        pipeline.start(setting)
        names = [name for each, name in runs if each == setting]
        ways = sorted({CASES[name].burst.force.circulate for name in names})  # sum orders differ
        truths = {
            way: run_step(
                setting,
                build(setting, config_for(setting, BurstConfig(force=Force(circulate=way)))),
            )
            for way in ways
        }
        gc.freeze()  # later collections scan only what the cases make
        for name in names:
            case = CASES[name]
            truth = truths[case.burst.force.circulate]
            options = {k: list(v) if isinstance(v, tuple) else v for k, v in case.recompute}
            chunks = build(setting, config_for(setting, case.burst, **options))
            evaluate(setting, chunks)
            got = run_step(setting, chunks)
            has_mtp = bool(setting.mtp and chunks[-1].post_process)
            calls = setting.micro_batches * (LAYERS // setting.pp + has_mtp)
            assert truth.kernels % calls == 0
            extra = got.kernels - truth.kernels, truth.kernels // calls, got.hops - truth.hops
            found[setting, name] = relative_error(got, truth), *extra, has_mtp, kept_recordings()
    return found


def evaluate(setting: Setting, chunks: list) -> None:
    """Evaluation before the step, also in training mode; it must leave nothing behind."""
    few = replace(setting, micro_batches=setting.pp)
    for training in (True, False):
        if not (training and setting.mtp):  # MTP's loss then needs a graph
            for chunk in chunks:
                chunk.train(training)
            run_step(few, chunks, forward_only=True)
    for chunk in chunks:
        chunk.train()


@pytest.fixture(scope="module")
def comparisons(once, request):
    def compared():
        return run_ranks(compare_all, 4, RUNS if request.config.getoption("--all") else USUAL)

    return once(compared)


@pytest.mark.parametrize("setting, name", PARAMETERS, ids=str)
def test_gradients_are_those_without_recomputation(comparisons, setting, name):
    """Bitwise, except for the early half, whose kernel calls have other shapes."""
    for results in comparisons:
        error, *_, left = results[setting, name]
        assert error <= (0 if name in EXACT else 1e-12)
        assert left == 0


@pytest.mark.parametrize("setting, name", PARAMETERS, ids=str)
def test_recomputation_runs_no_attention_and_sends_nothing_where_all_is_kept(
    comparisons, setting, name
):
    case = CASES[name]
    for results in comparisons:
        _, kernels, of_call, hops, has_mtp, _ = results[setting, name]
        layers = case.recomputed[setting.vp - 1] + case.mtp_recomputed * has_mtp
        recomputed = setting.micro_batches * layers
        if "half" in name:
            # of a half, which is resharded and returned
            assert kernels >= recomputed and hops >= recomputed
        else:
            assert (kernels, hops) == (of_call * recomputed, recomputed)
