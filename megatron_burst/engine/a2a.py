"""Runs a schedule that exchanges heads: each rank computes all rows of its host for some heads."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from megatron_burst.comm.aside import Aside
from megatron_burst.engine.call import Call
from megatron_burst.engine.exchanged import Inbound, Outbound
from megatron_burst.engine.relayed import LocalSums, Sum, TravellingSums
from megatron_burst.engine.visiting import Guests, KeyVisitors, QueryVisitors, Shape
from megatron_burst.kernels.backends import QuerySide
from megatron_burst.kernels.partial import (
    accumulate_dtype,
    delta_stand_in,
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
    schedule = call.forward
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    lse = q.new_empty(*q.shape[:3], 1, dtype=accumulate_dtype(q.dtype))
    there = _Wholes(call, schedule, (q, k, v))
    back = Inbound(call, schedule, (out, lse))
    keys = _keys(call, schedule, there, k, v)
    guests = Guests(call, schedule.relay, keys, q.device)
    parts: list[tuple[Tile, Tensor, Tensor]] = []
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
            _merge(parts, *back.results(leg.round))
            parts.clear()
            back.collect()
            back.post(leg.round)
    back.collect()
    guests.finish()
    return out, lse.squeeze(-1).transpose(1, 2).contiguous()


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
    whole_lse.copy_(_as_rows(lse))


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
    run = _Backward(call, q, k, v, out, lse, dout)
    for index, leg in enumerate(call.backward.relay.legs):
        run.begin(index)
        if call.backward.topology.inter_size == 1:
            run.compute_alone(leg.round)
        else:
            run.compute(index)
    return run.finish()


class _Backward:
    """The backward pass of a call: exchanges, visitors and sums."""

    def __init__(self, call, q, k, v, out, lse, dout) -> None:
        self._call, self._schedule = call, call.backward
        schedule = self._schedule
        self._grads = tuple(
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)
        )
        by_delta = call.backend.capability.takes_delta or schedule.circulate is Circulate.Q
        self._by_delta = by_delta
        last = _as_rows(row_delta(dout, out)) if by_delta else out
        self._there = _Wholes(call, schedule, (q, k, v, dout, _as_rows(lse), last))
        self._back = Inbound(call, schedule, self._grads)
        self._keys = self._queries = None
        if schedule.circulate is Circulate.KV:
            self._keys = _keys(call, schedule, self._there, k, v)
        else:
            self._queries = QueryVisitors(
                call, schedule.relay, self._side, self._there.shapes(q, v), q
            )
        visitors = self._keys or self._queries
        self._guests = Guests(call, schedule.relay, visitors, q.device)
        kinds = (LocalSums, TravellingSums) if self._keys else (TravellingSums, LocalSums)
        shapes = [self._there.shapes(q, v), self._there.shapes(k, v)]
        of_queries = [[shape[:4]] for shape in shapes[0]]
        of_keys = [[shape[:4], (*shape[:3], shape[4])] for shape in shapes[1]]
        make = partial(self._make_sums, device=q.device)
        self._of_queries = make(kinds[0], lambda i: self._back.results(i)[:1], of_queries)
        self._of_keys = make(kinds[1], lambda i: self._back.results(i)[1:], of_keys)

    def _make_sums(self, kind: type, targets, shapes: list, device: torch.device):
        return kind(self._call, self._schedule.relay, targets, shapes, device)

    def _side(self, round_: int) -> QuerySide:
        """The query side of this rank's heads of its host's rows."""
        queries, _, _, douts, lses, lasts = self._there.of(round_)
        delta = _as_statistics(lasts) if self._by_delta else None
        out = None if self._by_delta else lasts
        if self._by_delta and not self._call.backend.capability.takes_delta:
            out = delta_stand_in(douts, delta)
        return QuerySide(queries, douts, _as_statistics(lses), delta, out)

    def begin(self, index: int) -> None:
        """Let come what a step needs; start the next exchange."""
        round_ = self._schedule.relay.legs[index].round
        if self._schedule.relay.is_first(index):
            self._there.of(round_)
            self._there.post(round_ + 1)
        self._guests.expect(index)
        self._guests.receive(index)

    def compute_alone(self, round_: int) -> None:
        """A round of one host: one tile, whose results go back at once."""
        _, keys, values, *_ = self._there.of(round_)
        self._call.backend.backward(
            self._side(round_), keys, values, self._call.scale,
            _causal(self._schedule.tiles[round_][0]),
            into=tuple(self._back.results(round_)), deterministic=self._call.deterministic,
        )  # fmt: skip
        self._send_back(round_)

    def _send_back(self, round_: int) -> None:
        self._back.collect()
        self._back.post(round_)

    def compute(self, index: int) -> None:
        """A step's tiles, and the sums that they belong to."""
        round_ = self._schedule.relay.legs[index].round
        visits = self._guests.await_visitor(index)
        side = self._queries.side(index) if visits and self._queries else self._side(round_)
        keys = self._there.of(round_)[1:3]
        if visits and self._keys:
            keys = self._keys.split(self._keys.views(index)[0])
        parts = [(tile, self._tile(tile, side, keys)) for tile in self._schedule.tiles[index]]
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
        for coming in self._schedule.relay.homecomings[turn]:
            self._send_back(coming.round)

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """Wait for the last results."""
        for sums in (self._of_queries, self._of_keys):
            sums.finish()
        self._send_home(len(self._schedule.relay.legs))
        self._back.collect()
        self._guests.finish()
        return self._grads


