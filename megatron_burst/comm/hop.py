"""Hops in flight and the packed buffers that they move."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.comm.aside import Aside
from megatron_burst.comm.slots import Parcels, Slots
from megatron_burst.plan.schedule import HOME, Cargo, Hop, Schedule


@dataclass(frozen=True, slots=True)
class Segment:
    """One tensor of a packed buffer."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def alignment(self) -> int:
        """The largest power of two that divides its bytes."""
        return self.num_bytes & -self.num_bytes


class PackedBuffers:
    """Hop buffers that hold several tensors each, one behind the other without gaps.

    Those whose size is a multiple of the higher power of two lie first. So each begins at a
    multiple of its dtype's width, and those with a head dimension that is a multiple of 8 at a
    multiple of 16 bytes, which kernels want.
    """

    def __init__(self, segments: Sequence[Segment], flat: Sequence[Tensor]) -> None:
        self._flat = flat
        self._views = [_split(buffer, segments) for buffer in flat]

    def flat(self, slot: int) -> Tensor:
        """The whole buffer as bytes; the last one for HOME."""
        return self._flat[slot]

    def views(self, slot: int) -> tuple[Tensor, ...]:
        """The buffer's tensors."""
        return self._views[slot]


def _split(buffer: Tensor, segments: Sequence[Segment]) -> tuple[Tensor, ...]:
    views, offset = {}, 0
    for index in sorted(range(len(segments)), key=lambda index: -segments[index].alignment):
        segment = segments[index]
        part = buffer[offset : offset + segment.num_bytes]
        views[index] = part.view(segment.dtype).view(segment.shape)
        offset += segment.num_bytes
    return tuple(views[index] for index in range(len(segments)))


class Transfer:
    """A hop under way: its send and its receive."""

    def __init__(
        self,
        works: Sequence[dist.Work],
        timeout_s: float | None,
        explain: Callable[[Exception], Exception],
    ) -> None:
        self._works, self._timeout_s, self._explain = works, timeout_s, explain

    def wait(self) -> None:
        """Let the current stream (on CPU: this thread) wait until both have happened.

        Once: gloo waits for ever for what was waited for before.
        """
        works, self._works = self._works, ()
        try:
            for work in works:
                if self._timeout_s is None:
                    work.wait()
                else:
                    work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise self._explain(error) from error


class Carrier(Protocol):
    """What carries hops: a `Communicator`, or a stand-in that joins simulated ranks."""

    cp_rank: int

    def buffers(
        self, use: Hashable, count: int, num_bytes: int, device: torch.device
    ) -> list[Tensor]: ...

    def start(self, hop: Hop, send: Tensor, recv: Tensor) -> Transfer: ...

    def exchange(self, cargo: Cargo, sends: Parcels, recvs: Parcels) -> Transfer: ...

    def slots(self, cargo: Cargo, rounds: int, num_bytes: int, device: torch.device) -> Slots: ...

    def beside(self, device: torch.device) -> Aside: ...


class Flight:
    """Posts and lands the hops of a schedule.

    Args:
        schedule: whose hops.
        carrier: what carries them.
        buffers: the packed buffers of each cargo.
    """

    def __init__(
        self, schedule: Schedule, carrier: Carrier, buffers: dict[Cargo, PackedBuffers]
    ) -> None:
        self._schedule, self._carrier, self._buffers = schedule, carrier, buffers
        self._under_way: dict[int, list[Transfer]] = defaultdict(list)

    def post(self, step: int) -> None:
        """Start the hops of a step: before its tiles, which are to hide them."""
        for hop in self._schedule.steps[step].hops:
            buffers = self._buffers[hop.cargo]
            send, recv = buffers.flat(hop.from_slot), buffers.flat(hop.to_slot)
            self._under_way[hop.lands].append(self._carrier.start(hop, send, recv))

    def land(self, step: int) -> None:
        """Wait for the hops that must be complete at the end of a step."""
        for transfer in self._under_way.pop(step, ()):
            transfer.wait()


def pack_home(carrier: Carrier, schedule: Schedule, tensors: Sequence[Tensor]) -> PackedBuffers:
    """Read buffers of a schedule, with this rank's own tensors packed into the HOME one."""
    segments = [Segment(tuple(x.shape), x.dtype) for x in tensors]
    count = schedule.read_slots + 1 if schedule.read_slots else 0
    num_bytes = sum(segment.num_bytes for segment in segments)
    flat = carrier.buffers(Cargo.READ, count, num_bytes, tensors[0].device)
    buffers = PackedBuffers(segments, flat)
    if count:
        for view, tensor in zip(buffers.views(HOME), tensors, strict=True):
            view.copy_(tensor)
    return buffers
