"""Tensors of a rank's heads over all rows: exchanged in this pass, or left by forward."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from megatron_burst.comm.aside import Aside
from megatron_burst.engine.call import Call
from megatron_burst.engine.exchanged import Outbound, fields_of, views_of
from megatron_burst.engine.visiting import Shape
from megatron_burst.kernels.backends import QuerySide
from megatron_burst.kernels.partial import delta_stand_in
from megatron_burst.plan.a2a import A2ASchedule


class Wholes:
    """What has been exchanged, round by round: waited for once.

    On several hosts that is beside the kernels: what goes on to the next host is needed earlier.

    Args:
        call: the call.
        schedule: of the pass.
        tensors: [b, n, heads, d] each.
        kept: filled with what has been exchanged in each round, if it is to stay: [s, b, bytes].
    """

    def __init__(
        self,
        call: Call,
        schedule: A2ASchedule,
        tensors: Sequence[Tensor],
        kept: list[Tensor] | None = None,
    ) -> None:
        self._carrier, self._schedule = call.carrier, schedule
        self._device = tensors[0].device
        self._exchanges = Outbound(call, schedule, tensors, kept)
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

    def keys(self, round_: int) -> list[Tensor]:
        """k and v, where the tensors are q, k, v and others."""
        return self.of(round_)[1:3]


@dataclass(frozen=True, slots=True)
class Left:
    """What forward has exchanged and leaves for backward.

    Attributes:
        rows: bytes of q, k and v in each round, [s, b, bytes].
        lses: log-sum-exp in each round, [b, heads, s].
    """

    rows: list[Tensor]
    lses: list[Tensor]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of it, for autograd to save."""
        return *self.rows, *self.lses

    @staticmethod
    def of(tensors: Sequence[Tensor] = ()) -> "Left":
        """From `tensors`; none for a forward pass to fill."""
        rounds = len(tensors) // 2
        return Left(list(tensors[:rounds]), list(tensors[rounds:]))


class Recalled:
    """What backward needs of each round: dout and delta are exchanged, the rest forward has left.

    Args:
        there: of dout and delta.
        left: by forward.
        schedule: of backward; its rounds are forward's.
        like: tensors shaped as q, k and v, with their dtype.
    """

    def __init__(
        self, there: Wholes, left: Left, schedule: A2ASchedule, like: Sequence[Tensor]
    ) -> None:
        self._there, self._left = there, left
        self._schedule, self._like = schedule, like
        self.post = there.post

    def of(self, round_: int) -> list[Tensor]:
        """q, k, v, dout, lse and delta of this rank's heads, [b, s, heads, d] each."""
        dout, delta = self._there.of(round_)
        return [*self._views(round_), dout, as_rows(self._left.lses[round_]), delta]

    def keys(self, round_: int) -> list[Tensor]:
        """k and v, which wait for nothing."""
        return self._views(round_)[1:3]

    def _views(self, round_: int) -> list[Tensor]:
        fields = fields_of(self._schedule, round_, self._like)
        return views_of(self._left.rows[round_], fields)


class Sides:
    """The query side of this rank's heads of its host's rows, round by round.

    Delta travels, whatever the kernel wants: it is 4 bytes where a bf16 output is 2 dv, and the
    stand-in made of it is nearer to the true delta than a rounded output.

    Args:
        call: the call.
        there: q, k, v, dout, lse and delta, round by round.
    """

    def __init__(self, call: Call, there: Wholes | Recalled) -> None:
        self._there = there
        self._takes_delta = call.backend.capability.takes_delta
        self._made: tuple[int, QuerySide] | None = None

    def bare(self, round_: int) -> QuerySide:
        """A round's side without an output, as it travels; made on the current stream."""
        queries, _, _, douts, lses, deltas = self._there.of(round_)
        return QuerySide(queries, douts, as_statistics(lses), as_statistics(deltas), None)

    def make(self, round_: int) -> QuerySide:
        """A round's side, made on the current stream."""
        side = self.bare(round_)
        if self._takes_delta:
            return side
        return replace(side, out=delta_stand_in(side.dout, side.delta))

    def of(self, round_: int) -> QuerySide:
        """A round's side for kernels; made once, whoever's keys it meets."""
        if self._made is None or self._made[0] != round_:
            self._made = round_, self.make(round_)
        return self._made[1]


def shapes_of(schedule: A2ASchedule, x: Tensor, v: Tensor) -> list[Shape]:
    """What a rank has of a tensor [b, n, heads, d] in each round, and the width of values."""
    return [
        (x.shape[0], schedule.num_rows, fields_of(schedule, i, [x])[0].heads, x.shape[3],
         v.shape[3])
        for i in range(len(schedule.rounds))
    ]  # fmt: skip


def as_rows(statistics: Tensor) -> Tensor:
    """[b, h, n] as [b, n, h, 1]."""
    return statistics.transpose(1, 2).unsqueeze(-1)


def as_statistics(rows: Tensor) -> Tensor:
    """[b, s, h, 1] as [b, h, s], dense."""
    return rows.squeeze(-1).transpose(1, 2).contiguous()
