"""The loss by definition, in float64 with all logits, differentiable; and random inputs."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from unittest import mock

import torch
from torch import Tensor

from megatron_burst.loss.statistics import LossOptions
from megatron_burst.loss.tiles import choose_tiles

PLAIN = LossOptions()


@dataclass(frozen=True)
class Problem:
    """Inputs of one call.

    Attributes:
        hidden: [s, b, h].
        weight: [vocab, h].
        labels: [s, b].
        loss_mask: [s, b] or None.
    """

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    loss_mask: Tensor | None = None

    def leaves(self, dtype=None) -> "Problem":
        """The same numbers as leaf tensors that collect gradients."""
        dtype = dtype or self.hidden.dtype
        hidden, weight = (x.detach().to(dtype).requires_grad_() for x in (self.hidden, self.weight))
        return replace(self, hidden=hidden, weight=weight)


def random_problem(s=12, b=2, width=16, vocab=40, dtype=torch.float64, mask=True, seed=0):
    """A problem with some ignored labels and some masked tokens."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(s, b, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64) * 0.5
    labels = torch.randint(0, vocab, (s, b), generator=generator)
    labels[torch.rand(s, b, generator=generator) < 0.15] = -100
    loss_mask = (torch.rand(s, b, generator=generator) < 0.7).double() if mask else None
    return Problem(hidden.to(dtype), weight.to(dtype), labels, loss_mask)


def oracle(problem: Problem, options=PLAIN, reduction="mean"):
    """(loss, lse, entropy) as `linear_cross_entropy` defines them; only the loss is reduced."""
    z = problem.hidden.double() @ problem.weight.double().t() * options.logit_scale
    if options.softcap:
        z = options.softcap * (z / options.softcap).tanh()
    vocab = z.shape[-1]
    valid = problem.labels != options.ignore_index
    weights = torch.ones_like(z[..., 0])
    if problem.loss_mask is not None:
        valid, weights = valid & (problem.loss_mask != 0), problem.loss_mask.double()
    lse = z.logsumexp(-1)
    target = z.gather(-1, problem.labels.where(valid, 0).unsqueeze(-1)).squeeze(-1)
    smooth = (z.sum(-1) - target) / max(vocab - 1, 1)
    alpha = options.label_smoothing if vocab > 1 else 0.0
    loss = lse - (1 - alpha) * target - alpha * smooth + options.z_loss * lse**2
    p = z.softmax(-1)
    entropy = -(p * p.clamp_min(1e-300).log()).sum(-1)
    loss, lse, entropy = (torch.where(valid, x, 0) for x in (loss, lse, entropy))
    if reduction != "none":
        weights = weights * valid
        loss = (loss * weights).sum()
        if reduction == "mean":
            loss = loss / weights.sum() if weights.sum() else loss * 0
    return loss, lse, entropy


def chunks_of(rows: int | None) -> AbstractContextManager:
    """Makes losses compute so many rows of logits at a time; None: as many as they choose."""

    def chosen(sizes, whole):
        blocks = sizes.blocks
        return replace(choose_tiles(sizes, whole), rows=max(rows // blocks, 1) * blocks)

    return mock.patch("megatron_burst.loss.linear.choose_tiles", chosen) if rows else nullcontext()


def relative_error(got: Tensor, truth: Tensor) -> float:
    """Largest difference over the largest true value."""
    if truth.numel() == 0:
        return 0.0
    scale = truth.abs().max().clamp_min(1e-30)
    return float((got.double() - truth.double()).abs().max().detach() / scale.detach())
