"""Models from Hugging Face's config.json: their sizes, and Megatron's flags of what no size says.

What is known of keys and of model types is data: `../models/families.toml`.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import cycle, islice
from types import MappingProxyType
from typing import Any

from megatron_burst.errors import BurstError
from megatron_burst.tools.job.model import Experts, Latent, Model, Sizes, Windows, positive, unread

Config = Mapping[str, Any]
Flags = dict[str, int | float | str | bool]
_FULL, _SLIDING = "full_attention", "sliding_attention"
_NOTHING = (None, False, 0)


@dataclass(frozen=True, slots=True)
class _Type:
    """A model type of transformers; `../models/families.toml` says what the fields mean."""

    name: str = ""  # of its class, if its flags are printed
    reads: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    usual: Config = field(default_factory=dict)
    period: int = 0
    gated: bool = True
    sinks: bool = False


def _table(name: str) -> dict[str, Any]:
    path = files("megatron_burst.tools") / "models" / f"{name}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


_FAMILIES = _table("families")
_KEYS: dict[str, Any] = _FAMILIES["keys"]
_TYPES = {kind: _Type(has.pop("class", ""), **has) for kind, has in _FAMILIES["types"].items()}


def from_hugging_face(config: Config, name: str) -> Model:
    """The model of a Hugging Face config (Llama, Qwen, Mistral, DeepSeek, Gemma, gpt-oss, ...).

    Raises:
        BurstError: if it lacks something, or has layers that the planner does not count.
    """
    inner = config.get("text_config")  # the language model of one that has other parts too
    config = {**config, **inner} if isinstance(inner, Mapping) else config
    kind = _TYPES.get(str(config.get("model_type")), _Type())
    config = {**kind.usual, **config}
    _check_layers(config, name)
    size = Sizes(config, name)
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
        dense = _dense_layers(config, layers, name)
        experts = Experts(count, size("num_experts_per_tok"), width, shared, dense)
    flags, unknown = _flags(config, kind)
    return Model(
        config.get("_name_or_path") or name, layers, hidden, heads, heads_kv,
        *dims, size("intermediate_size"), size("vocab_size"), gated=kind.gated,
        tied=size.truth("tie_word_embeddings"), experts=experts, latent=latent,
        windows=_windows(config, kind, layers, name),
        sinks=kind.sinks or any(config[key] is True for key in config if "attention_sink" in key),
        beside=tuple(flags.items()), unknown=unknown,
    )  # fmt: skip


def _check_layers(config: Config, name: str) -> None:
    """Refuse layers that the planner has no times for."""
    found = [f"{key} {config[key]}" for key in _KEYS["not_counted"] if config.get(key)]
    kinds = {str(kind) for kind in config.get("layer_types") or ()}
    if unknown := sorted(kinds - {_FULL, _SLIDING}):
        found.append(f"layer_types with {', '.join(unknown)}")
    if any(kind != 1 for kind in config.get("attn_type_list") or ()):  # MiniMax: 1 is softmax
        found.append("attn_type_list with others than 1")
    if found:
        raise BurstError(
            f"plan: {name} must be a model whose layers are softmax attention over all earlier "
            "keys or a window of them, because the planner has no times for others; got "
            f"{', '.join(found)}; plan another model"
        )


def _windows(config: Config, kind: _Type, layers: int, name: str) -> Windows | None:
    kinds = config.get("layer_types") or _layer_types(config, kind, layers)
    if len(kinds) != layers:
        raise unread(name, "kind for each layer", f"{len(kinds)} layer_types and {layers} layers")
    if _SLIDING not in kinds:
        return None
    return Windows.of(config.get("sliding_window"), [k == _SLIDING for k in kinds], name)


def _layer_types(config: Config, kind: _Type, layers: int) -> list[str]:
    """Those of a config without layer_types."""
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return [_FULL] * layers
    if config.get("use_sliding_window") and "max_window_layers" in config:  # Qwen: the later ones
        first = min(int(config["max_window_layers"]), layers)
        return [_FULL] * first + [_SLIDING] * (layers - first)
    pattern = config.get("sliding_window_pattern") or kind.period
    if isinstance(pattern, str):  # EXAONE: "LLLG"
        period = [_SLIDING if letter == "L" else _FULL for letter in pattern]
    else:
        period = [_SLIDING] * (pattern - 1) + [_FULL] if pattern else [_SLIDING]
    return list(islice(cycle(period), layers))


def _dense_layers(config: Config, layers: int, name: str) -> int:
    """Layers without experts of a model with experts."""
    first = int(config.get("first_k_dense_replace") or 0)
    only, freq = config.get("mlp_only_layers") or (), config.get("moe_layer_freq", 1)
    if isinstance(freq, list):
        return layers - sum(map(bool, freq))
    each = positive(freq, "moe_layer_freq", name)
    step = positive(config.get("decoder_sparse_step", 1), "decoder_sparse_step", name)
    return sum(
        number < first or number in only or number % each > 0 or (number + 1) % step > 0
        for number in range(layers)
    )


def _flags(config: Config, kind: _Type) -> tuple[Flags, tuple[str, ...]]:
    """Megatron's flags of what no size says; and, instead of them, the entries that no flag here
    says."""
    rotary, unknown = _rotary(config)
    if not isinstance(config.get("rms_norm_eps"), int | float):
        unknown.append("no rms_norm_eps")
    every = (*_of_class(config, kind), *_unread(config, kind), *unknown)
    if every:
        return {}, every
    return {"--norm-epsilon": config["rms_norm_eps"]} | rotary | _own(config, kind), ()


def _of_class(config: Config, kind: _Type) -> Iterator[str]:
    if not kind.name:
        yield f"model_type {config['model_type']}" if "model_type" in config else "no model_type"
    elif (classes := config.get("architectures")) not in (None, [f"{kind.name}ForCausalLM"]):
        yield f"architectures {classes}"


def _unread(config: Config, kind: _Type) -> Iterator[str]:
    known = {*_KEYS["read"], *_KEYS["harmless"], *(kind.reads if kind.name else _KEYS["sizes"])}
    for key, value in config.items():
        off = key in _KEYS["off"] and value in _NOTHING
        if key in known or off or (key in _KEYS["at"] and value == _KEYS["at"][key]):
            continue
        plain = isinstance(value, str | int | float) and len(str(value)) < 30
        yield f"{key} {value}" if plain else key


def _own(config: Config, kind: _Type) -> Flags:
    """Flags of what a type has beside a Llama's."""
    flags: Flags = dict.fromkeys(kind.flags, True)
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


PRESETS: Mapping[str, Model] = MappingProxyType(
    {name: from_hugging_face(config, name) for name, config in _table("presets").items()}
)
