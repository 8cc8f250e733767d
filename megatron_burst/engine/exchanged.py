"""Buffers of a call that exchanges heads: tensors on their way there, results on their way back."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_burst.comm.rows import Field, field_views, row_bytes
from megatron_burst.comm.slots import Give, Take, UnderWay
from megatron_burst.engine.call import Call
from megatron_burst.plan.a2a import A2ASchedule
from megatron_burst.plan.schedule import Cargo


class Outbound:
    """A round's heads of all rows on their way to the ranks that compute them.

    A slot holds this rank's rows once for each rank, with that rank's heads: [P, n, b, bytes].

    Args:
        call: the call.
        schedule: of the pass.
        tensors: [b, n, heads, d] each.
        kept: filled with what comes in each round, [s, b, bytes]; None: it stays for two rounds.
    """

    def __init__(
        self,
        call: Call,
        schedule: A2ASchedule,
        tensors: Sequence[Tensor],
        kept: list[Tensor] | None = None,
    ) -> None:
        self._schedule, self._tensors, self._kept = schedule, tensors, kept
        self._batch, device = tensors[0].shape[0], tensors[0].device
        num_bytes = schedule.num_rows * self._batch * row_bytes(self._fields(0))
        rounds = len(schedule.rounds)
        self._slots = call.carrier.slots(Cargo.READ, rounds, num_bytes, device)
        if kept is None:
            self._buffers = call.carrier.buffers("heads", min(2, rounds), num_bytes, device)
        self._under_way: dict[int, UnderWay] = {}

    def _fields(self, index: int) -> list[Field]:
        return fields_of(self._schedule, index, self._tensors)

    def _shape(self, fields: Sequence[Field]) -> tuple[int, ...]:
        return self._schedule.num_rows, self._batch, row_bytes(fields)

    def _whole(self, index: int, fields: Sequence[Field]) -> Tensor:
        shape = self._shape(fields)
        if self._kept is None:
            buffer = self._buffers[index % len(self._buffers)]
            return buffer.view(-1)[: shape[0] * shape[1] * shape[2]].view(shape)
        if index == len(self._kept):
            self._kept.append(self._tensors[0].new_empty(shape, dtype=torch.uint8))
        return self._kept[index]

    def post(self, index: int) -> None:
        """Start to exchange a round's heads, if there is such a round."""
        schedule = self._schedule
        if index >= len(schedule.rounds):
            return
        fields = self._fields(index)
        slot = self._slots.view(index, self._shape(fields), torch.uint8)
        ranks = schedule.ranks
        of_ranks = slot.unflatten(0, (len(ranks), schedule.tokens))
        for view, tensor in zip(field_views(of_ranks, fields), self._tensors, strict=True):
            heads = _heads_of(schedule, index, tensor)
            dealt = tensor[:, :, heads].unflatten(2, (len(ranks), view.shape[3]))
            view.copy_(dealt.permute(2, 1, 0, 3, 4))
        mine, tokens, whole = schedule.cp_rank, schedule.tokens, self._whole(index, fields)
        gives, takes = [], []
        for piece in schedule.pieces:
            rows = piece.rows.moved(ranks.index(mine) * tokens).slice
            if piece.holder == mine:
                whole[piece.whole.slice] = slot[rows]
            else:
                takes.append(Take(piece.holder, rows, whole[piece.whole.slice]))
        for column, peer in enumerate(ranks):
            own = schedule.pieces if peer != mine else ()
            gives += [
                Give(peer, piece.rows.moved(column * tokens).slice)
                for piece in own
                if piece.holder == mine
            ]
        self._under_way[index] = self._slots.exchange(index, slot, gives, takes)

    def land(self, index: int) -> list[Tensor]:
        """Wait for a round; the tensors of this rank's heads over all rows, [b, s, heads, d]."""
        self._under_way.pop(index).wait()
        return views_of(self._whole(index, self._fields(index)), self._fields(index))


