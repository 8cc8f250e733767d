"""Buffers of pieces that go from host to host, and of their gradients on the way home."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from megatron_burst.comm.hop import PackedBuffers, Segment, Transfer
from megatron_burst.engine.call import Call
from megatron_burst.kernels.partial import accumulate_dtype, sum_parts
from megatron_burst.plan.mask import Span
from megatron_burst.plan.relay import Homecoming, Relay
from megatron_burst.plan.schedule import HOME, Cargo, Hop

Targets = Callable[[int], Sequence[Tensor]]  # of a round, [b, rows, heads, d] each
SumShape = tuple[int, int, int, int]  # batch, rows, heads, d
Sum = tuple[Span, Sequence[Sequence[Tensor]]]  # rows, and for each tensor the parts to be added


class _Buffers:
    """Buffers of pieces or sums; a round's may be smaller than another's."""

    def __init__(
        self, call: Call, use: Hashable, count: int, segments: Sequence[list[Segment]], device
    ) -> None:
        self._segments = segments
        self._sizes = [sum(segment.num_bytes for segment in of_round) for of_round in segments]
        self._flat = call.carrier.buffers(use, count, max(self._sizes), device)

    def flat(self, slot: int, round_: int) -> Tensor:
        """A buffer's bytes in a round."""
        return self._flat[slot][: self._sizes[round_]]

    def views(self, slot: int, round_: int) -> tuple[Tensor, ...]:
        """A buffer's tensors in a round."""
        return PackedBuffers(self._segments[round_], [self.flat(slot, round_)]).views(0)

    def sums(self, slot: int, round_: int) -> tuple[Tensor, ...]:
        """The same of sums, which have rows outermost in memory: [b, rows, heads, d] each."""
        return tuple(view.transpose(0, 1) for view in self.views(slot, round_))


class _Hops(_Buffers):
    """The hops of one cargo and their buffers."""

    def __init__(
        self, call: Call, cargo: Cargo, count: int, segments: Sequence[list[Segment]], device
    ) -> None:
        super().__init__(call, ("relay", cargo), count, segments, device)
        self._carrier = call.carrier
        self._under_way: dict[int, list[Transfer]] = defaultdict(list)

    def start(self, hop: Hop) -> None:
        send, recv = (self.flat(slot, hop.round) for slot in (hop.from_slot, hop.to_slot))
        self._under_way[hop.lands].append(self._carrier.start(hop, send, recv))

    def land(self, index: int) -> None:
        for transfer in self._under_way.pop(index, ()):
            transfer.wait()


class Visitors(ABC):
    """Pieces that come by.

    Args:
        call: the call.
        relay: of the pass.
        segments: of a round's piece.
        device: of the buffers.
    """

    def __init__(
        self,
        call: Call,
        relay: Relay,
        segments: Sequence[list[Segment]],
        device: torch.device,
    ) -> None:
        self._relay, self._mine = relay, call.carrier.cp_rank
        self._hops = _Hops(call, Cargo.READ, relay.read_slots, segments, device)

    @abstractmethod
    def _pack_own(self, round_: int, piece: tuple[Tensor, ...]) -> None:
        """Write the rank's own piece of a round into tensors of its segments."""

    def land(self, index: int) -> None:
        """Let the current stream wait for the piece of a step."""
        self._hops.land(index)

    def set_out(self, index: int) -> None:
        """Send the rank's own piece, if it is to leave in a step."""
        for hop in self._relay.legs[index].reads:
            if hop.sends == self._mine:
                self._pack_own(hop.round, self._hops.views(hop.from_slot, hop.round))
                self._hops.start(hop)

    def pass_on(self, index: int) -> None:
        """Send on what came for a step, if it is to go on."""
        for hop in self._relay.legs[index].reads:
            if hop.sends != self._mine:
                self._hops.start(hop)

    def views(self, index: int) -> tuple[Tensor, ...] | None:
        """The visiting piece of a step; None if it is the rank's own."""
        leg = self._relay.legs[index]
        return None if leg.slot == HOME else self._hops.views(leg.slot, leg.round)


