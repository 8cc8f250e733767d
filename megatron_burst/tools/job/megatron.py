"""Models from Megatron's arguments.

Sources: is_layer_window_attention and the argument parser of Megatron-Core 0.19.
"""

import ast
import operator
import re
from collections.abc import Mapping
from typing import Any

from megatron_burst.errors import BurstError
from megatron_burst.files import excerpt
from megatron_burst.tools.job.entries import MOST_LAYERS, Sizes, positive, unread
from megatron_burst.tools.job.layers import Experts, Latent, Windows
from megatron_burst.tools.job.linear import DeltaNet, Linear, Mamba
from megatron_burst.tools.job.model import Model

Arguments = Mapping[str, Any]
_OPERATORS: dict[type, Any] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_DELTA_NETS = ("gated_delta_net", "gdn")  # until 0.19, and from 0.20 on
_LETTERS = ("M*+-E", "G*+-E")  # of hybrids whose layers all have times
_PAIRS = re.compile("([*+G]-)*([*+G]E)*")  # of layers as a GPT has them, dense ones first
# other letters and variants that main has, or forks of it
_UNTIMED = {
    "D": "D is DSA, where learned scores select keys", "K": "K is Kimi delta attention",
    "C": "C is DeepSeek-V4's CSA", "H": "H is DeepSeek-V4's HCA", "W": "W is DeepSeek-V4's windows",
    "dsa": "learned scores select keys", "gdn2": "each of its channels has a decay of its own",
}  # fmt: skip


