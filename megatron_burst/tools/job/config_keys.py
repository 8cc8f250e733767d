"""Megatron's flags for what a Hugging Face config says, and its entries that no flag here says.

An allow-list: an entry is either read, or without effect on what the model computes, or named.
Sources: the configuration and modelling classes of transformers 4.57 and 5.12, the argument parser
and the rotary embeddings of Megatron-Core 0.19.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]
Flags = dict[str, int | float | str | bool]


@dataclass(frozen=True, slots=True)
class _Kind:
    """A model class of transformers: a Llama but for what it reads, and for what it always has."""

    name: str  # without ForCausalLM
    reads: frozenset[str] = frozenset()  # keys beside a Llama's
    has: tuple[str, ...] = ()  # flags


_LLAMA = frozenset({
    "model_type", "architectures", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings",
    "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
})  # fmt: skip
_OLD_QWEN = {"sliding_window", "max_window_layers"}  # without effect unless use_sliding_window
_QWEN = frozenset({*_OLD_QWEN, "use_sliding_window", "layer_types"})
_EXPERTS = {"num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"}
_SHARED = {"shared_expert_intermediate_size", "qkv_bias"}
_KINDS = {
    "llama": _Kind("Llama"),
    "mistral": _Kind("Mistral", frozenset({"sliding_window"})),
    "mixtral": _Kind(
        "Mixtral", frozenset({"sliding_window", "num_local_experts", "num_experts_per_tok"})
    ),
    "phi3": _Kind("Phi3", frozenset({"sliding_window", "partial_rotary_factor"})),
    "qwen2": _Kind("Qwen2", _QWEN, ("--add-qkv-bias",)),
    "qwen2_moe": _Kind(
        "Qwen2Moe", frozenset(_EXPERTS | _SHARED | _OLD_QWEN), ("--moe-shared-expert-gate",)
    ),
    "qwen3": _Kind("Qwen3", _QWEN, ("--qk-layernorm",)),
    "qwen3_moe": _Kind("Qwen3Moe", frozenset(_EXPERTS | _OLD_QWEN), ("--qk-layernorm",)),
    "seed_oss": _Kind("SeedOss", frozenset({"attention_bias"})),
}
# of the classes, where they differ from what the planner takes for a key that is not there
_QWEN_USUAL = {"use_sliding_window": False, "rope_theta": 10000, "rms_norm_eps": 1e-6}
_TIED = {"tie_word_embeddings": True}
_USUAL: Mapping[str, Config] = {
    "llama": {"rope_theta": 10000, "rms_norm_eps": 1e-6},
    "mistral": {
        "rope_theta": 10000, "rms_norm_eps": 1e-6, "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "mixtral": {"rope_theta": 1000000, "rms_norm_eps": 1e-5, "num_key_value_heads": 8},
    "phi3": {"rope_theta": 10000, "rms_norm_eps": 1e-5},
    "qwen2": {**_QWEN_USUAL, "num_key_value_heads": 32, "max_window_layers": 28},
    "qwen2_moe": {
        **_QWEN_USUAL, "num_key_value_heads": 16, "shared_expert_intermediate_size": 5632,
        "qkv_bias": True,
    },
    "qwen3": {
        **_QWEN_USUAL, "num_key_value_heads": 32, "max_window_layers": 28, "head_dim": 128,
    },
    "qwen3_moe": {**_QWEN_USUAL, "num_key_value_heads": 4},
    "seed_oss": {
        "rope_theta": 10000, "rms_norm_eps": 1e-6, "num_key_value_heads": 8, "head_dim": 128,
        "attention_bias": True,
    },
    "gemma3_text": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
        "sliding_window": 4096, **_TIED,
    },
    **dict.fromkeys(
        ("cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "gemma", "gemma4_text", "smollm3",
         "starcoder2"), _TIED
    ),
}  # fmt: skip
_COUNTED = frozenset({  # read for the sizes of any model
    *_LLAMA, *_QWEN, *_EXPERTS, "num_local_experts", "n_routed_experts", "n_shared_experts",
    "shared_expert_intermediate_size", "first_k_dense_replace", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "sliding_window_pattern",
    "attn_type_list",
}) - {"norm_topk_prob"}  # fmt: skip
_WITHOUT_EFFECT = frozenset({  # on what the model computes from its weights
    "_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "use_bfloat16",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "tokenizer_class",
    "initializer_range", "attention_dropout", "hidden_dropout", "residual_dropout", "resid_pdrop",
    "embd_pdrop", "max_position_embeddings", "original_max_position_embeddings", "pretraining_tp",
    "output_router_logits", "router_aux_loss_coef", "output_attentions", "output_hidden_states",
    "return_dict", "gradient_checkpointing", "id2label", "label2id", "task_specific_params",
    "_attn_implementation_autoset", "unsloth_fixed", "unsloth_version",
})  # fmt: skip
_NOTHING = (None, False, 0)
_OFF: Mapping[str, tuple[Any, ...]] = {  # values that leave a Llama as it is
    "hidden_act": ("silu",), "partial_rotary_factor": (1,), "decoder_sparse_step": (1,),
    "moe_layer_freq": (1,), "mlp_only_layers": (None, []),
    **dict.fromkeys(
        ("attention_bias", "attention_out_bias", "mlp_bias", "router_jitter_noise",
         "use_sliding_window", "sliding_window", "use_mrope", "is_encoder_decoder",
         "add_cross_attention", "chunk_size_feed_forward"), _NOTHING
    ),
}  # fmt: skip


def with_usual(config: Config) -> Config:
    """A config with its class's values for what it leaves out, on one level: the language model's
    entries over those of a model that has it as `text_config` beside other parts."""
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, Mapping) else config
    return {**_USUAL.get(str(config.get("model_type")), {}), **config}


def flags_of(config: Config) -> tuple[Flags, tuple[str, ...]]:
    """Megatron's flags of what no size says in a config (`with_usual`); and, instead of them, the
    entries that no flag here says."""
    kind = _KINDS.get(str(config.get("model_type")))
    rotary, unknown = _rotary(config)
    if not isinstance(config.get("rms_norm_eps"), int | float):
        unknown.append("no rms_norm_eps")
    reads = _LLAMA | kind.reads if kind else _COUNTED
    every = (*_of_class(config, kind), *_unread(config, reads), *unknown)
    if every or not kind:
        return {}, every
    return {"--norm-epsilon": config["rms_norm_eps"]} | rotary | _own(config, kind), ()


def _of_class(config: Config, kind: _Kind | None) -> Iterator[str]:
    if not kind:
        yield f"model_type {config['model_type']}" if "model_type" in config else "no model_type"
    elif (classes := config.get("architectures")) not in (None, [f"{kind.name}ForCausalLM"]):
        yield f"architectures {classes}"


def _unread(config: Config, reads: frozenset[str]) -> Iterator[str]:
    for key, value in config.items():
        if key not in reads | _WITHOUT_EFFECT and value not in _OFF.get(key, ()):
            plain = isinstance(value, str | int | float) and len(str(value)) < 30
            yield f"{key} {value}" if plain else key


def _own(config: Config, kind: _Kind) -> Flags:
    """Flags of what a class has beside a Llama's."""
    flags: Flags = dict.fromkeys(kind.has, True)
    if any(key in kind.reads and config.get(key) for key in ("attention_bias", "qkv_bias")):
        flags["--add-qkv-bias"] = True
    if "norm_topk_prob" in kind.reads and not config.get("norm_topk_prob"):
        flags["--moe-router-pre-softmax"] = True  # weights of all experts, not of the chosen ones
    if (part := config.get("partial_rotary_factor", 1)) != 1:
        flags["--rotary-percent"] = part
    return flags


