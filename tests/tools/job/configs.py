"""Published config.json files: some with the fields that sizes depend on, and `PRINTED` and
`WITHHELD` as they are published, written from their cards and from the defaults of their classes.
"""

# of google/gemma-3-27b-it: missing fields have their class's default
GEMMA_3_27B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504,
        "model_type": "gemma3_text", "num_attention_heads": 32, "num_hidden_layers": 62,
        "num_key_value_heads": 16, "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
}  # fmt: skip
# of google/gemma-3-4b-it
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}  # fmt: skip
# of openai/gpt-oss-20b
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
    "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
    "num_local_experts": 32, "rms_norm_eps": 1e-05, "rope_theta": 150000, "sliding_window": 128,
    "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088,
}  # fmt: skip
# of mistralai/Mixtral-8x7B-v0.1
MIXTRAL_8X7B = {
    "hidden_size": 4096, "intermediate_size": 14336, "model_type": "mixtral",
    "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_local_experts": 8, "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
    "vocab_size": 32000,
}  # fmt: skip
# of mistralai/Mistral-7B-v0.1
MISTRAL_7B = {
    "hidden_size": 4096, "intermediate_size": 14336, "model_type": "mistral",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
    "tie_word_embeddings": False, "vocab_size": 32000,
}  # fmt: skip

_TRAINED = {  # as in nearly every file
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "initializer_range": 0.02, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
    "transformers_version": "4.46.0", "use_cache": True,
}  # fmt: skip


def _config(kind, sizes, theta, epsilon, **more):
    """A config of so many layers, hidden size, feed-forward, heads, KV heads and words."""
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
             "num_key_value_heads", "vocab_size")  # fmt: skip
    return {
        **_TRAINED, "model_type": kind, **dict(zip(names, sizes, strict=True)), "rope_theta": theta,
        "rms_norm_eps": epsilon, "tie_word_embeddings": False, **more,
    }  # fmt: skip


def _without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False,
    "pretraining_tp": 1, "rope_scaling": None,
}  # fmt: skip
_LLAMA_8B = (32, 4096, 14336, 32, 8, 128256)
LLAMA_3_8B = _config("llama", _LLAMA_8B, 500000.0, 1e-05, **_LLAMA)
LLAMA_3_1_8B = LLAMA_3_8B | {
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
}  # fmt: skip
LLAMA_3_1_405B = LLAMA_3_1_8B | _config(
    "llama", (126, 16384, 53248, 128, 8, 128256), 500000.0, 1e-05
)
QWEN_3_8B = _config(
    "qwen3", (36, 4096, 12288, 32, 8, 151936), 1000000, 1e-06, architectures=["Qwen3ForCausalLM"],
    attention_bias=False, head_dim=128, max_window_layers=36, rope_scaling=None,
    sliding_window=None, use_sliding_window=False,
)  # fmt: skip
_QWEN_3_MOE = _config(
    "qwen3_moe", (48, 2048, 6144, 32, 4, 151936), 1000000.0, 1e-06,
    architectures=["Qwen3MoeForCausalLM"], attention_bias=False, decoder_sparse_step=1,
    head_dim=128, max_window_layers=48, mlp_only_layers=[], moe_intermediate_size=768,
    norm_topk_prob=True, num_experts=128, num_experts_per_tok=8, output_router_logits=False,
    rope_scaling=None, router_aux_loss_coef=0.001, sliding_window=None, use_sliding_window=False,
)  # fmt: skip
QWEN_2_5_7B = _config(  # its windows are switched off
   
    "qwen2", (28, 3584, 18944, 28, 4, 152064), 1000000.0, 1e-06,
    architectures=["Qwen2ForCausalLM"], max_window_layers=28, sliding_window=131072,
    use_sliding_window=False, use_mrope=False,
)  # fmt: skip
QWEN_2_5_72B = QWEN_2_5_7B | {
    "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 29568,
    "num_attention_heads": 64, "num_key_value_heads": 8, "max_window_layers": 80,
}  # fmt: skip
QWEN_3_32B = QWEN_3_8B | {
    "num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 25600,
    "num_attention_heads": 64, "max_window_layers": 64,
}  # fmt: skip
_YARN = {"factor": 4.0, "original_max_position_embeddings": 32768, "rope_type": "yarn"}
_MISTRAL = {"architectures": ["MistralForCausalLM"], "head_dim": 128, "sliding_window": None}

_DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "aux_loss_alpha": 0.001,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "ep_size": 1,
    "first_k_dense_replace": 3, "kv_lora_rank": 512, "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8"}, "routed_scaling_factor": 2.5,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "scoring_func": "sigmoid", "seq_aux": True, "topk_group": 4, "topk_method": "noaux_tc",
    "v_head_dim": 128,
}  # fmt: skip
DEEPSEEK_V3 = _config("deepseek_v3", (61, 7168, 18432, 128, 128, 129280), 10000, 1e-06, **_DEEPSEEK)

_DELTA_NET = {
    "full_attention_interval": 4, "head_dim": 256, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "moe_intermediate_size": 512, "partial_rotary_factor": 0.25,
    "shared_expert_intermediate_size": 512,
}  # fmt: skip
# of Qwen/Qwen3-Next-80B-A3B-Instruct
QWEN_3_NEXT_80B = _config(
    "qwen3_next", (48, 2048, 5120, 16, 2, 151936), 10000000, 1e-06, num_experts=512,
    num_experts_per_tok=10, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
    architectures=["Qwen3NextForCausalLM"], rope_scaling=None, **_DELTA_NET,
)  # fmt: skip
# of Qwen/Qwen3.5-35B-A3B, whose layers all have experts
QWEN_3_5_35B = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
    "image_token_id": 248056, "vision_config": {"depth": 27},
    "text_config": _without(
        _config("qwen3_5_moe_text", (40, 2048, None, 16, 2, 248320), None, 1e-06,
                num_experts=256, num_experts_per_tok=8, **_DELTA_NET,
                rope_parameters={
                    "mrope_interleaved": True, "mrope_section": [11, 11, 10],
                    "rope_theta": 10000000, "rope_type": "default",
                }),
        "intermediate_size",
    ),
}  # fmt: skip

# of nvidia/Nemotron-H-8B-Base-8K
NEMOTRON_H_8B = _without(
    _config(
        "nemotron_h", (52, 4096, 21504, 32, 8, 131072), None, 1e-05, attention_bias=False,
        architectures=["NemotronHForCausalLM"], attention_head_dim=128, chunk_size=128,
        auto_map={"AutoConfig": "configuration_nemotron_h.NemotronHConfig"}, conv_kernel=4,
        expand=2, hidden_dropout=0.0, layer_norm_epsilon=1e-05, mamba_head_dim=64,
        hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        mamba_hidden_act="silu", mamba_num_heads=128, mamba_proj_bias=False, mlp_bias=False,
        mlp_hidden_act="relu2", n_groups=8, num_logits_to_keep=1, rescale_prenorm_residual=True,
        residual_in_fp32=False, sliding_window=None, ssm_state_size=128, time_step_floor=0.0001,
        time_step_limit=[0.0, float("inf")], time_step_max=0.1, time_step_min=0.001,
        use_bias=False, use_conv_bias=True, use_mamba_kernels=True,
    ),
    "hidden_act", "rope_theta",
)  # fmt: skip
# of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16
NEMOTRON_3_NANO = NEMOTRON_H_8B | {
    "hidden_size": 2688, "intermediate_size": 1856, "num_key_value_heads": 2, "head_dim": 128,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "mamba_num_heads": 64, "moe_intermediate_size": 1856, "n_group": 1, "n_routed_experts": 128,
    "moe_shared_expert_intermediate_size": 3712, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_experts_per_tok": 6, "routed_scaling_factor": 2.5, "topk_group": 1,
}  # fmt: skip
# of ibm-granite/granite-4.0-h-small
GRANITE_4_H_SMALL = _config(
    "granitemoehybrid", (40, 4096, 768, 32, 8, 100352), 10000, 1e-05, attention_bias=False,
    architectures=["GraniteMoeHybridForCausalLM"], attention_multiplier=0.0078125,
    embedding_multiplier=12, logits_scaling=16, residual_multiplier=0.22,
    layer_types=[["mamba", "attention"][number % 10 == 5] for number in range(40)],
    mamba_chunk_size=256, mamba_conv_bias=True, mamba_d_conv=4, mamba_d_head=64,
    mamba_d_state=128, mamba_expand=2, mamba_n_groups=1, mamba_n_heads=128,
    mamba_proj_bias=False, normalization_function="rmsnorm", num_experts_per_tok=10,
    num_local_experts=72, position_embedding_type="nope", rope_scaling=None,
    shared_intermediate_size=1536,
) | {"tie_word_embeddings": True}  # fmt: skip
# of ibm-granite/granite-4.0-h-micro
GRANITE_4_H_MICRO = GRANITE_4_H_SMALL | {
    "hidden_size": 2048, "intermediate_size": 8192, "shared_intermediate_size": 8192,
    "mamba_n_heads": 64, "num_local_experts": 0, "num_experts_per_tok": 0,
}  # fmt: skip

