"""Windows, sinks and other kinds of layers: read from configs and Megatron's arguments, timed.

Guards against planning a model that burst refuses as if all its layers saw all keys.
"""

import json
from dataclasses import replace

import pytest

from megatron_burst.errors import BurstError
from megatron_burst.tools.hardware_file import preset
from megatron_burst.tools.job.flags import as_json, as_words, flag_values
from megatron_burst.tools.job.hugging_face import PRESETS, from_hugging_face
from megatron_burst.tools.job.kept import last_flops, module_costs
from megatron_burst.tools.job.layers import Windows
from megatron_burst.tools.job.megatron import from_megatron
from megatron_burst.tools.job.memory import memory_of
from megatron_burst.tools.job.model_file import megatron_arguments
from megatron_burst.tools.job.model_flags import as_hybrid, hybrid_pattern, model_flags
from megatron_burst.tools.job.search import search
from megatron_burst.tools.job.step import step_time
from megatron_burst.tools.job.strategy import Job, Strategy
from tests.tools.job.configs import (
    GEMMA_3_4B,
    GEMMA_3_27B,
    GPT_OSS_20B,
    MISTRAL_7B,
    MIXTRAL_8X7B,
    QWEN_2_5_7B,
)

M = 1 << 20
FIVE_TO_ONE = [number % 6 > 0 for number in range(1, 63)]
IRREGULAR = ["sliding_attention"] * 5 + ["full_attention"] * 27
DENSE = {name: value for name, value in MISTRAL_7B.items() if name != "sliding_window"}


def model(config):
    return from_hugging_face(config, "config.json")


@pytest.mark.parametrize(
    ("config", "billions", "size", "windows"),
    [  # weights as in the models' cards
        (GEMMA_3_27B, 27.0, 1024, FIVE_TO_ONE),
        (GEMMA_3_4B, 3.88, 1024, FIVE_TO_ONE[:34]),
        (GPT_OSS_20B, 20.9, 128, [True, False] * 12),
        (MISTRAL_7B, 7.24, 4096, [True] * 32),
    ],
)
def test_windows_of_published_configs(config, billions, size, windows):
    found = model(config)
    assert found.params / 1e9 == pytest.approx(billions, rel=0.005)
    assert found.windows == Windows(size, tuple(windows))
    assert found.sinks == (config is GPT_OSS_20B)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": None}, None),
        ({"sliding_window": 4096, "use_sliding_window": False}, None),
        ({"layer_types": ["full_attention"] * 32, "sliding_window": 4096}, None),
        (
            {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 24},
            [False] * 24 + [True] * 8,
        ),
        ({"sliding_window": 512, "sliding_window_pattern": 4}, ([True] * 3 + [False]) * 8),
        ({"sliding_window": 512, "sliding_window_pattern": "LLLG"}, ([True] * 3 + [False]) * 8),
        ({"sliding_window": 512, "model_type": "cohere2"}, ([True] * 3 + [False]) * 8),
    ],
)
def test_keys_that_say_which_layers_have_windows(changes, windows):
    found = model(DENSE | changes)
    assert found.windows == (windows and Windows(changes["sliding_window"], tuple(windows)))


@pytest.mark.parametrize("config", [QWEN_2_5_7B, MIXTRAL_8X7B])
def test_windows_that_are_switched_off_are_none(config):
    found = model(config)
    assert found.windows is None and found.full_layers == found.layers


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"layer_types": ["linear_attention", "full_attention"] * 16},
            "with linear_attention; plan",
        ),
        ({"layer_types": ["chunked_attention"] * 32}, "got layer_types with chunked_attention"),
        ({"attention_chunk_size": 8192}, "got attention_chunk_size 8192"),
        ({"attn_logit_softcapping": 50.0}, "got attn_logit_softcapping 50.0"),
        ({"full_attention_interval": 4}, "got full_attention_interval 4"),
        ({"layer_types": ["full_attention"] * 31}, "got 31 layer_types and 32 layers"),
        (
            {"layer_types": ["sliding_attention"] * 32, "sliding_window": None},
            "a sliding_window that can be read.*None",
        ),
        ({"sliding_window": "wide"}, "a sliding_window that can be read.*'wide'"),
    ],
)
def test_layers_that_the_planner_does_not_count_are_refused(changes, match):
    with pytest.raises(BurstError, match=match):
        model(DENSE | changes)