def _rotary(config: Config) -> tuple[Flags, list[str]]:
    """Flags of rotary embeddings, and what none says; transformers 5 has `rope_parameters`."""
    said = {"rope_theta": config.get("rope_theta")}
    for key in ("rope_scaling", "rope_parameters"):
        more = config.get(key) or {}
        if not isinstance(more, Mapping):
            return {}, [key]
        said |= more
    base, kind = said.pop("rope_theta"), said.pop("type", None)
    kind = said.pop("rope_type", kind) or "default"
    if not isinstance(base, int | float) or base != int(base):
        return {}, ["no rope_theta that is a whole number"]
    scaled = _scaled(kind, said)
    unknown = [f"{kind} scaling of rotary embeddings"] if scaled is None else []
    return {"--rotary-base": int(base)} | (scaled or {}), unknown


def _scaled(kind: str, said: dict[str, Any]) -> Flags | None:
    """Flags of a scaling of positions; None where Megatron's would compute another."""
    factor = said.pop("factor", 1)
    if not isinstance(factor, int | float):
        return None
    if kind == "default" and not said:
        return {}
    if kind == "linear" and not said and factor == int(factor):
        return {"--rotary-seq-len-interpolation-factor": int(factor)}
    fixed = {  # in Megatron's code
        "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    if kind == "llama3" and said == fixed:
        return {"--use-rope-scaling": True, "--rope-scaling-factor": factor}
    betas = {"beta_fast": 32, "beta_slow": 1} | said
    length = betas.pop("original_max_position_embeddings", None)
    if kind != "yarn" or length is None or betas.keys() != {"beta_fast", "beta_slow"}:
        return None
    return {
        "--position-embedding-type": "yarn", "--rotary-scaling-factor": factor,
        "--yarn-original-max-position-embeddings": length,
        "--yarn-beta-fast": betas["beta_fast"], "--yarn-beta-slow": betas["beta_slow"],
    }  # fmt: skip
