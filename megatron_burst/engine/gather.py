"""Runs a gather schedule: keys arrive a few heads ahead of the tiles that need them."""

from dataclasses import replace
from functools import partial

from torch import Tensor

from megatron_burst.comm.aside import Aside
from megatron_burst.engine.call import Call
from megatron_burst.engine.gathered import GatheredKeys, KeyGrads, Pieces
from megatron_burst.engine.gathered_tiles import BackwardTiles, Outputs
from megatron_burst.engine.relayed import LocalSums, Sum, TravellingSums
from megatron_burst.engine.visiting import Guests, KeyVisitors, QueryVisitors
from megatron_burst.kernels.backends import QuerySide
from megatron_burst.kernels.partial import accumulate_dtype, row_delta
from megatron_burst.plan.gather import GatherSchedule, GatherStep
from megatron_burst.plan.schedule import Circulate


def gather_forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries over the keys of all ranks.

    Args:
        call: the call.
        q: [b, n, h, dqk].
        k: [b, n, h_kv, dqk].
        v: [b, n, h_kv, dv].

    Returns:
        out [b, n, h, dv] in q's dtype and lse [b, h, n] in the accumulation dtype.
    """
    return _forward(call, _Keys(call, call.forward, k, v), q, k, v)


def gather_forward_leaving(
    call: Call, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Pieces]:
    """As `gather_forward`; also the keys of other hosts that came, for `call.recalling`."""
    left = Pieces.made_for(call.forward, k, v)
    out, lse = _forward(call, _Keys(call, call.forward, k, v, left), q, k, v)
    return out, lse, left


def _forward(call: Call, keys: "_Keys", q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    schedule = call.forward
    out = _empty_rows_like(q, v.shape[-1])
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=accumulate_dtype(q.dtype))
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
        keys.expect_ahead(index + 1)
        for tile in step.tiles:
            outputs.compute(tile, *gathered)
        keys.receive(index + 1)
        if schedule.relay.is_last(index):
            outputs.merge()
    keys.finish()
    return out, lse


class _Keys:
    """Gathered keys, of visitors too if these are keys: those are prepared beside the kernels."""

    def __init__(
        self, call: Call, schedule: GatherSchedule, k: Tensor, v: Tensor, left: Pieces | None = None
    ) -> None:
        self._schedule, self._left = schedule, left
        self._gathered = GatheredKeys(call, schedule, k, v)
        self._visitors, self._expected = None, -1
        self._last: tuple[Tensor, Tensor] | None = None
        if schedule.circulate is Circulate.KV and not schedule.recalls:
            batch, rows, _, dim_qk = k.shape
            shapes = [(batch, rows, len(heads), dim_qk, v.shape[-1]) for heads in schedule.rounds]

            def own(round_: int) -> tuple[Tensor, Tensor]:
                heads = schedule.rounds[round_].slice
                return k[:, :, heads], v[:, :, heads]

            self._visitors = KeyVisitors(call, schedule.relay, own, shapes, k)
        self._guests = Guests(call, schedule.relay, self._visitors, k.device)

    def _begins(self, index: int) -> bool:
        steps = self._schedule.steps
        return index == 0 or steps[index].gather != steps[index - 1].gather

    def expect_ahead(self, index: int) -> None:
        """Let the keys of a step come beside the kernels that are queued next, if slots allow it;
        at once if no visitor has to come first."""
        if not self._gathered.in_one_slot:
            self._expect(index)

    def _expect(self, index: int) -> None:
        self._expected = index
        self._guests.expect(index, partial(self._gather, index))

    def receive(self, index: int) -> None:
        """Let the visitor of a step come and gather its keys; a single slot must have been read
        by then."""
        if index > self._expected:
            self._expect(index)
        self._guests.receive(index)

    def _gather(self, index: int) -> None:
        leg = self._schedule.relay.legs[index]
        visitor = self._visitors and self._visitors.views(index)
        if self._left and leg.distance:
            piece = self._left.of(leg)
            if visitor:
                piece.copy_(visitor[0])
            visitor = (piece,)
        if self._begins(index):
            self._gathered.post(self._schedule.steps[index].gather, visitor)

    def land(self, index: int) -> tuple[Tensor, Tensor]:
        """k [b, s, heads, d_qk] and v [b, s, heads, d_v] of a step."""
        if self._begins(index):
            # a rank that is alone on its host sends and receives nothing that it could wait for
            self._guests.await_visitor(index)
            self._last = self._gathered.land(self._schedule.steps[index].gather)
        return self._last

    def finish(self) -> None:
        """Let the current stream wait for all that was done beside it."""
        self._guests.finish()


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
        left: by `gather_forward_leaving`, if it ran; not changed.
    """
    schedule = call.recalling if left else call.backward
    dq, dk, dv = (_empty_rows_like(x, x.shape[-1]) for x in (q, k, v))
    keys, shares = _Keys(call, schedule, k, v, left), KeyGrads(call, schedule, k, v)
    sides = _Sides(call, schedule, QuerySide(q, dout, lse, None, out), k.shape[2])
    of_queries, of_keys = _sums(call, schedule, dq, (dk, dv))
    of_keys = _KeySums(call, schedule, shares, of_keys)
    sides.expect(0)
    sides.receive(0)
    keys.receive(0)
    for index, step in enumerate(schedule.steps):
        direct = dq[:, :, _query_heads(step, q, k)] if schedule.topology.inter_size == 1 else None
        tiles = BackwardTiles(call, step, sides.of(index), direct)
        own = tuple(x[:, :, step.heads.slice] for x in (k, v))
        own_grads = [(tile, tiles.compute(tile, *own)) for tile in step.before]
        gathered = keys.land(index)
        sides.expect(index + 1)
        keys.expect_ahead(index + 1)
        of_keys.expect(index - 1)
        for tile, share in zip(step.tiles, shares.shares(index), strict=True):
            tiles.compute(tile, *gathered, into=shares.split(share))
        of_keys.add(index - 1)
        sides.receive(index + 1)
        keys.receive(index + 1)
        of_keys.settle(index - 1)
        shares.post(index)
        own_grads += [(tile, tiles.compute(tile, *own)) for tile in step.after]
        for tile, grads in own_grads:
            shares.add_own(tile, *grads)
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
        self._schedule, self._visitors = schedule, None
        batch, rows, heads_q, dim_qk = whole.q.shape
        self._group = heads_q // heads_kv
        if schedule.circulate is Circulate.Q:
            whole = replace(whole, delta=row_delta(whole.dout, whole.out))
            dims = dim_qk, whole.dout.shape[-1]
            shapes = [(batch, rows, len(heads) * self._group, *dims) for heads in schedule.rounds]
            self._visitors = QueryVisitors(call, schedule.relay, self._own, shapes, whole.q)
        self._whole = whole
        self._guests = Guests(call, schedule.relay, self._visitors, whole.q.device)

    def _own(self, round_: int) -> QuerySide:
        heads = self._schedule.rounds[round_]
        return self._whole.rows(
            slice(None), slice(heads.start * self._group, heads.stop * self._group)
        )

    def expect(self, index: int) -> None:
        """Let the visitor of a step come beside the kernels that are queued next."""
        if self._visitors:
            self._guests.expect(index)

    def receive(self, index: int) -> None:
        """Let the visitor of a step come, if there is such a step."""
        self._guests.receive(index)

    def of(self, index: int) -> QuerySide:
        """The side of a step."""
        if self._visitors and self._guests.await_visitor(index):
            return self._visitors.side(index)
        return self._own(self._schedule.relay.legs[index].round)


