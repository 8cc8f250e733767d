"""A model as Megatron's flags, those of the argument parser of Megatron-Core 0.19."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from megatron_burst.tools.job.linear import DeltaNet, Mamba
from megatron_burst.tools.job.model import Model

Values = dict[str, int | float | str | bool | list[str] | tuple[Any, ...]]
_SPEC = ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec")  # of hybrids
# of rotary embeddings, what HybridModel does not pass on
_GPT_ONLY = {"--use-rope-scaling", "--rotary-seq-len-interpolation-factor", "--mrope-section"}


def model_flags(model: Model) -> Values:
    """A model as Megatron's flags: its sizes, and what it has beside a Llama's layers.

    They are those of another model if it has `unknown` entries.
    """
    flags = {flag: value for flag, of in _FLAGS if (value := of(model))}
    every: Values = {**flags, **_ALWAYS, **dict(model.beside)}
    return {flag: value for flag, value in every.items() if value is not False}


def as_hybrid(model: Model) -> Model | None:
    """A GPT as the HybridModel that computes the same; None if Megatron cannot build it so.

    Source: HybridModel and hybrid_builder of Megatron-LM 0.19.
    """
    beside = dict(model.beside)
    if model.pattern or model.unknown or _GPT_ONLY & beside.keys():
        return None
    if skips := beside.get("--no-rope-freq"):
        words: list[Any] = str(skips).strip("[]").split(",")
        if isinstance(skips, int):
            words = [int(number % skips == 0) for number in range(1, model.layers + 1)]
        beside["--no-rope-freq"] = _of_letters(words)
    return replace(model, hybrid=True, beside=tuple(beside.items()))


def _of_letters(words: Iterable[object]) -> str:
    """A list of a word a layer, with 0 for its feed-forward, which is a layer of a HybridModel."""
    return f"[{','.join(f'{word},0' for word in words)}]"


def hybrid_pattern(model: Model, stages: Sequence[int] = ()) -> str:
    """Letters of a hybrid's layers, as --hybrid-layer-pattern has them; "" of other models.

    `stages`: layers of each pipeline stage, if the letters have their ends.
    """
    softmax, feed = "+" if model.latent else "*", "E" if model.moe_layers else "-"
    layers = [*model.pattern]
    if model.hybrid:
        linear = model.linear.layers if model.linear else (False,) * model.layers
        feeds = "-" * model.dense_layers + "E" * model.moe_layers
        pairs = zip(linear, feeds, strict=True)
        layers = [("G" if is_linear else softmax) + one for is_linear, one in pairs]
    if not layers:
        return ""
    for end in reversed([*accumulate(stages[:-1])]):
        layers.insert(end, "|")
    return "".join(layers) + f"/{softmax}{feed}" * model.predicted


def _skip_freq(model: Model) -> str | int | None:
    """Which layers have no window: every n-th, or a list; None if all have one."""
    if not model.windows or all(model.windows.layers):
        return None
    if model.hybrid:
        return _of_letters(map(int, model.windows.layers))
    return _all_but_each(model.windows.layers)


def _linear_freq(model: Model) -> str | int | None:
    """Which layers have gated delta nets: all but every n-th, or a list."""
    if not isinstance(model.linear, DeltaNet) or model.pattern or model.hybrid:
        return None
    return _all_but_each(model.linear.layers)


def _all_but_each(layers: tuple[bool, ...]) -> str | int:
    """n if it is all layers but every n-th, else a list."""
    numbers = range(1, len(layers) + 1)
    every = (n for n in numbers if layers == tuple(number % n > 0 for number in numbers))
    return next(every, f"[{','.join(str(int(one)) for one in layers)}]")


def _moe_freq(model: Model) -> str | None:
    """Which layers have experts, if the first ones have none."""
    if not model.experts or not model.experts.dense_layers or model.pattern or model.hybrid:
        return None
    return f"[0]*{model.experts.dense_layers}+[1]*{model.moe_layers}"


def _of(kind: type, name: str) -> Callable[[Model], Any]:
    return lambda model: isinstance(model.linear, kind) and getattr(model.linear, name)


_FLAGS: tuple[tuple[str, Callable[[Model], Any]], ...] = (  # a flag is there if its value is true
    ("--num-layers", lambda m: m.megatron_layers),
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
    ("--moe-latent-size", lambda m: m.experts and m.experts.latent),
    ("--moe-layer-freq", _moe_freq),
    # Megatron's window size leaves out the query's own key
    ("--window-size", lambda m: m.windows and f"{m.windows.size - 1},0"),
    ("--window-attn-skip-freq", _skip_freq),
    ("--hybrid-layer-pattern", hybrid_pattern),
    ("--spec", lambda m: hybrid_pattern(m) and _SPEC),
    ("--mamba-num-heads", _of(Mamba, "heads")),
    ("--mamba-head-dim", _of(Mamba, "dim")),
    ("--mamba-num-groups", _of(Mamba, "groups")),
    ("--mamba-state-dim", _of(Mamba, "state")),
    ("--experimental-attention-variant", lambda m: _linear_freq(m) and "gated_delta_net"),
    ("--linear-attention-freq", _linear_freq),
    ("--linear-num-key-heads", _of(DeltaNet, "heads_k")),
    ("--linear-num-value-heads", _of(DeltaNet, "heads_v")),
    ("--linear-key-head-dim", _of(DeltaNet, "dim_k")),
    ("--linear-value-head-dim", _of(DeltaNet, "dim_v")),
    ("--linear-conv-kernel-dim", _of(DeltaNet, "conv")),
    ("--attention-output-gate", lambda m: m.gated_attention),
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
