"""Where the weight's gradient goes: float32 sums, straight into Megatron's `main_grad` if there is
one; and what the gradient of a head's losses will be, so that it need not wait for backward.

Megatron scales a loss after it was computed: by one number for all tokens, or by one over the
number of tokens, the same in every micro-batch. The last backward pass tells which. Under that
scale forward adds the weight's gradient straight to `main_grad`; backward compares, and where the
gradient is another one takes out what was added and computes it anew.

`main_grad` may hold more than was asked for between a forward pass and its backward pass. So it is
added to in forward only between `open` (it was set to zero) and `close` (it is about to be used),
and `close` fails if a backward pass is missing.

Megatron's contract (core/tensor_parallel/layers.py:690, core/distributed/
distributed_data_parallel.py:485): whoever adds to `weight.main_grad` says so in
`grad_added_to_main_grad`; then the hook of the weight adds `weight.grad` only if `zero_out_wgrad`.
"""

import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.errors import BurstError
from megatron_burst.loss.statistics import sum_dtype

_SAME = 1e-6  # relative: a few roundings of float32 in the scale, far below those of the gradients
_HITS_A_MISS = 16  # a miss costs five GEMMs, a hit saves one
_FREE_MISSES = 2

_log = logging.getLogger(__name__)


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool = False) -> None:
    """total += a @ b, where total is in float32 or wider and the GEMM adds up in it.

    `first`: whatever total had is neither read nor kept.
    """
    beta = 0 if first else 1
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=beta)
    elif total.is_cuda:  # one cuBLAS call: 16-bit inputs, float32 sums read and written
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, beta=beta, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)


def held_bytes(weight: Tensor) -> int:
    """What sums of its gradient take where Megatron has some already; 0 where they are alone."""
    return 0 if main_grad_of(weight) is None else weight.numel() * sum_dtype(weight.dtype).itemsize


def main_grad_of(weight: Tensor) -> Tensor | None:
    """Megatron's float32 buffer of this weight's gradient, if it may be added to directly.

    Not where Megatron-FSDP makes it as it goes, nor in 16 bit, in which nothing is added up.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None or hasattr(weight, "__fsdp_param__"):
        return None
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    fits = main_grad.dtype == sum_dtype(weight.dtype) and main_grad.shape == weight.shape
    return main_grad if fits and main_grad.is_contiguous() else None


def announce_main_grad(weight: Tensor) -> Tensor | None:
    """Tell Megatron that `main_grad` has this call's gradient; what autograd shall get for it.

    Megatron's hook wants to find a gradient. It gets one of a single zero, expanded; only a weight
    that others give gradients to as well (`zero_out_wgrad`, `shared_embedding`) gets real zeros,
    which theirs can be added to.
    """
    weight.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False) or getattr(weight, "shared_embedding", False):
        return torch.zeros_like(weight)
    if weight.grad is None:
        weight.grad = weight.new_zeros(1).expand_as(weight)
    return None


@dataclass(slots=True)
class Forecast:
    """What the gradient of one head's losses will be."""

    per_token: bool  # whether losses are summed; else they are divided by the sum of their mask
    # number on the device by which they are multiplied besides, as the last backward pass had it
    factor: Tensor | None = None
    step: int = 0  # how often `main_grad` was set to zero
    is_open: bool = False  # whether `main_grad` may be added to in forward
    pending: int = 0  # calls of this step that did so and had no backward pass yet
    hits: int = 0  # backward passes that found what was expected
    misses: int = 0  # those that did not

    def open(self) -> None:
        """`main_grad` was set to zero: what was added before is gone."""
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
        """Whether it was wrong too often to be worth anything."""
        return self.misses > _FREE_MISSES + self.hits // _HITS_A_MISS

    def ready(self, weight: Tensor) -> bool:
        """Whether a call with this weight can count on it."""
        wanted = torch.is_grad_enabled() and weight.requires_grad
        known = self.is_open and self.factor is not None and not self.given_up
        return wanted and known and main_grad_of(weight) is not None


@dataclass(slots=True)
class Expected:
    """What one call expects."""

    forecast: Forecast
    share: Tensor  # [blocks, n], what the losses' gradients are multiples of
    gradient: Tensor | None = None  # [blocks, n], what was counted on in forward, if anything
    step: int = 0  # when that was

    def count_on_it(self) -> Tensor:
        """The gradient of the losses, [blocks, n]; from now on `main_grad` depends on it."""
        self.step, self.forecast.pending = self.forecast.step, self.forecast.pending + 1
        self.gradient = self.share * self.forecast.factor
        return self.gradient

    @property
    def in_main_grad(self) -> bool:
        """Whether `main_grad` still has what was added: it was not set to zero since."""
        return self.step == self.forecast.step

    def resolve(self, grad: Tensor, group: dist.ProcessGroup | None) -> bool:
        """In backward: was it right about the losses' grad [blocks, n]? On all ranks of the group
        alike. The CPU waits for the GPU, to know whether to compute more.
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
        """Note the factor for calls to come; one that says nothing leaves it as it was.

        It is never NaN or infinite, because what is added under it could not be taken out again.
        """
        if grad.numel() == 0:
            return
        factor = common_factor(grad, self.share)
        before = torch.zeros_like(factor) if self.forecast.factor is None else self.forecast.factor
        self.forecast.factor = torch.where(factor.isfinite() & (factor != 0), factor, before)


def common_factor(grad: Tensor, row_weight: Tensor) -> Tensor:
    """The number c of grad = c * row_weight, as a scalar tensor; NaN if there is none."""
    if grad.numel() == 0:
        return grad.new_ones(())
    grad, row_weight = grad.flatten(), row_weight.flatten()
    largest = row_weight.abs().argmax()  # exact where grad is a product with row_weight
    weight = row_weight[largest]
    factor = torch.where(weight != 0, grad[largest] / weight, 0)
    off = (grad - factor * row_weight).abs() > 1e-3 * (factor * weight).abs()
    return torch.where(off.any(), torch.nan, factor)
