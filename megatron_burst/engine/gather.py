"""Runs a gather schedule: keys arrive a few heads ahead of the tiles that need them."""

from dataclasses import replace

from torch import Tensor

from megatron_burst.engine.call import Call
from megatron_burst.engine.gathered import Keys, Pieces
from megatron_burst.engine.gathered_grads import KeyGrads, KeySums
from megatron_burst.engine.relayed import LocalSums, TravellingSums
from megatron_burst.engine.tiles import BackwardTiles, Outputs
from megatron_burst.engine.visiting import Guests, QueryVisitors
from megatron_burst.kernels.backends import QuerySide
from megatron_burst.kernels.partial import accumulate_dtype, row_delta
from megatron_burst.plan.gather import GatherSchedule, GatherStep
from megatron_burst.plan.schedule import Circulate


def gather_forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, left: Pieces | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries over the keys of all ranks.

    Args:
        call: the call.
        q: [b, n, h, dqk].
        k: [b, n, h_kv, dqk].
        v: [b, n, h_kv, dv].
        left: filled with the keys of other hosts that come, for a backward that recalls.

    Returns:
        out [b, n, h, dv] in q's dtype and lse [b, h, n] in the accumulation dtype.
    """
    schedule = call.forward
    out = _empty_rows_like(q, v.shape[-1])
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=accumulate_dtype(q.dtype))
    keys = Keys(call, schedule, k, v, left)
    keys.receive(0)
    for index, step in enumerate(schedule.steps):
        heads = _query_heads(step, q, k)
        if schedule.relay.is_first(index):
            tiles = schedule.tiles_of_round(index)
            outputs = Outputs(call, tiles, q[:, :, heads], out[:, :, heads], lse[:, heads])
        own = tuple(x[:, :, step.heads.slice] for x in (k, v))
        for tile in step.before:
            outputs.compute(tile, *own)
        gathered = keys.land(index)
        keys.expect(index + 1)
        for tile in step.tiles:
            outputs.compute(tile, *gathered)
        keys.receive(index + 1)
        if schedule.relay.is_last(index):
            outputs.merge()
    keys.finish()
    return out, lse


def gather_backward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor,
    left: Pieces | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of this rank's q, k and v, in their dtype.

    Args:
        call: the call.
        q: [b, n, h, dqk].
        k: [b, n, h_kv, dqk].
        v: [b, n, h_kv, dv].
        out: [b, n, h, dv].
        lse: [b, h, n].
        dout: [b, n, h, dv].
        left: filled by forward, for `call.recalling`; None: keys go between hosts again.
    """
    schedule = call.recalling if left else call.backward
    dq, dk, dv = (_empty_rows_like(x, x.shape[-1]) for x in (q, k, v))
    keys, shares = Keys(call, schedule, k, v, left), KeyGrads(call, schedule, k, v)
    sides = _Sides(call, schedule, QuerySide(q, dout, lse, None, out), k.shape[2])
    of_queries, of_keys = _sums(call, schedule, shares, dq, (dk, dv))
    sides.receive(0)
    keys.receive(0)
    for index, step in enumerate(schedule.steps):
        direct = dq[:, :, _query_heads(step, q, k)] if schedule.topology.inter_size == 1 else None
        tiles = BackwardTiles(call, step.every_tile, sides.of(index), direct)
        own = tuple(x[:, :, step.heads.slice] for x in (k, v))
        of_keys.expect(index - 1)
        for tile in step.before:
            shares.add_own(index, tile, *tiles.compute(tile, *own))
        if step.before:  # these tiles hide what the sums wait for inside the host
            of_keys.add(index - 1)
        gathered = keys.land(index)
        sides.expect(index + 1)
        keys.expect(index + 1)
        for tile, share in zip(step.tiles, shares.shares(index), strict=True):
            tiles.compute(tile, *gathered, into=shares.split(share))
        if not step.before:
            of_keys.add(index - 1)
        sides.receive(index + 1)
        keys.receive(index + 1)
        of_keys.settle(index - 1)
        shares.post(index)
        for tile in step.after:
            shares.add_own(index, tile, *tiles.compute(tile, *own))
        of_queries.add(index, tiles.sums())
        of_queries.come_home(index)
    of_queries.finish()
    of_keys.finish()
    keys.finish()
    return dq, dk, dv


class _Sides:
    """The query side of each step, of visitors too if queries circulate."""

    def __init__(
        self, call: Call, schedule: GatherSchedule, whole: QuerySide, heads_kv: int
    ) -> None:
        batch, rows, heads_q, dim_qk = whole.q.shape
        group = heads_q // heads_kv
        if schedule.circulate is Circulate.Q:
            whole = replace(whole, delta=row_delta(whole.dout, whole.out))

        def own(round_: int) -> QuerySide:
            heads = schedule.rounds[round_]
            return whole.rows(slice(None), slice(heads.start * group, heads.stop * group))

        self._schedule, self._own, self._visitors = schedule, own, None
        if schedule.circulate is Circulate.Q:
            dims = dim_qk, whole.dout.shape[-1]
            shapes = [(batch, rows, len(heads) * group, *dims) for heads in schedule.rounds]
            self._visitors = QueryVisitors(call, schedule.relay, own, shapes, whole.q)
        self._guests = Guests(call, schedule.relay, self._visitors, whole.q.device)

    def expect(self, index: int) -> None:
        """Let the visitor of a step come beside the kernels that are queued next."""
        self._guests.expect(index)

    def receive(self, index: int) -> None:
        """Let the visitor of a step come, if there is such a step."""
        self._guests.receive(index)

    def of(self, index: int) -> QuerySide:
        """The side of a step."""
        if self._guests.await_visitor(index):
            return self._visitors.side(index)
        return self._own(self._schedule.relay.legs[index].round)


def _sums(
    call: Call, schedule: GatherSchedule, shares: KeyGrads, dq: Tensor, dkv: tuple[Tensor, Tensor]
) -> tuple[LocalSums | TravellingSums, KeySums]:
    """Sums of dq, and of dk and dv: those of what circulates travel home."""
    group = dq.shape[2] // dkv[0].shape[2]

    def of_queries(round_: int) -> tuple[Tensor, ...]:
        heads = schedule.rounds[round_]
        return (dq[:, :, heads.start * group : heads.stop * group],)

    def of_keys(round_: int) -> tuple[Tensor, ...]:
        return tuple(x[:, :, schedule.rounds[round_].slice] for x in dkv)

    kinds = [LocalSums, TravellingSums]
    if schedule.circulate is Circulate.Q:
        kinds.reverse()
    made = []
    for kind, targets in zip(kinds, (of_queries, of_keys), strict=True):
        rounds = range(len(schedule.rounds))
        shapes = [[tuple(x.shape) for x in targets(round_)] for round_ in rounds]
        made.append(kind(call, schedule.relay, targets, shapes, dq.device))
    return made[0], KeySums(call, schedule, shares, made[1])


def _query_heads(step: GatherStep, q: Tensor, k: Tensor) -> slice:
    """The query heads that belong to a step's key heads."""
    group = q.shape[2] // k.shape[2]
    return slice(step.heads.start * group, step.heads.stop * group)


def _empty_rows_like(x: Tensor, dim: int) -> Tensor:
    """[b, n, h, dim] in x's dtype, with rows outermost in memory if they are in x."""
    batch, rows, heads, _ = x.shape
    if batch > 1 and x.stride(0) < x.stride(1):
        return x.new_empty(rows, batch, heads, dim).transpose(0, 1)
    return x.new_empty(batch, rows, heads, dim)
