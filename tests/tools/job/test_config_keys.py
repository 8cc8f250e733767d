"""Flags are printed for a model whose every entry is understood, and for no other.

Guards against flags that start another model than the config's: rotary scaling, routers,
activations, norms or layers that nobody read.
"""

import pytest

from megatron_burst.errors import BurstError
from megatron_burst.tools.job.flags import as_words
from megatron_burst.tools.job.hugging_face import from_hugging_face
from tests.tools.job.configs import (
    DEEPSEEK_V3,
    LLAMA_3_1_8B,
    LLAMA_3_8B,
    PRINTED,
    QWEN_3_8B,
    WITHHELD,
)

EXPERTS = PRINTED["Qwen3-30B-A3B"][0]


def model(config):
    return from_hugging_face(config, "config.json")


@pytest.mark.parametrize("name", PRINTED)
def test_flags_say_what_a_config_says(name):
    config, flags = PRINTED[name]
    found = model(config)
    assert found.unknown == () and " ".join(as_words(dict(found.beside))) == flags


@pytest.mark.parametrize("name", WITHHELD)
def test_entries_that_no_flag_says_are_named(name):
    config, billions, named = WITHHELD[name]
    found = model(config)
    assert set(found.unknown) == named and found.beside == ()
    assert billions is None or found.params / 1e9 == pytest.approx(billions, rel=0.006)


@pytest.mark.parametrize(
    ("name", "billions"),  # of its card
    [("Nemotron-4-Mini-4B", 4.19), ("StarCoder2-7B", 7.17), ("SmolLM3-3B", 3.075),
     ("gpt-oss-20b", 20.9), ("Moonlight-16B-A3B", 16.0),
     ("DeepSeek-V3", 671.0 + 11.6), ("GLM-4.5", 352.8 + 3.8)],  # with a prediction layer
)  # fmt: skip
def test_weights_of_models_unlike_a_llama(name, billions):
    assert model(PRINTED[name][0]).params / 1e9 == pytest.approx(billions, rel=0.006)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {
                "kv_lora_rank": 8,
                "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"beta_fast": 1},
                "qk_rope_head_dim": 64,
                "qk_nope_head_dim": 128,
                "v_head_dim": 128,
            },
            "yarn scaling",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"brand_new_attention": "yes"}, "brand_new_attention yes"),
        ({"brand_new_attention": {"rank": 4}}, "brand_new_attention"),
        ({"model_type": "llama9"}, "model_type llama9"),
        ({"model_type": None}, "model_type None"),
        ({"architectures": ["LlamaForTokenClassification"]}, "architectures"),
        ({"auto_map": {"AutoModel": "own.Model"}}, "auto_map"),
        ({"hidden_act": "relu2"}, "hidden_act relu2"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"attention_bias": True}, "attention_bias True"),  # of the output too
        ({"sliding_window": 4096}, "sliding_window 4096"),  # its class has none
        ({"num_experts": 8, "num_experts_per_tok": 2}, "num_experts 8"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_theta": 10000.5}, "no rope_theta"),
        ({"rope_scaling": "yes"}, "rope_scaling"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic scaling"),
        ({"rope_scaling": {"type": "linear", "factor": 2.5}}, "linear scaling"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "linear scaling"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn scaling"),
        (
            {"rope_scaling": LLAMA_3_1_8B["rope_scaling"] | {"low_freq_factor": 2.0}},
            "llama3 scaling",
        ),
        (
            {"rope_scaling": LLAMA_3_1_8B["rope_scaling"] | {"attention_factor": 2.0}},
            "llama3 scaling",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_any_other_key_or_value_withholds_the_flags(changes, named):
    found = model(LLAMA_3_8B | changes)
    assert len(found.unknown) >= 1 and any(one.startswith(named) for one in found.unknown)
    assert found.beside == ()


def test_what_classes_do_where_a_key_is_left_out():
    def flags_without(key, config):
        found = model({name: value for name, value in config.items() if name != key})
        assert found.unknown == ()
        return dict(found.beside), found

    assert flags_without("norm_topk_prob", EXPERTS)[0]["--moe-router-pre-softmax"]
    assert flags_without("head_dim", QWEN_3_8B | {"hidden_size": 5120})[1].dim_qk == 128
    assert flags_without("use_sliding_window", QWEN_3_8B | {"sliding_window": 9})[1].windows is None
    assert flags_without("num_key_value_heads", QWEN_3_8B)[1].heads_kv == 32
    assert flags_without("sliding_window", PRINTED["Mistral-7B-v0.1"][0])[1].windows.size == 4096
    assert flags_without("rms_norm_eps", LLAMA_3_8B)[0]["--norm-epsilon"] == 1e-6
    assert flags_without("tie_word_embeddings", LLAMA_3_8B)[1].tied is False
    assert dict(model(PRINTED["Phi-4"][0] | {"partial_rotary_factor": 0.75}).beside)[
        "--rotary-percent"
    ] == 0.75  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("Moonlight-16B-A3B", {"scoring_func": "softmax"}, "scoring_func softmax"),
        ("Moonlight-16B-A3B", {"norm_topk_prob": False}, "norm_topk_prob False"),
        # Megatron would choose groups by their best three
        ("Moonlight-16B-A3B", {"n_group": 8, "topk_group": 2}, "topk_group 2"),
        ("gpt-oss-20b", {"attention_bias": False}, "attention_bias False"),
        ("gpt-oss-20b", {"hidden_act": "gelu"}, "hidden_act gelu"),
        ("StarCoder2-7B", {"use_bias": False}, "use_bias False"),
        ("Nemotron-4-Mini-4B", {"hidden_act": "silu"}, "hidden_act silu"),
        ("Nemotron-4-Mini-4B", {"norm_eps": None}, "no norm_eps"),
    ],
)
def test_values_that_a_class_never_has_withhold_the_flags(name, changes, named):
    found = model(PRINTED[name][0] | changes)
    assert found.unknown == (named,) and found.beside == ()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Llama-3-8B", {"rope_theta": float("nan")}),
        ("DeepSeek-V3", {"first_k_dense_replace": "x"}),
        ("Qwen3-8B", {"layer_types": -1}),
        ("SmolLM3-3B", {"no_rope_layer_interval": 0}),
    ],
)
def test_values_of_another_kind_are_refused_in_a_sentence(name, changes):
    with pytest.raises(BurstError, match="must (be|hold) .*, because .*; got .*; correct it"):
        model(PRINTED[name][0] | changes)


