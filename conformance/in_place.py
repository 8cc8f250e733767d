"""Replaces the peers' context parallelism by burst, in the process that imports this.

`install` replaces TransformerEngine's function and turns Megatron's cp_comm_type "p2p", or none,
into "burst", as soon as somebody imports them.
"""

import functools
import inspect
import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from conformance.results import Outcome, write
from megatron_burst.errors import Need, require
from megatron_burst.imports import when_imported
from megatron_burst.patching import Patch

_WHO = "burst in place of TransformerEngine's context parallelism"
_CP = "transformer_engine.pytorch.attention.dot_product_attention"
_CONFIG = "megatron.core.transformer.transformer_config"
# What has the place of each of TransformerEngine's ways: the modes inside and between nodes.
MODES = {
    "p2p": ("ring", "ring"),
    "all_gather": ("gather", "ring"),
    "a2a": ("a2a", "a2a"),
    "a2a+p2p": ("gather", "ring"),  # burst has no all-to-all inside nodes
}
_DEFAULT_DROPOUT = 0.1  # of TransformerConfig.attention_dropout, and of Megatron's command line

TE_FUNCTION = Patch(
    "conformance",
    f"{_CP}.context_parallel:attn_forward_func_with_cp",
    "conformance.in_place:attend",
    tuple(
        "is_training q k v cu_seqlens_q cu_seqlens_kv max_seqlen_q max_seqlen_kv "
        "cu_seqlens_q_padded cu_seqlens_kv_padded dropout_p cp_group cp_global_ranks cp_stream "
        "cp_comm_type softmax_scale qkv_format attn_mask_type attn_bias_type attn_bias "
        "deterministic use_fused_attention window_size softcap fp8 fp8_meta quantizers "
        "pad_between_seqs use_flash_attn_3 use_flash_attn_4 softmax_type softmax_offset fp8_output "
        "layer_number return_max_logit load_balancing_strategy".split()
    ),
    "TransformerEngine's tests call it through DotProductAttention",
    package="transformer-engine",
)

TE_KERNEL = Patch(
    "conformance",
    f"{_CP}.utils:get_attention_backend",
    "conformance.in_place:choose_kernel",
    ("attention_params",),
    "TransformerEngine finds none where its own way lacks the case and never comes to its function",
    package="transformer-engine",
)


def install() -> None:
    """Install the replacements; imports neither TransformerEngine nor Megatron."""
    when_imported(f"{_CP}.backends", TE_FUNCTION.apply)
    when_imported(f"{_CP}.utils", TE_KERNEL.apply)
    when_imported(_CONFIG, _turn_configurations)
    when_imported("megatron.training.global_vars", _turn_arguments)
    when_imported("megatron_burst.mcore.core_attention", _drop_known_masks)


@functools.cache
def _note(what: str) -> None:
    """Record once per process that burst ran: the tests would also pass without it."""
    if os.environ.get("RANK", "0") == "0" and "CONFORMANCE_RESULTS" in os.environ:
        row = Outcome(os.environ["CONFORMANCE_SUITE"], "", "attended", detail=what)
        write(Path(os.environ["CONFORMANCE_RESULTS"]), row)


# ---- TransformerEngine ------------------------------------------------------------------------


def attend(attn_forward_func_with_cp, /, *args, **options):
    """Replaces TransformerEngine's function by `burst_attention`; out like q, [..., h, d_v], and
    the largest logits [h] if they are asked for.

    Raises:
        BurstError: for a feature that burst lacks.
    """
    from megatron_burst.attention import burst_attention
    from megatron_burst.config import BurstConfig

    bound = inspect.signature(attn_forward_func_with_cp).bind(*args, **options)
    bound.apply_defaults()
    call = SimpleNamespace(**bound.arguments)
    require(_WHO, _needs(call))
    intra, inter = modes_of(call)
    _note(f"cp_comm_type {call.cp_comm_type} by {intra}, {inter} between nodes")
    group, nodes = _group(call)
    return burst_attention(
        call.q, call.k, call.v, causal="causal" in call.attn_mask_type,
        window=_window(call), softmax_scale=call.softmax_scale, qkv_format=call.qkv_format,
        softcap=call.softcap or 0.0, return_max_logit=bool(call.return_max_logit),
        config=BurstConfig(
            intra=intra, inter=inter, deterministic=call.deterministic, nodes=nodes
        ),
        group=group, sink=_sink(call, group), **_sample(call),
    )  # fmt: skip


def choose_kernel(get_attention_backend, /, attention_params):
    """TransformerEngine's function; asked about all_gather where its own ways cannot have the case.

    It finds nothing for a window in p2p and a2a+p2p, and has sinks in a2a alone. In a2a it gives
    each rank KV heads // ranks of the KV heads, and cuDNN divides by that: with fewer KV heads than
    ranks the process ends in SIGFPE.
    """
    if attention_params.softmax_type != "vanilla":
        return get_attention_backend(replace(attention_params, cp_comm_type="a2a"))
    way, heads = attention_params.cp_comm_type, attention_params.num_gqa_groups
    windowed_ring = "p2p" in way and _window(attention_params)
    if windowed_ring or (way == "a2a" and heads % attention_params.cp_size):
        attention_params = replace(attention_params, cp_comm_type="all_gather")
    return get_attention_backend(attention_params)