class TravellingSums:
    """Gradients of pieces that come by: each host adds its own; the last hop brings them home.

    Args:
        call: the call.
        relay: of the backward pass.
        targets: where the rank's own gradients go, for each round: [b, rows, heads, d] each.
        shapes: [b, rows, heads, d] of each target of each round.
        device: of the buffers.
    """

    def __init__(
        self,
        call: Call,
        relay: Relay,
        targets: Targets,
        shapes: Sequence[Sequence[SumShape]],
        device: torch.device,
    ) -> None:
        self._relay, self._targets = relay, targets
        segments = _segments(shapes, call.grad_dtype)
        self._hops = _Hops(call, Cargo.GRAD, relay.grad_slots, segments, device)

    def add(self, index: int, sums: Sequence[Sum]) -> None:
        """Add what this host contributes in a step and send it on; `sums` name every row once.

        A sum that starts here waits for nothing that arrives.
        """
        leg = self._relay.legs[index]
        if not leg.fresh:
            self._hops.land(index)
        home = leg.grad_slot == HOME
        totals = self._targets(leg.round) if home else self._hops.sums(leg.grad_slot, leg.round)
        for span, parts in sums:
            for total, own in zip(totals, parts, strict=True):
                rows = total[:, span.slice]
                add_up(rows, own, fresh=leg.fresh)
        for hop in leg.grads:
            self._hops.start(hop)

    def finish(self) -> None:
        """Wait for the last of the rank's own gradients."""
        self.come_home(len(self._relay.legs))

    def come_home(self, index: int) -> None:
        """Wait for the rank's own gradients that come home in a step, behind its sum."""
        self._hops.land(index)
        for coming in self._relay.homecomings[index]:
            self._join(coming)

    def _join(self, coming: Homecoming) -> None:
        slots = coming.waiting, coming.arrived
        parts = [self._hops.sums(slot, coming.round) for slot in slots]
        for target, own in zip(self._targets(coming.round), zip(*parts, strict=True), strict=True):
            sum_parts(target, own)


class LocalSums:
    """Gradients that stay: summed over the steps of a round, rounded when it is over.

    Args:
        call: the call.
        relay: of the backward pass.
        targets: where they go, for each round: [b, rows, heads, d] each.
        shapes: [b, rows, heads, d] of each target of each round.
        device: of the buffers.
    """

    def __init__(
        self,
        call: Call,
        relay: Relay,
        targets: Targets,
        shapes: Sequence[Sequence[SumShape]],
        device: torch.device,
    ) -> None:
        self._relay, self._targets = relay, targets
        segments = _segments(shapes, accumulate_dtype(call.grad_dtype))
        count = int(len(relay.legs) > len(shapes))
        self._buffers = _Buffers(call, "local sums", count, segments, device)

    def add(self, index: int, sums: Sequence[Sum]) -> None:
        """Add a step's share; the sums of a step name rows once, those of its round every row."""
        round_, first = self._relay.legs[index].round, self._relay.is_first(index)
        targets, last = self._targets(round_), self._relay.is_last(index)
        totals = targets if first and last else self._buffers.sums(0, round_)
        for span, parts in sums:
            for target, total, own in zip(targets, totals, parts, strict=True):
                rows = total[:, span.slice]
                if last and not first:
                    sum_parts(target[:, span.slice], [rows, *own])
                else:
                    add_up(rows, own, fresh=first)

    def come_home(self, index: int) -> None:
        """Nothing travels."""

    def finish(self) -> None:
        """Nothing is under way."""


def add_up(total: Tensor, parts: Sequence[Tensor], fresh: bool) -> None:
    """total <- sum of parts, added to what is there unless it is fresh; [b, n, h, d] each."""
    if parts:
        sum_parts(total, parts if fresh else [total, *parts])
    elif fresh:
        total.zero_()


def _segments(shapes: Sequence[Sequence[SumShape]], dtype: torch.dtype) -> list[list[Segment]]:
    """Of the sums of every round, with rows outermost in memory."""
    return [
        [Segment((rows, batch, heads, dim), dtype) for batch, rows, heads, dim in of_round]
        for of_round in shapes
    ]
