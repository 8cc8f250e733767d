"""Models whose layers are mostly linear attention (gated delta net, Mamba-2), counted by hand.

Guards against a plan of Qwen3-Next, Qwen3.5, Nemotron-H or Granite-4 as if every layer saw all
keys, and against sizes that Megatron refuses.
"""

from dataclasses import replace

import pytest

from megatron_burst.errors import BurstError
from megatron_burst.mcore import offsets
from megatron_burst.tools.hardware_file import preset
from megatron_burst.tools.job.flags import as_words
from megatron_burst.tools.job.hugging_face import from_hugging_face
from megatron_burst.tools.job.layer_time import AGAIN, ATTENTION, LINEAR, MATMUL
from megatron_burst.tools.job.linear import DeltaNet, Mamba
from megatron_burst.tools.job.megatron import from_megatron
from megatron_burst.tools.job.memory import memory_of
from megatron_burst.tools.job.model import Model
from megatron_burst.tools.job.model_file import megatron_arguments
from megatron_burst.tools.job.model_flags import model_flags
from megatron_burst.tools.job.search import layouts, search
from megatron_burst.tools.job.step import step_time
from megatron_burst.tools.job.strategy import Job, Strategy, misfit
from megatron_burst.tools.simulate.kernels import Timer
from tests.tools.job.configs import (
    GRANITE_4_H_MICRO,
    GRANITE_4_H_SMALL,
    NEMOTRON_3_NANO,
    NEMOTRON_H_8B,
    QWEN_3_5_35B,
    QWEN_3_NEXT_80B,
)