@pytest.mark.parametrize("changes", [{"head_dim": 512}, {"global_head_dim": 320}])
def test_heads_wider_than_any_kernel_of_a_gpu_are_refused(changes):
    """Gemma-4's layers without windows were planned with heads of 256."""
    with pytest.raises(BurstError, match="at most 256 dimensions, .*; got heads of (512|320)"):
        model(DENSE | changes)


@pytest.mark.parametrize(
    "described",
    [
        *PRESETS.values(), *map(model, (GEMMA_3_27B, GPT_OSS_20B, MISTRAL_7B, MIXTRAL_8X7B)),
        model(DENSE | {"sliding_window": 9, "layer_types": IRREGULAR}),
    ],
    ids=lambda described: described.name,
)  # fmt: skip
def test_the_flags_of_a_model_describe_it(described):
    """What is printed for a run is read back as the same model; of a model with unknown entries
    nothing is printed, and its linear layers have no flags."""
    text = " ".join(as_words(model_flags(described)))
    found = from_megatron(megatron_arguments(text), described.name)
    if described.unknown:
        found = replace(found, unknown=described.unknown, towers=described.towers)
        found = replace(found, linear=described.linear)
    assert replace(found, beside=described.beside) == described


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ("--window-size many", "--window-size that can be read.*'many'"),
        ("--window-size 9,0 --window-attn-skip-freq [1,0]", "got 2 of 4 layers"),
        ("--window-size 9,0 --window-attn-skip-freq '[exit()]'", r"got \[exit\(\)\]"),
    ],
)
def test_windows_of_megatron_that_cannot_be_read_are_refused(flags, match):
    sizes = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 9"
    with pytest.raises(BurstError, match=match):
        from_megatron(megatron_arguments(f"{sizes} {flags}"), "flags.txt")


def test_every_pattern_of_expert_layers_is_counted():
    sizes = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --vocab-size 9 --num-experts 4"
    for freq, dense in (("", 0), ("1", 0), ("2", 4), ("3", 5), ("[0]*3+[1]*5", 3), ("[0,1]*4", 4)):
        flag = f"--moe-layer-freq {freq}" if freq else ""
        found = from_megatron(megatron_arguments(f"{sizes} {flag}"), "flags.txt")
        assert found.experts.dense_layers == dense, freq


