"""Plain torch attention in blocks of query rows: any device, any dtype; the oracle in float64."""

from dataclasses import replace

import torch
from torch import Tensor

from megatron_burst.kernels.backends import Capability, QuerySide, deliver
from megatron_burst.kernels.partial import accumulate_dtype, row_delta

_ROWS = 1024  # query rows at a time: bounds the scores to rows x keys


class Reference:
    """Attention by its definition, computed in max(float32, input dtype)."""

    capability = Capability(
        name="reference",
        devices=frozenset(),
        dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
        max_dim=0,
        dim_multiple=1,
        takes_delta=True,
        rectangular_causal=True,
        wide_grads=True,
        speed="runs anywhere, slowly: plain torch in blocks",
    )

    def missing(self) -> str | None:
        return None

    def forward(self, q, k, v, scale, causal, into=None):
        dtype = accumulate_dtype(q.dtype)
        k, v = k.to(dtype), v.to(dtype)
        ahead = k.shape[1] - q.shape[1]  # keys before the first query's own
        out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=dtype, device=q.device)
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=dtype, device=q.device)
        for rows in _blocks(q.shape[1]):
            scores = _scores(q[:, rows].to(dtype), k, scale, causal, ahead + rows.start)
            block_lse = torch.logsumexp(scores, dim=-1, keepdim=True)
            weights = torch.exp(scores - block_lse.masked_fill(block_lse == -torch.inf, 0.0))
            out[:, rows] = _ungroup(torch.einsum("bkgqs,bskd->bqkgd", weights, v))
            lse[:, :, rows] = block_lse.squeeze(-1).flatten(1, 2)
        return deliver((out, lse), into)

    def backward(self, side: QuerySide, k, v, scale, causal, into=None, deterministic=False):
        dtype, heads_kv = accumulate_dtype(side.q.dtype), k.shape[2]
        if side.delta is None:
            side = replace(side, delta=row_delta(side.dout, side.out))
        k, v = k.to(dtype), v.to(dtype)
        ahead = k.shape[1] - side.q.shape[1]
        dq = torch.empty(side.q.shape, dtype=dtype, device=k.device)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for rows in _blocks(side.q.shape[1]):
            block = side.rows(rows)
            q, dout = block.q.to(dtype), _group(block.dout.to(dtype), heads_kv)
            scores = _scores(q, k, scale, causal, ahead + rows.start)
            weights = torch.exp(scores - _group_stat(block.lse, heads_kv))
            dv += torch.einsum("bkgqs,bqkgd->bskd", weights, dout)
            dweights = torch.einsum("bqkgd,bskd->bkgqs", dout, v)
            dscores = weights * (dweights - _group_stat(block.delta, heads_kv)) * scale
            dq[:, rows] = _ungroup(torch.einsum("bkgqs,bskd->bqkgd", dscores, k))
            dk += torch.einsum("bkgqs,bqkgd->bskd", dscores, _group(q, heads_kv))
        return deliver((dq, dk, dv), into)


def _blocks(num_rows: int) -> list[slice]:
    return [slice(start, min(start + _ROWS, num_rows)) for start in range(0, num_rows, _ROWS)]


def _group(x: Tensor, heads_kv: int) -> Tensor:
    """[b, n, h, d] -> [b, n, h_kv, g, d]: the query heads of each KV head."""
    return x.unflatten(2, (heads_kv, -1))


def _ungroup(x: Tensor) -> Tensor:
    return x.flatten(2, 3)


def _group_stat(stat: Tensor, heads_kv: int) -> Tensor:
    """[b, h, n] -> [b, h_kv, g, n, 1]."""
    return stat.unflatten(1, (heads_kv, -1)).unsqueeze(-1)


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool, first_row: int) -> Tensor:
    """Scaled, masked scores [b, h_kv, g, n_q, n_kv] of a block of rows from `first_row`."""
    scores = torch.einsum("bqkgd,bskd->bkgqs", _group(q, k.shape[2]), k) * scale
    if not causal:
        return scores
    row = torch.arange(first_row, first_row + q.shape[1], device=q.device).unsqueeze(1)
    return scores.masked_fill(torch.arange(k.shape[1], device=q.device) > row, -torch.inf)
