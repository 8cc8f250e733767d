"""The autograd functions: logits recomputed in backward, or gradients computed in forward.

The weight's gradient is summed in float32, directly in Megatron's `main_grad` if it exists. By its
contract (core/tensor_parallel/layers.py:690, core/distributed/distributed_data_parallel.py:485)
code that adds to `weight.main_grad` sets `grad_added_to_main_grad`; then the weight's hook adds
`weight.grad` only if `zero_out_wgrad`.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_burst.comm.announce import backward_of
from megatron_burst.errors import BurstError
from megatron_burst.loss import classes, passes
from megatron_burst.loss.attempt import Attempt
from megatron_burst.loss.passes import Factors, Head, Sums
from megatron_burst.loss.rows import Rows
from megatron_burst.loss.statistics import WHO, Factor, Stat, sum_dtype
from megatron_burst.loss.tensor_parallel import HiddenGrad
from megatron_burst.transforms import refuse_transforms

_ROWS_AT_ONCE = 4096


class Recomputed(torch.autograd.Function):
    """Statistics in forward; backward recomputes the logits, except the last tile.

    Returns loss, log-sum-exp and entropy of each token; where it has several classes their
    log-probabilities, that of all others, and the entropy.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, rows: Rows, head: Head):
        with head.tp.attempt(hidden, rows) as attempt:
            stats, z, buffer = passes.statistics_pass(head, hidden, weight, rows, attempt)
            outputs = attempt(_outputs, head, rows, stats, z)
        ctx.save_for_backward(hidden, weight, stats, z)
        ctx.tile = buffer if head.keep and any(ctx.needs_input_grad[:2]) else None
        ctx.rows, ctx.head, ctx.announce = rows, head, backward_of(head.tp.group)
        # after offloading, saved_tensors does not return the parameter itself: keep its buffer
        ctx.weight = weight
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        refuse_transforms(WHO, *grads)
        ctx.announce()
        hidden, weight, *stats = ctx.saved_tensors
        head, rows = ctx.head, ctx.rows
        wants_weight = ctx.needs_input_grad[1]
        total = main_grad = main_grad_of(ctx.weight) if wants_weight else None
        tile, ctx.tile = ctx.tile, None  # overwritten: a second backward recomputes it
        with head.tp.attempt(hidden) as attempt:
            factors = attempt(_factors, head, rows, *stats, *grads)
            if wants_weight and main_grad is None:
                dtype = sum_dtype(weight.dtype)
                total = attempt(torch.zeros_like, weight, dtype=dtype)
            sums = Sums(_hidden_sum(ctx, head, rows, hidden, attempt), total)
            passes.gradient_pass(head, hidden, weight, rows, factors, sums, attempt, tile)
            del tile
            dhidden = sums.hidden and sums.hidden.finish(hidden.shape)
        if main_grad is not None:
            return dhidden, announce_main_grad(ctx.weight), None, None
        return dhidden, None if total is None else total.to(weight.dtype), None, None


