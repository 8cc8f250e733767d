"""The flags that `plan` prints for a model, through Megatron's parser, are the config of
Megatron-Bridge's provider for the same config.json, field by field.

Guards against flags that mean another model than the one that Bridge builds.
"""

import dataclasses
import importlib.util
import json

import pytest

from megatron_burst.tools.job.config_flags import TYPES, Type, table
from megatron_burst.tools.job.flags import as_words
from megatron_burst.tools.job.hugging_face import PRESETS, from_hugging_face
from megatron_burst.tools.job.model_flags import model_flags
from tests.mcore.test_model_flags import built
from tests.tools.job.configs import PRINTED, WITHHELD
from tests.tools.job.test_families import CONFIGS, SAID

if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("Megatron-Bridge is not installed: make test-integrations", allow_module_level=True)

# every config whose flags are printed, presets too
PUBLISHED = {name: config for name, (config, _) in PRINTED.items()}
PUBLISHED |= {name: CONFIGS[name] for name in SAID}
PUBLISHED |= {  # TOML has no null
    f"preset {name}": {
        key: None if value == 0 and key in ("sliding_window", "q_lora_rank") else value
        for key, value in table("presets")[name].items() if key != "also"
    }
    for name in table("presets") if not PRESETS[name].unknown
}  # fmt: skip
# model types that Bridge 0.6.2 has no provider for
LACKING = {
    "mixtral", "qwen2_moe", "phi3", "seed_oss", "starcoder2", "smollm3", "qwen2_5_vl_text",
}  # fmt: skip
# of the run and its speed, not of the model
OF_RUN = set(
    """apply_rope_fusion attention_backend autocast_dtype bias_activation_fusion
    bias_dropout_fusion cp_comm_type cross_entropy_fusion_impl cross_entropy_loss_fusion
    cuda_graph_modules deallocate_pipeline_outputs embedding_init_method_std
    expert_tensor_parallel_num_weight_shards expert_tensor_parallel_size first_last_layers_bf16
    hetereogenous_dist_checkpoint inference_cuda_graph_scope inference_sampling_seed
    microbatch_group_size_per_vp_stage moe_grouped_gemm moe_permute_fusion
    moe_shared_expert_overlap moe_token_dispatcher_type persist_layer_norm pipeline_dtype
    recompute_modules tensor_parallel_num_weight_shards use_cpu_initialization""".split()
)
# a recipe's choice in Bridge, yours in a command line: config.json has none of these
OF_TRAINING = set(
    """moe_aux_loss_coeff moe_router_bias_update_rate moe_router_load_balancing_type
    mtp_loss_scaling_factor""".split()
)
# what only Bridge sets where the model has no such part: experts of hybrids without any
OF_NO_EXPERTS = set(
    """num_moe_experts moe_ffn_hidden_size moe_router_dtype moe_router_enable_expert_bias
    moe_router_group_topk moe_router_num_groups moe_router_score_function
    moe_router_topk_scaling_factor moe_shared_expert_intermediate_size""".split()
)
_USUAL = {"yarn_mscale": None, "yarn_mscale_all_dim": None}  # which Megatron then has as 1 and 0
_PLAIN = {"rope_type": "yarn", "mscale_all_dim": 1.0}  # YaRN with a factor of 1 is plain RoPE
SAID_OTHERWISE = {  # by name or model type: what Bridge has where ours is the same model
    "Qwen2.5-7B, YaRN as its card says": _USUAL | {
        # Bridge is wrong: without the first two its model fails, without the last it does not round
        # as transformers does
        "yarn_beta_fast": None, "yarn_beta_slow": None, "yarn_correction_range_round_to_int": None,
    },
    # every linear layer has biases, those of q, k and v too
    "gpt_oss": _USUAL | {"add_qkv_bias": False},
    "qwen3_next": {
        "linear_attention_freq": [1, 1, 1, 0] * 12, "moe_router_dtype": "fp32",
    },
    "nemotron_h": {"mtp_num_layers": 0},
    "Moonlight-16B-A3B": _PLAIN, "preset moonlight-16b-a3b": _PLAIN,
}  # fmt: skip


def read(config, folder):
    """What transformers reads of a config.json."""
    from transformers import AutoConfig

    kind = TYPES.get(config["model_type"], Type()).name
    usual = {"architectures": [f"{kind}ForCausalLM"], "torch_dtype": "bfloat16"}
    config = usual | config
    (folder / "config.json").write_text(json.dumps(config))
    return AutoConfig.from_pretrained(folder)


def provided(config, folder):
    """Fields of the provider that Bridge makes of a config.json."""
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_config(read(config, folder))
    provider = bridge.to_megatron_provider(load_weights=False)
    fields = {each.name: getattr(provider, each.name) for each in dataclasses.fields(provider)}
    return {name: getattr(value, "__name__", value) for name, value in fields.items()}


def unused(name, ours):
    """Whether a field says nothing in this model."""
    return (
        (name == "rope_scaling_factor" and not ours["use_rope_scaling"])
        or (name == "kv_channels" and ours["multi_latent_attention"])
        or (name in OF_NO_EXPERTS and not ours["num_moe_experts"])
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_flags_are_the_config_of_bridges_provider(name, tmp_path):
    config, kind = PUBLISHED[name], PUBLISHED[name]["model_type"]
    if kind in LACKING:
        with pytest.raises(ValueError, match="not (yet )?supported"):
            provided(config, tmp_path)
        return
    theirs = provided(config, tmp_path)
    model = from_hugging_face(config, name)
    ours = built(" ".join([*as_words(model_flags(model)), "--attention-dropout 0"]))
    theirs["kv_channels"] = (
        theirs["kv_channels"] or ours["hidden_size"] // ours["num_attention_heads"]
    )
    shared = (ours.keys() & theirs.keys()) - OF_RUN - OF_TRAINING
    differing = {
        key: theirs[key] for key in sorted(shared)
        if plain(ours[key]) != plain(theirs[key]) and not unused(key, ours)
    }  # fmt: skip
    assert differing == SAID_OTHERWISE.get(name, SAID_OTHERWISE.get(kind, {}))
    assert {"num_layers", "hidden_size", "rotary_base", "layernorm_epsilon"} <= shared


def test_bridge_scales_positions_of_mistral_small_31_which_its_config_does_not(tmp_path):
    """So Bridge 0.6.2 is no oracle for it: its config.json has no rope_scaling."""
    config = WITHHELD["Mistral-Small-3.1-24B"][0]
    assert "rope_scaling" not in config["text_config"]
    theirs = provided(config, tmp_path)
    assert (theirs["position_embedding_type"], theirs["yarn_rotary_scaling_factor"]) == ("yarn", 16)


def plain(value):
    """Lists and tuples are alike."""
    return list(value) if isinstance(value, tuple) else value
