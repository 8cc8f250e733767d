"""What meets in each step: the rank's own queries and keys, or what comes from other hosts."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_burst.comm.aside import Aside
from megatron_burst.comm.hop import Segment
from megatron_burst.engine.call import Call
from megatron_burst.engine.relayed import Visitors
from megatron_burst.kernels.backends import QuerySide
from megatron_burst.kernels.partial import accumulate_dtype, delta_stand_in
from megatron_burst.plan.relay import Relay

Shape = tuple[int, int, int, int, int]  # batch, rows, heads, d_qk, d_v


class KeyVisitors(Visitors):
    """Keys and values that come by, side by side: [rows, b, heads, d_qk + d_v].

    Args:
        call: the call.
        relay: of the pass.
        own: the rank's own k and v in a round, [b, rows, heads, d] each.
        shapes: of each round.
        like: a tensor with their dtype and device.
    """

    def __init__(
        self,
        call: Call,
        relay: Relay,
        own: Callable[[int], tuple[Tensor, Tensor]],
        shapes: Sequence[Shape],
        like: Tensor,
    ) -> None:
        self._own, self._dims = own, shapes[0][3:]
        segments = [
            [Segment((rows, batch, heads, sum(dims)), like.dtype)]
            for batch, rows, heads, *dims in shapes
        ]
        super().__init__(call, relay, segments, like.device)

    def _pack_own(self, round_: int, piece: tuple[Tensor, ...]) -> None:
        for target, own in zip(self.split(piece[0]), self._own(round_), strict=True):
            target.copy_(own)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """k [b, rows, heads, d_qk] and v [b, rows, heads, d_v] of a piece."""
        return rows.transpose(0, 1).split(self._dims, dim=-1)


class QueryVisitors(Visitors):
    """Query sides that come by: lse, delta, q, dout.

    Args:
        call: the call.
        relay: of the backward pass.
        own: the rank's own side in a round, with delta.
        shapes: of each round.
        like: a tensor with the queries' dtype and device.
    """

    def __init__(
        self,
        call: Call,
        relay: Relay,
        own: Callable[[int], QuerySide],
        shapes: Sequence[Shape],
        like: Tensor,
    ) -> None:
        self._own = own
        self._takes_delta = call.backend.capability.takes_delta
        segments = [_side_segments(*shape, like.dtype) for shape in shapes]
        super().__init__(call, relay, segments, like.device)

    def _pack_own(self, round_: int, piece: tuple[Tensor, ...]) -> None:
        side = self._own(round_)
        for target, own in zip(piece, (side.lse, side.delta, side.q, side.dout), strict=True):
            target.copy_(own)

    def side(self, index: int) -> QuerySide:
        """The side that visits in a step."""
        lse, delta, q, dout = self.views(index)
        out = None if self._takes_delta else delta_stand_in(dout, delta)
        return QuerySide(q, dout, lse, delta, out)


class Guests:
    """Lets visitors come and go beside the kernels.

    Args:
        call: the call.
        relay: of the pass.
        visitors: who comes; None: nobody.
        device: of the kernels.
    """

    def __init__(
        self, call: Call, relay: Relay, visitors: Visitors | None, device: torch.device
    ) -> None:
        self._carrier, self._relay, self._device = call.carrier, relay, device
        self._visitors = visitors
        self._expected: dict[int, tuple[Aside, Aside, Callable[[], None] | None]] = {}
        self._landed: dict[int, Aside] = {}
        self._latest = -1  # step whose visitor may come

    def expect(self, index: int, then: Callable[[], None] | None = None) -> None:
        """Say that the visitor of a step may come from here on; before the kernels beside which it
        comes.

        Where nobody comes, `then` runs at once, on the current stream: it has nothing to wait for,
        and behind kernels that fill the GPU it would begin late.
        """
        if index >= len(self._relay.legs):
            return
        self._latest = index
        leg = self._relay.legs[index]
        comes = self._visitors and leg.distance
        if then and not comes:
            then()
        if self._visitors and (leg.distance or leg.reads):
            aside = self._carrier.beside
            then = then if comes else None
            self._expected[index] = aside(self._device), aside(self._device), then

    def receive(self, index: int, then: Callable[[], None] | None = None) -> None:
        """Let the visitor of a step come, do with it what was to be done, send on what goes on.

        Behind these kernels in the GPU's queue, as it waits for other hosts. Whom nobody expected
        may come from here on.
        """
        if index > self._latest:
            self.expect(index, then)
        if index not in self._expected:
            return
        coming, going, then = self._expected.pop(index)
        if self._relay.legs[index].reads:
            with going:
                self._visitors.set_out(index)
        if self._relay.legs[index].distance:
            with coming:
                self._visitors.land(index)
                if then:
                    then()
            self._landed[index] = coming
        if self._relay.legs[index].reads:
            with going:
                self._visitors.pass_on(index)

    def await_visitor(self, index: int) -> bool:
        """Let the current stream wait for a step's visitor and for what was done with it; whether
        there is one."""
        landed = self._landed.pop(index, None)
        if landed:
            landed.wait()
        return landed is not None

    def finish(self) -> None:
        """Let the current stream wait for all that was done beside it."""
        if self._relay.read_slots:
            with self._carrier.beside(self._device) as everything:
                pass
            everything.wait()


def _side_segments(
    batch: int, rows: int, heads: int, dim_qk: int, dim_v: int, dtype: torch.dtype
) -> list[Segment]:
    statistics = Segment((batch, heads, rows), accumulate_dtype(dtype))
    tensors = [Segment((batch, rows, heads, dim), dtype) for dim in (dim_qk, dim_v)]
    return [statistics, statistics, *tensors]