# published configs, with the flags that say what no size does
PRINTED = {
    "Llama-2-7B": (
        _without(
            _config("llama", (32, 4096, 11008, 32, 32, 32000), 10000, 1e-05, **_LLAMA), "rope_theta"
        ),
        "--norm-epsilon 1e-05 --rotary-base 10000",
    ),
    "Llama-3-8B": (LLAMA_3_8B, "--norm-epsilon 1e-05 --rotary-base 500000"),
    "Llama-3.1-8B": (
        LLAMA_3_1_8B,
        "--norm-epsilon 1e-05 --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 8.0",
    ),
    "Llama-3.2-1B": (
        LLAMA_3_1_8B
        | _config("llama", (16, 2048, 8192, 32, 8, 128256), 500000.0, 1e-05)
        | {
            "head_dim": 64, "tie_word_embeddings": True,
            "rope_scaling": LLAMA_3_1_8B["rope_scaling"] | {"factor": 32.0},
        },
        "--norm-epsilon 1e-05 --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 32.0",
    ),
    "LongChat-7B, linear": (
        LLAMA_3_8B | {"rope_scaling": {"factor": 8.0, "type": "linear"}},
        "--norm-epsilon 1e-05 --rotary-base 500000 --rotary-seq-len-interpolation-factor 8",
    ),
    "Mistral-7B-v0.1": (
        _config("mistral", (32, 4096, 14336, 32, 8, 32000), 10000.0, 1e-05,
                architectures=["MistralForCausalLM"], sliding_window=4096),
        "--norm-epsilon 1e-05 --rotary-base 10000",
    ),
    "Mistral-7B-v0.3": (
        _config("mistral", (32, 4096, 14336, 32, 8, 32768), 1000000.0, 1e-05, **_MISTRAL),
        "--norm-epsilon 1e-05 --rotary-base 1000000",
    ),
    "Mistral-Small-24B": (
        _config("mistral", (40, 5120, 32768, 32, 8, 131072), 100000000.0, 1e-05, **_MISTRAL),
        "--norm-epsilon 1e-05 --rotary-base 100000000",
    ),
    "Mixtral-8x7B": (
        _config("mixtral", (32, 4096, 14336, 32, 8, 32000), 1000000.0, 1e-05,
                architectures=["MixtralForCausalLM"], num_experts_per_tok=2, num_local_experts=8,
                output_router_logits=False, router_aux_loss_coef=0.02, sliding_window=None),
        "--norm-epsilon 1e-05 --rotary-base 1000000",
    ),
    "Qwen2.5-7B": (QWEN_2_5_7B, "--norm-epsilon 1e-06 --rotary-base 1000000 --add-qkv-bias"),
    "Qwen2.5-7B, YaRN as its card says": (
        QWEN_2_5_7B | {"rope_scaling": _without(_YARN, "rope_type") | {"type": "yarn"}},
        "--norm-epsilon 1e-06 --rotary-base 1000000 --position-embedding-type yarn "
        "--rotary-scaling-factor 4.0 "
        "--yarn-original-max-position-embeddings 32768 --yarn-beta-fast 32 --yarn-beta-slow 1 "
        "--add-qkv-bias",
    ),
    "DeepSeek-R1-Distill-Qwen-7B": (
        QWEN_2_5_7B | {"rope_theta": 10000, "sliding_window": 4096},
        "--norm-epsilon 1e-06 --rotary-base 10000 --add-qkv-bias",
    ),
    "Qwen2-57B-A14B": (
        _config("qwen2_moe", (28, 3584, 18944, 28, 4, 151936), 1000000.0, 1e-06,
                architectures=["Qwen2MoeForCausalLM"], decoder_sparse_step=1, max_window_layers=28,
                moe_intermediate_size=2560, norm_topk_prob=False, num_experts=64,
                num_experts_per_tok=8, output_router_logits=False, router_aux_loss_coef=0.001,
                shared_expert_intermediate_size=20480, sliding_window=65536,
                use_sliding_window=False),
        "--norm-epsilon 1e-06 --rotary-base 1000000 --moe-shared-expert-gate --add-qkv-bias "
        "--moe-router-pre-softmax",
    ),
    "Qwen3-8B": (QWEN_3_8B, "--norm-epsilon 1e-06 --rotary-base 1000000 --qk-layernorm"),
    "Qwen3-8B, as transformers 5 writes it": (
        _without(QWEN_3_8B, "rope_theta", "rope_scaling", "torch_dtype", "use_sliding_window")
        | {
            "dtype": "bfloat16", "layer_types": ["full_attention"] * 36,
            "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        },
        "--norm-epsilon 1e-06 --rotary-base 1000000 --qk-layernorm",
    ),
    "Qwen3-30B-A3B": (
        _QWEN_3_MOE, "--norm-epsilon 1e-06 --rotary-base 1000000 --qk-layernorm",
    ),
    "Phi-4": (
        _config("phi3", (40, 5120, 17920, 40, 10, 100352), 250000, 1e-05,
                architectures=["Phi3ForCausalLM"], attention_bias=False, embd_pdrop=0.0,
                original_max_position_embeddings=16384, resid_pdrop=0.0, rope_scaling=None,
                sliding_window=None),
        "--norm-epsilon 1e-05 --rotary-base 250000",
    ),
    "Seed-OSS-36B": (
        _config("seed_oss", (64, 5120, 27648, 80, 8, 155136), 10000000.0, 1e-06,
                architectures=["SeedOssForCausalLM"], attention_bias=True, attention_dropout=0.1,
                attention_out_bias=False, head_dim=128, mlp_bias=False, pretraining_tp=1,
                residual_dropout=0.1, rope_scaling={"rope_type": "default"}),
        "--norm-epsilon 1e-06 --rotary-base 10000000 --add-qkv-bias",
    ),
    "gpt-oss-20b": (
        _TRAINED | GPT_OSS_20B
        | {
            "initial_context_length": 4096, "quantization_config": {"quant_method": "mxfp4"},
            "rope_scaling": {
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
                "original_max_position_embeddings": 4096, "truncate": False,
            },
        },
        "--norm-epsilon 1e-05 --rotary-base 150000 --position-embedding-type yarn "
        "--rotary-scaling-factor 32.0 --yarn-original-max-position-embeddings 4096 "
        "--yarn-beta-fast 32.0 --yarn-beta-slow 1.0 --no-yarn-correction-range-round-to-int "
        "--quick-geglu --glu-linear-offset 1 --activation-func-clamp-value 7.0",
    ),
    "Nemotron-4-Mini-4B": (
        _without(
            _config("nemotron", (32, 3072, 9216, 24, 8, 256000), 10000.0, None,
                    architectures=["NemotronForCausalLM"], head_dim=128, hidden_act="relu2",
                    mlp_bias=False, norm_eps=1e-05, partial_rotary_factor=0.5),
            "rms_norm_eps",
        ),
        "--norm-epsilon 1e-05 --rotary-base 10000 --rotary-percent 0.5 --squared-relu "
        "--normalization LayerNorm --apply-layernorm-1p",
    ),
    "StarCoder2-7B": (
        _without(
            _config("starcoder2", (32, 4608, 18432, 36, 4, 49152), 1000000, None,
                    architectures=["Starcoder2ForCausalLM"], embedding_dropout=0.0,
                    hidden_act="gelu_pytorch_tanh", mlp_type="default", norm_epsilon=1e-05,
                    norm_type="layer_norm", sliding_window=4096, use_bias=True),
            "rms_norm_eps", "tie_word_embeddings",
        ),
        "--norm-epsilon 1e-05 --rotary-base 1000000 --normalization LayerNorm",
    ),
    "SmolLM3-3B": (
        _without(
            _config("smollm3", (36, 2048, 11008, 16, 4, 128256), 5000000.0, 1e-06,
                    architectures=["SmolLM3ForCausalLM"], layer_types=["full_attention"] * 36,
                    no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 9),
            "tie_word_embeddings",
        ),
        "--norm-epsilon 1e-06 --rotary-base 5000000 --no-rope-freq 4",
    ),
    "Qwen3-Next-80B-A3B": (
        QWEN_3_NEXT_80B,
        "--norm-epsilon 1e-06 --rotary-base 10000000 --rotary-percent 0.25 --qk-layernorm "
        "--apply-layernorm-1p --moe-shared-expert-gate",
    ),
    "Nemotron-H-8B": (
        NEMOTRON_H_8B, "--norm-epsilon 1e-05 --squared-relu --position-embedding-type none",
    ),
    "Nemotron-3-Nano-30B-A3B": (
        NEMOTRON_3_NANO,
        "--norm-epsilon 1e-05 --squared-relu --position-embedding-type none "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-router-dtype fp32 --moe-router-num-groups 1 --moe-router-group-topk 1 "
        "--moe-router-topk-scaling-factor 2.5",
    ),
    "Qwen2.5-VL-7B, its language model": (
        _without(QWEN_2_5_7B, "architectures")
        | {
            "model_type": "qwen2_5_vl_text",
            "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default"},
        },
        "--norm-epsilon 1e-06 --rotary-base 1000000 --position-embedding-type mrope "
        "--mrope-section 16 24 24 --add-qkv-bias",
    ),
    "DeepSeek-V3": (
        DEEPSEEK_V3,
        "--norm-epsilon 1e-06 --rotary-base 10000 --rotary-scaling-factor 40 --mscale 1.0 "
        "--mscale-all-dim 1.0 --qk-layernorm --moe-router-score-function sigmoid "
        "--moe-router-pre-softmax --moe-router-enable-expert-bias --moe-router-dtype fp32 "
        "--moe-router-num-groups 8 --moe-router-group-topk 4 "
        "--moe-router-topk-scaling-factor 2.5",
    ),
    "GLM-4.5": (
        _config("glm4_moe", (92, 5120, 12288, 96, 8, 151552), 1000000, 1e-05,
                architectures=["Glm4MoeForCausalLM"], attention_bias=True, first_k_dense_replace=3,
                head_dim=128, moe_intermediate_size=1536, n_group=1, n_routed_experts=160,
                n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=8,
                num_nextn_predict_layers=1, partial_rotary_factor=0.5, rope_scaling=None,
                routed_scaling_factor=2.5, topk_group=1, use_qk_norm=True),
        "--norm-epsilon 1e-05 --rotary-base 1000000 --rotary-percent 0.5 "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-router-dtype fp32 --add-qkv-bias --qk-layernorm --moe-router-num-groups 1 "
        "--moe-router-group-topk 1 --moe-router-topk-scaling-factor 2.5",
    ),
    "Moonlight-16B-A3B": (
        _config("deepseek_v3", (27, 2048, 11264, 16, 16, 163840), 50000.0, 1e-05,
                **_DEEPSEEK | {
                    "first_k_dense_replace": 1, "moe_intermediate_size": 1408, "n_group": 1,
                    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
                    "num_nextn_predict_layers": 0, "q_lora_rank": None, "rope_scaling": None,
                    "routed_scaling_factor": 2.446, "topk_group": 1,
                }),
        "--norm-epsilon 1e-05 --rotary-base 50000 --rope-type rope --no-rope-fusion "
        "--qk-layernorm --moe-router-score-function sigmoid --moe-router-pre-softmax "
        "--moe-router-enable-expert-bias --moe-router-dtype fp32 --moe-router-num-groups 1 "
        "--moe-router-group-topk 1 --moe-router-topk-scaling-factor 2.446",
    ),
}  # fmt: skip

