"""Models whose layers are mostly linear attention (gated delta net), counted by hand.

Guards against a plan of Qwen3-Next or Qwen3.5 as if every layer saw all keys, and against sizes
that Megatron refuses.
"""

from dataclasses import replace

import pytest

from megatron_burst.errors import BurstError
from megatron_burst.tools.hardware_file import preset
from megatron_burst.tools.job.arguments import megatron_arguments
from megatron_burst.tools.job.hugging_face import from_hugging_face
from megatron_burst.tools.job.layer import AGAIN, ATTENTION, LINEAR, MATMUL
from megatron_burst.tools.job.linear import Linear
from megatron_burst.tools.job.megatron import from_megatron
from megatron_burst.tools.job.memory import memory_of
from megatron_burst.tools.job.model import Model
from megatron_burst.tools.job.step import step_time
from megatron_burst.tools.job.strategy import Job, Strategy, misfit
from megatron_burst.tools.simulate.kernels import Timer
from tests.plan.configs import QWEN_3_5_35B, QWEN_3_NEXT_80B

H200 = preset("h200")
THREE_OF_FOUR = (True, True, True, False)
DENSE = Model("x", 4, 4096, 32, 8, 128, 128, 14336, 1)
MIXED = replace(DENSE, linear=Linear(THREE_OF_FOUR, 16, 32, 128, 128, 4))
PROJECTED = 2 * 16 * 128 + 2 * 32 * 128 + 2 * 32  # q, k; v and its gate; two rates
DELTA_NET = 4096 * (PROJECTED + 32 * 128)


def model(config):
    return from_hugging_face(config, "config.json")


def planned(described, **how):
    strategy = Strategy(**{"cp": 4, **how})
    job = Job(described, 1 << 18, strategy.gpus, 8, 8, H200)
    memory = memory_of(job, strategy)
    return dict(step_time(job, strategy, memory).parts), memory


@pytest.mark.parametrize(
    ("config", "billions", "layers", "dims"),
    [(QWEN_3_NEXT_80B, 79.7, 48, (256, 2)), (QWEN_3_5_35B, 34.7, 40, (256, 2))],
)  # by hand, of 80B and 35B on their cards
def test_published_hybrids_are_planned_and_none_of_their_flags_printed(
    config, billions, layers, dims
):
    found = model(config)
    assert found.params / 1e9 == pytest.approx(billions, rel=0.002)
    assert found.linear.layers == THREE_OF_FOUR * (layers // 4)
    assert (found.dim_qk, found.heads_kv) == dims and found.full_layers == layers // 4
    assert any(one.startswith("model_type qwen3_") for one in found.unknown)


def test_kinds_of_layers_may_be_listed():
    kinds = ["full_attention", "linear_attention"] * 24
    listed = model(QWEN_3_NEXT_80B | {"layer_types": kinds})
    assert listed.linear.layers == (False, True) * 24


@pytest.mark.parametrize("freq", ["4", "[1,1,1,0]"])
def test_megatrons_arguments_are_read(freq):
    sizes = (
        "--num-layers 4 --hidden-size 4096 --num-attention-heads 32 --group-query-attention "
        "--num-query-groups 8 --ffn-hidden-size 14336 --vocab-size 1 --swiglu "
        "--untie-embeddings-and-output-weights --disable-bias-linear "
        "--experimental-attention-variant gated_delta_net"
    )
    read = megatron_arguments(f"{sizes} --linear-attention-freq {freq} --attention-output-gate")
    assert from_megatron(read, "x") == replace(MIXED, gated_attention=True)
    for flags, got in (
        (sizes, "none"),
        (f"{sizes} --linear-attention-freq [1,0]", "2 of 4 layers"),
    ):
        with pytest.raises(BurstError, match=f"--linear-attention-freq .*{got}"):
            from_megatron(megatron_arguments(flags), "x")


def test_weights_and_flops():
    feed, softmax = 3 * 4096 * 14336, 2 * 4096 * 4096 + 2 * 4096 * 1024
    weights = 3 * DELTA_NET + softmax + 4 * feed
    assert MIXED.params == weights + 2 * 4096
    gated = replace(MIXED, gated_attention=True)
    assert gated.params - MIXED.params == 4096 * 4096
    # of a token and layer: convolution, and four products with each state
    rule = 2 * (4 * (2 * 16 * 128 + 32 * 128) + 4 * 32 * 128 * 128)
    attention = 3 * 32 * (128 + 128) * 4096
    assert MIXED.flops_per_token(4096) == 6 * (weights + 4096) + attention + 3 * 3 * rule


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_time_of_softmax_attention_is_that_of_its_layers(recompute):
    (mixed, _), (dense, _) = (planned(one, recompute=recompute) for one in (MIXED, DENSE))
    assert mixed[ATTENTION] == pytest.approx(dense[ATTENTION] / 4)
    assert mixed[MATMUL] > dense[MATMUL]  # more weights
    assert (mixed[AGAIN] > dense[AGAIN]) == (recompute == "full")


def test_time_of_linear_attention():
    """Without context parallelism nothing is sent; backward is two forwards."""
    tokens = 1 << 18
    timer = Timer(H200)
    saved = 2 * (PROJECTED + 8192 + 32 * (2 * 128 + 64 + 2 * 128)) + 8 * 32
    states = 2 * 32 * 128 * 128 / 64
    forward = timer.matmul(2 * (4 * 8192 + 4 * 32 * 128 * 128) * tokens)
    forward += timer.memory(2 * (saved + states) * tokens)
    found, _ = planned(MIXED, cp=1, recompute="none")
    assert found[LINEAR] == pytest.approx(8 * 3 * 3 * forward)
    alone = planned(MIXED, cp=4, dp=1, recompute="none")[0][LINEAR]
    sent = 2 * (PROJECTED + 4096) * (tokens / 4) * 3 / 4
    hand = forward / 4 + H200.links.intra.seconds(sent)
    assert alone == pytest.approx(8 * 3 * 3 * hand, rel=0.01)


def test_memory_is_saved_by_each_kind_of_layer():
    """KiB of a token: norm and input 8 each, the sum 8 and norm 8, the feed-forward 84."""
    of_linear = (2 * (PROJECTED + 8192 + 32 * (2 * 128 + 64 + 2 * 128)) + 8 * 32) / 1024
    own = {"recompute": "none", "cp": 4}
    tokens = (1 << 18) / 4 * 1024
    (_, mixed), (_, dense) = (planned(one, **own) for one in (MIXED, DENSE))
    assert dense.saved / tokens == 4 * 136.125
    assert mixed.saved / tokens == pytest.approx(3 * (16 + of_linear + 16 + 84) + 136.125)
    # all of a linear layer is restored at once, with gradients and states
    (_, mixed), (_, dense) = (planned(one, recompute="full", keep="all") for one in (MIXED, DENSE))
    assert mixed.layer > dense.layer and mixed.saved == dense.saved
    kept = [planned(one, keep="all", offload=True)[1].node for one in (MIXED, DENSE)]
    assert kept[0] == pytest.approx(kept[1] / 4)


def test_heads_bound_the_ranks():
    """Source: TransformerConfig.__post_init__ of Megatron-Core 0.19."""
    job = Job(MIXED, 1 << 18, 32, 8, 8, H200)
    assert misfit(job, Strategy(tp=2, cp=8, dp=2)) == ""
    assert "16 heads of K" in misfit(job, Strategy(tp=4, cp=8))