class GradientsInForward(torch.autograd.Function):
    """Gradients of sum(weights * loss) in forward, weights [blocks, tokens]; backward multiplies
    them by a scalar. `target`: of a loss that has one; see `passes.forward_gradient_pass`."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, weights: Tensor | None, rows, head: Head,
                target: classes.Target | None = None):  # fmt: skip
        with head.tp.attempt(hidden, rows) as attempt:
            row_weight, total = attempt(rows.collect, weights), None
            target = target and attempt(target.of, rows)
            if ctx.needs_input_grad[1]:
                total = attempt(torch.empty_like, weight, dtype=sum_dtype(weight.dtype))
            hidden_sum = _hidden_sum(ctx, head, rows, hidden, attempt)
            sums = Sums(hidden_sum, total, fresh=total is not None)
            inputs = head, hidden, weight, rows, row_weight
            losses = passes.forward_gradient_pass(*inputs, sums, attempt, target)
            dhidden = hidden_sum and hidden_sum.finish(hidden.shape)
            loss = attempt(rows.spread, losses)
        ctx.sums = dhidden, total
        ctx.rows, ctx.row_weight, ctx.weight = rows, row_weight, weight
        ctx.announce = backward_of(head.tp.group)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        refuse_transforms(WHO, grad)
        if ctx.sums is None:
            raise BurstError(f"{WHO}: backward must run only once if gradients were computed in "
                             "forward, because it scales them in place; got a second backward; "
                             "pass grads='recompute', or class_log_probs to top_k_kl")  # fmt: skip
        ctx.announce()
        factor = common_factor(ctx.rows.collect(grad), ctx.row_weight)
        (dhidden, total), ctx.sums, dweight = ctx.sums, None, None
        if dhidden is not None:
            # rounded once: torch would first round a zero-dimensional factor to 16 bits; some rows
            # at a time: on the CPU torch makes copies in the wider dtype
            for rows in dhidden.flatten(0, -2).split(_ROWS_AT_ONCE):
                torch.mul(rows, factor.view(1), out=rows)
        if total is not None:
            main_grad = main_grad_of(ctx.weight)
            if main_grad is None:
                dtype = ctx.weight.dtype
                out = total if total.dtype == dtype else torch.empty_like(total, dtype=dtype)
                dweight = torch.mul(total, factor, out=out)
            else:
                main_grad.addcmul_(total, factor)
                dweight = announce_main_grad(ctx.weight)
        return dhidden, dweight, None, None, None, None


def _outputs(head: Head, rows: Rows, stats: Tensor, z: Tensor | None) -> tuple[Tensor, ...]:
    if z is None:
        values = passes.losses(head, stats), stats[Stat.LSE], stats[Stat.LSE] - stats[Stat.MEAN]
    else:
        values = classes.probabilities(rows.labels, stats, z, head.options, head.entropy)[:3]
    return tuple(map(rows.spread, values))


def _factors(
    head: Head, rows: Rows, stats: Tensor, z: Tensor | None, *grads: Tensor | None
) -> Factors:
    """Factors of the gradient from the gradients of what forward returns."""
    shapes = (stats[0] if z is None else z, stats[0], stats[0])
    pairs = zip(grads, shapes, strict=True)
    of_rows = [torch.zeros_like(x) if g is None else rows.collect(g) for g, x in pairs]
    if z is not None:
        return Factors(*classes.factors_of(rows.labels, stats, z, head.options, tuple(of_rows)))
    loss, lse, entropy = of_rows
    factors = passes.loss_factors(head, stats, loss)
    # d entropy / dz = -p (z - mean)
    factors[Factor.SOFTMAX] += lse + entropy * stats[Stat.MEAN]
    factors[Factor.SLOPE] -= entropy
    return Factors(factors)


def _hidden_sum(ctx, head: Head, rows: Rows, hidden: Tensor, attempt: Attempt) -> HiddenGrad | None:
    return HiddenGrad(head.tp, rows, hidden, attempt) if ctx.needs_input_grad[0] else None


def held_bytes(weight: Tensor) -> int:
    """Bytes of a gradient sum of the weight if Megatron already has one; else 0."""
    return 0 if main_grad_of(weight) is None else weight.numel() * sum_dtype(weight.dtype).itemsize


def main_grad_of(weight: Tensor) -> Tensor | None:
    """Megatron's float32 gradient buffer of this weight, if we may add to it: not Megatron-FSDP's,
    which is allocated on the fly, nor one in 16 bits, too coarse for sums."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None or hasattr(weight, "__fsdp_param__"):
        return None
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    fits = main_grad.dtype == sum_dtype(weight.dtype) and main_grad.shape == weight.shape
    return main_grad if fits and main_grad.is_contiguous() else None


def announce_main_grad(weight: Tensor) -> Tensor | None:
    """Tell Megatron that `main_grad` has this call's gradient; returns what autograd gets for it.

    Megatron's hook requires a gradient: a single zero, expanded. Only a weight with other gradients
    too (`zero_out_wgrad`, `shared_embedding`) gets real zeros, to which those can be added.
    """
    weight.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False) or getattr(weight, "shared_embedding", False):
        return torch.zeros_like(weight)
    if weight.grad is None:
        weight.grad = weight.new_zeros(1).expand_as(weight)
    return None


def common_factor(grad: Tensor, row_weight: Tensor) -> Tensor:
    """c such that grad = c * row_weight, as a scalar tensor; NaN if there is none."""
    if grad.numel() == 0:
        return grad.new_ones(())
    grad, row_weight = grad.flatten(), row_weight.flatten()
    largest = row_weight.abs().argmax()  # exact if grad is a multiple of row_weight
    weight, at_largest = (x.gather(0, largest.view(1)) for x in (row_weight, grad))
    factor = torch.where(weight != 0, at_largest / weight, 0).view(())
    off = (grad - factor * row_weight).abs() > 1e-3 * (factor * weight).abs()
    return torch.where(off.any(), torch.nan, factor)
