"""Logits of tiny models from transformers, converted by Megatron-Bridge, over two ranks of burst.

Guards against a model whose attention burst computes otherwise than its own framework: windows,
scaled rotary embeddings, sinks, latent attention.
"""

import importlib
import importlib.util

import pytest
import torch
import torch.distributed as dist

from tests.mcore.gpt import SEQ, VOCAB, sharded
from tests.ranks import preload, run_ranks

if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("Megatron-Bridge is not installed: make test-integrations", allow_module_level=True)
preload("megatron.bridge", "megatron.bridge.training.config")

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 4 * SEQ, "tie_word_embeddings": False,
}  # fmt: skip
_LLAMA3 = {  # Megatron's has no other length, and scales long wavelengths alone
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": SEQ,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS = {  # class of transformers, and what its configuration has besides `SIZES`
    "Llama, llama3 scaling, tied": (
        "Llama",
        {"rope_scaling": _LLAMA3, "tie_word_embeddings": True},
    ),
    "Qwen2": ("Qwen2", {}),
    "Qwen3, YaRN": ("Qwen3", {"rope_scaling": _YARN}),
    "Mistral, window": ("Mistral", {"sliding_window": 5}),
    "Qwen3-MoE": ("Qwen3Moe", _EXPERTS),
    "DeepSeek-V3": ("DeepseekV3", {
        "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "head_dim": 8, "num_key_value_heads": 4, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
    }),
    "gpt-oss": ("GptOss", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5,
        "rope_scaling": _YARN | {
            "truncate": False, "factor": 32.0, "original_max_position_embeddings": 4096,
        },
        "max_position_embeddings": 131072,
    }),
    "Gemma-2": ("Gemma2", {
        "sliding_window": 5, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 0.5,
        "tie_word_embeddings": True,
    }),
    "Gemma-3, text": ("Gemma3", {
        "num_hidden_layers": 6, "sliding_window": 5, "query_pre_attn_scalar": 20,
        "tie_word_embeddings": True, "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
        },
    }),
}  # fmt: skip
# fields that Bridge 0.6.2 leaves out, so that its model is not transformers'
CORRECTED = {"Qwen3, YaRN": {"yarn_correction_range_round_to_int": True}}
# whose layers are Bridge's own
OWN_LAYERS = {"Gemma-2", "Gemma-3, text"}
# transformers' norms and rotary embeddings are in float32
EXACT = 1e-5


def tiny(name, folder, given, **sizes):
    """Save a model with random weights and its logits of tokens; returns its class."""
    import transformers

    kind, more = MODELS[name]
    kind = getattr(transformers, f"{kind}ForCausalLM")
    save(kind, kind.config_class(**SIZES | more | sizes), folder, input_ids=given)
    return kind


def save(kind, config, folder, **batch):
    """Save a model of a class with random weights, norms and biases too, and its logits."""
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(3)
    model = kind(config)
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.1 * torch.randn_like(x))
        torch.save(model.double()(**batch).logits, folder / "logits.pt")
    model.float().save_pretrained(folder)


def tokens(seq=SEQ, vocab=VOCAB):
    return torch.randint(0, vocab, (2, seq), generator=torch.Generator().manual_seed(7))


def converted(name, folder, parallel, own_layers):
    """Bridge's model of a folder, and its provider, with Bridge's layers or Megatron's."""
    from megatron.bridge import AutoBridge
    from megatron.core.transformer.enums import AttnBackend

    from tests.integrations import te_on_cpu
    from tests.integrations.test_bridge import built, on_a_cpu, start

    start(parallel)
    bridge = AutoBridge.from_hf_pretrained(folder)
    provider = bridge.to_megatron_provider(load_weights=False)
    own = provider.transformer_layer_spec
    provider = on_a_cpu(provider, parallel)
    vars(provider).update(CORRECTED.get(name, {}))
    if own_layers:
        te_on_cpu.install()
        provider.transformer_layer_spec, provider.attention_backend = own, AttnBackend.auto
    gpt = built(provider)
    bridge.load_hf_weights([gpt])
    return gpt, provider


def logits(rank, name, folder):
    """Relative error of this rank's logits, and its core attentions."""
    from tests.integrations.test_bridge import CP2, cores_of

    importlib.import_module("megatron_burst.auto")
    gpt, _ = converted(name, folder, CP2, name in OWN_LAYERS)
    given = tokens()
    batch = {"tokens": given, "position_ids": torch.arange(SEQ).expand_as(given)}
    batch = sharded(batch, dist.group.WORLD)
    with torch.no_grad():
        got = gpt(batch["tokens"], batch["position_ids"], attention_mask=None)
    return error_of(got, folder), cores_of(gpt)


def error_of(got, folder):
    """Error of a rank's logits, relative to the largest."""
    truth = torch.load(folder / "logits.pt")
    own = sharded({"truth": truth}, dist.group.WORLD)["truth"]
    return float((got - own).abs().max() / truth.abs().max())


def without_betas(rank, folder):
    from megatron.bridge import AutoBridge

    from tests.integrations.test_bridge import CP2, built, on_a_cpu, start

    start(CP2)
    bridge = AutoBridge.from_hf_pretrained(folder)
    provider = on_a_cpu(bridge.to_megatron_provider(load_weights=False), CP2)
    with pytest.raises(TypeError, match="NoneType"):
        built(provider)


def test_bridges_yarn_fails_where_the_config_leaves_the_betas_to_their_usual_values(tmp_path):
    """Qwen's cards have no betas; transformers takes 32 and 1."""
    from transformers import Qwen3Config

    scaling = {key: value for key, value in _YARN.items() if "beta" not in key}
    config = Qwen3Config(**SIZES, rope_scaling=scaling, architectures=["Qwen3ForCausalLM"])
    config.save_pretrained(tmp_path)
    run_ranks(without_betas, 2, tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_logits_over_two_ranks_are_those_of_transformers(name, tmp_path):
    tiny(name, tmp_path, tokens())
    for error, cores in run_ranks(logits, 2, name, tmp_path):
        print(f"{name}: {error:.1e}")
        assert all("Burst" in core for core in cores), cores
        assert error <= EXACT
