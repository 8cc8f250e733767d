"""Accumulates the weight's gradient in float32, directly in Megatron's `main_grad` if it exists,
and forecasts the gradient of a head's losses so that forward can already do so.

Megatron scales a loss after computing it: by one factor for all tokens, or by one over the number
of tokens, the same in every micro-batch. The last backward pass shows which. With that scale,
forward adds the weight's gradient to `main_grad`; backward compares, and if the gradient differs,
subtracts what was added and recomputes it.

Between a forward pass and its backward pass, `main_grad` thus holds gradients that backward has not
confirmed. So forward adds to it only between `open` (it was zeroed) and `close` (it is about to be
used), and `close` fails if a backward pass is missing.

Megatron's contract (core/tensor_parallel/layers.py:690, core/distributed/
distributed_data_parallel.py:485): code that adds to `weight.main_grad` sets
`grad_added_to_main_grad`; then the weight's hook adds `weight.grad` only if `zero_out_wgrad`.
"""

import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.errors import BurstError
from megatron_burst.loss.statistics import sum_dtype

_SAME = 1e-6  # relative: a few float32 roundings of the scale, far below those of the gradients
_HITS_A_MISS = 16  # a miss costs five GEMMs, a hit saves one
_FREE_MISSES = 2

_log = logging.getLogger(__name__)


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool = False) -> None:
    """total += a @ b, where total is in float32 or wider and the GEMM accumulates in it.

    `first`: total's previous content is ignored and overwritten.
    """
    beta = 0 if first else 1
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=beta)
    elif total.is_cuda:  # one cuBLAS call: 16-bit inputs, float32 sums read and written
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, beta=beta, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)


def held_bytes(weight: Tensor) -> int:
    """Bytes of a gradient sum of the weight if Megatron already has one; else 0."""
    return 0 if main_grad_of(weight) is None else weight.numel() * sum_dtype(weight.dtype).itemsize


def main_grad_of(weight: Tensor) -> Tensor | None:
    """Megatron's float32 gradient buffer of this weight, if we may add to it directly.

    Not with Megatron-FSDP, which allocates it on the fly, nor in 16 bits, too coarse for sums.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None or hasattr(weight, "__fsdp_param__"):
        return None
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    fits = main_grad.dtype == sum_dtype(weight.dtype) and main_grad.shape == weight.shape
    return main_grad if fits and main_grad.is_contiguous() else None


def announce_main_grad(weight: Tensor) -> Tensor | None:
    """Tell Megatron that `main_grad` has this call's gradient; returns what autograd gets for it.

    Megatron's hook requires a gradient. It gets a single zero, expanded; only a weight with other
    gradients too (`zero_out_wgrad`, `shared_embedding`) gets real zeros, to which those can be
    added.
    """
    weight.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False) or getattr(weight, "shared_embedding", False):
        return torch.zeros_like(weight)
    if weight.grad is None:
        weight.grad = weight.new_zeros(1).expand_as(weight)
    return None


@dataclass(slots=True)
class Forecast:
    """The expected gradient of one head's losses."""

    per_token: bool  # whether losses are summed, not divided by the sum of their mask
    # further factor of the losses in the last backward pass, on the device
    factor: Tensor | None = None
    step: int = 0  # how often `main_grad` was zeroed
    is_open: bool = False  # whether `main_grad` may be added to in forward
    pending: int = 0  # calls of this step that did so, still without backward
    hits: int = 0  # backward passes that found what was expected
    misses: int = 0  # those that did not

    def open(self) -> None:
        """`main_grad` was zeroed: earlier additions are gone."""
        self.step += 1
        self.is_open, self.pending = True, 0

    def close(self) -> None:
        """`main_grad` is complete, and about to be used."""
        self.is_open = False
        if self.pending:
            raise BurstError(
                "--burst-fused-loss: each loss of a training step must have one backward pass, "
                "because its gradient was added to main_grad along with the loss; got "
                f"{self.pending} without one; compute such losses under torch.no_grad(), or "
                "call fuse_loss with FusedLossConfig(grads='recompute') instead of the flag"
            )

    @property
    def given_up(self) -> bool:
        """Whether it was wrong too often to be worthwhile."""
        return self.misses > _FREE_MISSES + self.hits // _HITS_A_MISS

    def ready(self, weight: Tensor) -> bool:
        """Whether a call with this weight can use it."""
        wanted = torch.is_grad_enabled() and weight.requires_grad
        known = self.is_open and self.factor is not None and not self.given_up
        return wanted and known and main_grad_of(weight) is not None


@dataclass(slots=True)
class Expected:
    """What one call expects."""

    forecast: Forecast
    share: Tensor  # [blocks, n], the losses' gradients are multiples of it
    gradient: Tensor | None = None  # [blocks, n], what forward assumed, if anything
    step: int = 0  # the step of that forward

    def count_on_it(self) -> Tensor:
        """The losses' expected gradient, [blocks, n]; from now on `main_grad` depends on it."""
        self.step, self.forecast.pending = self.forecast.step, self.forecast.pending + 1
        self.gradient = self.share * self.forecast.factor
        return self.gradient

    @property
    def in_main_grad(self) -> bool:
        """Whether `main_grad` still has what was added: it was not zeroed since."""
        return self.step == self.forecast.step

    def resolve(self, grad: Tensor, group: dist.ProcessGroup | None) -> bool:
        """In backward: whether the losses' grad [blocks, n] is as expected, on all ranks of the
        group. Synchronizes, because the CPU must know whether to recompute.
        """
        forecast, tolerance = self.forecast, _SAME * self.gradient.abs()
        off = (~((grad - self.gradient).abs() <= tolerance)).any().int()  # NaN is off
        if group is not None:
            dist.all_reduce(off, dist.ReduceOp.MAX, group)
        if self.in_main_grad:
            forecast.pending -= 1
        hit = not off.item()
        forecast.hits, forecast.misses = forecast.hits + hit, forecast.misses + (not hit)
        if not hit:
            self.learn(grad)
            if forecast.given_up:
                _log.warning(
                    "--burst-fused-loss: the scale of the losses changes unpredictably; from "
                    "now on logits are recomputed in backward"
                )
        return hit and self.in_main_grad

    def learn(self, grad: Tensor) -> None:
        """Remember the factor for later calls; an undefined one changes nothing.

        It is never NaN or infinite, because such additions could not be subtracted again.
        """
        if grad.numel() == 0:
            return
        factor = common_factor(grad, self.share)
        before = torch.zeros_like(factor) if self.forecast.factor is None else self.forecast.factor
        self.forecast.factor = torch.where(factor.isfinite() & (factor != 0), factor, before)


def common_factor(grad: Tensor, row_weight: Tensor) -> Tensor:
    """c such that grad = c * row_weight, as a scalar tensor; NaN if there is none."""
    if grad.numel() == 0:
        return grad.new_ones(())
    grad, row_weight = grad.flatten(), row_weight.flatten()
    largest = row_weight.abs().argmax()  # exact if grad is a multiple of row_weight
    weight = row_weight[largest]
    factor = torch.where(weight != 0, grad[largest] / weight, 0)
    off = (grad - factor * row_weight).abs() > 1e-3 * (factor * weight).abs()
    return torch.where(off.any(), torch.nan, factor)