class _Wholes:
    """What has been exchanged, round by round: waited for once.

    On several hosts that is beside the kernels: what goes on to the next host is needed earlier.
    """

    def __init__(self, call: Call, schedule: A2ASchedule, tensors: tuple[Tensor, ...]) -> None:
        self._carrier, self._schedule = call.carrier, schedule
        self._num_keys, self._device = tensors[1].shape[2], tensors[0].device
        self._exchanges = Outbound(call, schedule, tensors)
        self._landed: dict[int, tuple[list[Tensor], Aside]] = {}
        self.post(0)

    def post(self, round_: int) -> None:
        """Start the exchange of a round, if there is such a round."""
        self._exchanges.post(round_)

    def of(self, round_: int) -> list[Tensor]:
        """The tensors of this rank's heads over all rows of the host, [b, s, heads, d]."""
        if round_ not in self._landed:
            several = self._schedule.topology.inter_size > 1
            aside = self._carrier.beside(self._device) if several else Aside(None)
            with aside as landed:
                self._landed[round_] = self._exchanges.land(round_), landed
            self._landed.pop(round_ - 2, None)
        tensors, landed = self._landed[round_]
        landed.wait()
        return tensors

    def shapes(self, x: Tensor, v: Tensor) -> list[Shape]:
        """What a rank has of a tensor [b, n, heads, d] in each round, and the width of values."""
        group, ranks = x.shape[2] // self._num_keys, len(self._schedule.ranks)
        return [
            (x.shape[0], self._schedule.num_rows, len(heads) // ranks * group, x.shape[3],
             v.shape[3])
            for heads in self._schedule.rounds
        ]  # fmt: skip


def _keys(call: Call, schedule: A2ASchedule, there: _Wholes, k: Tensor, v: Tensor) -> KeyVisitors:
    """The keys and values that come from other hosts."""

    def own(round_: int) -> list[Tensor]:
        return there.of(round_)[1:3]

    return KeyVisitors(call, schedule.relay, own, there.shapes(k, v), k)


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


def _as_rows(statistics: Tensor) -> Tensor:
    """[b, h, n] as [b, n, h, 1]."""
    return statistics.transpose(1, 2).unsqueeze(-1)


def _as_statistics(rows: Tensor) -> Tensor:
    """[b, s, h, 1] as [b, h, s], dense."""
    return rows.squeeze(-1).transpose(1, 2).contiguous()
