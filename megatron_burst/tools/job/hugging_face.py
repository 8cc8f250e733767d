"""Models from Hugging Face's config.json: sizes and kinds of layers."""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import cycle, islice
from types import MappingProxyType
from typing import Any

from megatron_burst.errors import BurstError, nearest
from megatron_burst.files import Count, LongText, Reader, excerpt
from megatron_burst.tools.job.config_flags import KEYS, TYPES, Config, Type, flags_of, table
from megatron_burst.tools.job.entries import Sizes, positive, unread
from megatron_burst.tools.job.layers import Experts, Latent, Windows
from megatron_burst.tools.job.linear import DeltaNet, Linear, Mamba
from megatron_burst.tools.job.model import Model

_SIZES = "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"
_PATTERN = "hybrid_override_pattern"
_TIED = "tie_word_embeddings"  # of a model with other parts too, that of the whole counts
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_NAMES = {"attention": _FULL, "mamba": _LINEAR}  # of kinds of layers, of hybrids
# transformers 5 has names of other models' layers for the first two
_LETTERS = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E", _LINEAR: "M", _FULL: "*"}
# how entries of attention begin whose learned scores select keys (DSA, QSA, MSA)
_SELECTS = re.compile("(index|indexer|sparse)_")
_SELECTED = " (learned scores select keys)"
_MEANT = {"linear_attn_config": " (Kimi delta attention)"}  # of keys that do not say it
_LONG = 60  # letters of a value that is not shown
# types of entries that are no sizes; such as are null, false or 0 say nothing
_ENTRIES: Mapping[str, Any] = {
    **dict.fromkeys(("model_type", "_name_or_path", _PATTERN), LongText),
    **dict.fromkeys(("architectures", "layer_types", "layers_block_type"), tuple[str, ...]),
    **dict.fromkeys(("mlp_only_layers", "no_rope_layers", "attn_type_list"), tuple[int, ...]),
    **dict.fromkeys(("first_k_dense_replace", "max_window_layers", "full_attention_interval",
                     "no_rope_layer_interval", "topk_group", "num_experts_per_tok"), Count),
    "moe_layer_freq": Count | tuple[int, ...], "sliding_window_pattern": Count | str,
    **dict.fromkeys(("rope_theta", "routed_scaling_factor", "swiglu_limit"), float),
    "n_group": Count,
}  # fmt: skip
# of experts, which a hybrid's config has without any of them too
_OF_EXPERTS = ("n_routed_experts", "n_group", "topk_group", "routed_scaling_factor")


def from_hugging_face(config: Config, name: str) -> Model:
    """The model of a Hugging Face config (Llama, Qwen, Mistral, DeepSeek, Gemma, gpt-oss, ...).

    Raises:
        BurstError: if it lacks something, or has layers that the planner does not count.
    """
    reader = Reader("plan", name, "sizes and flags are read from it", "correct it")
    try:
        return _model(config, name, reader)
    except BurstError:
        raise
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        got = f"one of another kind ({error})"
        raise reader.refusal("hold values as transformers writes them", got) from error


