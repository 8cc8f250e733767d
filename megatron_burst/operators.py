"""Attention as operators of torch's compiler, so that a compiled model stays one graph (not on the
reading path).

    megatron_burst::attention            q, k, v, sink, sample, group, options -> out, lse, largest
    megatron_burst::attention_backward   dout, q, k, v, sink, out, lse, sample -> dq, dk, dv, dsink

An operator runs the same call as without the compiler. The compiler sees tensors, the name of a
process group and a text of options, which mean the same in the next process: compiled code is kept
on disk. Nothing is saved but inputs and outputs: an all-to-all sends q, k and v again in backward.
All ranks of a group must compile their calls, or none; a rank that does not use an output makes no
call.
"""

from ast import literal_eval
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import fields
from functools import lru_cache
from hashlib import blake2b
from math import isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import assume_constant_result
from torch.fx.experimental.symbolic_shapes import guard_scalar

from megatron_burst.arguments import CallArgs, sample_args_of
from megatron_burst.comm.alone import Ranks, group_or_default
from megatron_burst.config import BurstConfig
from megatron_burst.engine.passes import FRAMES
from megatron_burst.force import Force
from megatron_burst.kernels.partial import accumulate_dtype
from megatron_burst.largest_logits import LargestLogits
from megatron_burst.transforms import autocast_inputs, refuse_transforms
from megatron_burst.version import __version__

if TYPE_CHECKING:
    from megatron_burst.attention import ReadyCall

_WHO = "burst attention"
_CONFIG = tuple(field.name for field in fields(BurstConfig) if field.name != "force")
_FORCE = tuple(field.name for field in fields(Force))
_PLAIN = int, float, bool, str, type(None)


def _count_nothing() -> None:
    """What an operator tells of its calls, unless somebody asks."""


# called when an operator runs: who counts calls sees none of them in compiled code
ON_CALL: ContextVar[Callable[[], object]] = ContextVar(
    "megatron_burst on call", default=_count_nothing
)


def source_of(file: str) -> str:
    """This version and a digest of an operator's module. The text of options has it, because the
    compiler keeps code on disk by the text, not by what the operator promises of its outputs."""
    return f"{__version__} {blake2b(Path(file).read_bytes(), digest_size=8).hexdigest()}"


_SOURCE = source_of(__file__)