@pytest.mark.parametrize("cp", [1, 8])
def test_windows_are_timed_as_windows(cp):
    """By hand: two products over the window's keys and one more block, at the kernel's speed, once
    in forward and 2.5 times in backward; the other layers as in a model without windows."""
    windowed = model(GEMMA_3_27B)
    job = Job(windowed, M // 2, 8 * cp, 8, 8, preset("h200"))
    strategy = Strategy(tp=8, cp=cp, keep="all")
    dense = replace(job, model=replace(windowed, windows=None))
    steps = [step_time(one, strategy, memory_of(one, strategy)) for one in (job, dense)]
    times = [dict(step.parts)["attention kernels"] for step in steps]
    keys = 1024 - 1024**2 / (2 * job.seq) + 128
    flops = 4 * keys * (job.seq // cp) * (32 // 8) * 128
    kernel = job.hardware.kernel(128)
    seconds = flops / (kernel.forward.at(1e9) * 1e12) + 2.5 * flops / (
        kernel.backward.at(1e9) * 1e12
    )
    hand = times[1] * 10 / 62 + 8 * 52 * seconds
    assert times[0] == pytest.approx(hand, rel=0.01)
    assert times[0] < 0.2 * times[1]


def test_model_flops_count_a_window_as_far_as_it_sees():
    windowed, seq = model(MISTRAL_7B), M // 4
    dense = replace(windowed, windows=None)
    wide = replace(windowed, windows=Windows(2 * seq, windowed.windows.layers))
    assert wide.flops_per_token(seq) == dense.flops_per_token(seq)
    pairs = sum(min(row + 1, 4096) for row in range(seq)) / seq
    attention = windowed.flops_per_token(seq) - 6 * windowed.matmul_params
    assert attention == pytest.approx(12 * 32 * 32 * 128 * pairs, rel=1e-3)


GPT = (
    "--num-layers 6 --hidden-size 4096 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --ffn-hidden-size 14336 --vocab-size 128256 --swiglu "
    "--untie-embeddings-and-output-weights --disable-bias-linear"
)
MOE = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 1024"
DELTA = "--linear-num-key-heads 16 --linear-num-value-heads 32"
WINDOW = "--window-size 4095,0 --window-attn-skip-freq"


def read(flags):
    return from_megatron(megatron_arguments(flags), "x")


def test_experts_of_a_latent_width():
    """LatentMoE of Nemotron-3-Super: routed experts between two products that all share."""
    flags = f"{GPT} {MOE} --moe-shared-expert-intermediate-size 2048"
    plain, latent = read(flags), read(f"{flags} --moe-latent-size 512")
    assert model_flags(latent)["--moe-latent-size"] == 512 == latent.expert_width
    expert, around = 3 * 512 * 1024, 2 * 4096 * 512
    beside = around + 4096 * 8 + 3 * 4096 * 2048  # the router and the shared expert
    assert (latent.expert_params, latent.shared_params) == (8 * expert, beside)
    assert latent.active_params == beside + 2 * expert
    parts = {}
    for model in (plain, latent):
        strategy = Strategy(cp=4, ep=4, keep="all")
        job = Job(model, 1 << 18, 4, 8, 8, preset("h200"))
        parts[model] = dict(step_time(job, strategy, memory_of(job, strategy)).parts)
        width, tokens = model.expert_width, (1 << 18) / 4
        costs = {cost.name: cost for cost in module_costs(job, strategy)}
        products = 4096 * 2048 + width * 2 * 1024  # of the shared expert, and of two routed ones
        assert costs["linear_fc1"].flops == 2 * 2 * products * tokens
        assert last_flops(job, strategy) == 2 * products * tokens
    sent = [parts[model]["expert-parallel transfers"] for model in (latent, plain)]
    assert sent[0] == pytest.approx(sent[1] / 8, rel=0.1)  # and a latency
    element_wise = [parts[model]["element-wise kernels"] for model in (latent, plain)]
    assert element_wise[0] < element_wise[1]


@pytest.mark.parametrize(
    ("gpt", "hybrid"),  # flags that are added to both
    [
        ("", "--hybrid-layer-pattern *-*-*-*-*-*-"),
        ("", "--hybrid-override-pattern *-*-|*-*-|*-*-"),
        ("--mtp-num-layers 1", "--hybrid-layer-pattern *-*-*-*-*-*-/*-"),
        (f"{MOE} --moe-layer-freq [0]*2+[1]*4", f"{MOE} --hybrid-layer-pattern *-*-*E*E*E*E"),
        (MOE, f"{MOE} --hybrid-layer-pattern *E*E*E|*E*E*E"),
        ("", f"{MOE} --hybrid-layer-pattern *-*-*-*-*-*-"),  # whose experts no layer has
        (f"{WINDOW} 2", f"{WINDOW} [1,1,0,1]*3 --hybrid-layer-pattern *-*-*-*-*-*-"),
        (f"{WINDOW} 1", f"{WINDOW} 1 --hybrid-layer-pattern *-*-*-*-*-*-"),
        ("--multi-latent-attention --kv-lora-rank 512",
         "--kv-lora-rank 512 --hybrid-layer-pattern +-+-+-+-+-+-"),
        (f"{DELTA} --experimental-attention-variant gdn --linear-attention-freq 3",
         f"{DELTA} --hybrid-layer-pattern G-G-*-G-G-*-"),
    ],
    ids=lambda flags: flags.rpartition(" ")[2],
)  # fmt: skip
def test_a_hybrid_of_pairs_is_planned_as_the_gpt(gpt, hybrid):
    plain = read(f"{GPT} {gpt}")
    paired = read(f"{GPT} {hybrid}".replace("--num-layers 6 ", ""))  # which the letters say
    assert paired.hybrid and replace(paired, hybrid=False) == plain
    jobs = [Job(model, 1 << 18, 8, 8, 8, preset("h200")) for model in (plain, paired)]
    one, other = (search(job)[:50] for job in jobs)
    assert one == other  # strategies, times and memory


def test_a_hybrid_of_mixers_and_feed_forwards_has_windows_in_its_attention_alone():
    found = read(f"{GPT} --mamba-num-heads 128 --window-size 4095,0 --hybrid-layer-pattern M-*-M-")
    assert not found.hybrid and found.layers == 6
    assert found.windows.layers == (False, False, True, False, False, False)
    assert (found.softmax_layers, found.full_layers) == (1, 0)


def test_flags_of_a_hybrid_of_pairs():
    """Its layers are twice as many, two in a checkpoint, with the ends of pipeline stages."""
    hybrid = as_hybrid(read(f"{GPT} --mtp-num-layers 1".replace("layers 6", "layers 5")))
    job = Job(hybrid, 1 << 18, 8, 8, 8, preset("h200"))
    flags = flag_values(job, Strategy(pp=2, cp=4))
    assert flags["--hybrid-layer-pattern"] == "*-*-*-|*-*-/*-"
    assert "--decoder-last-pipeline-num-layers" not in flags
    assert flags["--recompute-method"] == "uniform" and flags["--recompute-num-layers"] == 2
    block = flag_values(job, Strategy(cp=8, again_layers=3))
    assert (
        block["--hybrid-layer-pattern"] == "*-*-*-*-*-/*-" and block["--recompute-num-layers"] == 6
    )
    written = json.loads(as_json(job, search(job)))
    assert written["job"]["model"]["layers"] == written["model_flags"]["--num-layers"] == 10
    gpt = flag_values(replace(job, model=replace(hybrid, hybrid=False)), Strategy(pp=2, cp=4))
    assert gpt["--decoder-last-pipeline-num-layers"] == 2 and gpt["--recompute-num-layers"] == 1
    assert hybrid_pattern(replace(hybrid, hybrid=False)) == ""


@pytest.mark.parametrize(
    ("flags", "option", "got"),
    [
        ("--hybrid-layer-pattern *-D-", "pattern of M or G", r"\*-D- \(D is DSA"),
        ("--hybrid-layer-pattern KEKE*E", "pattern of M or G", r"\(K is Kimi delta attention"),
        ("--hybrid-layer-pattern C-H-W-", "pattern of M or G", "CSA, H is DeepSeek-V4's HCA, W is"),
        ("--hybrid-layer-pattern M-*-/MM", r"pattern with \*- or \+-", "MM"),
        (f"{MOE} --hybrid-layer-pattern *E/*-", r"pattern with \*E or \+E", r"\*-"),
        ("--experimental-attention-variant gdn2 --hybrid-layer-pattern G-*-", "variant of gated",
         r"gdn2 \(each of its channels has a decay"),
        ("--experimental-attention-variant dsa", "variant of gated", "dsa .learned scores select"),
    ],
    ids=lambda text: text.rpartition(" ")[2],
)  # fmt: skip
def test_layers_of_megatrons_without_times_are_refused(flags, option, got):
    with pytest.raises(BurstError, match=f"^plan: x must have .*{option}.*; got .*{got}.*; plan"):
        read(f"{GPT} {flags}")
