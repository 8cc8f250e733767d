"""What the gradient of a head's losses will be, so that the weight's gradient need not wait for it.

Megatron scales a loss after it was computed: by one number for all tokens, or by one over the
number of tokens, the same in every micro-batch. The last backward pass tells which. Under that
scale forward adds the weight's gradient straight to `main_grad`; backward compares, and where the
gradient is another one takes out what was added and computes it anew.

`main_grad` may hold more than was asked for between a forward pass and its backward pass. So it is
added to in forward only between `open` (it was set to zero) and `close` (it is about to be used),
and `close` fails if a backward pass is missing.
"""

import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.errors import BurstError
from megatron_burst.loss.weight_grad import main_grad_of

_SAME = 1e-6  # relative: a few roundings of float32 in the scale, far below those of the gradients
_HITS_A_MISS = 16  # a miss costs five GEMMs, a hit saves one
_FREE_MISSES = 2

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Forecast:
    """Of one head.

    Attributes:
        per_token: whether losses are summed; else they are divided by the sum of their mask.
        factor: number on the device by which they are multiplied besides, as the last backward
            pass had it; None before the first one.
        step: how often `main_grad` was set to zero.
        is_open: whether `main_grad` may be added to in forward.
        pending: calls of this step that did so and had no backward pass yet.
        hits: backward passes that found what was expected.
        misses: those that did not.
    """

    per_token: bool
    factor: Tensor | None = None
    step: int = 0
    is_open: bool = False
    pending: int = 0
    hits: int = 0
    misses: int = 0

    def open(self) -> None:
        """`main_grad` was set to zero: what was added before is gone."""
        self.step += 1
        self.is_open, self.pending = True, 0

    def close(self) -> None:
        """`main_grad` is complete, and about to be used.

        Raises:
            BurstError: if it holds the gradient of a loss that had no backward pass.
        """
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
    """What one call expects.

    Attributes:
        forecast: of its head.
        share: [blocks, n], what the losses' gradients are multiples of.
        gradient: [blocks, n], what was counted on in forward; None where nothing was.
        step: when that was.
    """

    forecast: Forecast
    share: Tensor
    gradient: Tensor | None = None
    step: int = 0

    def count_on_it(self) -> Tensor:
        """The gradient of the losses, [blocks, n]; from now on `main_grad` depends on it."""
        self.step, self.forecast.pending = self.forecast.step, self.forecast.pending + 1
        self.gradient = self.share * self.forecast.factor
        return self.gradient

    @property
    def in_main_grad(self) -> bool:
        """Whether `main_grad` still has what was added: it was not set to zero since."""
        return self.step == self.forecast.step

    def settle(self, grad: Tensor, group: dist.ProcessGroup | None) -> bool:
        """In backward: was it right? The CPU waits for the GPU, to know whether to compute more.

        Args:
            grad: [blocks, n], of the losses.
            group: of the ranks that must give the same answer.
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
                    "--burst-fused-loss: the scale of the losses changes in a way that cannot be "
                    "foreseen; from now on logits are computed again in backward"
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
