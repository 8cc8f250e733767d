"""More models, as transformers 5.12 writes their configs with a published model's sizes; those of
2026 as copies of their config.json in public repositories are, or as transformers 5.24's classes.

Guards against flags of another model than the class's, and against sizes under another name that a
plan would count as if they were not there.
"""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from docs import family_pages
from megatron_burst.errors import BurstError
from megatron_burst.tools.job.flags import as_words
from megatron_burst.tools.job.hugging_face import from_hugging_face
from megatron_burst.tools.job.megatron import from_megatron
from megatron_burst.tools.job.model_file import megatron_arguments
from megatron_burst.tools.job.model_flags import as_hybrid, model_flags
from tests.tools.job.configs import PRINTED, WITHHELD

CONFIGS = json.loads((Path(__file__).parent / "families.json").read_text())
_ROPE = "--norm-epsilon 1e-06 --rotary-base"
# what their classes compute beside a Llama's layers
SAID = {
    "Yi-1.5-9B": (8.83, f"{_ROPE} 5000000"),
    "Falcon3-7B": (7.46, f"{_ROPE} 1000042"),
    "DeepSeek-R1-Distill-Llama-8B": (
        8.03,
        "--norm-epsilon 1e-05 --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 8.0",
    ),
    "Mistral-Nemo-12B": (12.25, "--norm-epsilon 1e-05 --rotary-base 1000000"),
    "Qwen3-235B-A22B": (235.1, f"{_ROPE} 1000000 --qk-layernorm"),
    "GLM-4.5-Air": (  # with its prediction layer
        106.8 + 2.4,
        "--norm-epsilon 1e-05 --rotary-base 1000000 --rotary-percent 0.5 "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-router-dtype fp32 --add-qkv-bias --moe-router-num-groups 1 "
        "--moe-router-group-topk 1 "
        "--moe-router-topk-scaling-factor 1.0",
    ),
}
_NEMOTRON_3 = (
    "--norm-epsilon 1e-05 --squared-relu --position-embedding-type none "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32 "
    "--moe-router-num-groups 1 --moe-router-group-topk 1 --moe-router-topk-scaling-factor 5.0"
)
SAID |= {  # with prediction layers; sizes and flags as in Megatron-LM's examples/post_training
    "Nemotron-3-Super-120B-A12B": (120.6 + 3.0, _NEMOTRON_3),
    "Nemotron-3-Ultra-550B-A55B": (549.5 + 11.1, _NEMOTRON_3),
}
# billions of their cards; one of the entries that are named beside the model type
NAMED = {
    "Hunyuan-A13B": (80.4, "eod_token_id 3"),
    "EXAONE-4.0-32B": (32.0, ""),
    "dbrx": (132, "no rms_norm_eps"),
    "OLMoE-1B-7B": (6.92, "norm_topk_prob False"),
    "Apertus-8B": (8.05, "hidden_act xielu"),
    "AFM-4.5B": (4.62, "hidden_act relu2"),
    "ERNIE-4.5-21B-A3B": (21.8, "moe_norm_min 1e-12"),
    "Phi-3.5-MoE": (41.9, "lm_head_bias False"),
    "Gemma-7B": (8.54, "hidden_act gelu_pytorch_tanh"),
    "Command-R-35B": (35.0, "logit_scale 0.0625"),
    "DeepSeek-V2-Lite": (15.7, "topk_method greedy"),
    "Granite-3.1-MoE": (3.37, "residual_multiplier 1.0"),
    "Helium-1-2B": (2.02, ""),
    "StableLM-2-12B": (12.1, "use_parallel_residual True"),
    "Ministral-8B": (8.02, ""),
    "Hunyuan-7B": (8.03, "eod_token_id 3"),
    "dots.llm1": (142.8, "routed_scaling_factor 2.5"),
    "Pythia-6.9B": (6.86, "use_parallel_residual True"),
    "Qwen3.5-27B": (26.9, "partial_rotary_factor 0.25"),
    "Qwen3-VL-8B": (8.19, "mrope scaling of rotary embeddings"),
    "Qwen3-VL-30B-A3B": (30.5, "vision_config"),
    "InternLM2.5-7B": (7.74, "auto_map"),
    "InternLM3-8B": (8.80, "qkv_bias False"),
    "InternVL2.5-8B": (7.74, "downsample_ratio 0.5"),
    "Qwen3.8-2.4T-A95B": (2415.8, "mtp_num_hidden_layers 1"),
}
REFUSED = {
    "Jamba-v0.1": "attn_layer_period 8",
    "Falcon-H1-7B": "mamba_d_state 256",
    "Bamba-9B": "mamba_d_state 256",
    "Zamba2-7B": "mamba_d_state 64",
    "LFM2-1.2B": "conv_L_cache 3",
    "MiniMax-Text-01": "layer_types with linear_attention",
    "Llama-4-Scout-17B-16E": "attention_chunk_size 8192",
    "Gemma-2-9B": "attn_logit_softcapping 50.0",
    "Gemma-4 31B, text": "heads of 512",
    **dict.fromkeys(["DeepSeek-V3.2", "GLM-5", "GLM-5.2"], "index_topk 2048 .learned scores"),
    **dict.fromkeys(["DeepSeek-V4-Flash", "DeepSeek-V4.1-Flash"], "index_topk 512 .learned scores"),
    "GLM-5.3-Flash": "linear_attn_config .Kimi delta attention., index_topk 2048 .learned",
    **dict.fromkeys(["Kimi-Linear-48B-A3B", "Kimi-K3"], "linear_attn_config .Kimi delta attention"),
    "MiniMax-M3": "sparse_attention_config .learned scores select keys",
    "Qwen3.8-Flash-Next": "indexer_budget 2048 .learned scores select keys",
    "GPT-2": "model_type gpt2 without num_hidden_layers, hidden_size, num_attention_heads",
}


