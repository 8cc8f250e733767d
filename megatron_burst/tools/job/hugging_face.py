"""Models from Hugging Face's config.json: sizes and kinds of layers."""

from collections.abc import Mapping
from itertools import cycle, islice
from types import MappingProxyType

from megatron_burst.errors import BurstError
from megatron_burst.tools.job.config_flags import KEYS, TYPES, Config, Type, flags_of, table
from megatron_burst.tools.job.entries import Sizes, positive, unread
from megatron_burst.tools.job.linear import Linear
from megatron_burst.tools.job.model import Experts, Latent, Model, Windows

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"


def from_hugging_face(config: Config, name: str) -> Model:
    """The model of a Hugging Face config (Llama, Qwen, Mistral, DeepSeek, Gemma, gpt-oss, ...).

    Raises:
        BurstError: if it lacks something, or has layers that the planner does not count.
    """
    inner = config.get("text_config")  # the language model of one that has other parts too
    config = {**config, **inner} if isinstance(inner, Mapping) else config
    kind = TYPES.get(str(config.get("model_type")), Type())
    config = _with_layer_types({**kind.usual, **config}, kind)
    _check_layers(config, kind, name)
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
        width = size("moe_intermediate_size", 0) or size("intermediate_size")
        shared = size("n_shared_experts", 0) * width
        shared = size("shared_expert_intermediate_size", shared)
        dense = _dense_layers(config, layers, name)
        experts = Experts(count, size("num_experts_per_tok"), width, shared, dense)
    # a model with experts in all layers need not say how wide others would be
    unused = experts.ffn if experts and not experts.dense_layers else None
    flags, unknown = flags_of(config, kind)
    return Model(
        config.get("_name_or_path") or name, layers, hidden, heads, heads_kv,
        *dims, size("intermediate_size", unused), size("vocab_size"), gated=kind.gated,
        tied=size.truth("tie_word_embeddings"), experts=experts, latent=latent,
        windows=_windows(config, kind, layers, name), linear=_linear(config, size),
        gated_attention=kind.linear,
        predicted=size("num_nextn_predict_layers", 0),
        sinks=kind.sinks or any(config[key] is True for key in config if "attention_sink" in key),
        biases=kind.biases, beside=tuple(flags.items()), unknown=unknown,
    )  # fmt: skip


def _with_layer_types(config: Config, kind: Type) -> Config:
    """A config of layers of which every n-th has softmax attention, with their kinds."""
    every = config.get("full_attention_interval")
    if not kind.linear or not every or not config.get("num_hidden_layers"):
        return config
    numbers = range(1, int(config["num_hidden_layers"]) + 1)
    kinds = [_LINEAR if number % every else _FULL for number in numbers]
    beside = {key: value for key, value in config.items() if key != "full_attention_interval"}
    return {**beside, "layer_types": config.get("layer_types") or kinds}


def _linear(config: Config, size: Sizes) -> Linear | None:
    """Its layers of gated delta nets."""
    layers = tuple(kind == _LINEAR for kind in config.get("layer_types") or ())
    if not any(layers):
        return None
    return Linear(
        layers, size("linear_num_key_heads"), size("linear_num_value_heads"),
        size("linear_key_head_dim"), size("linear_value_head_dim"), size("linear_conv_kernel_dim"),
    )  # fmt: skip


def _check_layers(config: Config, kind: Type, name: str) -> None:
    """Refuse layers that the planner has no times for."""
    found = [f"{key} {config[key]}" for key in KEYS["not_counted"] if config.get(key)]
    kinds = {str(kind) for kind in config.get("layer_types") or ()}
    known = {_FULL, _SLIDING, _LINEAR} if kind.linear else {_FULL, _SLIDING}
    if unknown := sorted(kinds - known):
        found.append(f"layer_types with {', '.join(unknown)}")
    if any(kind != 1 for kind in config.get("attn_type_list") or ()):  # MiniMax: 1 is softmax
        found.append("attn_type_list with others than 1")
    if found:
        raise BurstError(
            f"plan: {name} must be a model whose layers are softmax attention over all earlier "
            "keys or a window of them, because the planner has no times for others; got "
            f"{', '.join(found)}; plan another model"
        )


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


PRESETS: Mapping[str, Model] = MappingProxyType(
    {name: from_hugging_face(config, name) for name, config in table("presets").items()}
)
