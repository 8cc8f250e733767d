"""Models from Megatron's arguments, and as Megatron's flags.

Sources: is_layer_window_attention and the argument parser of Megatron-Core 0.19.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from megatron_burst.tools.job.entries import Sizes, positive, unread
from megatron_burst.tools.job.linear import Linear
from megatron_burst.tools.job.model import Experts, Latent, Model, Windows

Arguments = Mapping[str, Any]
Values = dict[str, int | float | str | bool | list[str]]
MODEL_ARGUMENTS = {  # Megatron's, of which a model's figures depend
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "kv_channels", "vocab_size", "padded_vocab_size", "num_experts", "moe_router_topk",
    "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_layer_freq",
    "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
    "window_size", "window_attn_skip_freq", "softmax_type", "mtp_num_layers",
    "experimental_attention_variant", "linear_attention_freq", "linear_conv_kernel_dim",
    "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
    "linear_num_value_heads", "attention_output_gate",
}  # fmt: skip
_OPERATORS: dict[type, Any] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


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
            _dense_layers(arguments, layers, name),
        )  # fmt: skip
    return Model(
        name, layers, hidden, heads, heads_kv, *dims, ffn,
        size(vocab), gated=size.truth("swiglu") or size.truth("quick_geglu"),
        tied=not size.truth("untie_embeddings_and_output_weights"), experts=experts, latent=latent,
        windows=_windows(arguments, layers, name), predicted=size("mtp_num_layers", 0),
        linear=_linear(arguments, layers, name),
        gated_attention=size.truth("attention_output_gate"),
        sinks=arguments.get("softmax_type", "vanilla") not in ("vanilla", None),
        biases=size.truth("add_bias_linear", True) and not size.truth("disable_bias_linear"),
    )  # fmt: skip


def _windows(arguments: Arguments, layers: int, name: str) -> Windows | None:
    """The windows, whose sizes leave out the query's own key."""
    asked = arguments.get("window_size")
    if asked in (None, "None"):
        return None
    keys = 1 + positive(str(asked).strip("()[]").partition(",")[0], "--window-size", name)
    freq = _freq(arguments.get("window_attn_skip_freq"), "--window-attn-skip-freq", name)
    if freq is None:
        freq = [1] * layers
    if isinstance(freq, int):
        freq = [number % freq for number in range(1, layers + 1)]
    if len(freq) != layers:
        raise unread(name, "--window-attn-skip-freq", f"{len(freq)} of {layers} layers")
    return Windows.of(keys, freq, name)


def _linear(arguments: Arguments, layers: int, name: str) -> Linear | None:
    """The layers of gated delta nets; unset sizes are those of Megatron."""
    if arguments.get("experimental_attention_variant") != "gated_delta_net":
        return None
    freq = _freq(arguments.get("linear_attention_freq"), "--linear-attention-freq", name)
    if isinstance(freq, int):
        freq = [number % freq for number in range(1, layers + 1)]
    if freq is None or len(freq) != layers:
        got = "none" if freq is None else f"{len(freq)} of {layers} layers"
        raise unread(name, "--linear-attention-freq", got)
    size = Sizes(arguments, name)
    return Linear(
        tuple(map(bool, freq)),
        size("linear_num_key_heads", 16), size("linear_num_value_heads", 32),
        size("linear_key_head_dim", 128), size("linear_value_head_dim", 128),
        size("linear_conv_kernel_dim", 4),
    )  # fmt: skip


def _dense_layers(arguments: Arguments, layers: int, name: str) -> int:
    """Layers without experts."""
    freq = _freq(arguments.get("moe_layer_freq"), "--moe-layer-freq", name)
    if freq is None:
        return 0
    if isinstance(freq, int):
        return layers - len(range(0, layers, freq))
    return len(freq) - sum(freq)


