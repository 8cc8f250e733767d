"""Runs a schedule that exchanges heads: each rank computes whole sequences of some heads."""

import torch
from torch import Tensor

from megatron_burst.engine.call import Call
from megatron_burst.engine.exchanged import Inbound, Outbound
from megatron_burst.kernels.backends import QuerySide
from megatron_burst.kernels.partial import accumulate_dtype, row_delta
from megatron_burst.plan.mask import Mask


def a2a_forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries over the keys of all ranks.

    Args:
        call: the call.
        q: [b, n, h, dqk].
        k: [b, n, h_kv, dqk].
        v: [b, n, h_kv, dv].

    Returns:
        out [b, n, h, dv] in q's dtype and lse [b, h, n] in the accumulation dtype.
    """
    schedule = call.forward
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    lse = q.new_empty(*q.shape[:3], 1, dtype=accumulate_dtype(q.dtype))
    there = Outbound(call, schedule, (q, k, v))
    back = Inbound(call, schedule, (out, lse))
    there.post(0)
    for index in range(len(schedule.rounds)):
        queries, keys, values = there.land(index)
        there.post(index + 1)
        whole_out, whole_lse = back.results(index)
        _, statistics = call.backend.forward(
            queries, keys, values, call.scale, schedule.tiles[0][0].mask is Mask.CAUSAL,
            into=(whole_out, _new_statistics(whole_lse)),
        )  # fmt: skip
        whole_lse.copy_(statistics.transpose(1, 2).unsqueeze(-1))
        back.collect()
        back.post(index)
    back.collect()
    return out, lse.squeeze(-1).transpose(1, 2).contiguous()


def a2a_backward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's q, k and v, in their dtype.

    Args:
        call: the call.
        q: [b, n, h, dqk].
        k: [b, n, h_kv, dqk].
        v: [b, n, h_kv, dv].
        out: [b, n, h, dv].
        lse: [b, h, n].
        dout: [b, n, h, dv].
    """
    schedule = call.backward
    grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    takes_delta = call.backend.capability.takes_delta
    last = _as_rows(row_delta(dout, out)) if takes_delta else out
    there = Outbound(call, schedule, (q, k, v, dout, _as_rows(lse), last))
    back = Inbound(call, schedule, grads)
    there.post(0)
    for index in range(len(schedule.rounds)):
        queries, keys, values, douts, lses, lasts = there.land(index)
        there.post(index + 1)
        delta = _as_statistics(lasts) if takes_delta else None
        side = QuerySide(
            queries, douts, _as_statistics(lses), delta, None if takes_delta else lasts
        )
        call.backend.backward(
            side, keys, values, call.scale, schedule.tiles[0][0].mask is Mask.CAUSAL,
            into=tuple(back.results(index)), deterministic=call.deterministic,
        )  # fmt: skip
        back.collect()
        back.post(index)
    back.collect()
    return grads


def _as_rows(statistics: Tensor) -> Tensor:
    """[b, h, n] as [b, n, h, 1]."""
    return statistics.transpose(1, 2).unsqueeze(-1)


def _as_statistics(rows: Tensor) -> Tensor:
    """[b, s, h, 1] as [b, h, s], dense."""
    return rows.squeeze(-1).transpose(1, 2).contiguous()


def _new_statistics(rows: Tensor) -> Tensor:
    batch, length, heads, _ = rows.shape
    return rows.new_empty(batch, heads, length)
