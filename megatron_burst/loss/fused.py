"""The kernels of `statistics` in Triton: one pass over a tile each, sums in float32.

Megatron's own loss makes about ten passes over float32 logits (fused_cross_entropy.py); here a tile
is read once for statistics, and read and written once for gradients.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_burst.loss.statistics import LossOptions

_BLOCK = 4096  # classes that a statistics program reads at a time
_GRADIENT_BLOCK = 2048
_SIDE = 8  # adjacent classes of a lane: 16 bytes of 16-bit logits, one load of a thread


def merge_statistics(
    stats: Tensor, raw: Tensor, targets: Tensor, options: LossOptions, extras: bool
) -> None:
    """`statistics.merge_statistics` of [rows, classes] up to float32; a program does a row."""
    rows, classes = raw.shape
    if rows == 0:
        return
    block, targets = _block(classes, _BLOCK), targets.contiguous()
    with torch.cuda.device_of(raw):  # Triton launches on the current device, not on the tensors'
        _statistics_kernel[(rows,)](stats, raw, targets, classes, stats.stride(0), raw.stride(0),
                                    options.logit_scale, options.softcap or 1.0,
                                    CAPPED=options.softcap > 0, EXTRAS=extras,
                                    BLOCKS=triton.cdiv(classes, block), LANES=block // _SIDE,
                                    SIDE=_SIDE, num_warps=8)  # fmt: skip


def gradient_(raw: Tensor, targets: Tensor, factors: Tensor, options: LossOptions) -> None:
    """`statistics.gradient_` of [rows, classes] up to float32; a program does a block of a row."""
    rows, classes = raw.shape
    if rows == 0:
        return
    block = _block(classes, _GRADIENT_BLOCK)
    targets, factors = targets.contiguous(), factors.contiguous()  # views where a piece is one row
    with torch.cuda.device_of(raw):
        _gradient_kernel[(rows, triton.cdiv(classes, block))](
            raw, targets, factors, classes, raw.stride(0), factors.stride(0),
            options.logit_scale, options.softcap or 1.0,
            CAPPED=options.softcap > 0, BLOCK=block, num_warps=4,
        )  # fmt: skip


def swap_(raw: Tensor, columns: Tensor, values: Tensor) -> Tensor:
    """`statistics.swap_`; a program does a row."""
    rows, count = columns.shape
    before = raw.new_empty(rows, count)
    if rows:
        columns, values = columns.contiguous(), values.contiguous()
        with torch.cuda.device_of(raw):
            _swap_kernel[(rows,)](raw, columns, values, before, raw.shape[1], count, raw.stride(0),
                                  LANES=triton.next_power_of_2(count), num_warps=1)  # fmt: skip
    return before


def _block(classes: int, most: int) -> int:
    return min(most, max(_SIDE, triton.next_power_of_2(classes)))


@triton.jit
def _logits(x, scale, softcap, CAPPED: tl.constexpr):
    """z of raw logits x."""
    z = x.to(tl.float32) * scale
    if CAPPED:
        # tanh(u) = sign(u) (1 - e) / (1 + e), e = exp(-2 |u|): nothing overflows
        e = tl.exp(-2.0 * tl.abs(z) / softcap)
        z = tl.where(z < 0, -softcap, softcap) * (1.0 - e) / (1.0 + e)
    return z


@triton.jit
def _finite(lse):
    """A log-sum-exp, or a largest logit, to subtract; of no classes 0."""
    return tl.where(lse == -float("inf"), 0.0, lse)


@triton.jit(do_not_specialize=["scale", "softcap"])
def _statistics_kernel(stats, raw, targets, classes, stats_step, raw_step, scale, softcap,
                       CAPPED: tl.constexpr, EXTRAS: tl.constexpr, BLOCKS: tl.constexpr,
                       LANES: tl.constexpr, SIDE: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    raw += row * raw_step
    stats += row
    columns = tl.arange(0, LANES)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    # per lane, combined at the end: a sum over all lanes waits for all threads
    largest = tl.full([LANES], -float("inf"), tl.float32)
    weight = tl.zeros([LANES], tl.float32)  # sum of exp(z - largest)
    weighted = tl.zeros([LANES], tl.float32)  # sum of exp(z - largest) z
    total = tl.zeros([LANES], tl.float32)
    for block in range(BLOCKS):  # a constant: the interpreter supports no other bounds
        at = block * LANES * SIDE + columns
        inside = at < classes
        x = tl.load(raw + at, mask=inside, other=0.0)
        z = _logits(x, scale, softcap, CAPPED)
        inside = inside & (x != -float("inf"))
        masked = tl.where(inside, z, -float("inf"))
        now = tl.maximum(largest, tl.max(masked, axis=1))
        base = tl.where(now == -float("inf"), 0.0, now)  # no valid class so far
        shrink = tl.exp(largest - base)
        e = tl.exp(masked - base[:, None])
        weight = weight * shrink + tl.sum(e, axis=1)
        if EXTRAS:
            weighted = weighted * shrink + tl.sum(tl.where(inside, e * z, 0.0), axis=1)
            total += tl.sum(tl.where(inside, z, 0.0), axis=1)
        largest = now
    top = _finite(tl.max(largest, axis=0))
    shrink = tl.exp(largest - top)
    whole = tl.sum(weight * shrink, axis=0)
    lse = top + tl.log(whole)
    before = tl.load(stats)
    high = _finite(tl.maximum(before, lse))
    merged = high + tl.log(tl.exp(before - high) + tl.exp(lse - high))
    tl.store(stats, merged)
    target = tl.load(targets + row)
    here = (target >= 0) & (target < classes)
    x = tl.load(raw + target, mask=here, other=0.0)
    z = tl.where(here, _logits(x, scale, softcap, CAPPED), 0.0)
    tl.store(stats + stats_step, tl.load(stats + stats_step) + z)
    if EXTRAS:
        tl.store(stats + 2 * stats_step, tl.load(stats + 2 * stats_step) + tl.sum(total, axis=0))
        base = _finite(merged)
        mean = tl.load(stats + 3 * stats_step) * tl.exp(before - base)
        mean += tl.sum(weighted * shrink, axis=0) / tl.maximum(whole, 1e-38) * tl.exp(lse - base)
        tl.store(stats + 3 * stats_step, mean)


@triton.jit(do_not_specialize=["scale", "softcap"])
def _gradient_kernel(raw, targets, factors, classes, raw_step, factors_step, scale, softcap,
                     CAPPED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < classes
    pointers = raw + row * raw_step + columns
    x = tl.load(pointers, mask=inside, other=0.0)
    z = _logits(x, scale, softcap, CAPPED)
    factors += row
    lse = tl.load(factors)
    softmax = tl.load(factors + factors_step)
    slope = tl.load(factors + 2 * factors_step)
    label = tl.load(factors + 3 * factors_step)
    every = tl.load(factors + 4 * factors_step)
    dz = tl.exp(z - lse) * (softmax + slope * z) - every
    dz -= tl.where(columns == tl.load(targets + row), label, 0.0)
    if CAPPED:
        dz *= 1.0 - (z / softcap) * (z / softcap)
    tl.store(pointers, (dz * scale).to(x.dtype), mask=inside)


@triton.jit
def _swap_kernel(raw, columns, values, before, classes, count, raw_step, LANES: tl.constexpr):
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    place, listed = row * count + lane, lane < count
    column = tl.load(columns + place, mask=listed, other=-1)
    inside = (column >= 0) & (column < classes)
    pointers = raw + row * raw_step + column
    x = tl.load(pointers, mask=inside, other=0.0)
    tl.store(before + place, x, mask=listed)
    tl.store(pointers, tl.load(values + place, mask=inside, other=0.0).to(x.dtype), mask=inside)
