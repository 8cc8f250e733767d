"""Layers of multi-token prediction: weights, time, memory and flags, counted by hand.

Guards against a plan of DeepSeek-V3 or GLM-4.5 without the layer and the pass of the head that
their training has.
"""

from dataclasses import replace

import pytest

from megatron_burst.tools.hardware_file import preset
from megatron_burst.tools.job.hugging_face import PRESETS
from megatron_burst.tools.job.layer_time import HEAD, MATMUL
from megatron_burst.tools.job.memory import memory_of
from megatron_burst.tools.job.model import Model
from megatron_burst.tools.job.model_flags import model_flags
from megatron_burst.tools.job.step import step_time
from megatron_burst.tools.job.strategy import Job, Strategy
from megatron_burst.tools.job.weights import params_of_rank

DEEPSEEK = PRESETS["deepseek-v3"]
LLAMA = Model("x", 4, 4096, 32, 8, 128, 128, 14336, 128256, predicted=1)
HIDDEN = 8  # KiB of a token in bf16
LAYER = 4096 * (4096 + 2048) + 4096 * 4096 + 3 * 4096 * 14336


def job(model, strategy):
    return Job(model, 1 << 18, strategy.gpus, 8, 8, preset("h200"))


def kib(part, model, **how):
    """A part of the memory, in KiB per token of a rank."""
    strategy = Strategy(cp=4, **how)
    return getattr(memory_of(job(model, strategy), strategy), part) / (1 << 16) / 1024


def parts(model, **how):
    strategy = Strategy(cp=4, **how)
    asked = job(model, strategy)
    return dict(step_time(asked, strategy, memory_of(asked, strategy)).parts)


def test_weights_of_deepseeks_prediction_layer():
    """Its card has 14B of prediction, with embedding and head, which the model shares."""
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    experts = 3 * 7168 * 2048
    dense = attention + 2 * 7168 * 7168 + experts + 7168 * 256
    assert DEEPSEEK.predicted_params == (dense, 256 * experts)
    assert sum(DEEPSEEK.predicted_params) + 2 * 129280 * 7168 == pytest.approx(14e9, rel=0.05)
    without = replace(DEEPSEEK, predicted=0)
    assert DEEPSEEK.params - without.params == dense + 256 * experts
    active = dense + 8 * experts + 129280 * 7168
    assert DEEPSEEK.matmul_params - without.matmul_params == active
    flops = DEEPSEEK.flops_per_token(4096) - without.flops_per_token(4096)
    assert flops == 6 * active + 3 * 128 * (192 + 128) * 4096


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_time_is_that_of_a_layer_more_and_of_the_head_again(recompute):
    without, with_one = (replace(LLAMA, predicted=count) for count in (0, 1))
    longer = parts(replace(without, layers=5), recompute=recompute)
    found, plain = (parts(one, recompute=recompute) for one in (with_one, without))
    assert found[HEAD] == pytest.approx(2 * plain[HEAD])
    # the join: products of 2 H x H, in forward, twice in backward, and again if recomputed
    share = 2 * 4096**2 * (3 + (recompute == "full")) / (3 * LAYER)
    a_layer = longer[MATMUL] - plain[MATMUL]
    assert found[MATMUL] - longer[MATMUL] == pytest.approx(share * a_layer, rel=0.01)
    for part in ("attention kernels", "element-wise kernels"):
        assert found[part] == pytest.approx(longer[part])


def test_of_a_hybrid_it_is_two_letters():
    halves = replace(LLAMA, layers=8, pattern="*-" * 4)
    longer = replace(halves, layers=10, pattern="*-" * 5, predicted=0)
    for part in ("attention kernels", "element-wise kernels"):
        assert parts(halves)[part] == pytest.approx(parts(longer)[part])
    assert kib("saved", halves) == kib("saved", longer)


def test_time_of_a_stage_with_fewer_layers_has_room_for_it():
    """Of 7 layers on 2 stages, the last has 3."""
    seven = replace(LLAMA, layers=7)
    eight = parts(replace(seven, predicted=0), pp=2)
    assert parts(seven, pp=2)["attention kernels"] == pytest.approx(eight["attention kernels"])
    more = parts(replace(LLAMA, layers=8), pp=2)
    assert more["attention kernels"] > 1.2 * eight["attention kernels"]


@pytest.mark.parametrize(("recompute", "joined"), [("full", HIDDEN), ("none", 5 * HIDDEN)])
def test_memory_is_that_of_a_layer_more_and_of_the_head_again(recompute, joined):
    without = replace(LLAMA, predicted=0)
    longer = replace(without, layers=5)
    for part in ("saved", "layer"):
        assert kib(part, LLAMA, recompute=recompute) == kib(part, longer, recompute=recompute)
    again = kib("head", LLAMA, recompute=recompute) - kib("head", without, recompute=recompute)
    assert again == pytest.approx(2 * HIDDEN + joined)  # the head's input and its gradient
    own = {"recompute": recompute, "fused_loss": False}
    logits = kib("head", LLAMA, **own) - kib("head", without, **own) - again
    assert logits == pytest.approx(128256 * (2 + 4 + 2) / 1024)


def test_the_last_stage_has_its_weights_embedding_and_head():
    strategy = Strategy(cp=4, pp=2)
    words = 128256 * 4096
    assert params_of_rank(job(LLAMA, strategy), strategy) == (
        2 * LAYER + (LAYER + 2 * 4096**2) + 2 * words, 0
    )  # fmt: skip
    without = replace(LLAMA, predicted=0)
    assert params_of_rank(job(without, strategy), strategy) == (2 * LAYER + words, 0)
    # 14, 14, 14 and 11 + 1 layers: the first is the largest
    four, uneven = Strategy(cp=2, pp=4), replace(LLAMA, layers=53, vocab=1)
    assert params_of_rank(job(uneven, four), four)[0] == 14 * LAYER + 4096


def test_its_flag():
    assert model_flags(DEEPSEEK)["--mtp-num-layers"] == 1
    assert not model_flags(replace(DEEPSEEK, predicted=0)).get("--mtp-num-layers")
