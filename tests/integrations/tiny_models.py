"""Tiny models of all causal model types of transformers, and what burst makes of each on two ranks.

`outcome_of` is what a user would see: the loss and gradients of one process, or one sentence.
"""

import contextlib
import io
import logging
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

VOCAB, LENGTHS = 64, (11, 3, 18)  # documents of a packed sample
_SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, n_embd=32, d_model=32, intermediate_size=48, ffn_dim=48,
    n_inner=48, decoder_ffn_dim=48, encoder_ffn_dim=48, num_hidden_layers=2, n_layer=2, n_layers=2,
    num_layers=2, decoder_layers=2, encoder_layers=2, num_attention_heads=4, n_head=4, n_heads=4,
    num_heads=4, decoder_attention_heads=4, encoder_attention_heads=4, num_key_value_heads=2,
    num_attention_groups=2, n_group=1, topk_group=1, head_dim=8, kv_channels=8, n_positions=128,
    max_position_embeddings=128, n_ctx=128, embedding_size=32, word_embed_proj_dim=32,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, num_experts=4, num_local_experts=4,
    n_routed_experts=4, moe_num_experts=4, num_experts_per_tok=2, num_experts_per_token=2,
    moe_topk=2, moe_k=2, moe_intermediate_size=16, expert_ffn_hidden_size=16, ffn_hidden_size=48,
    shared_expert_intermediate_size=16, moe_shared_expert_intermediate_size=16,
    shared_intermediate_size=16, n_shared_experts=1, num_shared_experts=1, kv_lora_rank=8,
    q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, rotary_dim=8,
    first_k_dense_replace=1, num_dense_layers=1, sliding_window=7, attention_window_size=7,
    intermediate_size_mlp=48, vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8,
    num_kv_shared_layers=0, attention_chunk_size=8, query_pre_attn_scalar=8, lru_width=32,
    mamba_d_state=8, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, state_size=8,
    ssm_state_size=8, mamba_num_heads=4, mamba_head_dim=16, n_groups=1, linear_num_key_heads=2,
    linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, chunk_size=8,
    index_n_heads=2, index_head_dim=8, index_topk=8, max_window_layers=1, attention_dropout=0.0,
)  # fmt: skip

_OF_TYPES: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 7},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 8, "expand": 2},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "deepseek_v2": {"num_experts_per_tok": 2},
    **{name: {"attn_logit_softcapping": 0.2} for name in ("gemma2", "vaultgemma")},
}


def model_types() -> dict[str, str]:
    """The class of each causal model type of transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()))


def config_of(model_type: str, fills: bool) -> Any:
    """A config of the type with two small layers; `fills`: also sizes that are None by default."""
    from transformers import CONFIG_MAPPING

    text = CONFIG_MAPPING[model_type]()
    if not text.is_encoder_decoder:
        text = text.get_text_config(decoder=True)
    names = text.to_dict()
    sizes = {name: size for name, size in _SIZES.items()
             if name in names and (fills or names[name] is not None)}  # fmt: skip
    if "kv_lora_rank" in sizes:  # latent attention has as many KV heads as heads
        sizes.pop("head_dim", None)
        sizes["num_key_value_heads"] = 4
    sizes |= {name: 0.0 for name, x in names.items() if "drop" in name and isinstance(x, float)}
    for name in ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers"):
        if isinstance(names.get(name), list):
            kinds = list(dict.fromkeys(names[name]))
            sizes[name] = (kinds * 2)[:2]
    return type(text)(**sizes | _OF_TYPES.get(model_type, {}))


def model_of(model_type: str, attention: str) -> torch.nn.Module:
    """A random model in float64, the same on all ranks."""
    try:
        return _built(config_of(model_type, False), attention)
    except Exception:
        return _built(config_of(model_type, True), attention)


def _built(config: Any, attention: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"attn_implementation": attention}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, **options)
    size = sum(p.numel() for p in model.parameters())
    if size > 40_000_000:
        raise ValueError(f"{size} parameters")
    torch.manual_seed(0)
    try:  # other implementations of experts have no float64
        model = AutoModelForCausalLM.from_config(config, experts_implementation="eager", **options)
    except TypeError:
        model = AutoModelForCausalLM.from_config(config, **options)
    return model.double().train()


def batch_of(packed: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (1, sum(LENGTHS)), generator=generator)
    labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.3, -100, ids)
    batch = {"input_ids": ids, "labels": labels}
    if packed:
        batch["position_ids"] = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return batch


def expected(model_type: str, packed: bool) -> tuple[Tensor, list[Tensor | None]]:
    """Loss and gradients of one process, each document by itself."""
    try:
        model = model_of(model_type, "sdpa")
    except ValueError:  # it has no sdpa
        model = model_of(model_type, "eager")
    batch = batch_of(packed)
    lengths = LENGTHS if packed else (sum(LENGTHS),)
    pieces = zip(
        batch["input_ids"].split(lengths, 1), batch["labels"].split(lengths, 1), strict=True
    )
    total, count = torch.zeros((), dtype=torch.float64), 0
    for ids, labels in pieces:
        logits = model(input_ids=ids, use_cache=False).logits.double()
        total = total + torch.nn.functional.cross_entropy(
            logits[0, :-1], labels[0, 1:], ignore_index=-100, reduction="sum"
        )
        count += int((labels[0, 1:] != -100).sum())
    loss = total / count
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


def outcome_of(model_type: str, packed: bool, **options: Any) -> str:
    """One of "right", "refused: ...", "wrong: ...", "crash: ..." or "not built: ..."."""
    from megatron_burst import BurstError
    from megatron_burst.hf import shard_batch

    try:
        model = model_of(model_type, "burst")
    except BurstError as error:
        return f"refused: {error}"
    except Exception as error:  # of the recipe, or of a package that is not installed
        return f"not built: {type(error).__name__}: {str(error).splitlines()[0][:150]}"
    crash = ""
    try:
        out = model(**shard_batch(batch_of(packed), **options), use_cache=False)
        out.loss.backward()
    except BurstError as error:
        return f"refused: {error}"
    except Exception as error:
        crash = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    try:
        loss, grads = expected(model_type, packed)
    except Exception as error:
        return f"not built: {type(error).__name__}: {str(error).splitlines()[0][:150]}"
    if crash:
        return f"crash: {crash}"
    mean = out.loss.detach().double()
    dist.all_reduce(mean)
    errors = [float(abs(mean / 2 - loss) / loss)]
    for ours, theirs in zip((p.grad for p in model.parameters()), grads, strict=True):
        if theirs is None:
            continue
        ours = torch.zeros_like(theirs) if ours is None else ours
        dist.all_reduce(ours)
        errors.append(float((ours / 2 - theirs).abs().max() / theirs.abs().max().clamp(min=1e-3)))
    if errors[0] < 1e-6 and max(errors) < 1e-4:
        return "right"
    return f"wrong: loss {errors[0]:.1e}, gradients {max(errors[1:]):.1e}"


def outcomes(rank: int, types: list[str], packed: bool, options: dict) -> dict[str, str]:
    """Of many types, on this rank."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(io.StringIO()):
        return {one: outcome_of(one, packed, **options) for one in types}