def modes_of(call: Any) -> tuple[str, str]:
    """Burst's modes, inside and between nodes, for TransformerEngine's way; in the place of a ring,
    which has no windows in documents, burst chooses."""
    if call.cp_comm_type == "p2p" and call.qkv_format == "thd" and _window(call):
        return "auto", "auto"
    return MODES[call.cp_comm_type]


def _group(call: Any) -> tuple[Any, int | None]:
    """The context-parallel group, and its nodes if given; in a2a+p2p TransformerEngine gives its
    rows and columns."""
    import torch.distributed as dist

    if call.cp_comm_type == "a2a+p2p":  # no group of all its ranks comes with it
        ranks = list(call.cp_global_ranks)
        must = "in a2a+p2p all ranks must share one context-parallel group, as in its tests"
        everyone = ranks == list(range(dist.get_world_size()))
        require(_WHO, [(everyone, must, ranks, "leave the case out")])
        return dist.group.WORLD, call.cp_group[1].size()
    return call.cp_group, None


def _needs(call: Any):
    """Requirements of a call, for `require`."""
    kinds: tuple[Need, ...] = (
        (call.cp_comm_type in MODES, f"cp_comm_type must be one of {', '.join(MODES)}",
         call.cp_comm_type, "leave the case out"),
        (not call.fp8, "attention must not be fp8, which burst lacks", "fp8", "leave the case out"),
        (call.attn_bias_type == "no_bias", "there must be no bias, which burst does not add",
         call.attn_bias_type, "leave the case out"),
        (not call.dropout_p, "there must be no dropout, which burst lacks", call.dropout_p,
         "leave the case out"),
        (call.load_balancing_strategy.name == "DUAL_CHUNK_SWAP",
         "rows must lie in zigzag", call.load_balancing_strategy, "leave the case out"),
    )  # fmt: skip
    yield from kinds


def _window(call: Any) -> tuple[int, int] | None:
    """None where it is the mask's own, as TransformerEngine writes that."""
    return None if call.window_size in (None, (-1, -1), (-1, 0)) else call.window_size


def _sink(call: Any, group: Any) -> Any:
    """Sinks [h] of TransformerEngine's [1, h, 1, 1]; none if the softmax has none."""
    if call.softmax_offset is None:
        return None
    return _summing(call.softmax_offset.flatten(), group)


def _summing(sink: Any, group: Any) -> Any:
    """The same, with its gradient summed over ranks: TransformerEngine returns it so."""
    import torch
    import torch.distributed as dist

    class Summing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            grad = grad.clone()
            dist.all_reduce(grad, group=group)
            return grad

    return Summing.apply(sink)


def _sample(call: Any) -> dict[str, Any]:
    """How rows lie, for `burst_attention`."""
    if call.qkv_format != "thd":
        return {}
    padded = call.cu_seqlens_q_padded
    return {
        "layout": "zigzag-documents",
        "cu_seqlens": call.cu_seqlens_q,
        "cu_seqlens_padded": None if padded is call.cu_seqlens_q else padded,
    }


# ---- Megatron -----------------------------------------------------------------------------------


def _turn_configurations() -> None:
    """Have each TransformerConfig ask for burst, without the dropout that is Megatron's default."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    import megatron_burst.auto  # noqa: F401  the entry point for code that builds models itself

    original = TransformerConfig.__post_init__

    @functools.wraps(original)
    def ask_for_burst(self) -> None:
        self.cp_comm_type = turned(self.cp_comm_type)
        if self.attention_dropout == _DEFAULT_DROPOUT:
            self.attention_dropout = 0.0
        original(self)

    TransformerConfig.__post_init__ = ask_for_burst


def turned(kinds: str | list[str] | None) -> str | list[str]:
    """A `cp_comm_type` with none and "p2p" replaced by burst."""
    if isinstance(kinds, list):
        return ["burst" if kind == "p2p" else kind for kind in kinds]
    return "burst" if kinds in (None, "p2p") else kinds


def _turn_arguments() -> None:
    """The same for Megatron's arguments, once a test sets them."""
    from megatron.training import global_vars

    original = global_vars.set_args

    @functools.wraps(original)
    def set_turned(args) -> None:
        from megatron_burst.mcore import patches
        from megatron_burst.mcore.args import force_args

        if args.attention_dropout == _DEFAULT_DROPOUT:
            args.attention_dropout = 0.0
        if find_spec("fused_weight_gradient_mlp_cuda") is None:
            args.gradient_accumulation_fusion = False  # is Apex's; Megatron refuses it without
        if args.vocab_size is None:  # test_multi_token_prediction.py sets the padded one only
            args.vocab_size = getattr(args, "padded_vocab_size", None)
        force_args(args)
        patches.apply("packed")  # as --context-parallel-impl burst does
        original(args)

    global_vars.set_args = set_turned


def _drop_known_masks() -> None:
    """Calls with a dense mask beside a causal mask type, which TransformerEngine ignores and burst
    refuses, come without it."""
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_burst.mcore.core_attention import BurstForward

    original = BurstForward.__call__
    causal = AttnMaskType.causal, AttnMaskType.padding_causal

    @functools.wraps(original)
    def without_mask(self, query, key, value, attention_mask, attn_mask_type, *rest):
        _note(f"Megatron's layers at CP {self.cp_group.size()}")
        mask = None if attn_mask_type in causal else attention_mask
        return original(self, query, key, value, mask, attn_mask_type, *rest)

    BurstForward.__call__ = without_mask
