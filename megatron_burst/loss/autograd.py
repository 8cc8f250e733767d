"""The autograd functions: logits recomputed in backward, or gradients computed in forward."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_burst.errors import BurstError
from megatron_burst.loss import passes
from megatron_burst.loss.main_grad import announce_main_grad, common_factor, main_grad_of
from megatron_burst.loss.passes import Head, Sums
from megatron_burst.loss.rows import HiddenGrad, Rows
from megatron_burst.loss.statistics import WHO, Factor, Stat, sum_dtype
from megatron_burst.transforms import refuse_transforms

_ROWS_AT_ONCE = 4096


class Recomputed(torch.autograd.Function):
    """Statistics in forward; backward recomputes the logits, except the last tile."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, rows: Rows, head: Head):
        stats, buffer = passes.statistics_pass(head, hidden, weight, rows)
        ctx.save_for_backward(hidden, weight, stats)
        ctx.kept = buffer if head.keep and any(ctx.needs_input_grad[:2]) else None
        ctx.rows, ctx.head = rows, head
        # after offloading, saved_tensors does not return the parameter itself: keep its buffer
        ctx.weight = weight
        entropy = stats[Stat.LSE] - stats[Stat.MEAN]
        outputs = passes.losses(head, stats), stats[Stat.LSE], entropy
        ctx.set_materialize_grads(False)
        return tuple(map(rows.spread, outputs))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        refuse_transforms(WHO, *grads)
        hidden, weight, stats = ctx.saved_tensors
        head, rows = ctx.head, ctx.rows
        zeros = stats.new_zeros(rows.labels.shape)
        loss, lse, entropy = (zeros if g is None else rows.collect(g) for g in grads)
        factors = passes.loss_factors(head, stats, loss)
        # d entropy / dz = -p (z - mean)
        factors[Factor.SOFTMAX] += lse + entropy * stats[Stat.MEAN]
        factors[Factor.SLOPE] -= entropy
        wants_weight = ctx.needs_input_grad[1]
        total = main_grad = main_grad_of(ctx.weight) if wants_weight else None
        if wants_weight and main_grad is None:
            total = torch.zeros_like(weight, dtype=sum_dtype(weight.dtype))
        sums = Sums(_hidden_sum(ctx, head, rows, hidden), total)
        kept, ctx.kept = ctx.kept, None  # overwritten: a second backward recomputes it
        passes.gradient_pass(head, hidden, weight, rows, factors, sums, kept)
        del kept
        dhidden = sums.finish(hidden.shape)
        if main_grad is not None:
            return dhidden, announce_main_grad(ctx.weight), None, None
        return dhidden, None if total is None else total.to(weight.dtype), None, None


class GradientsInForward(torch.autograd.Function):
    """Gradients of sum(row_weight * loss) in forward; backward multiplies them by a scalar."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, row_weight: Tensor, rows: Rows, head: Head):
        total = None
        if ctx.needs_input_grad[1]:
            total = torch.empty_like(weight, dtype=sum_dtype(weight.dtype))
        sums = Sums(_hidden_sum(ctx, head, rows, hidden), total, fresh=total is not None)
        stats = passes.forward_gradient_pass(head, hidden, weight, rows, row_weight, sums)
        ctx.sums = sums.finish(hidden.shape), total
        ctx.rows, ctx.row_weight, ctx.weight = rows, row_weight, weight
        return rows.spread(passes.losses(head, stats))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        refuse_transforms(WHO, grad)
        if ctx.sums is None:
            raise BurstError(
                f"{WHO}: backward must run only once if gradients were computed in forward, "
                "because it scales them in place; got a second backward; pass grads='recompute'"
            )
        factor = common_factor(ctx.rows.collect(grad), ctx.row_weight)
        (dhidden, total), ctx.sums, dweight = ctx.sums, None, None
        if dhidden is not None:
            _scale(dhidden.flatten(0, -2), factor)
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


def _hidden_sum(ctx, head: Head, rows: Rows, hidden: Tensor) -> HiddenGrad | None:
    return HiddenGrad(head.tp, rows, hidden) if ctx.needs_input_grad[0] else None


def _scale(x: Tensor, factor: Tensor) -> None:
    """x *= factor, rounded once: torch would first round a zero-dimensional factor to 16 bits.

    Some rows at a time: on the CPU torch makes copies in the wider dtype.
    """
    for some in x.split(_ROWS_AT_ONCE):
        torch.mul(some, factor.view(1), out=some)