_GEMMA = {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256}
_NO_EPSILON = "no rms_norm_eps"
_TOWER = "vision_config"

# published configs, with the entries that are named; the size is that of the model's card
WITHHELD = {
    "Kimi-K2": (
        DEEPSEEK_V3
        | _config("kimi_k2", (61, 7168, 18432, 64, 64, 163840), 50000.0, 1e-06)
        | {
            "first_k_dense_replace": 1, "n_group": 1, "n_routed_experts": 384,
            "num_nextn_predict_layers": 0, "routed_scaling_factor": 2.827, "topk_group": 1,
            "rope_scaling": _DEEPSEEK["rope_scaling"] | {"factor": 32.0, "beta_fast": 1.0},
        },
        1026.4,
        {"yarn scaling of rotary embeddings"},
    ),
    "GLM-4-9B-0414": (
        _config("glm4", (40, 4096, 13696, 32, 2, 151552), 10000.0, 1e-05, head_dim=128,
                architectures=["Glm4ForCausalLM"], partial_rotary_factor=0.5),
        9.4,
        {"model_type glm4", "partial_rotary_factor 0.5"},
    ),
    "Gemma-3-1B": (
        _without(
            _config("gemma3_text", (26, 1152, 6912, 4, 1, 262144), 1000000, 1e-06,
                    architectures=["Gemma3ForCausalLM"], attn_logit_softcapping=None,
                    final_logit_softcapping=None, rope_local_base_freq=10000, rope_scaling=None,
                    sliding_window=512, sliding_window_pattern=6, **_GEMMA),
            "hidden_act", "tie_word_embeddings",
        ),
        1.0,
        {"model_type gemma3_text", "attn_logit_softcapping", "final_logit_softcapping",
         "hidden_activation gelu_pytorch_tanh", "query_pre_attn_scalar 256",
         "rope_local_base_freq 10000"},
    ),
    "Gemma-3-27B": (
        GEMMA_3_27B | {"image_token_index": 262144, "vision_config": {"hidden_size": 1152}}, 27.0,
        {"model_type gemma3_text", "image_token_index 262144", _TOWER,
         "query_pre_attn_scalar 168", "no rope_theta that is a whole number", _NO_EPSILON},
    ),
    "Qwen2.5-VL-7B": (
        QWEN_2_5_7B
        | {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
            "image_token_id": 151655, "vision_config": {"depth": 32},
            "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"},
        },
        7.6,
        {"architectures ['Qwen2_5_VLForConditionalGeneration']", "image_token_id 151655", _TOWER},
    ),
    "Qwen3-VL-2B": (
        {
            "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl",
            "image_token_id": 151655, "tie_word_embeddings": True, "vision_config": {"depth": 24},
            "text_config": _without(
                _config("qwen3_vl_text", (28, 2048, 6144, 16, 8, 151936), 5000000, 1e-06,
                        head_dim=128, rope_scaling={
                            "mrope_interleaved": True, "mrope_section": [24, 20, 20],
                            "rope_type": "default",
                        }),
                "tie_word_embeddings",
            ),
        },
        1.72,  # tied by its outer entry
        {"model_type qwen3_vl_text", "image_token_id 151655", _TOWER,
         "mrope scaling of rotary embeddings"},
    ),
    "Mistral-Small-3.1-24B": (
        {
            "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
            "image_token_index": 10, "spatial_merge_size": 2, "vision_config": {"depth": 24},
            "text_config": _without(
                _config("mistral", (40, 5120, 32768, 32, 8, 131072), 1e9, 1e-05, **_MISTRAL),
                "architectures",
            ),
        },
        23.6,
        {"image_token_index 10", "spatial_merge_size 2", _TOWER,
         "architectures ['Mistral3ForConditionalGeneration']"},
    ),
    "MiniMax-M2": (
        _config("minimax_m2", (62, 3072, 1536, 48, 8, 200064), 5000000, 1e-06,
                architectures=["MiniMaxM2ForCausalLM"], attn_type_list=[1] * 62, head_dim=128,
                num_experts_per_tok=8, num_local_experts=256, num_mtp_modules=3,
                qk_norm_type="per_layer", rotary_dim=64, scoring_func="sigmoid", use_mtp=True,
                use_qk_norm=True, use_routing_bias=True),
        228.7,
        {"model_type minimax_m2", "num_mtp_modules 3", "qk_norm_type per_layer", "rotary_dim 64",
         "scoring_func sigmoid", "use_mtp True", "use_qk_norm True", "use_routing_bias True"},
    ),
    "Command-R7B": (
        _without(
            _config("cohere2", (32, 4096, 14336, 32, 8, 256000), 50000, None,
                    architectures=["Cohere2ForCausalLM"], head_dim=128, layer_norm_eps=1e-05,
                    logit_scale=0.25, order_of_interleaved_layers="local_attn_first",
                    position_embedding_type="rope_gptj", rotary_pct=1.0, sliding_window=4096,
                    sliding_window_pattern=4, use_gated_activation=True, use_parallel_block=True),
            "rms_norm_eps", "tie_word_embeddings",
        ),
        8.03,
        {"model_type cohere2", "layer_norm_eps 1e-05", "logit_scale 0.25",
         "order_of_interleaved_layers local_attn_first", "position_embedding_type rope_gptj",
         "rotary_pct 1.0", "use_gated_activation True", "use_parallel_block True", _NO_EPSILON},
    ),
    "Phi-3-mini-128k": (
        _config("phi3", (32, 3072, 8192, 32, 32, 32064), 10000.0, 1e-05,
                architectures=["Phi3ForCausalLM"], original_max_position_embeddings=4096,
                auto_map={"AutoConfig": "configuration_phi3.Phi3Config"},
                rope_scaling={"long_factor": [1.1], "short_factor": [1.0], "type": "longrope"},
                sliding_window=262144),
        3.82, {"auto_map", "longrope scaling of rotary embeddings"},
    ),
    "Phi-4-mini": (
        _config("phi3", (32, 3072, 8192, 24, 8, 200064), 10000.0, 1e-05,
                architectures=["Phi3ForCausalLM"], partial_rotary_factor=0.75,
                original_max_position_embeddings=4096, tie_word_embeddings=True,
                rope_scaling={"long_factor": [1.1], "short_factor": [1.0], "type": "longrope"},
                sliding_window=262144),
        3.84, {"longrope scaling of rotary embeddings"},
    ),
    "OLMo-2-7B": (
        _config("olmo2", (32, 4096, 11008, 32, 32, 100352), 500000, 1e-06,
                architectures=["Olmo2ForCausalLM"]),
        7.3, {"model_type olmo2"},
    ),
    "OLMo-3-7B": (
        _config("olmo3", (32, 4096, 11008, 32, 32, 100278), 500000, 1e-06,
                architectures=["Olmo3ForCausalLM"], rope_scaling=_YARN | {"attention_factor": 1.2},
                layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8,
                sliding_window=4096),
        7.3, {"model_type olmo3", "yarn scaling of rotary embeddings"},
    ),
    "Granite-3.3-8B": (
        _config("granite", (40, 4096, 12800, 32, 8, 49159), 10000000.0, 1e-05,
                architectures=["GraniteForCausalLM"], attention_multiplier=0.0078125,
                embedding_multiplier=12.0, logits_scaling=16.0, residual_multiplier=0.22,
                tie_word_embeddings=True),
        8.17,
        {"model_type granite", "attention_multiplier 0.0078125", "embedding_multiplier 12.0",
         "logits_scaling 16.0", "residual_multiplier 0.22"},
    ),
    "Granite-4.0-H-Small": (
        GRANITE_4_H_SMALL, 32.2,
        {"model_type granitemoehybrid", "attention_multiplier 0.0078125",
         "embedding_multiplier 12", "logits_scaling 16", "residual_multiplier 0.22",
         "position_embedding_type nope"},
    ),
    "ERNIE-4.5-0.3B": (
        _without(
            _config("ernie4_5", (18, 1024, 3072, 16, 2, 103424), 500000.0, 1e-05, head_dim=128,
                    architectures=["Ernie4_5ForCausalLM"], use_bias=False),
            "tie_word_embeddings",
        ),
        0.36, {"model_type ernie4_5"},
    ),
}  # fmt: skip
