"""Attention in plain torch, any device and dtype; the oracle (not on the reading path)."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_burst.kernels.interface import Backend, Capability, QuerySide, copy_results
from megatron_burst.kernels.partial import accumulate_dtype, empty_results, raise_to, row_delta
from megatron_burst.kernels.visible import Visible, segments_of
from megatron_burst.schedule.mask import DOCUMENTS, SLICES, WINDOWS

_ROWS = 1024  # query rows at a time: bounds the scores to rows x keys


class Reference(Backend):
    """Attention by its definition, computed in max(float32, input dtype)."""

    capability = Capability(
        name="reference",
        devices=frozenset(),
        dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
        max_dim=0,
        dim_multiple=1,
        takes_delta=True,
        rectangular_causal=True,
        masks=frozenset({WINDOWS, DOCUMENTS, SLICES}),
        wide_grads=True,
        softcap=True,
        speed="runs anywhere, slowly: plain torch in blocks",
    )

    def finds_largest(self, device: torch.device) -> bool:
        return True

    def forward(self, q, k, v, scale, visible, into=None, softcap=0.0, largest=None):
        dtype = accumulate_dtype(q.dtype)
        q, k, v = (x.to(dtype) for x in (q, k, v))
        out, lse = empty_results(q, v)
        for block in _blocks(visible, q.shape[1], k.shape[1]):
            scores = _scores(q[:, block.rows], k[:, block.keys], scale, block, softcap)
            if largest is not None and scores.shape[-1]:
                raise_to(largest, scores.amax(-1).flatten(1, 2))
            block_lse = torch.logsumexp(scores, dim=-1, keepdim=True)
            weights = torch.exp(scores - block_lse.masked_fill(block_lse == -torch.inf, 0.0))
            values = torch.einsum("bkgqs,bskd->bqkgd", weights, v[:, block.keys])
            out[:, block.rows] = values.flatten(2, 3)
            lse[:, :, block.rows] = block_lse.squeeze(-1).flatten(1, 2)
        return copy_results((out, lse), into)

    def backward(
        self, side: QuerySide, k, v, scale, visible, into=None, deterministic=False, softcap=0.0
    ):
        dtype, heads_kv = accumulate_dtype(side.q.dtype), k.shape[2]
        if side.delta is None:
            side = side._replace(delta=row_delta(side.dout, side.out))
        k, v = k.to(dtype), v.to(dtype)
        dq = torch.empty(side.q.shape, dtype=dtype, device=k.device)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for block in _blocks(visible, side.q.shape[1], k.shape[1]):
            rows, keys, values = side.rows(block.rows), k[:, block.keys], v[:, block.keys]
            q, dout = rows.q.to(dtype), _group(rows.dout.to(dtype), heads_kv)
            lse = rows.lse.masked_fill(rows.lse == -torch.inf, torch.inf)  # -inf - -inf is NaN
            scores = _scores(q, keys, scale, block, softcap)
            weights = torch.exp(scores - _group_stat(lse, heads_kv))
            dv[:, block.keys] += torch.einsum("bkgqs,bqkgd->bskd", weights, dout)
            dweights = torch.einsum("bqkgd,bskd->bkgqs", dout, values)
            dscores = weights * (dweights - _group_stat(rows.delta, heads_kv)) * scale
            if softcap:  # where a score is -inf, its weight is 0
                dscores *= 1 - (scores.clamp(min=-softcap) / softcap).square()
            dq[:, block.rows] = torch.einsum("bkgqs,bskd->bqkgd", dscores, keys).flatten(2, 3)
            dk[:, block.keys] += torch.einsum("bkgqs,bqkgd->bskd", dscores, _group(q, heads_kv))
        return copy_results((dq, dk, dv), into)


class _Block(NamedTuple):
    """Some query rows and all keys that any of them sees; the first row is level with key `level`
    of these keys, which may lie outside. With parts: all keys."""

    rows: slice
    keys: slice
    level: int
    visible: Visible


def _blocks(visible: Visible, num_rows: int, num_keys: int) -> Iterator[_Block]:
    for rows, keys in segments_of(visible, num_rows, num_keys):
        ahead = (keys.stop - keys.start) - (rows.stop - rows.start)
        for start in range(rows.start, rows.stop, _ROWS):
            stop = min(start + _ROWS, rows.stop)
            first, last = (keys.start + ahead + row - rows.start for row in (start, stop - 1))
            begin, end = keys.start, keys.stop
            if visible.left is not None:
                begin = max(begin, min(end, first - visible.left))
            if visible.right is not None:
                end = max(begin, min(end, last + visible.right + 1))
            yield _Block(slice(start, stop), slice(begin, end), first - begin, visible)


def _group(x: Tensor, heads_kv: int) -> Tensor:
    """[b, n, h, d] -> [b, n, h_kv, g, d]: the query heads of each KV head."""
    return x.unflatten(2, (heads_kv, -1))


def _group_stat(stat: Tensor, heads_kv: int) -> Tensor:
    """[b, h, n] -> [b, h_kv, g, n, 1]."""
    return stat.unflatten(1, (heads_kv, -1)).unsqueeze(-1)


def with_scores(
    backend: Backend, largest: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float,
    visible: Visible, into: tuple[Tensor, Tensor] | None = None, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`Backend.forward` of a kernel that returns no largest scores, and another kernel that
    computes the scores again: our Triton kernel, if it has the dtype and the head dimensions."""
    from megatron_burst.kernels.triton import Triton

    supports, dim = Triton.capability, q.shape[-1]
    fits = q.dtype in supports.dtypes and supports.min_dim <= dim <= supports.max_dim
    fits = fits and Triton().missing() is None
    rows_of = Triton().largest_of_rows if q.is_cuda and fits else _largest_of_rows
    rows = rows_of(q, k, scale, visible)
    if softcap := options.get("softcap"):  # which keeps the order of scores
        rows = torch.where(rows == -torch.inf, rows, softcap * (rows / softcap).tanh())
    raise_to(largest, rows)
    return backend.forward(q, k, v, scale, visible, into=into, **options)


