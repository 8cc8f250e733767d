"""How autograd runs the passes: logits computed again in backward, or gradients in forward."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_burst.errors import BurstError
from megatron_burst.loss.forecast import Expected, common_factor
from megatron_burst.loss.options import WHO
from megatron_burst.loss.parallel import HiddenGrad
from megatron_burst.loss.passes import (
    Head,
    Sums,
    forward_gradient_pass,
    gradient_pass,
    loss_factors,
    losses,
    statistics_pass,
)
from megatron_burst.loss.rows import Rows
from megatron_burst.loss.statistics import Factor, Stat
from megatron_burst.loss.weight_grad import (
    announce_main_grad,
    main_grad_of,
    new_sums,
    unwritten_sums,
)
from megatron_burst.transforms import refuse_transforms

_ROWS_AT_ONCE = 4096


class Recomputed(torch.autograd.Function):
    """Statistics in forward; backward computes the logits again, but for the last tile."""

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, rows: Rows, head: Head, expected: Expected | None
    ):
        stats, buffer = statistics_pass(head, hidden, weight, rows)
        ctx.save_for_backward(hidden, weight, stats)
        ctx.kept = buffer if head.keep and any(ctx.needs_input_grad[:2]) else None
        ctx.rows, ctx.head, ctx.expected = rows, head, expected
        # a parameter is not what comes out of saved_tensors after offloading: keep its buffer
        ctx.weight = weight
        entropy = stats[Stat.LSE] - stats[Stat.MEAN]
        outputs = losses(head, stats), stats[Stat.LSE], entropy
        ctx.set_materialize_grads(False)
        return tuple(rows.spread(output) for output in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        refuse_transforms(WHO, *grads)
        hidden, weight, stats = ctx.saved_tensors
        head, rows = ctx.head, ctx.rows
        zeros = stats.new_zeros(rows.labels.shape)
        loss, lse, entropy = (zeros if g is None else rows.collect(g) for g in grads)
        if ctx.expected is not None:
            ctx.expected.learn(loss)
        factors = loss_factors(head, stats, loss)
        # d entropy / dz = -p (z - mean)
        factors[Factor.SOFTMAX] += lse + entropy * stats[Stat.MEAN]
        factors[Factor.SLOPE] -= entropy
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        main_grad = main_grad_of(ctx.weight) if wants_weight else None
        total = (new_sums(weight) if main_grad is None else main_grad) if wants_weight else None
        sums = Sums(HiddenGrad(head.tp, rows, hidden) if wants_hidden else None, total)
        kept, ctx.kept = ctx.kept, None  # written to: a second backward computes it again
        gradient_pass(head, hidden, weight, rows, factors, sums, kept)
        del kept
        dhidden = None
        if sums.hidden is not None:
            dhidden = sums.hidden.finish().view(hidden.shape)
        if main_grad is not None:
            return dhidden, announce_main_grad(ctx.weight), None, None, None
        return dhidden, None if total is None else total.to(weight.dtype), None, None, None


class GradientsInForward(torch.autograd.Function):
    """Gradients of sum(row_weight * loss) in forward; backward multiplies them by a number."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, row_weight: Tensor, rows: Rows, head: Head):
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        sums = Sums(
            HiddenGrad(head.tp, rows, hidden) if wants_hidden else None,
            unwritten_sums(weight) if wants_weight else None,
            fresh=wants_weight,
        )
        stats = forward_gradient_pass(head, hidden, weight, rows, row_weight, sums)
        if sums.hidden is not None:
            sums.hidden.finish()
        ctx.sums, ctx.rows, ctx.row_weight = sums, rows, row_weight
        ctx.hidden_shape, ctx.weight = hidden.shape, weight
        return rows.spread(losses(head, stats))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        refuse_transforms(WHO, grad)
        if ctx.sums is None:
            raise BurstError(
                f"{WHO}: backward must run once where gradients were computed in forward, because "
                "they are scaled in place; got a second backward; pass grads='recompute'"
            )
        factor = common_factor(ctx.rows.collect(grad), ctx.row_weight)
        hidden, total = ctx.sums.hidden, ctx.sums.weight
        dhidden = dweight = ctx.sums = None
        if hidden is not None:
            _scale(hidden.mine, factor)
            dhidden = hidden.mine.view(ctx.hidden_shape)
        if total is not None:
            main_grad = main_grad_of(ctx.weight)
            if main_grad is None:
                dtype = ctx.weight.dtype
                out = total if total.dtype == dtype else torch.empty_like(total, dtype=dtype)
                dweight = torch.mul(total, factor, out=out)
            else:
                main_grad.addcmul_(total, factor)
                dweight = announce_main_grad(ctx.weight)
        return dhidden, dweight, None, None, None


class GradientsInMainGrad(torch.autograd.Function):
    """Gradients in forward, the weight's added to `main_grad`, under the scale that is expected.

    Where backward finds another gradient, what was added is taken out again by the same products,
    and the right gradients are computed as `Recomputed` has it. So any gradient is right.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, rows: Rows, head: Head, expected: Expected):
        wants_hidden = ctx.needs_input_grad[0]
        sums = Sums(
            HiddenGrad(head.tp, rows, hidden) if wants_hidden else None, main_grad_of(weight)
        )
        row_weight = expected.count_on_it()
        stats = forward_gradient_pass(head, hidden, weight, rows, row_weight, sums)
        ctx.dhidden = sums.hidden.finish().view(hidden.shape) if wants_hidden else None
        ctx.save_for_backward(hidden, weight, stats)
        ctx.rows, ctx.head, ctx.expected, ctx.weight = rows, head, expected, weight
        return rows.spread(losses(head, stats))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad = ctx.rows.collect(grad)
        expected, ctx.expected = ctx.expected, None  # a second backward has nothing to count on
        dhidden, ctx.dhidden = ctx.dhidden, None
        if expected is None or not expected.settle(grad, ctx.head.tp.group):
            del dhidden
            dhidden = _corrected(ctx, grad, expected)
        return dhidden, announce_main_grad(ctx.weight), None, None, None


def _corrected(ctx, grad: Tensor, expected: Expected | None) -> Tensor | None:
    """The hidden states' gradient; `main_grad` gets the weight's instead of the expected one.

    Tiles are those of forward, so that products that are taken out have the bits of those added.
    """
    hidden, weight, stats = ctx.saved_tensors
    head, rows, main_grad = ctx.head, ctx.rows, main_grad_of(ctx.weight)
    if expected is not None and expected.in_main_grad:
        factors = loss_factors(head, stats, -expected.gradient)
        gradient_pass(head, hidden, weight, rows, factors, Sums(None, main_grad))
    sums = Sums(HiddenGrad(head.tp, rows, hidden) if ctx.needs_input_grad[0] else None, main_grad)
    gradient_pass(head, hidden, weight, rows, loss_factors(head, stats, grad), sums)
    return None if sums.hidden is None else sums.hidden.finish().view(hidden.shape)


def _scale(x: Tensor, factor: Tensor) -> None:
    """x *= factor, rounded once: torch would round a factor without an axis to 16 bit first.

    Some rows at a time: on the CPU torch makes copies in the wider dtype.
    """
    for some in x.split(_ROWS_AT_ONCE):
        torch.mul(some, factor.view(1), out=some)