class _KeySums:
    """Sums of the keys' gradients of each step, formed while the next one is computed.

    Those that travel on are formed beside its kernels, so that they set out at once.
    """

    def __init__(
        self,
        call: Call,
        schedule: GatherSchedule,
        shares: KeyGrads,
        sums: LocalSums | TravellingSums,
    ) -> None:
        self._shares, self._sums, self._call = shares, sums, call
        travels = isinstance(sums, TravellingSums) and schedule.topology.inter_size > 1
        self._beside = travels and not shares.in_one_slot
        self._last = len(schedule.steps) - 1
        self._asides: tuple[Aside, Aside] | None = None
        self._read: list[Sum] = []  # lives until the kernels' stream knows that it has been read

    def expect(self, index: int) -> None:
        """The sums of a step may be formed from here on, beside the kernels that are queued next;
        in a single slot they have to be, before it is filled again."""
        if index < 0:
            return
        if self._beside:
            device = self._shares.device
            self._asides = self._call.carrier.beside(device), self._call.carrier.beside(device)
        elif self._shares.in_one_slot:
            self._add(index)

    def add(self, index: int) -> None:
        """Form the sums of a step, unless that was done, and let them go on."""
        if index < 0 or self._shares.in_one_slot:
            return
        if not self._beside:
            self._add(index)
            return
        adding, _ = self._asides
        with adding:
            self._read = self._shares.collect(index)
            self._sums.add(index, self._read)

    def settle(self, index: int) -> None:
        """Let the kernels' stream wait for the sums of a step, though not for what comes home."""
        if index < 0 or not self._beside:
            return
        adding, coming_home = self._asides
        with coming_home:
            self._sums.come_home(index)
        adding.wait()
        self._read = []

    def _add(self, index: int) -> None:
        self._sums.add(index, self._shares.collect(index))
        self._sums.come_home(index)

    def finish(self) -> None:
        """Form the last sums and wait for all that comes home."""
        if self._asides:
            with self._call.carrier.beside(self._shares.device) as everything:
                pass
            everything.wait()
        self._add(self._last)
        self._sums.finish()


def _sums(call: Call, schedule: GatherSchedule, dq: Tensor, dkv: tuple[Tensor, Tensor]) -> list:
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
    return made


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
