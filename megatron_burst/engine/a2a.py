"""Runs a schedule that exchanges heads: each rank computes all rows of its host for some heads."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from megatron_burst.engine.call import Call
from megatron_burst.engine.exchanged import Inbound
from megatron_burst.engine.relayed import LocalSums, TravellingSums
from megatron_burst.engine.tiles import BackwardTiles, Outputs, sums_of
from megatron_burst.engine.visiting import Guests, KeyVisitors, QueryVisitors
from megatron_burst.engine.wholes import (
    Left,
    Recalled,
    Sides,
    Wholes,
    as_rows,
    as_statistics,
    shapes_of,
)
from megatron_burst.kernels.partial import accumulate_dtype, row_delta
from megatron_burst.plan.mask import Mask, cut
from megatron_burst.plan.schedule import Circulate


def a2a_forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, left: Left | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries over the keys of all ranks.

    Args:
        call: the call.
        q: [b, n, h, dqk].
        k: [b, n, h_kv, dqk].
        v: [b, n, h_kv, dv].
        left: filled with what `a2a_backward_recalling` takes in place of q, k, v and lse, and as
            large as these.

    Returns:
        out [b, n, h, dv] in q's dtype and lse [b, h, n] in the accumulation dtype.
    """
    schedule, relay = call.forward, call.forward.relay
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    lse = q.new_empty(*q.shape[:3], 1, dtype=accumulate_dtype(q.dtype))
    there = Wholes(call, schedule, (q, k, v), left and left.rows)
    back = Inbound(call, schedule, (out, lse))
    keys = KeyVisitors(call, relay, there.keys, shapes_of(schedule, k, v), k)
    guests = Guests(call, relay, keys, q.device)
    for index, leg in enumerate(relay.legs):
        if relay.is_first(index):
            queries, *home = there.of(leg.round)
            there.post(leg.round + 1)
            whole_out, whole_lse = back.results(leg.round)
            lse_there = lse.new_empty(q.shape[0], queries.shape[2], schedule.num_rows)
            tiles = schedule.tiles_of_round(index)
            outputs = Outputs(call, tiles, queries, whole_out, lse_there)
        guests.receive(index)
        visits = guests.await_visitor(index)
        met = keys.split(keys.views(index)[0]) if visits else home
        for tile in schedule.tiles[index]:
            outputs.compute(tile, *met)
        if relay.is_last(index):
            outputs.merge()
            whole_lse.copy_(as_rows(lse_there))
            if left:
                left.lses.append(lse_there)
            back.collect()
            back.post(leg.round)
    back.collect()
    guests.finish()
    return out, as_statistics(lse)


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
    statistics = [as_rows(x) for x in (lse, row_delta(dout, out))]
    there = Wholes(call, call.backward, (q, k, v, dout, *statistics))
    grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return _backward(_Backward(call, there, grads))