def _largest_of_rows(q: Tensor, k: Tensor, scale: float, visible: Visible) -> Tensor:
    """The largest score of each row [b, h, n], -inf without a key, in the accumulation dtype."""
    dtype = accumulate_dtype(q.dtype)
    q, k = q.to(dtype), k.to(dtype)
    rows = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf)
    for block in _blocks(visible, q.shape[1], k.shape[1]):
        scores = _scores(q[:, block.rows], k[:, block.keys], scale, block)
        if scores.shape[-1]:
            rows[:, :, block.rows] = scores.amax(-1).flatten(1, 2)
    return rows


def _scores(q: Tensor, k: Tensor, scale: float, block: _Block, softcap: float = 0.0) -> Tensor:
    """Scaled, capped and masked scores [b, h_kv, g, n_q, n_kv] of a block's rows and keys."""
    scores = torch.einsum("bqkgd,bskd->bkgqs", _group(q, k.shape[2]), k) * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if (parts := block.visible.parts) is not None:
        return scores.masked_fill(~parts.seen(block.rows, k.shape[1], q.device), -torch.inf)
    if block.visible.full:
        return scores
    return scores.masked_fill(hidden(block.visible, q, k, block.level), -torch.inf)


def hidden(visible: Visible, q: Tensor, k: Tensor, level: int) -> Tensor:
    """[n_q, n_kv]: keys outside the band of each query; the first is level with key `level`."""
    row = torch.arange(q.shape[1], device=q.device).unsqueeze(1)
    ahead = torch.arange(k.shape[1], device=q.device) - (row + level)
    outside = torch.zeros_like(ahead, dtype=torch.bool)
    if visible.right is not None:
        outside |= ahead > visible.right
    if visible.left is not None:
        outside |= ahead < -visible.left
    return outside
