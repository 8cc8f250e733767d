"""Runs a ring schedule: posts hops, computes tiles, merges results. Forward and backward."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_burst.comm.hop import Flight, PackedBuffers, Segment, pack_home
from megatron_burst.engine.call import Call
from megatron_burst.kernels.backends import QuerySide
from megatron_burst.kernels.partial import (
    accumulate_dtype,
    delta_stand_in,
    merge_partial,
    row_delta,
)
from megatron_burst.plan.mask import Mask, Tile
from megatron_burst.plan.schedule import HOME, Cargo, Circulate, Step


def ring_forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries over the keys of all ranks.

    Args:
        call: the call.
        q: [b, n, h, dqk].
        k: [b, n, h_kv, dqk].
        v: [b, n, h_kv, dv].

    Returns:
        out [b, n, h, dv] and lse [b, h, n], both in the accumulation dtype.
    """
    schedule, dtype = call.forward, accumulate_dtype(q.dtype)
    buffers = pack_home(call.carrier, schedule, (k, v))
    flight = Flight(schedule, call.carrier, {Cargo.READ: buffers})
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=dtype, device=q.device)
    lse = out.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf)
    for index, step in enumerate(schedule.steps):
        flight.post(index)
        visitor = (k, v) if step.slot == HOME else buffers.views(step.slot)
        for tile in step.tiles:
            rows, keys = tile.q.slice, tile.kv.slice
            tile_out, tile_lse = call.backend.forward(
                q[:, rows], *(x[:, keys] for x in visitor), call.scale, _causal(tile)
            )
            merge_partial(out[:, rows], lse[:, :, rows], tile_out, tile_lse)
        flight.land(index)
    return out, lse


def ring_backward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's q, k and v, in the accumulation dtype.

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
    q_circulates = schedule.circulate is Circulate.Q
    mine = QuerySide(q, dout, lse, row_delta(dout, out) if q_circulates else None, out)
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v))
    if q_circulates:
        reads, stays, travels = (mine.lse, mine.delta, q, dout), (dk, dv), (dq,)
    else:
        reads, stays, travels = (k, v), (dq,), (dk, dv)
    read = pack_home(call.carrier, schedule, reads)
    grad = _TravellingGrads(call, travels)
    flight = Flight(schedule, call.carrier, {Cargo.READ: read, Cargo.GRAD: grad.buffers})
    for index, step in enumerate(schedule.steps):
        flight.post(index)
        side, keys = _operands(call, step, mine, (k, v), read)
        shares = [_tile_backward(call, tile, side, keys, stays) for tile in step.tiles]
        flight.land(index)
        grad.add(step, shares)
    return dq, dk, dv


def _causal(tile: Tile) -> bool:
    return tile.mask is Mask.CAUSAL


def _operands(
    call: Call, step: Step, mine: QuerySide, keys: tuple[Tensor, ...], read: PackedBuffers
) -> tuple[QuerySide, tuple[Tensor, ...]]:
    """Query side and (k, v) of a step: one of them is the visitor's."""
    if step.slot == HOME:
        return mine, keys
    if call.backward.circulate is Circulate.KV:
        return mine, read.views(step.slot)
    lse, delta, q, dout = read.views(step.slot)
    out = None if call.backend.capability.takes_delta else delta_stand_in(dout, delta)
    return QuerySide(q, dout, lse, delta, out), keys


def _tile_backward(
    call: Call, tile: Tile, side: QuerySide, keys: tuple[Tensor, ...], stays: Sequence[Tensor]
) -> tuple[Tile, Sequence[Tensor]]:
    """Compute a tile's gradients; add those that stay, return those that travel."""
    k, v = (x[:, tile.kv.slice] for x in keys)
    dq, *dkv = call.backend.backward(
        side.rows(tile.q.slice), k, v, call.scale, _causal(tile), deterministic=call.deterministic
    )
    circulate_kv = call.backward.circulate is Circulate.KV
    staying, span = ([dq], tile.q) if circulate_kv else (dkv, tile.kv)
    for total, share in zip(stays, staying, strict=True):
        total[:, span.slice].add_(share)
    return tile, dkv if circulate_kv else [dq]


class _TravellingGrads:
    """Gradients of the shards that travel: this rank's own in `home`, visitors' in buffers."""

    def __init__(self, call: Call, home: tuple[Tensor, ...]) -> None:
        schedule = call.backward
        segments = [Segment(tuple(x.shape), call.grad_dtype) for x in home]
        num_bytes = sum(segment.num_bytes for segment in segments)
        device = home[0].device
        flat = call.carrier.buffers(Cargo.GRAD, schedule.grad_slots, num_bytes, device)
        self.buffers = PackedBuffers(segments, flat)
        self._home = home
        self._by_keys = schedule.circulate is Circulate.KV

    def _views(self, slot: int) -> tuple[Tensor, ...]:
        return self._home if slot == HOME else self.buffers.views(slot)

    def add(self, step: Step, shares: Sequence[tuple[Tile, Sequence[Tensor]]]) -> None:
        """Add a step's shares to what has arrived, then join what the step joins."""
        if step.grad_slot is not None:
            totals = self._views(step.grad_slot)
            if step.fresh:
                for total in totals:
                    total.zero_()
            for tile, grads in shares:
                rows = (tile.kv if self._by_keys else tile.q).slice
                for total, share in zip(totals, grads, strict=True):
                    total[:, rows].add_(share)
        for join in step.joins:
            for total, other in zip(self._views(join.into), self._views(join.source), strict=True):
                total.add_(other)
