"""An LM head on any device: its loss in float64, with all logits, and tile by tile."""

from dataclasses import asdict

import torch
import torch.nn.functional as F

from megatron_burst.loss.linear import linear_cross_entropy
from tests.loss.oracle import PLAIN, Problem, chunks_of, oracle


def problem_of(device, dtype, sizes, masked=False) -> Problem:
    """A head of (tokens, width, classes) whose logits have a standard deviation of 2; some labels
    are ignored."""
    tokens, width, vocab = sizes
    generator = torch.Generator(device).manual_seed(5)
    options = {"generator": generator, "device": device}
    hidden = torch.randn(tokens // 2, 2, width, **options).to(dtype)
    weight = torch.randn(vocab, width, **options).mul_(2 * width**-0.5).to(dtype)
    labels = torch.randint(0, vocab, (tokens // 2, 2), **options)
    labels[::7] = -100
    mask = (torch.rand(tokens // 2, 2, **options) < 0.5).float() if masked else None
    return Problem(hidden, weight, labels, mask)


def off(got, true) -> float:
    """Relative error in norm."""
    return float((got.double() - true).norm() / true.norm())


def call(problem, options=PLAIN, chunk=None, **settings):
    """`linear_cross_entropy` of a problem, a chunk of rows at a time."""
    with chunks_of(chunk):
        return linear_cross_entropy(
            problem.hidden, problem.weight, problem.labels, loss_mask=problem.loss_mask,
            **asdict(options), **settings,
        )  # fmt: skip


def exact(problem) -> dict:
    """Per-token losses, and gradients of their mean, in float64."""
    leaves = problem.leaves(torch.float64)
    losses = oracle(leaves, reduction="none")[0]
    weights = (problem.labels >= 0).double()
    if problem.loss_mask is not None:
        weights *= problem.loss_mask
    mean = (losses * weights).sum() / weights.sum()
    mean.backward()
    return {
        "losses": losses.detach(), "mean": mean.detach(),
        "hidden": leaves.hidden.grad, "weight": leaves.weight.grad,
    }  # fmt: skip


def plain(problem) -> dict:
    """The same with all logits: GEMMs in the model's dtype, the loss in float32."""
    leaves = problem.leaves()
    logits = F.linear(leaves.hidden, leaves.weight).flatten(0, 1).float()
    losses = F.cross_entropy(logits, problem.labels.flatten(), reduction="none")
    mean = losses.sum() / (problem.labels >= 0).sum()
    mean.backward()
    return {
        "losses": losses.detach().view(problem.labels.shape), "mean": mean.detach(),
        "hidden": leaves.hidden.grad, "weight": leaves.weight.grad,
    }  # fmt: skip


def fused(problem, **settings) -> dict:
    """The same with our fused loss."""
    leaves = problem.leaves()
    mean = call(leaves, **settings)
    mean.backward()
    with torch.no_grad():
        losses = call(leaves, **settings, reduction="none")
    return {
        "losses": losses, "mean": mean.detach(),
        "hidden": leaves.hidden.grad, "weight": leaves.weight.grad,
    }  # fmt: skip
