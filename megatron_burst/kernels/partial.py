"""Partial attention results and how they are merged; delta and its stand-in.

A partial is (out, lse) over the keys seen so far: out [b, n, h, dv] and lse [b, h, n], both in
`accumulate_dtype`. A row that has seen no key has out 0 and lse -inf.
"""

import torch
from torch import Tensor


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which results and gradients of `dtype` are summed: max(float32, dtype)."""
    return torch.promote_types(dtype, torch.float32)


def merge_partial(out: Tensor, lse: Tensor, tile_out: Tensor, tile_lse: Tensor) -> None:
    """Merge a tile's result into a partial, in place.

    out <- out + w (tile_out - out) with w = exp(tile_lse - logaddexp(lse, tile_lse)): no
    exponential of a positive number, so nothing overflows however far apart the two lse are.

    Args:
        out: [b, n, h, dv] of the partial.
        lse: [b, h, n] of the partial.
        tile_out: [b, n, h, dv], any floating dtype.
        tile_lse: [b, h, n].
    """
    merged = torch.logaddexp(lse, tile_lse)
    # -inf - -inf is NaN: a row that neither side has seen keeps weight exp(-inf - 0) = 0
    weight = torch.exp(tile_lse - merged.masked_fill(merged == -torch.inf, 0.0))
    out.lerp_(tile_out.to(out.dtype), weight.transpose(1, 2).unsqueeze(-1).to(out.dtype))
    lse.copy_(merged)


def row_delta(dout: Tensor, out: Tensor) -> Tensor:
    """delta = rowsum(dO * O), [b, h, n] in the accumulation dtype.

    Args:
        dout: [b, n, h, dv] gradient of the output.
        out: [b, n, h, dv] output.
    """
    dtype = accumulate_dtype(out.dtype)
    return (dout.to(dtype) * out.to(dtype)).sum(-1).transpose(1, 2).contiguous()


def delta_stand_in(dout: Tensor, delta: Tensor, nonzeros: int = 3) -> Tensor:
    """An output O' with rowsum(dO * O') = delta, for kernels that compute delta from the output.

    Three non-zeros a row, chosen greedily at the largest |dO|: each takes what is left of delta
    divided by that dO, rounded to dO's dtype. In bf16 the sum is delta to about 1e-8 of |dO||O|,
    where the real output rounded to bf16 gives 1e-4.

    Args:
        dout: [b, n, h, dv].
        delta: [b, h, n] in the accumulation dtype.
        nonzeros: how many entries a row may have.

    Returns:
        [b, n, h, dv] in dout's dtype.
    """
    stand_in = torch.zeros_like(dout, memory_format=torch.contiguous_format)
    left = delta.transpose(1, 2).unsqueeze(-1)
    columns = dout.abs().topk(min(nonzeros, dout.shape[-1]), dim=-1).indices
    for column in columns.split(1, dim=-1):
        factor = dout.gather(-1, column).to(left.dtype)
        largest = torch.finfo(dout.dtype).max  # fp16: what does not fit is left to the next entry
        share = torch.where(factor == 0, 0, left / factor).clamp(-largest, largest).to(dout.dtype)
        stand_in.scatter_(-1, column, share)
        left = left - share.to(left.dtype) * factor
    return stand_in


def merge_parts(out, lse, parts):
    """Temporary."""
    part_lse = torch.stack([l.expand_as(lse) for _, l in parts])
    merged = part_lse.logsumexp(0)
    w = torch.exp(part_lse - merged.masked_fill(merged == -torch.inf, 0.0))
    total = sum(o.to(lse.dtype) * x.transpose(1, 2).unsqueeze(-1) for (o, _), x in zip(parts, w))
    out.copy_(total)
    lse.copy_(merged)


def sum_parts(target, parts):
    """Temporary."""
    dtype = accumulate_dtype(target.dtype)
    target.copy_(sum(p.to(dtype) for p in parts))
