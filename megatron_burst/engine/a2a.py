"""Runs a schedule that exchanges heads: each rank computes all rows of its host for some heads."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from megatron_burst.engine.call import Call
from megatron_burst.engine.exchanged import Inbound
from megatron_burst.engine.relayed import LocalSums, Sum, TravellingSums
from megatron_burst.engine.visiting import Guests, KeyVisitors, QueryVisitors
from megatron_burst.engine.wholes import (
    Left,
    Recalled,
    Sides,
    Wholes,
    as_rows,
    as_statistics,
    dense_copy,
    shapes_of,
)
from megatron_burst.kernels.backends import QuerySide
from megatron_burst.kernels.partial import (
    accumulate_dtype,
    merge_parts,
    row_delta,
)
from megatron_burst.plan.a2a import A2ASchedule
from megatron_burst.plan.mask import Mask, Span, Tile, cut
from megatron_burst.plan.schedule import Circulate


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
    out, lse, _ = _forward(call, q, k, v, stays=False)
    return out, lse


def a2a_forward_leaving(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Left]:
    """As `a2a_forward`; also what `a2a_backward_recalling` takes in place of q, k, v and lse.

    What is left is as large as q, k, v and lse.
    """
    return _forward(call, q, k, v, stays=True)


def _forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, stays: bool
) -> tuple[Tensor, Tensor, Left]:
    schedule = call.forward
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    lse = q.new_empty(*q.shape[:3], 1, dtype=accumulate_dtype(q.dtype))
    there = Wholes(call, schedule, (q, k, v), stays)
    back = Inbound(call, schedule, (out, lse))
    keys = KeyVisitors(call, schedule.relay, there.keys, shapes_of(schedule, k, v), k)
    guests = Guests(call, schedule.relay, keys, q.device)
    parts: list[tuple[Tile, Tensor, Tensor]] = []
    lses: list[Tensor] = []
    for index, leg in enumerate(schedule.relay.legs):
        if schedule.relay.is_first(index):
            queries, *home = there.of(leg.round)
            there.post(leg.round + 1)
        guests.expect(index)
        guests.receive(index)
        visits = guests.await_visitor(index)
        k_there, v_there = keys.split(keys.views(index)[0]) if visits else home
        for tile in schedule.tiles[index]:
            rows, seen = tile.q.slice, tile.kv.slice
            part = call.backend.forward(
                queries[:, rows], k_there[:, seen], v_there[:, seen], call.scale, _causal(tile),
                into=_only_result(back, schedule, leg.round),
            )  # fmt: skip
            parts.append((tile, *part))
        if schedule.relay.is_last(index):
            results = back.results(leg.round)
            _merge(parts, *results)
            parts.clear()
            if stays:
                lses.append(dense_copy(as_statistics(results[1])))
            back.collect()
            back.post(leg.round)
    back.collect()
    guests.finish()
    return out, as_statistics(lse), Left(there.rows, tuple(lses))


def _only_result(back: Inbound, schedule: A2ASchedule, round_: int) -> tuple[Tensor, Tensor] | None:
    """Where the only tile of a round writes out and lse; None if there are several."""
    if schedule.topology.inter_size > 1:
        return None
    whole_out, whole_lse = back.results(round_)
    batch, length, heads, _ = whole_lse.shape
    return whole_out, whole_lse.new_empty(batch, heads, length)


def _merge(parts: Sequence[tuple[Tile, Tensor, Tensor]], out: Tensor, whole_lse: Tensor) -> None:
    """Merge the tiles of a round into out [b, s, h, d] and lse [b, s, h, 1]."""
    if len(parts) == 1:  # out is there
        lse = parts[0][2]
        if parts[0][1].data_ptr() != out.data_ptr():
            out.copy_(parts[0][1])
    else:
        batch, length, heads, _ = whole_lse.shape
        lse = whole_lse.new_empty(batch, heads, length)
        for span in cut((tile.q for tile, *_ in parts), length):
            held = []
            for tile, tile_out, tile_lse in parts:
                if tile.q.holds(span):
                    rows = span.moved(-tile.q.start).slice
                    held.append((tile_out[:, rows], tile_lse[:, :, rows]))
            merge_parts(out[:, span.slice], lse[:, :, span.slice], held)
    whole_lse.copy_(as_rows(lse))


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
        left: by `a2a_forward_leaving`; not changed.
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
            self._queries = QueryVisitors(call, schedule.relay, self._sides.make, shapes[0], q)
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
        self._guests.expect(index)
        self._guests.receive(index)

    def compute_alone(self, round_: int) -> None:
        """A round of one host: one tile, whose results go back at once."""
        keys, values = self._there.keys(round_)
        self._call.backend.backward(
            self._sides.make(round_), keys, values, self._call.scale,
            _causal(self.schedule.tiles[round_][0]),
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
        parts = [(tile, self._tile(tile, side, keys)) for tile in self.schedule.tiles[index]]
        rows, seen = side.q.shape[1], keys[0].shape[1]
        of_queries = _sums([(tile.q, grads[:1]) for tile, grads in parts], 1, rows)
        of_keys = _sums([(tile.kv, grads[1:]) for tile, grads in parts], 2, seen)
        sums = [(self._of_queries, of_queries), (self._of_keys, of_keys)]
        if self._keys:
            sums.reverse()
        travelling, local = sums
        # what came home goes back before the next round's results take a place there
        travelling[0].add(index, travelling[1])
        travelling[0].come_home(index)
        self._send_home(index)
        local[0].add(index, local[1])

    def _tile(self, tile: Tile, side: QuerySide, keys: Sequence[Tensor]) -> tuple[Tensor, ...]:
        k, v = (x[:, tile.kv.slice] for x in keys)
        return self._call.backend.backward(
            side.rows(tile.q.slice), k, v, self._call.scale, _causal(tile),
            deterministic=self._call.deterministic,
        )  # fmt: skip

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


def _sums(parts: Sequence[tuple[Span, Sequence[Tensor]]], count: int, length: int) -> list[Sum]:
    """What each row has of gradients over some rows each."""
    return [
        (
            span,
            [
                [grads[i][:, span.moved(-of.start).slice] for of, grads in parts if of.holds(span)]
                for i in range(count)
            ],
        )
        for span in cut((of for of, _ in parts), length)
    ]


def _causal(tile: Tile) -> bool:
    return tile.mask is Mask.CAUSAL