def is_gpt_with_flags(config):
    try:
        found = from_hugging_face(config, "x")
    except BurstError:
        return False
    return not found.unknown and not found.pattern


def test_every_config_has_an_expectation_and_a_page():
    assert CONFIGS.keys() == SAID.keys() | NAMED.keys() | REFUSED.keys()
    on_pages = [name for one in family_pages.FAMILIES.values() for name in one["models"]]
    every = [*CONFIGS, *PRINTED, *WITHHELD, "Qwen3.5-35B-A3B"]
    assert sorted(on_pages) == sorted(every)


@pytest.mark.parametrize("name", SAID)
def test_flags_are_those_of_the_class(name):
    billions, flags = SAID[name]
    found = from_hugging_face(CONFIGS[name], name)
    assert found.params / 1e9 == pytest.approx(billions, rel=0.006)
    assert found.unknown == () and " ".join(as_words(dict(found.beside))) == flags


@pytest.mark.parametrize("name", NAMED)
def test_no_flags_are_printed_where_none_says_an_entry(name):
    billions, entry = NAMED[name]
    found = from_hugging_face(CONFIGS[name], name)
    assert found.params / 1e9 == pytest.approx(billions, rel=0.01)
    config = CONFIGS[name]
    inner = config.get("text_config") or config.get("llm_config") or config
    assert found.beside == () and found.unknown[0] == f"model_type {inner['model_type']}"
    assert found.towers == (("vision_config",) if inner is not config else ())
    assert not entry or entry in found.unknown


@pytest.mark.parametrize("name", REFUSED)
def test_layers_without_times_are_refused(name):
    with pytest.raises(BurstError, match=f"got .*{REFUSED[name]}"):
        from_hugging_face(CONFIGS[name], name)


@pytest.mark.parametrize("tied", [True, False])
def test_whether_embeddings_are_tied_says_the_whole_model(tied):
    """As in transformers 5.12, where that of the language model has no effect."""
    config = CONFIGS["Qwen3-VL-8B"]
    inner = config["text_config"] | {"tie_word_embeddings": not tied}
    found = from_hugging_face(config | {"tie_word_embeddings": tied, "text_config": inner}, "x")
    assert found.tied == tied


def test_experts_under_unknown_names_are_refused_and_not_left_out():
    """ERNIE-4.5 was once planned as a dense model of a seventh of its size."""
    unknown = CONFIGS["ERNIE-4.5-21B-A3B"] | {"model_type": "ernie9"}
    with pytest.raises(BurstError, match="number of experts.*moe_num_experts 64"):
        from_hugging_face(unknown, "x")