def _freq(value: Any, option: str, name: str) -> int | list[int] | None:
    """An integer, or a list such as ([0]*3+[1]*58), as Megatron reads it."""
    if value in (None, "None"):
        return None
    if "[" not in str(value):
        return positive(value, option, name)
    try:
        return [int(one) for one in _value(ast.parse(str(value).strip(), mode="eval").body)]
    except (SyntaxError, ValueError, TypeError, ZeroDivisionError):
        raise unread(name, option, str(value)) from None


def _value(node: ast.AST) -> Any:
    """Of numbers, lists, their sums and products; refuses anything else."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.List(elts=items):
            return [_value(item) for item in items]
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_value(left), _value(right))
    raise ValueError(ast.unparse(node))


def model_flags(model: Model) -> Values:
    """A model as Megatron's flags: its sizes, and what it has beside a Llama's layers.

    They are those of another model if it has `unknown` entries.
    """
    found = {flag: value for flag, of in _FLAGS if (value := of(model))}
    every: Values = {**found, **_ALWAYS, **dict(model.beside)}
    return {flag: value for flag, value in every.items() if value is not False}


def _skip_freq(model: Model) -> str | int | None:
    """Which layers have no window: every n-th, or a list; None if all have one."""
    if not model.windows or all(model.windows.layers):
        return None
    have, numbers = model.windows.layers, range(1, model.layers + 1)
    every = (n for n in numbers if have == tuple(number % n > 0 for number in numbers))
    return next(every, f"[{','.join(str(int(window)) for window in have)}]")


def _moe_freq(model: Model) -> str | None:
    """Which layers have experts, if the first ones have none."""
    if not model.experts or not model.experts.dense_layers:
        return None
    return f"[0]*{model.experts.dense_layers}+[1]*{model.moe_layers}"


_FLAGS: tuple[tuple[str, Callable[[Model], Any]], ...] = (  # a flag is there if its value is true
    ("--num-layers", lambda m: m.layers),
    ("--hidden-size", lambda m: m.hidden),
    ("--ffn-hidden-size", lambda m: m.ffn),
    ("--num-attention-heads", lambda m: m.heads_q),
    ("--multi-latent-attention", lambda m: bool(m.latent)),
    ("--q-lora-rank", lambda m: m.latent and m.latent.q_rank),
    ("--kv-lora-rank", lambda m: m.latent and m.latent.kv_rank),
    ("--qk-head-dim", lambda m: m.latent and m.dim_qk - m.latent.rope_dim),
    ("--qk-pos-emb-head-dim", lambda m: m.latent and m.latent.rope_dim),
    ("--v-head-dim", lambda m: m.latent and m.dim_v),
    ("--group-query-attention", lambda m: m.heads_kv != m.heads_q),
    ("--num-query-groups", lambda m: m.heads_kv != m.heads_q and m.heads_kv),
    ("--kv-channels", lambda m: not m.latent and m.dim_qk),
    ("--num-experts", lambda m: m.experts and m.experts.count),
    ("--moe-router-topk", lambda m: m.experts and m.experts.active),
    ("--moe-ffn-hidden-size", lambda m: m.experts and m.experts.ffn),
    ("--moe-shared-expert-intermediate-size", lambda m: m.experts and m.experts.shared_ffn),
    ("--moe-layer-freq", _moe_freq),
    # Megatron's window size leaves out the query's own key
    ("--window-size", lambda m: m.windows and f"{m.windows.size - 1},0"),
    ("--window-attn-skip-freq", _skip_freq),
    ("--mtp-num-layers", lambda m: m.predicted),
    ("--softmax-type", lambda m: m.sinks and "learnable"),
    ("--swiglu", lambda m: m.gated),
    ("--disable-bias-linear", lambda m: not m.biases),
    ("--vocab-size", lambda m: m.vocab),
    ("--untie-embeddings-and-output-weights", lambda m: not m.tied),
)
_ALWAYS: Values = {
    "--normalization": "RMSNorm",
    "--position-embedding-type": "rope",
    "--hidden-dropout": 0,
}
