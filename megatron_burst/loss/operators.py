"""The loss as an operator of torch's compiler, so that a compiled model stays one graph.

    megatron_burst::linear_cross_entropy    hidden, weight, labels, mask -> loss, dhidden, dweight

It computes gradients along with the loss; backward multiplies them by a number. The compiler sees
the name of a process group and a text of options, which mean the same in the next process.
"""

from ast import literal_eval
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import assume_constant_result

from megatron_burst.comm.alone import group_or_default
from megatron_burst.loss.autograd import GradientsInForward, Recomputed
from megatron_burst.loss.checks import LossInputs
from megatron_burst.loss.statistics import WHO, sum_dtype
from megatron_burst.operators import context_of, is_plain, plain, source_of
from megatron_burst.transforms import autocast_inputs

_SOURCE = source_of(__file__)


def traced_loss(
    eager: Callable[..., Any], hidden: Tensor, weight: Tensor, labels: Tensor,
    loss_mask: Tensor | None, tp_group: dist.ProcessGroup | None, settings: dict[str, Any],
) -> Any:  # fmt: skip
    """What the compiler traces for `eager`, whose arguments the others are."""
    if not _is_operator((hidden, weight, labels), loss_mask, settings):
        return eager(hidden, weight, labels, loss_mask, tp_group, settings)
    hidden, weight = autocast_inputs(hidden, weight)
    enabled = torch.is_grad_enabled()
    needs_grad = enabled and hidden.requires_grad, enabled and weight.requires_grad
    options = [(key, plain(value)) for key, value in settings.items()]
    name, words = _constants(tp_group, tuple(options), needs_grad)
    operator = torch.ops.megatron_burst.linear_cross_entropy
    return operator(hidden, weight, labels, loss_mask, name, words)[0]


def _is_operator(tensors: tuple, loss_mask: Any, settings: dict[str, Any]) -> bool:
    """Whether the operator computes a call: not if backward recomputes logits, nor into Megatron's
    `main_grad`, nor with a count that an event announces."""
    if torch._C._are_functorch_transforms_active():
        return False
    masks = () if loss_mask is None else (loss_mask,)
    if not all(isinstance(x, Tensor) for x in (*tensors, *masks)) or not is_plain(
        [value for key, value in settings.items() if key != "supervised"]
    ):
        return False
    hidden, weight, _ = tensors
    late = hidden.dtype == torch.float16 or settings["return_lse"]
    scalar = settings["reduction"] in ("sum", "mean") and not settings["return_lse"]
    in_forward = settings["grads"] == "forward" or (settings["grads"] == "auto" and not late)
    is_word = isinstance(settings["supervised"], str)
    plain_weight = is_word and getattr(weight, "main_grad", None) is None
    return scalar and in_forward and plain_weight and not any(x.requires_grad for x in masks)


@assume_constant_result
def _constants(tp_group: dist.ProcessGroup | None, *options: Any) -> tuple[str, str]:
    """The name of the tensor-parallel group, "" for none, and options as a text."""
    name = "" if tp_group is None else group_or_default(tp_group, WHO).group_name
    return name, repr((*options, _SOURCE))


@lru_cache(maxsize=1024)
def _options_of(words: str) -> tuple[dict[str, Any], tuple[bool, bool]]:
    settings, needs_grad, _ = literal_eval(words)
    return dict(settings), needs_grad


@torch.library.custom_op(
    "megatron_burst::linear_cross_entropy", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def _linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, loss_mask: Tensor | None, group: str,
    options: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, gradients of hidden and weight if they are needed, else nothing)."""
    from megatron_burst.loss.linear import ready_loss  # whose import asks for this module

    settings, needs_grad = _options_of(options)
    tp_group = torch.distributed.distributed_c10d._resolve_process_group(group) if group else None
    with torch.no_grad():
        inputs = LossInputs(hidden, weight, labels, loss_mask)
        rows, weights, head = ready_loss(inputs, tp_group, settings, needs_grad)
        ctx = context_of(needs_grad)
        if head.whole:
            losses = GradientsInForward.forward(ctx, hidden, weight, weights, rows, head)
            grads = ctx.sums
        else:
            losses, *_ = Recomputed.forward(ctx, hidden, weight, rows, replace(head, keep=False))
            grads = None, None
        loss = (losses * weights).sum()
    return loss, *(hidden.new_empty(0) if grad is None else grad for grad in grads)


@_linear_cross_entropy.register_fake
def _(hidden, weight, labels, loss_mask, group, options):
    _, (of_hidden, of_weight) = _options_of(options)
    dtype = sum_dtype(hidden.dtype)
    dhidden = hidden.new_empty(hidden.shape if of_hidden else 0)
    # a sum, which is rounded once it is multiplied
    dweight = hidden.new_empty(weight.shape, dtype=dtype) if of_weight else hidden.new_empty(0)
    if loss_mask is not None:
        dtype = torch.promote_types(dtype, loss_mask.dtype)
    return hidden.new_empty((), dtype=dtype), dhidden, dweight


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    _, *grads = output
    ctx.save_for_backward(*grads)
    ctx.needs_grad, ctx.dtype = _options_of(inputs[-1])[1], inputs[1].dtype
    ctx.mark_non_differentiable(*grads)


def _backward(ctx: Any, dloss: Tensor, *_: Any) -> tuple:
    pairs = zip(ctx.saved_tensors, ctx.needs_grad, strict=True)
    grads = [(x.to(dloss.dtype) * dloss).to(ctx.dtype) if w else None for x, w in pairs]
    return *grads, None, None, None, None


_linear_cross_entropy.register_autograd(_backward, setup_context=_save)