def test_sizes_that_are_missing_are_named_together():
    match = "model_type gpt2 without num_hidden_layers, hidden_size, num_attention_heads"
    with pytest.raises(BurstError, match=match):
        model({"model_type": "gpt2", "n_embd": 768, "vocab_size": 50257})


def test_a_hybrid_without_its_pattern_is_refused():
    """Its layers would all be counted as attention with a feed-forward."""
    hybrid = {
        key: x for key, x in PRINTED["Nemotron-H-8B"][0].items() if key != "hybrid_override_pattern"
    }
    with pytest.raises(BurstError, match="model_type nemotron_h without hybrid_override_pattern"):
        model(hybrid)


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("Qwen3-30B-A3B", "num_experts"),
        ("DeepSeek-V3", "kv_lora_rank"),
        ("gpt-oss-20b", "rope_scaling"),
    ],
)
def test_keys_that_are_not_there_have_their_classes_values(name, left_out):
    """Without its experts or latent attention it would be another model, with flags."""
    config = PRINTED[name][0]
    found = model({key: x for key, x in config.items() if key != left_out})
    assert found == model(config)


def test_layers_without_rotary_embedding_may_be_any():
    config = PRINTED["SmolLM3-3B"][0]
    found = dict(model(config | {"no_rope_layers": [0] * 4 + [1] * 32}).beside)
    assert found["--no-rope-freq"] == f"[{','.join(['1'] * 4 + ['0'] * 32)}]"
    left_out = {key: value for key, value in config.items() if "no_rope" not in key}
    assert dict(model(left_out).beside)["--no-rope-freq"] == 4


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({}, 0),
        ({"mlp_only_layers": [0, 5]}, 2),
        ({"decoder_sparse_step": 2}, 24),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [0, 1]}, 25),
        ({"first_k_dense_replace": 3}, 3),
        ({"moe_layer_freq": 2, "first_k_dense_replace": 3}, 26),
        ({"moe_layer_freq": [0] + [1] * 47}, 1),
    ],
)
def test_layers_without_experts_are_counted_and_only_usual_ones_printed(changes, dense):
    found = model(EXPERTS | changes)
    assert found.experts.dense_layers == dense and bool(found.unknown) == bool(changes)


@pytest.mark.parametrize(
    ("config", "got"),
    [
        (
            {
                "model_type": "qwen3_5_moe",
                "text_config": {"layer_types": ["linear_attention", "full_attention"]},
            },
            "layer_types with linear_attention",
        ),
        ({"full_attention_interval": 4}, "full_attention_interval 4"),
        ({"index_topk": 2048}, "index_topk 2048"),
        ({"model_type": "minicpm", "sparse_config": {"topk": 64}}, "sparse_config {'topk': 64}"),
        ({"attn_type_list": [0, 1]}, "attn_type_list with others than 1"),
    ],
)
def test_other_layers_are_the_reason_before_any_missing_size(config, got):
    with pytest.raises(BurstError, match=got):
        model(config)