def test_sizes_of_each_layer_that_are_alike_are_one():
    config = CONFIGS["Hunyuan-A13B"]
    listed = config | {"moe_topk": [8] * 32, "num_shared_expert": [1] * 32}
    assert from_hugging_face(listed, "x") == from_hugging_face(config, "x")


@pytest.mark.parametrize("name", family_pages.PAGES)
def test_pages_of_families_are_what_the_planner_says(name):
    """`python docs/family_pages.py` rebuilds them."""
    assert (family_pages.DOCS / "families" / name).read_text() == family_pages.PAGES[name]()


def test_frameworks_are_told_of_model_types_that_have_a_page():
    kinds = {config["model_type"] for config in family_pages.published().values()}
    for name, framework in family_pages.CONVERTERS.items():
        assert set(framework["types"]) <= kinds, name
        assert framework["types"] == sorted(set(framework["types"])), name


def test_planned_times_of_the_pages_are_the_planners():
    with family_pages.PLANS.open() as file:
        rows = list(csv.DictReader(file))
    planned = [name for one in family_pages.FAMILIES.values() for name in one["planned"]]
    assert [row["model"] for row in rows] == [name for name in planned for _ in range(3)]
    now = list(family_pages.plans_of("Gemma-3-27B"))
    there = [row for row in rows if row["model"] == "Gemma-3-27B"]
    for row, again in zip(there, now, strict=True):
        assert row == {key: str(again[key]) for key in row}


HYBRID = [name for name, config in family_pages.published().items() if is_gpt_with_flags(config)]


@pytest.mark.parametrize("name", HYBRID)
def test_flags_of_a_hybrid_are_read_as_those_of_the_gpt(name):
    """But for scaled rotary embeddings, which Megatron's HybridModel has none of."""
    gpt = from_hugging_face(family_pages.published()[name], name)
    scaled = {"--use-rope-scaling", "--rotary-seq-len-interpolation-factor", "--mrope-section"}
    hybrid = as_hybrid(gpt)
    assert (hybrid is None) == bool(scaled & model_flags(gpt).keys())
    if hybrid:
        plain, paired = (
            from_megatron(megatron_arguments(" ".join(as_words(model_flags(one)))), name)
            for one in (gpt, hybrid)
        )
        assert paired.hybrid and replace(paired, hybrid=False) == plain


@pytest.mark.parametrize("name", ["DeepSeek-V3", "gpt-oss-20b", "Qwen3-Next-80B-A3B"])
def test_megatron_makes_the_same_config_of_a_hybrids_flags(name):
    """But for what names or counts layers."""
    pytest.importorskip("megatron.training")
    from tests.mcore.test_model_flags import built

    gpt = from_hugging_face(family_pages.published()[name], name)
    one, other = (built(" ".join(as_words(model_flags(m)))) for m in (gpt, as_hybrid(gpt)))
    of_layers = {
        "num_layers", "is_hybrid_model", "moe_layer_freq", "window_attn_skip_freq",
        "linear_attention_freq", "experimental_attention_variant",
    }  # fmt: skip
    assert {key for key in one if one[key] != other[key]} <= of_layers
    assert (one["num_layers"], other["num_layers"]) == (gpt.layers, 2 * gpt.layers)


def test_layers_without_rotary_embeddings_are_attentions_of_a_hybrid():
    smol = from_hugging_face(family_pages.published()["SmolLM3-3B"], "x")
    freq = [0, 0, 0, 0, 0, 0, 1, 0] * 9  # every fourth of 36 layers
    listed = replace(smol, beside=(("--no-rope-freq", "[0,0,0,1]"),), layers=4)
    assert json.loads(str(model_flags(as_hybrid(smol))["--no-rope-freq"])) == freq
    assert json.loads(str(model_flags(as_hybrid(listed))["--no-rope-freq"])) == freq[:8]


def test_no_hybrid_of_a_model_that_is_one_already_or_has_no_flags():
    for name in ("Nemotron-H-8B", "Qwen3.5-27B"):
        assert as_hybrid(from_hugging_face(family_pages.published()[name], name)) is None
