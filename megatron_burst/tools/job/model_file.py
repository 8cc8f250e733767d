"""Models by name, from Hugging Face's config.json, or from Megatron's arguments."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_burst.errors import BurstError, nearest
from megatron_burst.tools.job.arguments import DUMPED, megatron_arguments
from megatron_burst.tools.job.config_keys import flags_of, with_usual
from megatron_burst.tools.job.layer_kinds import (
    check_layers,
    dense_layers,
    has_sinks,
    hugging_face_windows,
    layers_without_experts,
    megatron_windows,
)
from megatron_burst.tools.job.model import PRESETS, Experts, Latent, Model

_HUB = "hf:"
# model types whose feed-forward has no gate
_UNGATED = ("apertus", "arcee", "gpt_neox", "nemotron", "persimmon", "phi", "starcoder2")
MODEL_ARGUMENTS = {  # Megatron's, of which a model's figures depend
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "kv_channels", "vocab_size", "padded_vocab_size", "num_experts", "moe_router_topk",
    "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_layer_freq",
    "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
    "window_size", "window_attn_skip_freq", "softmax_type",
}  # fmt: skip


def model_of(name_or_path: str) -> Model:
    """A preset by name, else the model that a file describes.

    Args:
        name_or_path: one of `PRESETS`; hf:ORG/NAME, which the local cache must have; a config.json;
            or a file with Megatron's arguments, as --burst-dump-args writes them, as `--flag value`
            text (a shell script) or as YAML (`flag: value`).

    Raises:
        BurstError: if it is none of them, or the file lacks something.
    """
    if name_or_path.lower() in PRESETS:
        return PRESETS[name_or_path.lower()]
    on_hub = name_or_path.startswith(_HUB)
    path = _cached_config(name_or_path) if on_hub else Path(name_or_path)
    if not path.is_file():
        raise BurstError(
            "plan: MODEL must be a preset or a file, because sizes come from there; got "
            f"{name_or_path!r}{nearest(name_or_path.lower(), PRESETS)}; choose one of "
            f"{', '.join(PRESETS)}, hf:ORG/NAME, a config.json, or a file of Megatron's arguments"
        )
    text = text_of(path)
    if path.suffix == ".json" and DUMPED not in _json(text, path):
        return from_hugging_face(_json(text, path), name_or_path)
    return from_megatron(megatron_arguments(text), str(path))


def _cached_config(name: str) -> Path:
    """The config.json of hf:ORG/NAME, or of hf:ORG/NAME@REVISION, in the local cache.

    Source of its location: huggingface_hub/constants.py, HF_HUB_CACHE.
    """
    usual = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", f"{usual}/huggingface")
    cache = os.environ.get("HUGGINGFACE_HUB_CACHE", f"{home}/hub")
    cache = os.environ.get("HF_HUB_CACHE", cache)
    repository, _, revision = name.removeprefix(_HUB).partition("@")
    folder = Path(cache).expanduser() / f"models--{repository.replace('/', '--')}"
    reference = folder / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else revision or "main"
    path = folder / "snapshots" / commit / "config.json"
    if not path.is_file():
        raise BurstError(
            f"plan: {name} must be in the local cache, because nothing is downloaded here; got no "
            f"{path}; run: hf download {repository} config.json"
        )
    return path


def text_of(path: Path) -> str:
    """The text of a model's file; bytes that are not UTF-8, as in old comments, are replaced.

    Raises:
        BurstError: if it cannot be read, or is a binary file.
    """
    try:
        data, got = path.read_bytes(), "a binary file"
    except OSError as error:
        data, got = b"\0", error.strerror or str(error)
    if b"\0" in data:
        raise BurstError(
            "plan: MODEL must name a text file, because sizes are read from its words; got "
            f"{path}: {got}; name a config.json, a file of Megatron's arguments, or a preset"
        )
    return data.decode(errors="replace")


def _json(text: str, path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
        got = f"a {type(found).__name__}"
    except json.JSONDecodeError as error:
        found, got = None, str(error)
    if not isinstance(found, dict):
        raise BurstError(
            f"plan: {path} must hold a JSON object, because it is read as a Hugging Face config; "
            f"got: {got}; name a model's config.json"
        )
    return found


class _Sizes:
    """Looks sizes up, and complains about missing ones."""

    def __init__(self, table: Mapping[str, Any], name: str) -> None:
        self._table, self._name = table, name

    def __call__(self, key: str, default: int | None = None) -> int:
        value = self._table.get(key)
        if value is None and default is not None:
            return default
        if value is None or not re.fullmatch(r"\d+(\.0*)?", str(value)):
            close = "" if value is not None else nearest(key, self._table)
            raise BurstError(
                f"plan: {self._name} must hold a number {key!r}, because a model's time and "
                f"memory depend on it; got {value!r}{close}; add it"
            )
        return int(float(value))

    def truth(self, key: str, default: bool = False) -> bool:
        value = self._table.get(key, default)
        return str(value).lower() not in ("false", "0", "none", "no")


def from_hugging_face(config: Mapping[str, Any], name: str) -> Model:
    """The model of a Hugging Face config (Llama, Qwen, Mistral, DeepSeek, Gemma, gpt-oss, ...).

    Raises:
        BurstError: if it lacks something, or has layers that the planner does not count.
    """
    config = with_usual(config)
    check_layers(config, name)
    size = _Sizes(config, name)
    heads, hidden = size("num_attention_heads"), size("hidden_size")
    dim = size("head_dim", hidden // max(heads, 1))
    heads_kv, dims, latent = size("num_key_value_heads", heads), (dim, dim), None
    if "kv_lora_rank" in config:
        rope = size("qk_rope_head_dim")
        dims = size("qk_nope_head_dim") + rope, size("v_head_dim")
        latent, heads_kv = Latent(size("q_lora_rank", 0), size("kv_lora_rank"), rope), heads
    layers, experts = size("num_hidden_layers"), None
    if count := size("n_routed_experts", size("num_local_experts", size("num_experts", 0))):
        width = size("moe_intermediate_size", size("intermediate_size"))
        shared = size("n_shared_experts", 0) * width
        shared = size("shared_expert_intermediate_size", shared)
        dense = layers_without_experts(config, layers, name)
        experts = Experts(count, size("num_experts_per_tok"), width, shared, dense)
    flags, unknown = flags_of(config)
    return Model(
        config.get("_name_or_path") or name, layers, hidden, heads, heads_kv,
        *dims, size("intermediate_size"), size("vocab_size"),
        gated=config.get("model_type") not in _UNGATED,
        tied=size.truth("tie_word_embeddings"), experts=experts, latent=latent,
        windows=hugging_face_windows(config, layers, name), sinks=has_sinks(config),
        beside=tuple(flags.items()), unknown=unknown,
    )  # fmt: skip


def from_megatron(arguments: Mapping[str, Any], name: str) -> Model:
    """The model of Megatron's arguments.

    Raises:
        BurstError: if they lack something.
    """
    size = _Sizes(arguments, name)
    heads, hidden = size("num_attention_heads"), size("hidden_size")
    dim = size("kv_channels", hidden // max(heads, 1))
    heads_kv, dims, latent = heads, (dim, dim), None
    if size.truth("group_query_attention"):
        heads_kv = size("num_query_groups")
    if size.truth("multi_latent_attention"):
        rope = size("qk_pos_emb_head_dim", 64)
        dims = size("qk_head_dim", 128) + rope, size("v_head_dim", 128)
        latent = Latent(size("q_lora_rank", 0), size("kv_lora_rank", 512), rope)
    # megatron/training/arguments.py: about as many weights with a gate as without
    width = int(4 * hidden * 2 / 3 / 64) * 64 if size.truth("swiglu") else 4 * hidden
    experts, ffn = None, size("ffn_hidden_size", width)
    layers = size("num_layers")
    vocab = "padded_vocab_size" if "padded_vocab_size" in arguments else "vocab_size"
    if size("num_experts", 0):
        experts = Experts(
            size("num_experts"), size("moe_router_topk", 2), size("moe_ffn_hidden_size", ffn),
            size("moe_shared_expert_intermediate_size", 0),
            dense_layers(arguments, layers, name),
        )  # fmt: skip
    return Model(
        name, layers, hidden, heads, heads_kv, *dims, ffn,
        size(vocab), gated=size.truth("swiglu"),
        tied=not size.truth("untie_embeddings_and_output_weights"), experts=experts, latent=latent,
        windows=megatron_windows(arguments, layers, name),
        sinks=arguments.get("softmax_type", "vanilla") not in ("vanilla", None),
        biases=size.truth("add_bias_linear", True) and not size.truth("disable_bias_linear"),
    )  # fmt: skip
