"""What `plan` prints for a model, through Megatron's own parser: the config that Megatron builds.

Guards against flags that Megatron reads otherwise than the model means them, or that set more.
"""

import dataclasses
import shlex
from argparse import ArgumentParser
from dataclasses import replace
from functools import cache

import pytest
import torch

from megatron_burst.tools.hardware_file import preset
from megatron_burst.tools.job.flags import as_words, fast_experts, flag_values
from megatron_burst.tools.job.hugging_face import from_hugging_face
from megatron_burst.tools.job.model_flags import model_flags
from megatron_burst.tools.job.strategy import Job, Strategy
from tests.tools.job.configs import PRINTED

# a CPU has no fused rotary embedding
JOB = "--bf16 --micro-batch-size 1 --seq-length 64 --max-position-embeddings 64 --no-rope-fusion"
OF_ARGUMENTS = (  # that Megatron gives to the model, not to its config
    "position_embedding_type", "rotary_base", "rotary_percent", "use_rope_scaling",
    "rope_scaling_factor", "rotary_seq_len_interpolation_factor", "vocab_size",
    "untie_embeddings_and_output_weights",
)  # fmt: skip
OF_LATENT = {  # that only a config of latent attention has, as they are if nothing sets them
    "rope_type": "yarn", "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
    "cache_mla_latents": False, "mla_down_proj_fusion": False, "rotary_scaling_factor": 1.0,
    "mscale": 1.0, "mscale_all_dim": 0.0,
}  # fmt: skip


@cache
def built(flags):
    """Megatron's config of such flags, and what else it gives to a model."""
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import add_megatron_arguments, validate_args

    args = add_megatron_arguments(ArgumentParser()).parse_args(shlex.split(f"{flags} {JOB}"))
    args.rank, args.world_size = 0, 1
    validate_args(args)
    config = core_transformer_config_from_args(args)
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    values |= {name: value for name, value in vars(config).items() if name.startswith("yarn_")}
    values |= {name: getattr(args, name) for name in OF_ARGUMENTS}
    return {
        name: getattr(value, "__name__", value)
        for name, value in values.items()
        if not name.endswith("init_method")
    }


def changed(flags):
    """What flags make of the config of Megatron's defaults."""
    plain = OF_LATENT | built("--num-layers 1 --hidden-size 8 --num-attention-heads 1")
    now = built(flags).items()
    return {name: value for name, value in now if name not in plain or plain[name] != value}


def like_llama(layers, hidden, ffn, heads, groups, vocab, **more):
    """Fields of a decoder with such sizes, without those of `more` that are `None`."""
    fields = {
        "num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": ffn,
        "num_attention_heads": heads, "num_query_groups": groups, "kv_channels": 128,
        "vocab_size": vocab, "hidden_dropout": 0.0, "add_bias_linear": False,
        "add_qkv_bias": False, "gated_linear_unit": True, "activation_func": "silu",
        "normalization": "RMSNorm", "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
    } | more  # fmt: skip
    return {name: value for name, value in fields.items() if value is not None}