def from_megatron(arguments: Arguments, name: str) -> Model:
    """The model of Megatron's arguments.

    Raises:
        BurstError: if they lack something.
    """
    size = Sizes(arguments, name)
    heads, hidden = size("num_attention_heads"), size("hidden_size")
    dim = size("kv_channels", hidden // max(heads, 1))
    heads_kv, dims, latent = heads, (dim, dim), None
    if size.truth("group_query_attention"):
        heads_kv = size("num_query_groups")
    pattern, predicted = _pattern(arguments, name)
    if size.truth("multi_latent_attention") or "+" in pattern:
        rope = size("qk_pos_emb_head_dim", 64)
        dims = size("qk_head_dim", 128) + rope, size("v_head_dim", 128)
        latent = Latent(size("q_lora_rank", 0), size("kv_lora_rank", 512), rope)
    # megatron/training/arguments.py: about as many weights with a gate as without
    width = int(4 * hidden * 2 / 3 / 64) * 64 if size.truth("swiglu") else 4 * hidden
    experts, ffn = None, size("ffn_hidden_size", width)
    pairs = _is_pairs(pattern)
    layers = len(pattern) // (2 if pairs else 1) or size("num_layers")
    vocab = "padded_vocab_size" if "padded_vocab_size" in arguments else "vocab_size"
    if size("num_experts", 0) and (not pattern or "E" in pattern):
        experts = Experts(
            size("num_experts"), size("moe_router_topk", 2), size("moe_ffn_hidden_size", ffn),
            size("moe_shared_expert_intermediate_size", 0),
            pattern.count("-") if pairs else _dense_layers(arguments, layers, name),
            size("moe_latent_size", 0),
        )  # fmt: skip
    return Model(
        name, layers, hidden, heads, heads_kv, *dims, ffn,
        size(vocab), gated=size.truth("swiglu") or size.truth("quick_geglu"),
        tied=not size.truth("untie_embeddings_and_output_weights"), experts=experts, latent=latent,
        windows=_windows(arguments, pattern, layers, name),
        predicted=predicted or size("mtp_num_layers", 0),
        linear=_linear(arguments, pattern, layers, name),
        pattern="" if pairs else pattern, hybrid=pairs,
        gated_attention=size.truth("attention_output_gate"),
        sinks=arguments.get("softmax_type", "vanilla") not in ("vanilla", None),
        biases=size.truth("add_bias_linear", True) and not size.truth("disable_bias_linear"),
    )  # fmt: skip


def letters_of_layer(arguments: Arguments) -> int:
    """Megatron's layers in one of `Model`: 2 of a HybridModel of mixers with feed-forwards."""
    return 2 if _is_pairs(_main_pattern(arguments)[0]) else 1


def _is_pairs(pattern: str) -> bool:
    return bool(pattern) and bool(_PAIRS.fullmatch(pattern))


def _windows(arguments: Arguments, pattern: str, layers: int, name: str) -> Windows | None:
    """The windows, whose sizes leave out the query's own key; a letter of a hybrid is a layer."""
    size = arguments.get("window_size")
    if size in (None, "None"):
        return None
    keys = 1 + positive(str(size).strip("()[]").partition(",")[0], "--window-size", name)
    every = len(pattern) or layers
    windowed = _layers_of(arguments, "--window-attn-skip-freq", every, name) or [1] * every
    if pattern:
        windowed = [has and letter in "*+" for has, letter in zip(windowed, pattern, strict=True)]
    return Windows.of(keys, windowed[:: letters_of_layer(arguments)], name)


def _main_pattern(arguments: Arguments) -> tuple[str, list[str]]:
    """Letters of a hybrid's layers, and those of its layers of multi-token prediction."""
    text = arguments.get("hybrid_layer_pattern") or arguments.get("hybrid_override_pattern")
    main, *predicted = str(text or "").replace("|", "").split("/")
    return main, [letters for letters in predicted if letters]


def _pattern(arguments: Arguments, name: str) -> tuple[str, int]:
    """Letters of a hybrid's layers, and its layers of multi-token prediction; "" of other models.
    Refuses layers that the planner has no times for."""
    main, predicted = _main_pattern(arguments)
    feed = "E" if "E" in main else "-"
    if all({*main} - {*letters} for letters in _LETTERS):
        raise _untimed(name, "--hybrid-layer-pattern of M or G, *, +, - and E", main)
    if {*predicted} - {f"*{feed}", f"+{feed}"}:
        must = f"--hybrid-layer-pattern with *{feed} or +{feed} behind each /"
        raise _untimed(name, must, "/".join(predicted))
    return main, len(predicted)


def _untimed(name: str, option: str, got: str) -> BurstError:
    """The refusal of layers without times, which says what they are where that is known."""
    meanings = ", ".join(what for layer, what in _UNTIMED.items() if layer in (got, *got))
    words = f" ({meanings})" if meanings else ""
    return BurstError(
        f"plan: {name} must have an {option}, because the planner has no times for other layers; "
        f"got {excerpt(got)}{words}; plan another model"
    )


def _linear(arguments: Arguments, pattern: str, layers: int, name: str) -> Linear | None:
    """The layers of gated delta nets or Mamba-2; unset sizes are those of Megatron."""
    variant = arguments.get("experimental_attention_variant")
    if variant not in (None, "None", *_DELTA_NETS):
        raise _untimed(name, "--experimental-attention-variant of gated_delta_net", str(variant))
    if pattern:
        kinds = tuple(letter in "MG" for letter in pattern[:: letters_of_layer(arguments)])
        of = _mamba if "M" in pattern else _delta
        return of(arguments, kinds, name) if any(kinds) else None
    if variant not in _DELTA_NETS:
        return None
    is_linear = _layers_of(arguments, "--linear-attention-freq", layers, name)
    if is_linear is None:
        raise unread(name, "--linear-attention-freq", "none")
    return _delta(arguments, tuple(map(bool, is_linear)), name)


def _mamba(arguments: Arguments, layers: tuple[bool, ...], name: str) -> Mamba:
    size = Sizes(arguments, name)
    dim = size("mamba_head_dim", 64)
    heads = size("mamba_num_heads", 2 * size("hidden_size") // max(dim, 1))
    return Mamba(
        layers, heads, dim, size("mamba_num_groups", 8), size("mamba_state_dim", 128), conv=4
    )


def _delta(arguments: Arguments, layers: tuple[bool, ...], name: str) -> DeltaNet:
    size = Sizes(arguments, name)
    return DeltaNet(
        layers,
        size("linear_num_key_heads", 16), size("linear_num_value_heads", 32),
        size("linear_key_head_dim", 128), size("linear_value_head_dim", 128),
        size("linear_conv_kernel_dim", 4),
    )  # fmt: skip


def _dense_layers(arguments: Arguments, layers: int, name: str) -> int:
    """Layers without experts."""
    freq = _freq(arguments, "--moe-layer-freq", name)
    if freq is None:
        return 0
    if isinstance(freq, int):
        return layers - len(range(0, layers, freq))
    return len(freq) - sum(freq)


def _layers_of(arguments: Arguments, option: str, layers: int, name: str) -> list[int] | None:
    """Whether each layer has something: all but every n-th, or as a list says."""
    freq = _freq(arguments, option, name)
    if isinstance(freq, int):
        return [number % freq for number in range(1, layers + 1)]
    if freq is not None and len(freq) != layers:
        raise unread(name, option, f"{len(freq)} of {layers} layers")
    return freq


def _freq(arguments: Arguments, option: str, name: str) -> int | list[int] | None:
    """An integer, or a list such as ([0]*3+[1]*58), as Megatron reads it."""
    value = arguments.get(option.removeprefix("--").replace("-", "_"))
    if value in (None, "None"):
        return None
    if "[" not in str(value):
        return positive(value, option, name)
    try:
        if len(str(value)) > 2 * MOST_LAYERS:
            raise ValueError
        return [int(one) for one in _value(ast.parse(str(value).strip(), mode="eval").body)]
    except (SyntaxError, ValueError, TypeError, ArithmeticError, MemoryError, RecursionError):
        raise unread(name, option, str(value)) from None


def _value(node: ast.AST) -> Any:
    """Of numbers, lists, their sums and products; refuses anything else."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.List(elts=items):
            return [_value(item) for item in items]
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            operands = _value(left), _value(right)
            lengths = [len(one) if isinstance(one, list) else one for one in operands]
            if max(_OPERATORS[type(sign)](*lengths), *lengths) <= MOST_LAYERS:
                return _OPERATORS[type(sign)](*operands)
    raise ValueError(ast.unparse(node))
