"""Buffers of a call that exchanges heads: tensors on their way there, results on their way back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_burst.comm.rows import Field, field_views, row_bytes
from megatron_burst.comm.slots import Give, Take, UnderWay
from megatron_burst.engine.call import Call
from megatron_burst.kernels.partial import accumulate_dtype
from megatron_burst.plan.a2a import A2ASchedule
from megatron_burst.plan.mask import Span
from megatron_burst.plan.schedule import Cargo


class Outbound:
    """A round's heads of all rows on their way to the ranks that compute them.

    A slot holds this rank's rows once for each rank, with that rank's heads: [P, n, b, bytes].
    """

    def __init__(self, call: Call, schedule: A2ASchedule, tensors: Sequence[Tensor]) -> None:
        self._schedule, self._tensors = schedule, tensors
        self._batch = tensors[0].shape[0]
        self._num_keys = tensors[1].shape[2]
        self._width = row_bytes(_fields(schedule, 0, tensors, self._num_keys))
        num_bytes = schedule.num_rows * self._batch * self._width
        device, rounds = tensors[0].device, len(schedule.rounds)
        self._slots = call.carrier.slots(Cargo.READ, rounds, num_bytes, device)
        self._wholes = call.carrier.buffers("heads", min(2, rounds), num_bytes, device)
        self._under_way: dict[int, UnderWay] = {}

    def _shape(self, fields: Sequence[Field]) -> tuple[int, ...]:
        return self._schedule.num_rows, self._batch, row_bytes(fields)

    def _whole(self, index: int, fields: Sequence[Field]) -> Tensor:
        buffer, shape = self._wholes[index % len(self._wholes)], self._shape(fields)
        return buffer[: shape[0] * shape[1] * shape[2]].view(shape)

    def post(self, index: int) -> None:
        """Start to exchange a round's heads, if there is such a round."""
        schedule = self._schedule
        if index >= len(schedule.rounds):
            return
        fields = _fields(schedule, index, self._tensors, self._num_keys)
        slot = self._slots.view(index, self._shape(fields), torch.uint8)
        ranks = schedule.ranks
        of_ranks = slot.unflatten(0, (len(ranks), schedule.tokens))
        for view, tensor in zip(field_views(of_ranks, fields), self._tensors, strict=True):
            heads = _heads_of(schedule.rounds[index], tensor, self._num_keys)
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
        fields = _fields(self._schedule, index, self._tensors, self._num_keys)
        views = field_views(self._whole(index, fields), fields)
        return [view.transpose(0, 1) for view in views]


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
        part = len(self._schedule.rounds[index]) // len(self._schedule.ranks)
        every = self._schedule.rounds[-1].stop
        return [
            Field(part * x.shape[2] // every, x.shape[3], dtype)
            for x, dtype in zip(self._targets, self._dtypes, strict=True)
        ]

    def _slot(self, index: int) -> Tensor:
        shape = self._schedule.num_rows, self._batch, row_bytes(self._fields(index))
        return self._slots.view(index, shape, torch.uint8)

    def results(self, index: int) -> list[Tensor]:
        """Where a round's results are to be put: [b, s, heads, d] each."""
        views = field_views(self._slot(index), self._fields(index))
        return [view.transpose(0, 1) for view in views]

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
        every, round_ = self._schedule.rounds[-1].stop, self._schedule.rounds[index]
        views = field_views(self._staged(index), self._fields(index))
        for target, view in zip(self._targets, views, strict=True):
            heads = _heads_of(round_, target, every)
            dealt = target[:, :, heads].unflatten(2, (len(self._schedule.ranks), view.shape[3]))
            dealt.copy_(view.permute(2, 1, 0, 3, 4))


def _fields(
    schedule: A2ASchedule, index: int, tensors: Sequence[Tensor], num_keys: int
) -> list[Field]:
    part = len(schedule.rounds[index]) // len(schedule.ranks)
    return [Field(part * x.shape[2] // num_keys, x.shape[3], x.dtype) for x in tensors]


def _heads_of(round_: Span, tensor: Tensor, num_keys: int) -> slice:
    """A tensor's heads that belong to a round's key heads."""
    group = tensor.shape[2] // num_keys
    return slice(round_.start * group, round_.stop * group)


def _result_dtypes(call: Call, targets: Sequence[Tensor]) -> list[torch.dtype]:
    """Gradients travel in the kernel's dtype if that is wider; each is rounded once."""
    if len(targets) == 3 and call.backend.capability.wide_grads:
        return [accumulate_dtype(x.dtype) for x in targets]
    return [x.dtype for x in targets]