def traced_attention(
    eager: Callable[..., tuple[Tensor, ...]], tensors: tuple[Tensor, Tensor, Tensor],
    sink: Tensor | None, sample: tuple, group: Ranks, options: tuple, return_lse: bool,
    config: BurstConfig | None, layer: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What the compiler traces for `eager`, whose arguments the others are. The graph does not know
    `layer`, of which each would be compiled anew."""
    bounds, padded, longest, tree, slices = sample
    listed = list(tree) if type(tree) in (list, tuple) else None
    parents = None if listed is not None else tree
    given = (*tensors, sink, bounds, padded, parents, slices)
    if not (_fits(config, options, longest, listed) and _are_tensors(tensors, given)):
        return eager(tensors, sink, sample, group, options, return_lse, config, layer)
    chosen = None if config is None else [getattr(config, name) for name in _CONFIG]
    forced = None if config is None else [getattr(config.force, name) for name in _FORCE]
    on = torch.is_grad_enabled()
    wanted = on and any(x.requires_grad for x in tensors), on and _needs_grad(sink)
    name, words = _constants(group, plain(options), plain(chosen), plain(forced), wanted)
    out, lse, largest, _ = torch.ops.megatron_burst.attention(
        *autocast_inputs(*tensors), sink, bounds, padded, longest, listed, parents, slices, name,
        words,
    )  # fmt: skip
    results = (out, lse) if return_lse else (out,)
    return (*results, largest) if options[-1] else results


def _fits(
    config: BurstConfig | None, options: tuple, longest: int | None, listed: list | None
) -> bool:
    """Whether the operator has such a call; `eager` refuses the wrong ones in its own words."""
    if torch._C._are_functorch_transforms_active() or not is_plain(options):
        return False
    if type(longest) not in (int, type(None)) or not all(type(x) is int for x in listed or ()):
        return False
    if config is None:
        return True
    if type(config) is not BurstConfig or config.keep != "none" or config.check:
        return False
    return is_plain([getattr(config, name) for name in _CONFIG])


def is_plain(x: Any) -> bool:
    """Whether a text says the same: of numbers, words and lists of them."""
    if type(x) in (tuple, list):
        return all(is_plain(y) for y in x)
    return type(x) in _PLAIN and (type(x) is not float or isfinite(guard_scalar(x)))


def plain(x: Any) -> Any:
    """The same, of constants: the compiler makes a symbol of a number that changes."""
    if type(x) in (tuple, list):
        return tuple([plain(y) for y in x])
    return guard_scalar(x) if type(x) in (int, float) else x


def _are_tensors(tensors: tuple, given: tuple) -> bool:
    return all(isinstance(x, Tensor) for x in tensors) and all(
        x is None or isinstance(x, Tensor) for x in given
    )


def _needs_grad(sink: Tensor | None) -> bool:
    return sink is not None and sink.requires_grad


@assume_constant_result
def _constants(group: Ranks, *options: Any) -> tuple[str, str]:
    """The name of a group, "" if it is of this process alone, and options as a text that
    `literal_eval` reads."""
    resolved = group_or_default(group, _WHO)
    return resolved.group_name if dist.is_initialized() else "", repr((*options, _SOURCE))


class _Options(NamedTuple):
    """What the text says; `wanted`: whether q, k and v, and whether sinks need gradients."""

    args: CallArgs
    wanted: tuple[bool, bool]


@lru_cache(maxsize=1024)
def _options_of(words: str) -> _Options:
    options, chosen, forced, wanted, _ = literal_eval(words)
    config = BurstConfig()
    if chosen is not None:
        force = Force(**dict(zip(_FORCE, forced, strict=True)))
        config = BurstConfig(**dict(zip(_CONFIG, chosen, strict=True)), force=force)
    return _Options(CallArgs(*options)._replace(return_lse=True, config=config), wanted)


def _ready(tensors: Sequence[Tensor], sink: Tensor | None, sample: tuple, name: str,
           words: str) -> tuple["ReadyCall", _Options]:  # fmt: skip
    """The call of an operator, as ranks without the compiler make it."""
    from megatron_burst.attention import ready_call  # whose import asks for this module

    args, wanted = options = _options_of(words)
    bounds, padded, longest, listed, parents, slices = sample
    sample = bounds, padded, longest, parents if listed is None else listed, slices
    args = args._replace(sample_args=sample_args_of(*sample))
    group = torch.distributed.distributed_c10d._resolve_process_group(name) if name else None
    with torch.set_grad_enabled(any(wanted)):
        tensors = [x.detach().requires_grad_(wanted[0]) for x in tensors]
        return ready_call(tuple(tensors), sink, args, sample, group), options


@torch.library.custom_op(
    "megatron_burst::attention", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def _attention(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, cu_seqlens: Tensor | None,
    padded: Tensor | None, max_seqlen: int | None, listed: Sequence[int] | None,
    parents: Tensor | None, slices: Tensor | None, group: str, options: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(out, lse, largest scores or none, number of the pass as an int64 on the CPU)."""
    refuse_transforms(_WHO, q, capturable=True)
    ON_CALL.get()()
    sample = cu_seqlens, padded, max_seqlen, listed, parents, slices
    ready, (args, wanted) = _ready((q, k, v), sink, sample, group, options)
    passes, (q, k, v) = ready.passes.for_recompute or ready.passes, ready.tensors
    largest = LargestLogits.of_call(q, passes, ready.group) if args.return_max_logit else None
    # ranks that are not compiled run another program if backward follows, under another name
    token = FRAMES.set(None if any(wanted) else FRAMES.get())
    try:
        with torch.no_grad():
            ctx, run = context_of((True, True, True, wanted[1])), _function().forward
            out, lse = run(ctx, q, k, v, sink, passes, ready.sample_mask, 0, largest)
    finally:
        FRAMES.reset(token)
    scores = lse.new_empty(0) if largest is None else largest.scores
    out, lse = (x.contiguous() for x in ready.as_given(out, lse))
    return out, lse, scores, torch.tensor(ctx.call[0])


def context_of(needs_input_grad: tuple[bool, ...], **more: Any) -> Any:
    """What an autograd function gets, where the compiler saves tensors itself."""
    ignored = "save_for_backward", "mark_non_differentiable", "set_materialize_grads"
    methods = dict.fromkeys(ignored, lambda *_: None)
    return SimpleNamespace(needs_input_grad=needs_input_grad, **methods, **more)


def _function() -> Any:
    from megatron_burst.attention import BurstAttentionFunction

    return BurstAttentionFunction


@_attention.register_fake
def _(q, k, v, sink, cu_seqlens, padded, max_seqlen, listed, parents, slices, group, options):
    args, dtype = _options_of(options).args, accumulate_dtype(q.dtype)
    *rows, heads, _ = q.shape
    at = [*rows[1:], rows[0]] if args.qkv_format == "sbhd" else rows
    lse = q.new_empty((*at[:-1], heads, at[-1]), dtype=dtype)
    largest = q.new_empty(heads if args.return_max_logit else 0, dtype=dtype)
    number = torch.empty((), dtype=torch.int64, device="cpu")
    return q.new_empty((*rows, heads, v.shape[-1])), lse, largest, number


@torch.library.custom_op(
    "megatron_burst::attention_backward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def _attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, out: Tensor, lse: Tensor,
    number: Tensor, cu_seqlens: Tensor | None, padded: Tensor | None, max_seqlen: int | None,
    listed: Sequence[int] | None, parents: Tensor | None, slices: Tensor | None, group: str,
    options: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv, gradient of the sinks or none)."""
    from megatron_burst.attention import to_bshd

    refuse_transforms(_WHO, dout, capturable=True)
    sample = cu_seqlens, padded, max_seqlen, listed, parents, slices
    ready, (args, wanted) = _ready((q, k, v), sink, sample, group, options)
    passes = ready.passes.for_recompute or ready.passes
    with torch.no_grad():
        out, dout = to_bshd(args.qkv_format, out, dout)
        lse = lse.unsqueeze(0) if args.qkv_format == "thd" else lse
        of_sink = (sink, lse) if wanted[1] else (None, None)
        ctx = context_of(
            (True, True, True, wanted[1]), saved_tensors=(out, *of_sink, *ready.tensors, lse),
            passes=passes, sample_mask=ready.sample_mask, call=(int(number), 0),
        )  # fmt: skip
        *grads, dsink = _function().backward(ctx, dout, None)[:4]
        grads = [ready.as_given(x)[0].contiguous() for x in grads]
    return *grads, out.new_empty(0) if dsink is None else dsink


@_attention_backward.register_fake
def _(dout, q, k, v, sink, *others):
    grads = [x.new_empty(x.shape) for x in (q, k, v)]
    wants_sink = _options_of(others[-1]).wanted[1]
    return *grads, sink.new_empty(sink.shape) if wants_sink else q.new_empty(0)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, sink, bounds, padded, longest, listed, parents, slices, *ctx.names = inputs
    out, lse, _, number = output
    ctx.save_for_backward(q, k, v, sink, out, lse, number, bounds, padded, parents, slices)
    ctx.numbers = longest, listed
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, dout: Tensor, *_: Any) -> tuple:
    *tensors, bounds, padded, parents, slices = ctx.saved_tensors
    *grads, dsink = torch.ops.megatron_burst.attention_backward(
        dout, *tensors, bounds, padded, *ctx.numbers, parents, slices, *ctx.names
    )
    wants_sink = _options_of(ctx.names[-1]).wanted[1]
    return *grads, dsink if wants_sink else None, *(None,) * 8


_attention.register_autograd(_backward, setup_context=_save)
