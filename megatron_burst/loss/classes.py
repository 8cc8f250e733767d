"""Several classes of each token, and all others as one: their probabilities and gradients.

Statistics are those of the other classes, so that a remainder near 0 is exact: while a tile is
merged, the named classes' logits are -inf.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_burst.loss.rows import Rows
from megatron_burst.loss.statistics import Factor, LossOptions, Stat, logits, raw_gradient


def merge_others(kernels: Any, stats: Tensor, raw: Tensor, columns: Tensor, options: LossOptions,
                 extras: bool) -> Tensor:  # fmt: skip
    """Merge a tile [rows, classes] without the columns [rows, k] of named classes; returns their
    logits z, 0 for those outside of the tile. Other arguments as of `merge_statistics`."""
    nothing = raw.new_full((), -torch.inf).expand(columns.shape)
    before = kernels.swap_(raw, columns, nothing)
    kernels.merge_statistics(stats, raw, columns.new_full(columns.shape[:1], -1), options, extras)
    kernels.swap_(raw, columns, before)  # backward may use this tile
    is_inside = (columns >= 0) & (columns < raw.shape[1])
    return torch.where(is_inside, logits(before, options), 0)


def gradient_of_all_(
    kernels: Any, raw: Tensor, columns: Tensor, factors: Tensor, gradients: Tensor,
    options: LossOptions,
) -> None:  # fmt: skip
    """Replace a tile's raw logits by their gradient: by factors [5, rows], and in the columns
    [rows, k] of named classes by the gradients given for these."""
    kernels.gradient_(raw, columns.new_full(columns.shape[:1], -1), factors, options)
    kernels.swap_(raw, columns, gradients)


def probabilities(
    ids: Tensor, stats: Tensor, z: Tensor, options: LossOptions, entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities [..., k] of classes (0 for ignored ones), those [...] of all others,
    entropies [...], 0 unless they are wanted, and log-sum-exps [...].

    Args:
        ids: [..., k].
        stats: [4, ...], of the other classes.
        z: [..., k] logits of the classes.
        options: what defines which ids are ignored.
        entropy: whether statistics have what it needs.
    """
    is_named, others = ids != options.ignore_index, stats[Stat.LSE]
    lse = torch.logaddexp(others, z.masked_fill(~is_named, -torch.inf).logsumexp(-1))
    log_probs = (z - lse.unsqueeze(-1)).masked_fill(~is_named, 0)
    rest, entropies = others - lse, torch.zeros_like(lse)
    if entropy:
        # without products of a logit, whose rounding would count as often as it is large
        within = (others - stats[Stat.MEAN] - rest).masked_fill(others == -torch.inf, 0)
        entropies = rest.exp() * within - (log_probs.exp() * log_probs).sum(-1)
    return log_probs, rest, entropies, lse


def factors_of(
    ids: Tensor, stats: Tensor, z: Tensor, options: LossOptions, grads: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Factors [5, ...] of the other classes' gradient, and the gradients of named classes' raw
    logits [..., k], from those of log-probabilities, of the rest and of the entropy.

    With p = softmax(z), r the probability of all others and g the sum of gradients of
    log-probabilities: dz = -p (g + dentropy (z - mean)), plus dlog_prob of the class itself, or
    d_rest p / r of others, for which p / r = exp(z - lse of others).
    """
    dlog_probs, drest, dentropy = grads
    log_probs, rest, entropies, lse = probabilities(ids, stats, z, options, True)
    mean = lse - entropies
    is_named, none = ids != options.ignore_index, stats[Stat.LSE] == -torch.inf
    dlog_probs, drest = dlog_probs * is_named, drest.masked_fill(none, 0)
    total, share = dlog_probs.sum(-1) + drest, rest.exp()
    factors = lse.new_zeros(len(Factor), *lse.shape)
    factors[Factor.LSE] = torch.where(none, lse, stats[Stat.LSE])
    factors[Factor.SOFTMAX] = drest - share * (total - dentropy * mean)
    factors[Factor.SLOPE] = -share * dentropy
    shift = total.unsqueeze(-1) + dentropy.unsqueeze(-1) * (z - mean.unsqueeze(-1))
    dz = (dlog_probs - log_probs.exp() * shift) * is_named
    return factors, raw_gradient(dz, z, options)


def with_rest(log_probs: Tensor, rest: Tensor) -> Tensor:
    """Values [..., k + 1] of classes [..., k] and of all others [...]."""
    return torch.cat((log_probs, rest.unsqueeze(-1)), -1)


def divergence(p: Tensor, q: Tensor, counts: Tensor) -> Tensor:
    """sum p (log p - log q) over the last axis, where it counts and p is not 0, from logarithms."""
    counts = counts & (p != -torch.inf)
    # masked before, not after: the gradient of -inf is NaN
    p, q = (x.masked_fill(~counts, 0) for x in (p, q))
    return (p.exp() * (p - q)).masked_fill(~counts, 0).sum(-1)


class Target(NamedTuple):
    """A teacher's log-probabilities of each token's classes and of all others."""

    log_probs: Tensor  # [..., k]; of rows [blocks, n, k]
    rest: Tensor  # [...]; of rows [blocks, n]
    reverse: bool  # whether the divergence is that of the student from the teacher

    def of(self, rows: Rows) -> "Target":
        """Of the rows that are computed."""
        shape = len(rows.valid), rows.tokens
        values = self.log_probs.reshape(*shape, self.log_probs.shape[-1]), self.rest.reshape(shape)
        return Target(*(rows.collect(x.detach()) for x in values), self.reverse)

    def compare(
        self, ids: Tensor, stats: Tensor, z: Tensor, weights: Tensor, piece: slice,
        options: LossOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Divergences [...] of some rows, and what `factors_of` makes of their gradients, times
        weights [...]; other arguments as there."""
        log_probs, rest, *_ = probabilities(ids, stats, z, options, False)
        q = with_rest(log_probs, rest)
        p = with_rest(self.log_probs[:, piece], self.rest[:, piece]).to(q.dtype)
        counts = torch.nn.functional.pad(ids != options.ignore_index, (0, 1), value=True)
        if self.reverse:
            losses, counts = divergence(q, p, counts), counts & (q != -torch.inf)
            dq = q.exp() * (q - p + 1)
        else:
            losses, dq = divergence(p, q, counts), -p.exp()
        dq = dq.masked_fill(~counts, 0) * weights.unsqueeze(-1)
        grads = dq[..., :-1], dq[..., -1], torch.zeros_like(rest)
        return losses, *factors_of(ids, stats, z, options, grads)
