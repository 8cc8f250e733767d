"""Partial attention results and how they are merged; sums of gradients; delta and its stand-in.

A partial is (out, lse) over the keys seen so far: out [b, n, h, dv] and lse [b, h, n], both in
`accumulate_dtype`. A row that has seen no key has out 0 and lse -inf.

Plain torch for CPU tensors and float64, which is the reference; for the rest Triton kernels that
pass over memory once (`fused`).
"""

from collections.abc import Sequence
from functools import reduce
from types import ModuleType

import torch
from torch import Tensor


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which results and gradients of `dtype` are summed: max(float32, dtype)."""
    return torch.promote_types(dtype, torch.float32)


def merge_parts(
    out: Tensor, lse: Tensor, parts: Sequence[tuple[Tensor, Tensor]], sink: Tensor | None = None
) -> None:
    """Merge results over disjoint keys: out <- sum of w_i out_i, lse <- logsumexp of lse_i.

    w_i = exp(lse_i - logsumexp(lse)), with the largest lse subtracted first: no exponential of a
    positive number, so nothing overflows however far apart the lse are, and the weights add up to 1
    however large they are. Summed in the accumulation dtype, rounded once. A part's rows with lse
    -inf weigh nothing; rows that no part has seen get 0 and -inf. A NaN in a part's out stays one:
    FlashAttention says lse -inf of rows whose scores have one.

    Args:
        out: [b, n, h, dv], any floating dtype; written.
        lse: [b, h, n], float32 or float64; written.
        parts: (out [b, n, h, dv], lse [b, h, n]) each; (out, lse) itself may be among them.
        sink: [h], any floating dtype: attention sinks, one more part with out 0 and this lse.
    """
    outs, lses = zip(*parts, strict=True)
    if fused := _fused(out, lse, *outs, *lses):
        return fused.merge_parts(out, lse, parts, sink)
    dtype = _common_dtype(out, lse, *outs, *lses)
    stacked = torch.stack([x.to(dtype) for x in lses])
    if sink is not None:
        sinks = sink.to(dtype).view(1, 1, -1, 1).expand(1, *lse.shape)
        stacked = torch.cat((stacked, sinks))
    merged = torch.zeros(out.shape, dtype=dtype, device=out.device)
    weights = stacked.softmax(0).masked_fill_(stacked == -torch.inf, 0)  # of only -inf it is NaN
    for part, weight in zip(outs, weights, strict=False):
        merged += part.to(dtype) * _to_rows(weight)
    out.copy_(merged)
    lse.copy_(stacked.logsumexp(0))


def sink_grad(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The gradient of attention sinks: -sum over rows of exp(sink - lse) * delta, [h].

    Args:
        sink: [h], any floating dtype.
        lse: [b, h, n], with the sink.
        delta: [b, h, n], of the output.
    """
    share = (sink.to(lse.dtype).view(1, -1, 1) - lse).exp()
    share = share.masked_fill(lse == -torch.inf, 0)  # neither keys nor a sink
    return -(share * delta).sum((0, 2)).to(sink.dtype)


def sum_parts(target: Tensor, parts: Sequence[Tensor]) -> None:
    """target <- sum of parts, in their order and the accumulation dtype, rounded once.

    Args:
        target: [b, n, h, d], any floating dtype; written; may be one of the parts.
        parts: [b, n, h, d] each, any floating dtypes; at least one.
    """
    if fused := _fused(target, *parts):
        return fused.sum_parts(target, parts)
    dtype = _common_dtype(target, *parts)
    total = parts[0].to(dtype, copy=True)
    for part in parts[1:]:
        total += part
    target.copy_(total)


def copy_rows(target: Tensor, source: Tensor) -> None:
    """target <- source, [b, n, h, d] or statistics, both alike. Of views torch's own copy reads and
    writes 1.5 TB/s on an H200, a sum of one part 4."""
    whole = source.ndim != 4 or (source.is_contiguous() and target.is_contiguous())
    if not whole and (fused := _fused(target, source)):
        return fused.sum_parts(target, [source])
    target.copy_(source)


def sum_rows(target: Tensor, source: Tensor, rows: Tensor) -> None:
    """target row <- sum of some rows of the source, in the accumulation dtype, rounded once.

    Args:
        target: [1, n, h, d], any floating dtype; written.
        source: [1, m, h, d], any floating dtype.
        rows: int64 [k, n]: the source rows that add up to each row; -1: none.
    """
    if fused := _fused(target, source):
        return fused.sum_rows(target, source, rows)
    dtype, total = _common_dtype(target, source), 0
    for some in rows:
        found = source.index_select(1, some.clamp(min=0)).to(dtype)
        total = total + found.masked_fill((some < 0).view(1, -1, 1, 1), 0)
    target.copy_(total)


def row_delta(dout: Tensor, out: Tensor) -> Tensor:
    """delta = rowsum(dO * O), [b, h, n] in the accumulation dtype.

    Args:
        dout: [b, n, h, dv] gradient of the output.
        out: [b, n, h, dv] output.
    """
    if fused := _fused(dout, out):
        return fused.row_delta(dout, out)
    dtype = accumulate_dtype(out.dtype)
    return (dout.to(dtype) * out.to(dtype)).sum(-1).transpose(1, 2).contiguous()


def surrogate_out(dout: Tensor, delta: Tensor, nonzeros: int = 3) -> Tensor:
    """An output O' with rowsum(dO * O') = delta, for kernels that compute delta from the output.

    Three non-zeros per row, placed greedily at the largest |dO|: each is the rest of delta divided
    by that dO, rounded to dO's dtype. In bf16 the sum is delta to about 1e-8 of |dO||O|, where the
    real output rounded to bf16 gives 1e-4.

    Args:
        dout: [b, n, h, dv].
        delta: [b, h, n] in the accumulation dtype.
        nonzeros: maximum entries per row.

    Returns:
        [b, n, h, dv] in dout's dtype.
    """
    if fused := _fused(dout, delta):
        return fused.delta_stand_in(dout, delta, nonzeros)
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


def _fused(*tensors: Tensor) -> ModuleType | None:
    """The Triton kernels, if they support these tensors; imported only then."""
    if not all(x.is_cuda and x.dtype != torch.float64 for x in tensors):
        return None
    from megatron_burst.kernels import fused

    return fused


def _common_dtype(*tensors: Tensor) -> torch.dtype:
    return reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)


def _to_rows(statistics: Tensor) -> Tensor:
    """[b, h, n] as [b, n, h, 1]."""
    return statistics.transpose(1, 2).unsqueeze(-1)
