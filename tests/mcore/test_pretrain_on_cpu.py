"""Whole runs in CPU mode: experts, both FSDPs, pipelines, optimizers, evaluation only.

The reference is always Megatron's own run without context parallelism.
"""

from functools import cache
from importlib.util import find_spec

import pytest

from tests.mcore.lacking import needs, parameters, why_not
from tests.mcore.pretraining import Pretrained, assert_same, pretrain

BURST = "--context-parallel-impl burst"
CP2 = f"{BURST} --context-parallel-size 2"
ODD = """--seq-length 31 --max-position-embeddings 31 --context-parallel-size 1
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"""
EXPERTS = """--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall
    --expert-model-parallel-size 2"""
FSDP2 = "--use-torch-fsdp2 --no-gradient-accumulation-fusion --ckpt-format torch_dist"
MEGATRON_FSDP = """--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params
    --ckpt-format fsdp_dtensor"""
PIPELINE = """--num-layers 4 --pipeline-model-parallel-size 2
    --num-virtual-stages-per-pipeline-rank 2 --micro-batch-size 1"""
SHARDED_STATES = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
MUON = "--optimizer muon --lr 0.01 --min-lr 0.001 --muon-fp32-matmul-prec high --adam-eps 1"
LION = "--optimizer lion --lr 0.01 --min-lr 0.001"
RUNS = {  # ranks and flags of the truth, ranks and flags of a run that must give the same
    "one rank": (
        (1, ODD),
        (1, f"{ODD} {BURST} --burst-keep half --burst-fused-loss --attention-backend flash"),
    ),
    "experts": ((2, EXPERTS), (2, f"{EXPERTS} {CP2}")),
    "FSDP2": ((1, ""), (2, f"{FSDP2} {CP2} --burst-fused-loss")),
    "Megatron-FSDP": (
        (1, ""),
        (2, f"{MEGATRON_FSDP} {CP2} --burst-fused-loss --calculate-per-token-loss"),
    ),
    "interleaved pipeline": ((2, PIPELINE), (4, f"{PIPELINE} {CP2}")),  # stages draw weights apart
    "distributed optimizer, two CP groups": ((1, ""), (4, f"{SHARDED_STATES} {CP2}")),
    "Muon": ((1, MUON), (2, f"{MUON} {CP2} --burst-fused-loss")),
    "Lion": ((1, LION), (2, f"{LION} {CP2} --burst-fused-loss")),
    "evaluation alone": ((1, "--skip-train"), (2, f"--skip-train {CP2} --burst-fused-loss")),
}
pytestmark = [pytest.mark.numeric, needs("training")]


def why(run: tuple) -> str:
    """Why this Megatron cannot run it."""
    needed = {"torch FSDP2": FSDP2, "Megatron-FSDP": MEGATRON_FSDP, "experts": EXPERTS}
    if "--optimizer" in run[1][1]:
        missing = "" if find_spec("emerging_optimizers") else "Emerging-Optimizers is not installed"
        return why_not("emerging optimizers") or missing
    return "".join(why_not(need) for need, flags in needed.items() if flags in run[1][1])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs (ranks, flags), each pair only once."""
    return cache(lambda ranks, flags: pretrain(tmp_path_factory.mktemp("run"), ranks, flags))


@pytest.mark.parametrize("name", parameters(RUNS, why))
def test_a_run_with_burst_gives_what_megatrons_own_gives(run, name):
    truth, got = (run(*each) for each in RUNS[name])
    assert len(truth.evaluated) == 2  # of the validation and the test set
    losses = [step["lm loss"] for step in truth.steps]
    if name == "evaluation alone":
        assert not losses
    else:
        assert len(losses) == 2 and losses[1] < losses[0] - 0.1
    assert_same(got, truth)


@needs("torch FSDP2")
def test_fsdp2_does_not_divide_gradients_by_tokens_which_is_said(run):
    """Megatron's own, without burst: if it does divide, the warning must go."""
    truth, got = run(1, ""), run(1, f"{FSDP2} --calculate-per-token-loss")
    for step, true in zip(got.steps, truth.steps, strict=True):
        assert step["grad norm"] == pytest.approx(4 * 32 * true["grad norm"], rel=2e-5)
    said = "--calculate-per-token-loss must be left out"
    assert [any(said in line for line in each.said) for each in (truth, got)] == [False, True]


@pytest.mark.skipif(bool(why(RUNS["Muon"])), reason=why(RUNS["Muon"]))
def test_a_run_with_burst_continues_one_without(tmp_path):
    """As test_checkpoints.py has it for Adam."""
    flags = f"{MUON} --ckpt-format torch_dist"
    whole = pretrain(tmp_path, 1, f"{flags} --save saved --save-interval 1")
    got = pretrain(tmp_path, 2, f"{flags} {CP2} --burst-fused-loss --load saved --ckpt-step 1")
    assert_same(got, Pretrained(whole.steps[1:], whole.evaluated))