def _model(config: Config, name: str, reader: Reader) -> Model:
    inner = [config.get(key) for key in KEYS["language"]]  # the model of one with other parts too
    whole = {} if config.get(_TIED) is None else {_TIED: config[_TIED]}
    config = {**config, **next((one for one in inner if isinstance(one, Mapping)), {}), **whole}
    for key in _ENTRIES.keys() & config.keys():
        if config[key]:
            reader.typed(_ENTRIES[key], config[key], key)
    kind = TYPES.get(str(config.get("model_type")), Type())
    config = _with_layer_types({**kind.usual, **config, **_renamed(config, kind)}, kind)
    _check_layers(config, kind, name)
    needed = (*_SIZES, _PATTERN) if kind.halves and not _pattern(config, kind) else _SIZES
    if missing := [key for key in needed if config.get(key) is None]:
        close = next(filter(None, (nearest(key, config) for key in missing)), "")
        raise BurstError(
            f"plan: {name} must hold all sizes that time and memory depend on, because none of "
            f"them has a usual value; got a config of model_type {config.get('model_type')} "
            f"without {', '.join(missing)}{close}; add them"
        )
    size = Sizes(config, name)
    heads, hidden = size("num_attention_heads"), size("hidden_size")
    dim = size("head_dim", hidden // max(heads, 1))
    dim = max(dim, size("global_head_dim", 0))  # Gemma-4's layers without windows
    heads_kv, dims, latent = size("num_key_value_heads", heads), (dim, dim), None
    if "kv_lora_rank" in config:
        rope = size("qk_rope_head_dim")
        dims = size("qk_nope_head_dim") + rope, size("v_head_dim")
        latent, heads_kv = Latent(size("q_lora_rank", 0), size("kv_lora_rank"), rope), heads
    layers = size("num_hidden_layers")
    experts = _experts(config, kind, size, layers, name)
    # a model with experts in all layers need not say how wide others would be
    unused = experts.ffn if experts and not experts.dense_layers else None
    ffn = 0 if experts else size("shared_intermediate_size", 0)  # Granite's, without experts
    flags, unknown = flags_of(config, kind)
    return Model(
        excerpt(config.get("_name_or_path") or name, 300), layers, hidden, heads, heads_kv,
        *dims, ffn or size("intermediate_size", unused), size("vocab_size"), gated=kind.gated,
        tied=size.truth(_TIED), experts=experts, latent=latent,
        windows=_windows(config, kind, layers, name),
        linear=_linear(config, kind, size), pattern=_pattern(config, kind),
        gated_attention=kind.delta,
        predicted=size("num_nextn_predict_layers", 0),
        sinks=kind.sinks or any(config[key] is True for key in config if "attention_sink" in key),
        biases=kind.biases, beside=tuple(flags.items()), unknown=unknown,
        towers=tuple(key for key in KEYS["towers"] if config.get(key)),
    )  # fmt: skip


def _with_layer_types(config: Config, kind: Type) -> Config:
    """A config with the kinds of a hybrid's layers, whatever tells them."""
    if pattern := _pattern(config, kind):
        kinds = [_LINEAR if letter == "M" else _FULL for letter in pattern]
        none = {} if "E" in pattern else dict.fromkeys(_OF_EXPERTS)
        return {**config, **none, "num_hidden_layers": len(pattern), "layer_types": kinds}
    if kind.mamba and (said := config.get("layer_types") or config.get("layers_block_type")):
        return {**config, "layer_types": [_NAMES.get(one, one) for one in said]}
    every = config.get("full_attention_interval")
    if not kind.delta or not every or not config.get("num_hidden_layers"):
        return config
    numbers = range(1, int(config["num_hidden_layers"]) + 1)
    kinds = [_LINEAR if number % every else _FULL for number in numbers]
    return {**config, "layer_types": config.get("layer_types") or kinds}


def _pattern(config: Config, kind: Type) -> str:
    """A letter a layer, of a hybrid whose layers are either a mixer or a feed-forward."""
    if not kind.halves:
        return ""
    return config.get(_PATTERN) or _letters_of(config.get("layers_block_type"))


def _letters_of(kinds: Iterable[str] | None) -> str:
    return "".join(_LETTERS.get(one, one) for one in kinds or ())


def _renamed(config: Config, kind: Type) -> Config:
    """Sizes that a type names otherwise, also in tables inside of its config."""
    sizes: dict[str, Any] = {}
    for name, key in kind.names.items():
        value: Any = config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            sizes[name] = value
    return sizes


def _experts(config: Config, kind: Type, size: Sizes, layers: int, name: str) -> Experts | None:
    count = size("n_routed_experts", size("num_local_experts", size("num_experts", 0)))
    if not count:
        others = [
            key for key, value in config.items() if "expert" in key and value not in (0, None)
        ]
        if others and not kind.name and not kind.mamba:
            raise unread(name, "number of experts", f"{others[0]} {config[others[0]]}")
        return None
    width = size("moe_intermediate_size", 0) or size("intermediate_size")
    shared = size("n_shared_experts", 0) * width
    for key in ("shared_intermediate_size", "moe_shared_expert_intermediate_size"):
        shared = size(key, shared)
    shared = size("shared_expert_intermediate_size", shared)
    dense = _dense_layers(config, layers, name)
    latent = size("moe_latent_size", 0)
    return Experts(count, size("num_experts_per_tok"), width, shared, dense, latent)


def _linear(config: Config, kind: Type, size: Sizes) -> Linear | None:
    """Its layers of gated delta nets, or Mamba-2."""
    layers = tuple(kind == _LINEAR for kind in config.get("layer_types") or ())
    if not any(layers):
        return None
    if kind.mamba:
        keys, heads = kind.mamba, size(kind.mamba["heads"])
        usual = 2 * size("hidden_size") // max(heads, 1)
        dim = usual if config.get(keys["dim"]) == "auto" else size(keys["dim"], usual)
        return Mamba(layers, heads, dim, *(size(keys[one]) for one in ("groups", "state", "conv")))
    return DeltaNet(
        layers, size("linear_num_key_heads"), size("linear_num_value_heads"),
        size("linear_key_head_dim"), size("linear_value_head_dim"), size("linear_conv_kernel_dim"),
    )  # fmt: skip


def _check_layers(config: Config, kind: Type, name: str) -> None:
    """Refuse layers that the planner has no times for."""
    if untimed := ", ".join(_untimed(config, kind)):
        raise BurstError(
            f"plan: {name} must be a model whose layers are softmax attention over all earlier "
            "keys or a window of them, gated delta nets or Mamba-2, because the planner has no "
            f"times for other layers; got {untimed}; plan another model"
        )


def _untimed(config: Config, kind: Type) -> Iterator[str]:
    """What says that a config has such layers."""
    selects = [key for key in config if _SELECTS.match(key) and config[key]]
    others = {*KEYS["not_counted"]}.difference(kind.reads, selects)
    keys = [key for key in KEYS["not_counted"] if key in others and config.get(key)]
    keys += sorted(selects, key=lambda one: not one.endswith(("topk", "budget")))[:1]
    for key in keys:
        value = excerpt(config[key])
        words = _SELECTED if key in selects else _MEANT.get(key, "")
        yield f"{key} {value}{words}" if len(value) < _LONG else f"{key}{words}"
    kinds = {str(one) for one in config.get("layer_types") or ()}
    timed = {_FULL, _SLIDING, _LINEAR} if kind.delta or kind.mamba else {_FULL, _SLIDING}
    if (unknown := sorted(kinds - timed)) and not keys:
        yield f"layer_types with {', '.join(unknown)}"
    if any(one != 1 for one in config.get("attn_type_list") or ()):  # MiniMax: 1 is softmax
        yield "attn_type_list with others than 1"
    if unknown := sorted({*_pattern(config, kind)} - {*_LETTERS.values()}):
        yield f"layers {', '.join(unknown)} of its pattern"
    ahead = config.get(f"mtp_{_PATTERN}") or _letters_of(config.get("mtp_layers_block_type"))
    if config.get("num_nextn_predict_layers") and ahead not in ("", "*E", "*-"):
        yield f"layers {ahead} of multi-token prediction"


def _windows(config: Config, kind: Type, layers: int, name: str) -> Windows | None:
    kinds = config.get("layer_types") or _layer_types(config, kind, layers)
    if len(kinds) != layers:
        raise unread(name, "kind for each layer", f"{len(kinds)} layer_types and {layers} layers")
    if _SLIDING not in kinds:
        return None
    return Windows.of(config.get("sliding_window"), [k == _SLIDING for k in kinds], name)


def _layer_types(config: Config, kind: Type, layers: int) -> list[str]:
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


def preset_name(name: str) -> str | None:
    """The preset that a name means, whatever its capitals, dots and dashes; None if it is none."""
    wanted = _letters(name)
    return next((known for known in PRESETS if _letters(known) == wanted), None)


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def _presets() -> Iterator[tuple[str, Model]]:
    for name, entries in table("presets").items():
        config = {key: value for key, value in entries.items() if key != "also"}
        for one in (name, *entries.get("also", ())):
            yield one, from_hugging_face(config, one)


PRESETS: Mapping[str, Model] = MappingProxyType(dict(_presets()))
