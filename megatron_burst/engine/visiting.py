"""The query side of backward, step by step: the rank's own, or what comes from other hosts."""

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
from megatron_burst.plan.schedule import Circulate


class QuerySides:
    """The query side of each step.

    Args:
        call: the call; if its backward circulates Q, sides come by.
        relay: of the backward pass.
        own: the rank's own side in a round; with delta if Q circulates.
        shapes: batch, rows, query heads, d_qk and d_v of each round.
        like: a tensor with the dtype and on the device of the queries.
    """

    def __init__(
        self,
        call: Call,
        relay: Relay,
        own: Callable[[int], QuerySide],
        shapes: Sequence[tuple[int, int, int, int, int]],
        like: Tensor,
    ) -> None:
        self._call, self._relay, self._own = call, relay, own
        self._device, self._asides = like.device, {}
        self._visitors = None
        if call.backward.circulate is Circulate.Q:
            segments = [_segments(*shape, like.dtype) for shape in shapes]
            self._visitors = Visitors(call, relay, segments, self._pack, like.device)

    def _pack(self, round_: int, piece: tuple[Tensor, ...]) -> None:
        side = self._own(round_)
        for target, own in zip(piece, (side.lse, side.delta, side.q, side.dout), strict=True):
            target.copy_(own)

    def prepare(self, index: int) -> None:
        """Let the visitor of a step come, if there is such a step."""
        if self._visitors and index < len(self._relay.legs):
            with self._call.carrier.beside(self._device) as aside:
                self._visitors.prepare(index)
            self._asides[index] = aside

    def side(self, index: int) -> QuerySide:
        """The query side of a step."""
        if not self._visitors:
            return self._own(self._relay.legs[index].round)
        waited: Aside = self._asides.pop(index)
        waited.wait()
        views = self._visitors.views(index)
        if views is None:
            return self._own(self._relay.legs[index].round)
        lse, delta, q, dout = views
        out = None if self._call.backend.capability.takes_delta else delta_stand_in(dout, delta)
        return QuerySide(q, dout, lse, delta, out)


def _segments(
    batch: int, rows: int, heads: int, dim_qk: int, dim_v: int, dtype: torch.dtype
) -> list[Segment]:
    """Of lse, delta, q and dout."""
    statistics = Segment((batch, heads, rows), accumulate_dtype(dtype))
    tensors = [Segment((batch, rows, heads, dim), dtype) for dim in (dim_qk, dim_v)]
    return [statistics, statistics, *tensors]