_NEMOTRON_H = {
    "gated_linear_unit": None, "activation_func": "squared_relu", "is_hybrid_model": True,
    "position_embedding_type": "none", "bias_activation_fusion": False,
}  # fmt: skip
# by hand from the published files, where Megatron's default is another
EXPECTED = {
    "Llama-3.2-1B": like_llama(
        16, 2048, 8192, 32, 8, 128256, kv_channels=64, rotary_base=500000, use_rope_scaling=True,
        rope_scaling_factor=32.0, untie_embeddings_and_output_weights=None,
    ),
    "LongChat-7B, linear": like_llama(
        32, 4096, 14336, 32, 8, 128256, rotary_base=500000, rotary_seq_len_interpolation_factor=8
    ),
    "Mistral-7B-v0.1": like_llama(32, 4096, 14336, 32, 8, 32000, window_size=(4095, 0)),
    "Qwen2.5-7B, YaRN as its card says": like_llama(
        28, 3584, 18944, 28, 4, 152064, add_qkv_bias=None, layernorm_epsilon=1e-6,
        rotary_base=1000000, position_embedding_type="yarn", yarn_rotary_scaling_factor=4.0,
        yarn_original_max_position_embeddings=32768, yarn_beta_fast=32.0, yarn_beta_slow=1.0,
        yarn_mscale=1.0, yarn_mscale_all_dim=0.0, yarn_correction_range_round_to_int=True,
    ),
    "Qwen2-57B-A14B": like_llama(
        28, 3584, 18944, 28, 4, 151936, add_qkv_bias=None, layernorm_epsilon=1e-6,
        rotary_base=1000000, num_moe_experts=64, moe_router_topk=8, moe_ffn_hidden_size=2560,
        moe_shared_expert_intermediate_size=20480, moe_shared_expert_gate=True,
        moe_router_pre_softmax=True,
    ),
    "Qwen3-8B": like_llama(
        36, 4096, 12288, 32, 8, 151936, layernorm_epsilon=1e-6, rotary_base=1000000,
        qk_layernorm=True,
    ),
    "Mixtral-8x7B": like_llama(
        32, 4096, 14336, 32, 8, 32000, rotary_base=1000000, num_moe_experts=8,
        moe_ffn_hidden_size=14336,
    ),
    "Phi-4": like_llama(40, 5120, 17920, 40, 10, 100352, rotary_base=250000),
    "Seed-OSS-36B": like_llama(
        64, 5120, 27648, 80, 8, 155136, layernorm_epsilon=1e-6, rotary_base=10000000,
        add_qkv_bias=None,
    ),
    "Qwen3-30B-A3B": like_llama(
        48, 2048, 6144, 32, 4, 151936, layernorm_epsilon=1e-6, rotary_base=1000000,
        num_moe_experts=128, moe_router_topk=8, moe_ffn_hidden_size=768, qk_layernorm=True,
    ),
    "Qwen2.5-VL-7B, its language model": like_llama(
        28, 3584, 18944, 28, 4, 152064, add_qkv_bias=None, layernorm_epsilon=1e-6,
        rotary_base=1000000, position_embedding_type="mrope", mrope_section=[16, 24, 24],
    ),
    "Qwen3-Next-80B-A3B": like_llama(  # sizes of its delta nets are Megatron's defaults
        48, 2048, 5120, 16, 2, 151936, kv_channels=256, layernorm_epsilon=1e-6,
        layernorm_zero_centered_gamma=True, rotary_base=10000000, rotary_percent=0.25,
        qk_layernorm=True, attention_output_gate=True, linear_attention_freq=4,
        experimental_attention_variant="gated_delta_net", num_moe_experts=512, moe_router_topk=10,
        moe_ffn_hidden_size=512, moe_shared_expert_intermediate_size=512,
        moe_shared_expert_gate=True,
    ),
    "Nemotron-H-8B": like_llama(52, 4096, 21504, 32, 8, 131072, **_NEMOTRON_H, mamba_num_heads=128),
    "Nemotron-3-Nano-30B-A3B": like_llama(
        52, 2688, 1856, 32, 2, 131072, **_NEMOTRON_H, mamba_num_heads=64, num_moe_experts=128,
        moe_router_topk=6, moe_ffn_hidden_size=1856, moe_shared_expert_intermediate_size=3712,
        moe_router_num_groups=1, moe_router_group_topk=1, moe_router_topk_scaling_factor=2.5,
        moe_router_score_function="sigmoid", moe_router_dtype="fp32",
        moe_router_enable_expert_bias=True,
    ),
    "gpt-oss-20b": like_llama(  # every linear layer has biases, and Megatron's router with them
        24, 2880, 2880, 64, 8, 201088, kv_channels=64, add_bias_linear=None, add_qkv_bias=None,
        num_moe_experts=32, moe_router_topk=4, moe_ffn_hidden_size=2880,
        activation_func="quick_gelu", activation_func_clamp_value=7.0, glu_linear_offset=1.0,
        window_size=(127, 0), window_attn_skip_freq=2, softmax_type="learnable",
        rotary_base=150000, position_embedding_type="yarn", yarn_rotary_scaling_factor=32.0,
        yarn_original_max_position_embeddings=4096, yarn_beta_fast=32.0, yarn_beta_slow=1.0,
        yarn_mscale=1.0, yarn_mscale_all_dim=0.0, yarn_correction_range_round_to_int=False,
    ),
    "Nemotron-4-Mini-4B": like_llama(
        32, 3072, 9216, 24, 8, 256000, gated_linear_unit=None, activation_func="squared_relu",
        normalization=None, layernorm_zero_centered_gamma=True, rotary_percent=0.5,
        bias_activation_fusion=False,  # there is no bias
    ),
    "StarCoder2-7B": like_llama(  # Megatron's GeLU with a bias is that with tanh
        32, 4608, 18432, 36, 4, 49152, add_bias_linear=None, add_qkv_bias=None,
        gated_linear_unit=None, activation_func=None, normalization=None, rotary_base=1000000,
        window_size=(4095, 0), untie_embeddings_and_output_weights=None,
    ),
    "SmolLM3-3B": like_llama(
        36, 2048, 11008, 16, 4, 128256, layernorm_epsilon=1e-6, rotary_base=5000000,
        no_rope_freq=[0, 0, 0, 1] * 9, untie_embeddings_and_output_weights=None,
    ),
    "DeepSeek-V3": like_llama(
        61, 7168, 18432, 128, 128, 129280, kv_channels=56, multi_latent_attention=True,
        q_lora_rank=1536, kv_lora_rank=512, qk_head_dim=128, qk_pos_emb_head_dim=64,
        v_head_dim=128, qk_layernorm=True, layernorm_epsilon=1e-6, rotary_scaling_factor=40.0,
        mscale_all_dim=1.0, num_moe_experts=256, moe_router_topk=8, moe_ffn_hidden_size=2048,
        moe_shared_expert_intermediate_size=2048, moe_layer_freq=[0] * 3 + [1] * 58,
        moe_router_num_groups=8, moe_router_group_topk=4, moe_router_topk_scaling_factor=2.5,
        moe_router_score_function="sigmoid", moe_router_pre_softmax=True,
        moe_router_enable_expert_bias=True, moe_router_dtype="fp32", mtp_num_layers=1,
    ),
    "GLM-4.5": like_llama(
        92, 5120, 12288, 96, 8, 151552, add_qkv_bias=None, rotary_base=1000000,
        rotary_percent=0.5, qk_layernorm=True, num_moe_experts=160, moe_router_topk=8,
        moe_ffn_hidden_size=1536, moe_shared_expert_intermediate_size=1536,
        moe_layer_freq=[0] * 3 + [1] * 89, moe_router_num_groups=1, moe_router_group_topk=1,
        moe_router_topk_scaling_factor=2.5, moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True, moe_router_dtype="fp32", mtp_num_layers=1,
    ),
    "Moonlight-16B-A3B": like_llama(
        27, 2048, 11264, 16, 16, 163840, rotary_base=50000, multi_latent_attention=True,
        q_lora_rank=None, kv_lora_rank=512, qk_head_dim=128, qk_pos_emb_head_dim=64,
        v_head_dim=128, rope_type="rope", qk_layernorm=True, num_moe_experts=64,
        moe_router_topk=6, moe_ffn_hidden_size=1408, moe_shared_expert_intermediate_size=2816,
        moe_layer_freq=[0] + [1] * 26, moe_router_num_groups=1, moe_router_group_topk=1,
        moe_router_topk_scaling_factor=2.446, moe_router_score_function="sigmoid",
        moe_router_pre_softmax=True, moe_router_enable_expert_bias=True, moe_router_dtype="fp32",
    ) | {"q_lora_rank": None},
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_megatron_builds_the_model_of_the_config(name):
    model = from_hugging_face(PRINTED[name][0], name)
    assert changed(" ".join(as_words(model_flags(model)))) == EXPECTED[name]


def test_a_model_of_every_type_whose_flags_are_printed_is_here():
    every = {config["model_type"] for config, _ in PRINTED.values()}
    assert {PRINTED[name][0]["model_type"] for name in EXPECTED} == every


def model_of(config):
    return from_hugging_face(config, "x")


WITH_EXPERTS = [name for name, (config, *_) in PRINTED.items() if model_of(config).experts]


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_what_is_predicted_of_experts_is_switched_on(name, monkeypatch):
    """Megatron accepts the flags where there are a GPU and TransformerEngine's kernels, and
    TEGroupedMLP finds a config that it does not refuse."""
    from megatron.core.transformer.moe import moe_utils

    model = model_of(PRINTED[name][0])
    flags = flag_values(Job(model, 8192, 8, 8, 8, preset("h200")), Strategy(cp=8))
    fast = fast_experts(model)
    assert (
        fast["--moe-grouped-gemm"]
        and fast["--moe-permute-fusion"]
        and fast.items() <= flags.items()
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for kernel in ("permute", "permute_with_probs", "unpermute", "sort_chunks_by_index",
                   "sort_chunks_by_index_with_probs"):  # fmt: skip
        monkeypatch.setattr(moe_utils, f"fused_{kernel}", print)
    config = built.__wrapped__(" ".join([*as_words(model_flags(model)), *as_words(fast)]))
    assert config["moe_grouped_gemm"] and config["moe_permute_fusion"]
    assert not (config["add_bias_linear"] and config["bias_dropout_fusion"])
    fused = config["bias_activation_fusion"]
    assert not fused or config["activation_func"] in ("silu", "quick_gelu")


def test_experts_whose_activation_no_grouped_product_has_get_no_such_flag():
    model = model_of(PRINTED["Mixtral-8x7B"][0])
    assert fast_experts(replace(model, gated=False)) == {}
