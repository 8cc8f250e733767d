"""The definition of the loss, and its two kernels in plain torch: statistics of a tile of logits,
and its gradient. `fused` has the same kernels in Triton.

A tile is [rows, classes] of raw logits x = hidden @ weight.T, in the model's dtype; z = cap(scale
x). Everything else is in float32 (float64 for float64).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from numbers import Integral, Real
from typing import Literal

import torch
from torch import Tensor

from megatron_burst.errors import Need

WHO = "linear cross-entropy"
Reduction = Literal["none", "sum", "mean"]
Grads = Literal["auto", "forward", "recompute"]


@dataclass(frozen=True, slots=True)
class LossOptions:
    """Numbers that define the loss of a token; z are its logits, y its label, V the vocabulary.

    z = cap(logit_scale * hidden @ weight.T), cap(x) = softcap * tanh(x / softcap);
    loss = lse(z) - (1 - s) z[y] - s mean(z) + z_loss * lse(z)^2, s = label_smoothing * V / (V - 1).

    Attributes:
        label_smoothing: probability spread evenly over the V - 1 other classes, as Megatron's
            vocab_parallel_cross_entropy has it; torch's cross_entropy spreads it over all V
            classes, which is the same for torch's label_smoothing = s.
        z_loss: weight of lse(z)^2, which keeps logits from drifting.
        softcap: bound of |z|; 0 switches it off.
        logit_scale: factor of logits before the cap; 1 / temperature, or MuP's output multiplier.
        ignore_index: tokens with this label are left out.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    logit_scale: float = 1.0
    ignore_index: int = -100

    def needs(self) -> Iterator[Need]:
        """What must hold of the values; checked in each call, where other ranks hear of it."""
        inf, change = float("inf"), "change it or leave it out"
        bounds = (
            ("label_smoothing", Real, lambda x: 0 <= x < 1, "be in [0, 1)", "it is a probability"),
            ("z_loss", Real, lambda x: 0 <= x < inf, "not be negative or infinite",
             "it is the weight of a penalty"),
            ("softcap", Real, lambda x: 0 <= x < inf, "be 0 or positive", "0 means no cap"),
            ("logit_scale", Real, lambda x: 0 < x < inf, "be positive and finite",
             "otherwise the order of the classes would change"),
            ("ignore_index", Integral, lambda x: True, "be an integer", "labels are integers"),
        )  # fmt: skip
        for name, kind, holds, must, why in bounds:
            x = getattr(self, name)
            is_in = isinstance(x, kind) and holds(x)
            yield is_in, f"{name} must {must}, because {why}", repr(x), change

    def smoothing(self, vocab: int) -> float:
        """s of the formula above."""
        return self.label_smoothing * vocab / (vocab - 1) if vocab > 1 else 0.0


class Stat(IntEnum):
    """Rows of the statistics [4, rows]; the last two are optional."""

    LSE = 0  # log sum exp z
    TARGET = 1  # z at the label
    TOTAL = 2  # sum of z, for label smoothing
    MEAN = 3  # sum of softmax(z) z, for the entropy


class Factor(IntEnum):
    """Rows of the factors [5, rows] that make dz = p (SOFTMAX + SLOPE z) - LABEL [y] - ALL."""

    LSE, SOFTMAX, SLOPE, LABEL, ALL = range(5)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of a dtype are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_statistics(rows: int, like: Tensor) -> Tensor:
    """Initial statistics [4, rows], over no classes."""
    stats = torch.zeros(len(Stat), rows, dtype=sum_dtype(like.dtype), device=like.device)
    stats[Stat.LSE] = -torch.inf
    return stats


def merge_statistics(
    stats: Tensor, raw: Tensor, targets: Tensor, options: LossOptions, extras: bool
) -> None:
    """Merge a tile into the statistics of its rows. A raw logit of -inf is that of no class.

    Args:
        stats: [4, rows], changed in place.
        raw: [rows, classes] raw logits, in the model's dtype.
        targets: [rows] int64: column of the label in this tile, or any number outside.
        options: scale and cap.
        extras: whether to compute TOTAL and MEAN.
    """
    z = logits(raw, options)
    lse = z.logsumexp(1)
    merged = torch.logaddexp(stats[Stat.LSE], lse)
    column = targets.clamp(0, z.shape[1] - 1).unsqueeze(1)
    is_inside = (targets >= 0) & (targets < z.shape[1])
    stats[Stat.TARGET] += torch.where(is_inside, z.gather(1, column).squeeze(1), 0)
    if extras:
        finite, base = z.masked_fill(z == -torch.inf, 0), _finite(merged)
        stats[Stat.TOTAL] += finite.sum(1)
        mean = ((z - _finite(lse).unsqueeze(1)).exp() * finite).sum(1)
        before, now = (stats[Stat.LSE] - base).exp(), (lse - base).exp()
        stats[Stat.MEAN] = stats[Stat.MEAN] * before + mean * now
    stats[Stat.LSE] = merged


def combined(parts: Tensor) -> Tensor:
    """Statistics of the whole vocabulary, from those of its parts [parts, 4, ...]."""
    lses, whole = parts[:, Stat.LSE], parts.sum(0)
    whole[Stat.LSE] = lses.logsumexp(0)
    shares = (lses - _finite(whole[Stat.LSE])).exp()
    whole[Stat.MEAN] = (shares * parts[:, Stat.MEAN]).sum(0)
    return whole


def gradient_(raw: Tensor, targets: Tensor, factors: Tensor, options: LossOptions) -> None:
    """Replace raw logits by their gradient in place, rounded once to the dtype; factors [5, rows],
    other arguments as of `merge_statistics`."""
    z = logits(raw, options)
    lse, softmax, slope, label, constant = (factor.unsqueeze(1) for factor in factors)
    dz = (z - lse).exp() * (softmax + slope * z) - constant
    columns = torch.arange(z.shape[1], device=z.device)
    dz -= torch.where(columns == targets.unsqueeze(1), label, 0)
    raw.copy_(raw_gradient(dz, z, options))


def swap_(raw: Tensor, columns: Tensor, values: Tensor) -> Tensor:
    """Write values [rows, k] to columns [rows, k] of a tile, where these are in it; returns what
    was there, 0 elsewhere. Columns of a row differ."""
    row, place = ((columns >= 0) & (columns < raw.shape[1])).nonzero(as_tuple=True)
    there, before = (row, columns[row, place]), raw.new_zeros(columns.shape)
    before[row, place] = raw[there]
    raw[there] = values[row, place].to(raw.dtype)
    return before


def logits(raw: Tensor, options: LossOptions) -> Tensor:
    """z of raw logits, in the dtype of sums."""
    z = raw.to(sum_dtype(raw.dtype)) * options.logit_scale
    if not options.softcap:
        return z
    capped = options.softcap * (z / options.softcap).tanh()
    return torch.where(z == -torch.inf, z, capped)


def raw_gradient(dz: Tensor, z: Tensor, options: LossOptions) -> Tensor:
    """The gradient of raw logits from that of z."""
    if options.softcap:
        dz = dz * (1 - (z / options.softcap).square())
    return dz * options.logit_scale


def _finite(lse: Tensor) -> Tensor:
    """A log-sum-exp to subtract; of no classes 0."""
    return lse.masked_fill(lse == -torch.inf, 0)