H200 = preset("h200")
THREE_OF_FOUR = (True, True, True, False)
DENSE = Model("x", 4, 4096, 32, 8, 128, 128, 14336, 1)
MIXED = replace(DENSE, linear=DeltaNet(THREE_OF_FOUR, 16, 32, 128, 128, 4))
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
def test_published_hybrids_are_planned(config, billions, layers, dims):
    found = model(config)
    assert found.params / 1e9 == pytest.approx(billions, rel=0.002)
    assert found.linear.layers == THREE_OF_FOUR * (layers // 4)
    assert (found.dim_qk, found.heads_kv) == dims and found.full_layers == layers // 4
    assert bool(found.unknown) == (config is QWEN_3_5_35B)  # it has images


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


# of each, its 8 KiB of input and norm left out: z, x, B, C, dt; the scan's output, the norm's
MAMBA_IN = 2 * 128 * 64 + 2 * 8 * 128 + 128
MAMBA = replace(DENSE, linear=Mamba(THREE_OF_FOUR, 128, 64, 8, 128, 4))
APART = replace(DENSE, layers=6, pattern="M-M-*-", linear=replace(
    MAMBA.linear, layers=(True, False) * 2 + (False,) * 2
))  # fmt: skip


@pytest.mark.parametrize(
    ("config", "billions", "softmax", "mamba", "moe", "dense"),
    [
        (NEMOTRON_H_8B, 8.1, 4, 24, 0, 24),
        (NEMOTRON_3_NANO, 31.6, 6, 23, 23, 0),
        (GRANITE_4_H_SMALL, 32.2, 4, 36, 40, 0),
        (GRANITE_4_H_MICRO, 3.19, 4, 36, 0, 40),
    ],
)  # of their cards
def test_published_mamba_hybrids_are_planned(config, billions, softmax, mamba, moe, dense):
    found = model(config)
    assert found.params / 1e9 == pytest.approx(billions, rel=0.002)
    assert (found.softmax_layers, found.linear.count) == (softmax, mamba)
    assert (found.moe_layers, found.dense_layers) == (moe, dense)


def test_layers_may_be_listed_or_a_pattern_and_megatrons_own_flags_say_the_same():
    names = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    later = names | {"M": "linear_attention", "*": "full_attention"}  # of transformers 5.24
    for config in (NEMOTRON_H_8B, NEMOTRON_3_NANO):
        listed = dict(config)
        pattern = listed.pop("hybrid_override_pattern")
        found = model(config)
        for kinds in (names, later):
            assert model(listed | {"layers_block_type": [kinds[one] for one in pattern]}) == found
        flags = " ".join(as_words(model_flags(found)))
        read = from_megatron(megatron_arguments(flags), found.name)
        assert replace(read, beside=found.beside) == found


@pytest.mark.parametrize(
    ("pattern", "got"), [("MD-", "MD-"), ("MG-", "MG-"), ("M?", r"M\?")], ids=str
)
def test_letters_without_times_are_refused(pattern, got):
    with pytest.raises(BurstError, match="layers [D?] of its pattern"):
        model(NEMOTRON_H_8B | {"hybrid_override_pattern": pattern.replace("G", "D")})
    text = "--num-attention-heads 2 --hidden-size 8 --vocab-size 9 --hybrid-layer-pattern"
    with pytest.raises(BurstError, match=f"--hybrid-layer-pattern of M or G.*{got}"):
        from_megatron(megatron_arguments(f"{text} '{pattern}'"), "x")


def test_weights_and_flops_of_mamba():
    mixer = 4096 * (MAMBA_IN + 8192)
    assert MAMBA.params - DENSE.params == 3 * (mixer - (2 * 4096 * 4096 + 2 * 4096 * 1024))
    scan = 7 * 8192 * 128 + 2 * 4 * (8192 + 2 * 8 * 128)  # as Megatron counts it, and convolution
    more = MAMBA.flops_per_token(4096) - 6 * MAMBA.matmul_params
    assert more == 3 * 32 * (128 + 128) * 4096 + 3 * 3 * scan


def test_a_hybrid_of_halves_is_its_mixers_and_feed_forwards():
    whole = replace(DENSE, layers=3, linear=replace(MAMBA.linear, layers=(True, True, False)))
    assert APART.params == whole.params
    assert APART.flops_per_token(4096) == whole.flops_per_token(4096)
    (halves, a), (together, b) = (planned(one, recompute="none") for one in (APART, whole))
    # element-wise kernels take a moment to start, in each layer
    expected = {name: pytest.approx(seconds, rel=0.005) for name, seconds in together.items()}
    assert halves == expected
    assert a.saved == pytest.approx(b.saved) and a.weights == b.weights
    # full recomputation keeps twice as many inputs, and restores half a layer at a time
    (_, a), (_, b) = (planned(one, recompute="full") for one in (APART, whole))
    assert a.saved == pytest.approx(2 * b.saved) and a.layer < b.layer


def test_memory_of_mamba_layers():
    of_mamba = (2 * (MAMBA_IN + 2 * 8192) + 4 * 8) / 1024
    _, memory = planned(APART, recompute="none", cp=4)
    saved = memory.saved / ((1 << 18) / 4 * 1024)
    assert saved == pytest.approx(2 * (16 + of_mamba) + (136.125 - 100) + 3 * 100)


def test_mambas_kernels_bound_the_length(monkeypatch):
    """A rank of 8 has 16 heads of 2 x 64 + 1 and a group of 2 x 128: 2320 of 2^31 elements a token,
    which are 925,639 tokens; of 16 ranks each has 8 heads and a group."""
    monkeypatch.setattr(offsets, "_scans_in_64_bits", lambda: False)
    job = Job(MAMBA, 925_632, 64, 8, 8, H200)
    assert (MAMBA.linear.heads, MAMBA.linear.groups, MAMBA.linear.state) == (128, 8, 128)
    assert misfit(job, Strategy(cp=8, dp=8)) == ""
    long = replace(job, seq=925_696)
    assert "TP x CP 8 is too small for Mamba" in misfit(long, Strategy(cp=8, dp=8))
    assert misfit(long, Strategy(cp=16, dp=4)) == ""
    few = replace(long, gpus=8)
    assert all(one.tp * one.cp > 8 for one in layouts(long, {}))
    uneven, fixed = replace(few, seq=4_000_001), (("cp", 2), ("tp", 4))
    for one, given in ((few, ()), (uneven, ()), (long, fixed)):
        with pytest.raises(BurstError, match="no such TP x CP is large enough for Mamba's"):
            search(one, given)
    odd = replace(MAMBA, linear=replace(MAMBA.linear, heads=96, groups=12))
    with pytest.raises(BurstError, match="choose a --seq-length that is a multiple of"):
        search(Job(odd, 1000, 12, 12, 4, H200), (("pp", 1),))
    with pytest.raises(BurstError, match="choose a --seq-length that is a multiple of 16"):
        search(replace(few, seq=1001), ())


def test_groups_of_heads_bound_the_ranks():
    """Sources: MambaMixer and MambaContextParallel of Megatron-Core 0.19."""
    job = Job(MAMBA, 1 << 18, 64, 8, 8, H200)
    assert misfit(job, Strategy(tp=2, cp=8, dp=4)) == ""
    one_group = replace(MAMBA, linear=replace(MAMBA.linear, groups=1))
    assert "TP 2 does not divide the 1 groups" in misfit(
        replace(job, model=one_group), Strategy(tp=2, cp=8, dp=4)
    )
    few = replace(MAMBA, linear=replace(MAMBA.linear, heads=24))
    assert "24 Mamba heads" in misfit(replace(job, model=few), Strategy(tp=2, cp=8, dp=4))
    ten = replace(APART, layers=10, pattern=APART.pattern + "*-*-")
    assert "PP 4 does not divide the 10 layers" in misfit(
        replace(job, model=ten), Strategy(pp=4, cp=4, dp=4)
    )
    # B and C of one group go to each of the ranks that have its heads
    assert one_group.linear.sent_bytes(8) - one_group.linear.sent_bytes(1) == 2 * 7 * 2 * 128
    assert MAMBA.linear.sent_bytes(8) == MAMBA.linear.sent_bytes(1)