class Inbound:
    """Results of a round's heads on their way back to the ranks that hold the rows.

    A slot holds this rank's heads of all rows: [s, b, bytes]; a rank gets its own rows of them.
    """

    def __init__(self, call: Call, schedule: A2ASchedule, targets: Sequence[Tensor]) -> None:
        self._schedule, self._targets = schedule, targets
        self._batch = targets[0].shape[0]
        self._dtypes = _result_dtypes(call, targets)
        width = row_bytes(self._fields(0))
        num_bytes = schedule.num_rows * self._batch * width
        device, rounds = targets[0].device, len(schedule.rounds)
        self._slots = call.carrier.slots(Cargo.GRAD, rounds, num_bytes, device)
        (self._staging,) = call.carrier.buffers("staging", 1, num_bytes, device)
        self._under_way: tuple[int, UnderWay] | None = None

    def _fields(self, index: int) -> list[Field]:
        fields = fields_of(self._schedule, index, self._targets)
        return [replace(one, dtype=d) for one, d in zip(fields, self._dtypes, strict=True)]

    def _slot(self, index: int) -> Tensor:
        shape = self._schedule.num_rows, self._batch, row_bytes(self._fields(index))
        return self._slots.view(index, shape, torch.uint8)

    def results(self, index: int) -> list[Tensor]:
        """Where a round's results are to be put: [b, s, heads, d] each."""
        return views_of(self._slot(index), self._fields(index))

    def _staged(self, index: int) -> Tensor:
        width = row_bytes(self._fields(index))
        shape = len(self._schedule.ranks), self._schedule.tokens, self._batch, width
        return self._staging[: self._schedule.num_rows * self._batch * width].view(shape)

    def post(self, index: int) -> None:
        """Start to bring a round's results home; those of the round before must be collected."""
        schedule, slot, staged = self._schedule, self._slot(index), self._staged(index)
        mine = schedule.cp_rank
        own = [piece for piece in schedule.pieces if piece.holder == mine]
        for piece in own:
            staged[schedule.ranks.index(mine), piece.rows.slice] = slot[piece.whole.slice]
        gives = [
            Give(piece.holder, piece.whole.slice)
            for piece in schedule.pieces
            if piece.holder != mine
        ]
        takes = [
            Take(peer, piece.whole.slice, staged[column, piece.rows.slice])
            for column, peer in enumerate(schedule.ranks)
            if peer != mine
            for piece in own
        ]
        self._under_way = index, self._slots.exchange(index, slot, gives, takes)

    def collect(self) -> None:
        """Wait for the results under way, if any, and put them where they belong."""
        if self._under_way is None:
            return
        index, under_way = self._under_way
        under_way.wait()
        self._under_way = None
        views = field_views(self._staged(index), self._fields(index))
        for target, view in zip(self._targets, views, strict=True):
            heads = _heads_of(self._schedule, index, target)
            dealt = target[:, :, heads].unflatten(2, (len(self._schedule.ranks), view.shape[3]))
            dealt.copy_(view.permute(2, 1, 0, 3, 4))


def fields_of(schedule: A2ASchedule, index: int, tensors: Sequence[Tensor]) -> list[Field]:
    """What a row of a round has of tensors [b, n, heads, d]: one rank's heads of each."""
    part = len(schedule.rounds[index]) // len(schedule.ranks)
    every = schedule.rounds[-1].stop
    return [Field(part * x.shape[2] // every, x.shape[3], x.dtype) for x in tensors]


def views_of(rows: Tensor, fields: Sequence[Field]) -> list[Tensor]:
    """The tensors [b, s, heads, d] in rows [s, b, bytes]."""
    return [view.transpose(0, 1) for view in field_views(rows, fields)]


def _heads_of(schedule: A2ASchedule, index: int, tensor: Tensor) -> slice:
    """A tensor's heads that belong to a round's key heads."""
    group, round_ = tensor.shape[2] // schedule.rounds[-1].stop, schedule.rounds[index]
    return slice(round_.start * group, round_.stop * group)


def _result_dtypes(call: Call, targets: Sequence[Tensor]) -> list[torch.dtype]:
    """Gradients travel as the wire's dtype says, if the kernel's is as wide; rounded once."""
    if len(targets) == 3 and call.backend.capability.wide_grads:
        return [call.grad_dtype for _ in targets]
    return [x.dtype for x in targets]
