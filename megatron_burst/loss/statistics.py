"""The two kernels of the loss in plain torch: statistics of a tile of logits, and its gradient.

A tile is [rows, classes] of raw logits x = hidden @ weight.T, in the model's dtype; z = cap(scale
x). Everything else is in float32 (float64 for float64). `fused` has the same in Triton.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor


class Stat(IntEnum):
    """Rows of the statistics [4, rows]; the last two are kept only where asked for."""

    LSE = 0  # log sum exp z
    TARGET = 1  # z at the label
    TOTAL = 2  # sum of z, for label smoothing
    MEAN = 3  # sum of softmax(z) z, for the entropy


class Factor(IntEnum):
    """Rows of the factors [5, rows] that make dz = p (SOFTMAX + SLOPE z) - LABEL [y] - ALL."""

    LSE = 0
    SOFTMAX = 1
    SLOPE = 2
    LABEL = 3
    ALL = 4


@dataclass(frozen=True, slots=True)
class Transform:
    """z = softcap tanh(scale x / softcap), or scale x where softcap is 0."""

    scale: float = 1.0
    softcap: float = 0.0


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of values of a dtype are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_statistics(rows: int, like: Tensor) -> Tensor:
    """Statistics [4, rows] of no class at all."""
    stats = torch.zeros(len(Stat), rows, dtype=sum_dtype(like.dtype), device=like.device)
    stats[Stat.LSE] = -torch.inf
    return stats


def merge_statistics(
    stats: Tensor, raw: Tensor, targets: Tensor, transform: Transform, extras: bool
) -> None:
    """Take a tile into the statistics of its rows.

    Args:
        stats: [4, rows], changed in place.
        raw: [rows, classes] raw logits, in the model's dtype.
        targets: [rows] int64: column of the label in this tile; another number where it has none.
        transform: from x to z.
        extras: whether TOTAL and MEAN are wanted.
    """
    z = _logits(raw, transform)
    lse = z.logsumexp(1)
    merged = torch.logaddexp(stats[Stat.LSE], lse)
    column = targets.clamp(0, z.shape[1] - 1).unsqueeze(1)
    here = (targets >= 0) & (targets < z.shape[1])
    stats[Stat.TARGET] += torch.where(here, z.gather(1, column).squeeze(1), 0)
    if extras:
        stats[Stat.TOTAL] += z.sum(1)
        mean = ((z - lse.unsqueeze(1)).exp() * z).sum(1)
        before, now = (stats[Stat.LSE] - merged).exp(), (lse - merged).exp()
        stats[Stat.MEAN] = stats[Stat.MEAN] * before + mean * now
    stats[Stat.LSE] = merged


def gradient_(raw: Tensor, targets: Tensor, factors: Tensor, transform: Transform) -> None:
    """Put the gradient of raw logits in their place.

    Args:
        raw: [rows, classes] raw logits; afterwards dx, rounded once to their dtype.
        targets: as in `merge_statistics`.
        factors: [5, rows].
        transform: from x to z.
    """
    z = _logits(raw, transform)
    lse, softmax, slope, label, every = (factor.unsqueeze(1) for factor in factors)
    dz = (z - lse).exp() * (softmax + slope * z) - every
    columns = torch.arange(z.shape[1], device=z.device)
    dz -= torch.where(columns == targets.unsqueeze(1), label, 0)
    if transform.softcap:
        dz *= 1 - (z / transform.softcap).square()
    raw.copy_(dz * transform.scale)


def _logits(raw: Tensor, transform: Transform) -> Tensor:
    z = raw.to(sum_dtype(raw.dtype)) * transform.scale
    return transform.softcap * (z / transform.softcap).tanh() if transform.softcap else z
