"""The planner's activation memory against figures counted by hand, tensor by tensor.

Guards against tensors left out or counted twice, the layer in backward counted among those that
wait, and a peak taken at the wrong moment of backward.

KiB per token of a rank, Llama-3-8B in bf16: hidden 8, q 8, k 2, v 2, out 8, lse 1/8, first MLP
products 56, activation output 28. The figures for no and full recomputation were measured on 4 H200
with 1, 2 and 4 layers.
"""

from dataclasses import replace

import pytest

from megatron_burst.tools.hardware_file import preset
from megatron_burst.tools.job.layers import Experts
from megatron_burst.tools.job.memory import memory_of
from megatron_burst.tools.job.model import Model
from megatron_burst.tools.job.strategy import Job, Strategy, attention_call
from megatron_burst.tools.simulate.call import buffer_bytes

LLAMA = Model("x", 4, 4096, 32, 8, 128, 128, 14336, 1)
ALL_HEADS = replace(LLAMA, heads_kv=32)


def kib(part, model=LLAMA, seq=1 << 18, batch=1, **sizes):
    """A part of the memory, in KiB per token of a rank."""
    strategy = Strategy(**{"cp": 4, **sizes})
    job = Job(model, seq, strategy.gpus, 8, batch, preset("h200"))
    tokens = seq / strategy.cp / strategy.tp
    return getattr(memory_of(job, strategy), part) / tokens / 1024


@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("seq", [1 << 16, 1 << 20])
def test_activations_of_llama(layers, seq):
    of = {"model": replace(LLAMA, layers=layers), "seq": seq}
    # input, norm, qkv, out and lse, sum with the residual, norm, first products, activation
    whole = 8 + 8 + 12 + 8.125 + 8 + 8 + 56 + 28
    assert kib("saved", recompute="none", **of) == layers * whole == layers * 136.125
    # gradients of the layer's output, the activation's output and input; that output is freed
    assert kib("layer", recompute="none", **of) == 8 + 28 + 56 - 28
    assert kib("saved", **of) == layers * 8
    # all but the input are recomputed, with recomputation's output
    assert kib("layer", **of) == (136.125 - 8) + 8 + 64 == 200.125
    assert kib("kept", **of) == 0


@pytest.mark.parametrize(("keep", "size"), [("all", 8.125), ("half", 4.0625)])
def test_what_is_kept_is_of_layers_that_wait(keep, size):
    for layers in (1, 2, 4):
        of = {"model": replace(LLAMA, layers=layers), "keep": keep}
        assert kib("kept", **of) == (layers - 1) * size
        assert kib("kept", offload=True, **of) == min(layers - 1, 1) * size
        assert kib("layer", **of) == 200.125
    # of two stages with two layers each, the first has two micro-batches in flight
    assert kib("kept", LLAMA, keep=keep, pp=2, batch=8) == (2 * 2 - 1) * size
    # but while the head runs, no layer is in backward yet
    assert kib("head", keep=keep) - kib("head") == pytest.approx(size)


def test_the_feed_forward_alone_computed_again():
    # the norm is computed in the first product, so its input is what the checkpoint saves
    assert kib("saved", recompute="selective") == 4 * (8 + 8 + 12 + 8.125 + 8)
    # norm, first products, activation and output are recomputed
    assert kib("layer", recompute="selective") == 8 + 56 + 28 + 8 + 64


def test_without_a_gate():
    plain = replace(LLAMA, ffn=16384, gated=False)  # 32 KiB before and after the activation
    assert kib("saved", plain, recompute="none") == 4 * (8 + 8 + 12 + 8.125 + 8 + 8 + 32 + 32)
    assert kib("layer", plain, recompute="none") == 8 + 32


def test_values_of_ungrouped_heads_hold_the_whole_projection():
    """Their 8 KiB are a slice of 24; if at most a quarter, they would be copied."""
    whole = 8 + 8 + 8 + 8 + 24 + 8.125 + 8 + 8 + 56 + 28
    assert kib("saved", ALL_HEADS, recompute="none") == 4 * whole
    assert kib("layer", ALL_HEADS) == whole - 8 + 8 + 64


@pytest.mark.parametrize(("tp", "fullest"), [(1, 56), (2, 56), (4, 32 + 28), (8, 2 * 64 + 8 - 28)])
def test_sequence_parallel_layers_gather(tp, fullest):
    """The gradient before the second product, or the first one's input and its gradient, which is
    then scattered, take 8 KiB times TP each."""
    assert kib("layer", recompute="none", tp=tp, cp=1) == 8 + fullest


@pytest.mark.parametrize(
    ("ffn", "active", "routed", "fullest"),
    [(8192, 2, 16 + 64 + 32, 64), (512, 8, 64 + 16 + 8, 64 + 8)],
)
def test_experts(ffn, active, routed, fullest):
    """Their inputs, first products and activations; narrow experts peak where the gradient of their
    returned outputs coexists with the activation output's."""
    experts = replace(LLAMA, experts=Experts(16, active, ffn))
    assert kib("saved", experts, recompute="none") == 4 * (8 + 8 + 12 + 8.125 + 8 + 8 + routed)
    assert kib("layer", experts, recompute="none") == 8 + fullest
    # whole experts are on a rank, so nothing is gathered for them
    assert kib("layer", experts, recompute="none", tp=8, cp=1) == 8 + fullest
    # their norm is separate, and saves its own input
    assert kib("saved", experts, recompute="selective") == 4 * (8 + 8 + 12 + 8.125 + 8 + 8)
    assert kib("layer", experts, recompute="selective") == routed + 8 + 8 + fullest


def test_experts_of_a_latent_width():
    """LatentMoE: their inputs and outputs have 2 KiB, which the products around them save too."""
    latent = replace(LLAMA, experts=Experts(16, 8, 512, latent=1024))
    routed = 8 * 2 + 16 + 8 + 2 * 2
    assert kib("saved", latent, recompute="none") == 4 * (8 + 8 + 12 + 8.125 + 8 + 8 + routed)
    assert kib("layer", latent, recompute="none") == 8 + 8 * 2 + 8


def test_layers_without_experts_may_need_more():
    mixed = replace(LLAMA, experts=Experts(16, 1, 512, 0, dense_layers=1))
    assert kib("layer", mixed, recompute="none") == 64


def test_attentions_turn_with_large_buffers():
    """A ring, and an MLP of 16 and 8 KiB, which is freed by the time attention runs."""
    narrow = replace(ALL_HEADS, ffn=4096)
    job, strategy = Job(narrow, 1 << 18, 4, 8, 1, preset("h200")), Strategy(cp=4, intra="ring")
    buffers = buffer_bytes(attention_call(job, strategy)) / (1 << 16) / 1024
    there = 8 + 8 + 8 + 8 + 24 + 8.125  # norm, output of recomputation, q, k, projection, out, lse
    grads = 8 + 8 + 24
    assert kib("layer", narrow, intra="ring") == there + grads + buffers
    assert kib("attention", narrow, intra="ring") == buffers > 100
    memory = memory_of(job, strategy)
    parts = memory.weights + memory.gradients + memory.optimizer + memory.saved + memory.layer
    assert memory.peak == parts  # buffers are in `layer`, not counted twice