def a2a_backward_recalling(
    call: Call, left: Left, shapes: Sequence[torch.Size], out: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As `a2a_backward`, with what forward has left: only dout and delta are exchanged, and grads.

    Args:
        call: the call.
        left: filled by forward; not changed.
        shapes: of q, k and v.
        out: [b, n, h, dv].
        dout: [b, n, h, dv].
    """
    grads = tuple(dout.new_empty(shape) for shape in shapes)
    there = Wholes(call, call.backward, (dout, as_rows(row_delta(dout, out))))
    recalled = Recalled(there, left, call.backward, grads)
    return _backward(_Backward(call, recalled, grads))


def _backward(run: "_Backward") -> tuple[Tensor, Tensor, Tensor]:
    for index, leg in enumerate(run.schedule.relay.legs):
        run.begin(index)
        if run.schedule.topology.inter_size == 1:
            run.compute_alone(leg.round)
        else:
            run.compute(index)
    return run.finish()


class _Backward:
    """The backward pass of a call: exchanges, visitors and sums.

    No part refers back to it: a cycle would hold all of its tensors until the garbage collector
    comes by.

    Args:
        call: the call.
        there: q, k, v, dout, lse and delta of this rank's heads, round by round.
        grads: of q, k and v, to be filled.
    """

    def __init__(self, call: Call, there: Wholes | Recalled, grads: tuple[Tensor, ...]) -> None:
        self._call, self.schedule = call, call.backward
        self._there, self._grads = there, grads
        self._sides = Sides(call, there)
        schedule, (q, k, v) = self.schedule, grads
        shapes = [shapes_of(schedule, x, v) for x in (q, k)]
        self._back = Inbound(call, schedule, grads)
        self._keys = self._queries = None
        if schedule.circulate is Circulate.KV:
            self._keys = KeyVisitors(call, schedule.relay, there.keys, shapes[1], k)
        else:
            self._queries = QueryVisitors(call, schedule.relay, self._sides.bare, shapes[0], q)
        visitors = self._keys or self._queries
        self._guests = Guests(call, schedule.relay, visitors, q.device)
        kinds = (LocalSums, TravellingSums) if self._keys else (TravellingSums, LocalSums)
        of_queries = [[shape[:4]] for shape in shapes[0]]
        of_keys = [[shape[:4], (*shape[:3], shape[4])] for shape in shapes[1]]
        self._of_queries = self._make_sums(kinds[0], slice(1), of_queries)
        self._of_keys = self._make_sums(kinds[1], slice(1, None), of_keys)

    def _make_sums(self, kind: type, part: slice, shapes: list):
        schedule, device = self.schedule, self._grads[0].device
        return kind(self._call, schedule.relay, partial(_results, self._back, part), shapes, device)

    def begin(self, index: int) -> None:
        """Let come what a step needs; start the next exchange."""
        round_ = self.schedule.relay.legs[index].round
        if self.schedule.relay.is_first(index):
            self._there.of(round_)
            self._there.post(round_ + 1)
        self._guests.receive(index)

    def compute_alone(self, round_: int) -> None:
        """A round of one host: one tile, whose results go back at once."""
        keys, values = self._there.keys(round_)
        self._call.backend.backward(
            self._sides.make(round_), keys, values, self._call.scale,
            self.schedule.tiles[round_][0].mask is Mask.CAUSAL,
            into=tuple(self._back.results(round_)), deterministic=self._call.deterministic,
        )  # fmt: skip
        self._send_back(round_)

    def _send_back(self, round_: int) -> None:
        self._back.collect()
        self._back.post(round_)

    def compute(self, index: int) -> None:
        """A step's tiles, and the sums that they belong to."""
        round_ = self.schedule.relay.legs[index].round
        visits = self._guests.await_visitor(index)
        side = self._queries.side(index) if visits and self._queries else self._sides.of(round_)
        keys = self._there.keys(round_)
        if visits and self._keys:
            keys = self._keys.split(self._keys.views(index)[0])
        tiles = BackwardTiles(self._call, self.schedule.tiles[index], side, None)
        parts = [(tile.kv, tiles.compute(tile, *keys)) for tile in self.schedule.tiles[index]]
        of_keys = sums_of(parts, 2, cut((seen for seen, _ in parts), self.schedule.num_rows))
        sums = [(self._of_queries, tiles.sums()), (self._of_keys, of_keys)]
        if self._keys:
            sums.reverse()
        travelling, local = sums
        # what came home goes back before the next round's results take a place there
        travelling[0].add(index, travelling[1])
        travelling[0].come_home(index)
        self._send_home(index)
        local[0].add(index, local[1])

    def _send_home(self, turn: int) -> None:
        for coming in self.schedule.relay.homecomings[turn]:
            self._send_back(coming.round)

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """Wait for the last results."""
        for sums in (self._of_queries, self._of_keys):
            sums.finish()
        self._send_home(len(self.schedule.relay.legs))
        self._back.collect()
        self._guests.finish()
        return self._grads


def _results(back: Inbound, part: slice, round_: int) -> list[Tensor]:
    """Where some of a round's results are to be put."""
    return back.results(round_)[part]
