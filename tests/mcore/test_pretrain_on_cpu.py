"""Whole runs in CPU mode: burst with experts, both FSDPs, evaluation alone, checkpoints.

The truth is in each case a run of Megatron's own without context parallelism.
"""

from functools import cache

import pytest

from tests.mcore.pretraining import Pretrained, pretrain

BURST = "--context-parallel-impl burst"
CP2 = f"{BURST} --context-parallel-size 2"
ODD = """--seq-length 31 --max-position-embeddings 31 --context-parallel-size 1
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"""
EXPERTS = """--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall
    --expert-model-parallel-size 2"""
FSDP2 = "--use-torch-fsdp2 --no-gradient-accumulation-fusion --ckpt-format torch_dist"
MEGATRON_FSDP = """--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params
    --ckpt-format fsdp_dtensor"""
RUNS = {  # ranks and flags of the truth, ranks and flags of a run that must give the same
    "one rank": (
        (1, ODD),
        (1, f"{ODD} {BURST} --burst-keep half --burst-fused-loss --attention-backend flash"),
    ),
    "experts": ((2, EXPERTS), (2, f"{EXPERTS} {CP2}")),
    "FSDP2": ((1, ""), (2, f"{FSDP2} {CP2}")),
    "Megatron-FSDP": ((1, ""), (2, f"{MEGATRON_FSDP} {CP2}")),
    "evaluation alone": ((1, "--skip-train"), (2, f"--skip-train {CP2} --burst-fused-loss")),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs ranks and flags, the same ones only once."""
    return cache(lambda ranks, flags: pretrain(tmp_path_factory.mktemp("run"), ranks, flags))


def assert_same(got: Pretrained, truth: Pretrained) -> None:
    """Equal to the rounding of float32, in which losses near 5 are stored to 5e-7."""
    for step, true in zip(got.steps, truth.steps, strict=True):
        assert step["iteration"] == true["iteration"]
        assert step["lm loss"] == pytest.approx(true["lm loss"], abs=2e-6)
        assert step["grad norm"] == pytest.approx(true["grad norm"], rel=2e-5)
    assert got.evaluated == pytest.approx(truth.evaluated, abs=2e-6)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_burst_gives_what_megatrons_own_gives(run, name):
    truth, got = (run(*each) for each in RUNS[name])
    assert len(truth.evaluated) == 2  # of the validation and the test set
    losses = [step["lm loss"] for step in truth.steps]
    if name == "evaluation alone":
        assert not losses
    else:
        assert len(losses) == 2 and losses[1] < losses[0] - 0.1
    assert_same(got, truth)


def test_a_checkpoint_of_a_run_with_burst_goes_on_with_it_and_without(tmp_path):
    """In torch_dist, for the writing of which Megatron needs psutil."""
    options = "--ckpt-format torch_dist --train-iters 3"
    whole = pretrain(tmp_path, 2, f"{CP2} {options} --save saved --save-interval 2")
    assert [step["iteration"] for step in whole.steps] == [1, 2, 3]
    load = f"{options} --load saved --ckpt-step 2"
    rest = Pretrained(whole.steps[2:], whole.evaluated)
    on = pretrain(tmp_path, 2, f"{CP2} {load}")
    values = ("iteration", "lm loss", "grad norm")
    assert [[s[v] for v in values] for s in on.steps] == [
        [s[v] for v in values] for s in rest.steps
    ]
    assert on.evaluated == rest.evaluated
    assert_same(pretrain(tmp_path, 1, load), rest)
