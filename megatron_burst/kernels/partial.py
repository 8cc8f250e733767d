"""Merging of partial attention results, sums of gradients, delta and its surrogate.

    out = sum of exp(lse_i - lse) out_i,   lse = logsumexp of lse_i,   delta = rowsum(dO * O)

A partial is (out [b, n, h, dv], lse [b, h, n]) over the keys seen so far, in `accumulate_dtype`; a
row that has seen no key has out 0 and lse -inf. Tensors on CPUs and float64 are computed in plain
torch, which is the reference; others by Triton kernels that pass over memory once (`fused`).
"""

from collections.abc import Sequence
from functools import reduce
from types import ModuleType

import torch
from torch import Tensor


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which results and gradients of `dtype` are summed: max(float32, dtype)."""
    return torch.promote_types(dtype, torch.float32)


def empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for (out [b, n, h, dv], lse [b, h, n]) of queries [b, n, h, d]."""
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=accumulate_dtype(q.dtype))
    return q.new_empty(*q.shape[:3], v.shape[3]), lse


def merge_parts(
    out: Tensor, lse: Tensor, parts: Sequence[tuple[Tensor, Tensor]], sink: Tensor | None = None
) -> None:
    """Merge results over disjoint keys: out <- sum of w_i out_i, lse <- logsumexp of lse_i.

    w_i = exp(lse_i - logsumexp(lse)), with the largest lse subtracted first: no exponential of a
    positive number, so nothing overflows, and the weights add up to 1. Summed in the accumulation
    dtype, rounded once. Rows with lse -inf weigh nothing, but a NaN in their out stays one, because
    FlashAttention returns lse -inf where scores are NaN. Rows that no part has seen get 0 and -inf.

    Args:
        out: [b, n, h, dv], any floating dtype; written.
        lse: [b, h, n], float32 or float64; written.
        parts: of the same shapes; may include (out, lse) itself.
        sink: [h], any floating dtype: one more part with out 0 and this lse.
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
        merged += part.to(dtype) * weight.transpose(1, 2).unsqueeze(-1)
    out.copy_(merged)
    lse.copy_(stacked.logsumexp(0))


def raise_to(largest: Tensor, rows: Tensor) -> None:
    """largest [h] <- the larger of it and of all rows [b, h, n]."""
    if rows.shape[0] * rows.shape[2]:
        torch.maximum(largest, rows.amax((0, 2)), out=largest)


def sink_grad(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The gradient of attention sinks [h]: -sum over rows of exp(sink - lse) * delta.

    `lse` [b, h, n] includes the sink.
    """
    share = (sink.to(lse.dtype).view(1, -1, 1) - lse).exp()
    share = share.masked_fill(lse == -torch.inf, 0)  # of rows without keys and sink
    return -(share * delta).sum((0, 2)).to(sink.dtype)


def sum_parts(target: Tensor, parts: Sequence[Tensor]) -> None:
    """target <- sum of parts in their order, in the accumulation dtype, rounded once.

    All are [b, n, h, d], of any floating dtypes. The target may be one of the parts.
    """
    if fused := _fused(target, *parts):
        return fused.sum_parts(target, parts)
    dtype = _common_dtype(target, *parts)
    total = parts[0].to(dtype, copy=True)
    for part in parts[1:]:
        total += part
    target.copy_(total)


def copy_rows(target: Tensor, source: Tensor) -> None:
    """target <- source, both [b, n, h, d] or statistics. Copying views, torch reaches 1.5 TB/s on
    an H200, and a sum of one part 4 TB/s."""
    is_dense = source.ndim != 4 or (source.is_contiguous() and target.is_contiguous())
    if not is_dense and (fused := _fused(target, source)):
        return fused.sum_parts(target, [source])
    target.copy_(source)


def sum_rows(target: Tensor, source: Tensor, rows: Tensor) -> None:
    """target row i <- sum over k of source row rows[k, i], in the accumulation dtype, rounded once.

    `target` [1, n, h, d] and `source` [1, m, h, d] have any floating dtypes; `rows` is int64
    [k, n], -1 for none.
    """
    if fused := _fused(target, source):
        return fused.sum_rows(target, source, rows)
    dtype, total = _common_dtype(target, source), 0
    for index in rows:
        addends = source.index_select(1, index.clamp(min=0)).to(dtype)
        total = total + addends.masked_fill((index < 0).view(1, -1, 1, 1), 0)
    target.copy_(total)


def row_delta(dout: Tensor, out: Tensor) -> Tensor:
    """delta = rowsum(dO * O), [b, h, n] in the accumulation dtype; dO and O are [b, n, h, dv]."""
    if fused := _fused(dout, out):
        return fused.row_delta(dout, out)
    dtype = accumulate_dtype(out.dtype)
    return (dout.to(dtype) * out.to(dtype)).sum(-1).transpose(1, 2).contiguous()


def surrogate_out(dout: Tensor, delta: Tensor, nonzeros: int = 3) -> Tensor:
    """An output O' with rowsum(dO * O') = delta, for kernels that compute delta from the output.

    A row has at most `nonzeros` entries, at the largest |dO|. Each is what is missing of delta,
    divided by that dO and rounded to dO's dtype. In bf16 the sum is delta to about 1e-8 of |dO||O|,
    where the real output rounded to bf16 gives 1e-4. dO and O' are [b, n, h, dv] of one dtype,
    delta is [b, h, n] in the accumulation dtype.
    """
    if fused := _fused(dout, delta):
        return fused.surrogate_out(dout, delta, nonzeros)
    surrogate = torch.zeros_like(dout, memory_format=torch.contiguous_format)
    remainder = delta.transpose(1, 2).unsqueeze(-1)
    columns = dout.abs().topk(min(nonzeros, dout.shape[-1]), dim=-1).indices
    for column in columns.split(1, dim=-1):
        factor = dout.gather(-1, column).to(remainder.dtype)
        largest = torch.finfo(dout.dtype).max  # fp16: the next entry gets what does not fit
        entry = torch.where(factor == 0, 0, remainder / factor).clamp(-largest, largest)
        entry = entry.to(dout.dtype)
        surrogate.scatter_(-1, column, entry)
        remainder = remainder - entry.to(remainder.dtype) * factor
    return surrogate


def _fused(*tensors: Tensor) -> ModuleType | None:
    """The Triton kernels, if they support these tensors; imported only then."""
    if not all(x.is_cuda and x.dtype != torch.float64 for x in tensors):
        return None
    from megatron_burst.kernels import fused

    return fused


def _common_dtype(*tensors: Tensor) -> torch.dtype:
    return reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)
