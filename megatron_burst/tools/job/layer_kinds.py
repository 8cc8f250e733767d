"""Kinds of attention layers in a model's description: windows, sinks, and unsupported ones.

Sources: the configuration classes of transformers 4.57 (defaults of keys that a published
config.json leaves out), is_layer_window_attention and the argument parser of Megatron-Core 0.19.
"""

import ast
import operator
from collections.abc import Mapping
from itertools import cycle, islice
from typing import Any

from megatron_burst.errors import BurstError
from megatron_burst.tools.job.model import Windows

_FULL, _SLIDING = "full_attention", "sliding_attention"
_PERIODS = {"gemma3_text": 6, "gemma3": 6, "cohere2": 4, "gpt_oss": 2}  # the last of them is full
_NOT_COUNTED = (  # keys of models with layers that are not softmax attention over a causal range
    "attn_logit_softcapping", "attention_chunk_size", "full_attention_interval",
    "linear_attn_config", "attn_layer_period", "hybrid_override_pattern",
    "block_types", "index_topk", "cross_attention_layers", "mamba_d_state", "ssm_state_size",
)  # fmt: skip

_OPERATORS: dict[type, Any] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def check_layers(config: Mapping[str, Any], name: str) -> None:
    """Refuse a Hugging Face config with layers that the planner has no times for.

    Raises:
        BurstError: if there are such layers; `name` is the file's.
    """
    found = [f"{key} {config[key]}" for key in _NOT_COUNTED if config.get(key)]
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


def hugging_face_windows(config: Mapping[str, Any], layers: int, name: str) -> Windows | None:
    """The windows in a Hugging Face config with this many layers; `name` is the file's.

    Raises:
        BurstError: if kinds of layers contradict the other keys.
    """
    kinds = config.get("layer_types") or _kinds(config, layers)
    if len(kinds) != layers:
        raise _unread(name, "kind for each layer", f"{len(kinds)} layer_types and {layers} layers")
    if _SLIDING not in kinds:
        return None
    return _windows(config.get("sliding_window"), tuple(k == _SLIDING for k in kinds), name)


def _kinds(config: Mapping[str, Any], layers: int) -> list[str]:
    """Layer kinds of a config without layer_types."""
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return [_FULL] * layers
    if config.get("use_sliding_window") and "max_window_layers" in config:  # Qwen: the later ones
        first = min(int(config["max_window_layers"]), layers)
        return [_FULL] * first + [_SLIDING] * (layers - first)
    pattern = config.get("sliding_window_pattern") or _PERIODS.get(config.get("model_type", ""), 0)
    if isinstance(pattern, str):  # EXAONE: "LLLG"
        period = [_SLIDING if letter == "L" else _FULL for letter in pattern]
    else:
        period = [_SLIDING] * (pattern - 1) + [_FULL] if pattern else [_SLIDING]
    return list(islice(cycle(period), layers))


def has_sinks(config: Mapping[str, Any]) -> bool:
    """Whether a Hugging Face config describes a model with attention sinks."""
    return config.get("model_type") == "gpt_oss" or any(
        value is True and "attention_sink" in key for key, value in config.items()
    )


def megatron_windows(arguments: Mapping[str, Any], layers: int, name: str) -> Windows | None:
    """The windows of Megatron's arguments, whose sizes leave out the query's own key.

    Raises:
        BurstError: if they cannot be read.
    """
    asked = arguments.get("window_size")
    if asked in (None, "None"):
        return None
    keys = 1 + _number(str(asked).strip("()[]").partition(",")[0], "--window-size", name)
    freq = _freq(arguments.get("window_attn_skip_freq"), "--window-attn-skip-freq", name)
    if freq is None:
        return _windows(keys, (True,) * layers, name)
    if isinstance(freq, int):
        return _windows(keys, tuple(bool(number % freq) for number in range(1, layers + 1)), name)
    if len(freq) != layers:
        raise _unread(name, "--window-attn-skip-freq", f"{len(freq)} of {layers} layers")
    return _windows(keys, tuple(map(bool, freq)), name)


def dense_layers(arguments: Mapping[str, Any], layers: int, name: str) -> int:
    """Layers without experts, from Megatron's --moe-layer-freq.

    Raises:
        BurstError: if it cannot be read.
    """
    freq = _freq(arguments.get("moe_layer_freq"), "--moe-layer-freq", name)
    if freq is None:
        return 0
    if isinstance(freq, int):
        return layers - len(range(0, layers, freq))
    return len(freq) - sum(freq)


def layers_without_experts(config: Mapping[str, Any], layers: int, name: str) -> int:
    """Layers without experts of a Hugging Face config of a model with experts.

    Raises:
        BurstError: if it cannot be read.
    """
    first = int(config.get("first_k_dense_replace") or 0)
    only, freq = config.get("mlp_only_layers") or (), config.get("moe_layer_freq", 1)
    if isinstance(freq, list):
        return layers - sum(map(bool, freq))
    each = _number(freq, "moe_layer_freq", name)
    step = _number(config.get("decoder_sparse_step", 1), "decoder_sparse_step", name)
    return sum(
        number < first or number in only or number % each > 0 or (number + 1) % step > 0
        for number in range(layers)
    )


def _windows(size: Any, layers: tuple[bool, ...], name: str) -> Windows | None:
    keys = _number(size, "sliding_window", name)
    return Windows(keys, layers) if any(layers) else None


def _freq(value: Any, option: str, name: str) -> int | list[int] | None:
    """An integer, or a list such as ([0]*3+[1]*58), as Megatron reads it."""
    if value in (None, "None"):
        return None
    if "[" not in str(value):
        return _number(value, option, name)
    try:
        return [int(one) for one in _arithmetic(str(value))]
    except (SyntaxError, ValueError, TypeError, ZeroDivisionError):
        raise _unread(name, option, str(value)) from None


def _number(value: Any, option: str, name: str) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = -1
    if number < 1 or isinstance(value, bool):
        raise _unread(name, option, repr(value))
    return number


def _unread(name: str, option: str, got: str) -> BurstError:
    return BurstError(
        f"plan: {name} must hold a {option} that can be read, because the time of attention "
        f"depends on it; got {got}; correct it"
    )


def _arithmetic(text: str) -> Any:
    """The value of numbers, lists, their sums and products.

    Raises:
        SyntaxError, ValueError, TypeError, ZeroDivisionError: if it has anything else.
    """
    return _evaluated(ast.parse(text.strip(), mode="eval").body)


def _evaluated(node: ast.AST) -> Any:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.List(elts=items):
            return [_evaluated(item) for item in items]
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_evaluated(left), _evaluated(right))
    raise ValueError(ast.unparse(node))
