"""Offloads kept tensors to host memory: copied during compute, fetched a layer ahead.

What a copy reads or writes lives until the compute stream has waited for the copy, so that device
memory is bounded by what the GPU has done. Freed earlier, with `record_stream`, it would not be
used again until the CPU sees that the copy has ended; but the CPU runs layers ahead.
"""

import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from itertools import accumulate, count

import torch
from torch import Tensor

from megatron_burst.comm.alone import is_first
from megatron_burst.environment import available_host_bytes
from megatron_burst.logs import log_message, log_message_once
from megatron_burst.recompute.auto.budget import LAYERS_BEHIND
from megatron_burst.recompute.keeping import WHO, Frame, Resident, Tensors, Watch, running

_ALIGNMENT = 256  # bytes; every dtype's width divides it
_GIB = 1 << 30


def host_limit_bytes(limit_gib: float | None) -> int:
    """A rank's limit of host memory: the given GiB, or half of what is available now."""
    return available_host_bytes() // 2 if limit_gib is None else int(limit_gib * _GIB)


@cache
def host_memory(device: torch.device, limit_gib: float | None) -> "HostMemory":
    """The host memory of a device: one per limit (None: half of what is available now), for the
    life of the process; logs its limit when created."""
    memory = HostMemory(device, host_limit_bytes(limit_gib))
    if is_first():
        how = "half of what is available" if limit_gib is None else "as asked"
        gib = memory.limit_bytes / _GIB
        log_message(f"{WHO}: takes at most {gib:.2f} GiB of host memory per rank ({how})")
    return memory


class _Lined:
    """Kept tensors of a frame, in the order of their use."""

    line: "weakref.ref[_Line]"  # that contains it
    order: tuple[int, int]  # that line's number, and how many it had before


class HostMemory:
    """Copies tensors of a device to pinned buffers and back, on a stream of its own."""

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        self.limit_bytes, self.taken_bytes = limit_bytes, 0  # taken: used or free
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: dict[int, list[Tensor]] = {}
        self._lines: weakref.WeakKeyDictionary[Frame, _Line] = weakref.WeakKeyDictionary()
        self._last: weakref.ref[_Line] | None = None
        self._numbers = count()  # of lines
        self._leaving: deque[weakref.ref[HostParcel]] = deque()  # also on the device; oldest first
        self._ahead: list[weakref.ref[HostParcel]] = []

    def pack(self, tensors: Tensors, input_of: Frame | None = None) -> "HostParcel | Resident":
        """Start copying tensors of the running frame to the host; if it is full they stay.
        `input_of`: the frame that needs them first in its recomputation, as its input."""
        num_bytes = _offsets(tensors)[-1]
        buffer = self._take(num_bytes)
        if buffer is None:
            return Resident(tensors)
        parcel = HostParcel(self, tensors, buffer)
        weakref.finalize(parcel, self._free.setdefault(num_bytes, []).append, buffer)
        self._line_up(parcel, input_of)
        self._leaving.append(weakref.ref(parcel))
        return parcel

    def stay(self, tensors: Tensors) -> "DeviceParcel":
        """Keep tensors of the running frame on the device; taking them starts fetching what
        backward needs next, as a parcel on the host does."""
        parcel = DeviceParcel(self, tensors)
        self._line_up(parcel, None)
        return parcel

    def _take(self, num_bytes: int) -> Tensor | None:
        if free := self._free.get(num_bytes):
            return free.pop()
        if self.taken_bytes + num_bytes > self.limit_bytes:
            self.release()
        if self.taken_bytes + num_bytes > self.limit_bytes:
            gib = self.limit_bytes / _GIB
            log_message_once(f"{WHO}: {gib:.2f} GiB of host memory per rank are full; further "
                             "results stay on the device")  # fmt: skip
            return None
        self.taken_bytes += num_bytes
        return _pinned(num_bytes, self.stream)

    def release(self) -> None:
        """Free unused buffers of all sizes."""
        for buffers in self._free.values():
            while buffers:
                self.taken_bytes -= buffers.pop().numel()

    def _line_up(self, parcel: _Lined, input_of: Frame | None) -> None:
        frame = running()[0].frame if input_of is None else input_of
        line = self._lines.get(frame)
        if line is None:
            line = self._lines[frame] = _Line(self._last, next(self._numbers))
            self._last = weakref.ref(line)
        parcel.order = line.number, len(line.parcels)
        line.parcels.insert(len(line.parcels) if input_of is None else 0, weakref.ref(parcel))
        parcel.line = weakref.ref(line)
        self._let_leave(parcel)

    def _let_leave(self, parcel: _Lined) -> None:
        """Free the device's memory of what was packed some layers before a parcel: its copy has
        had as much time. Backward holds as much, fetched a layer ahead."""
        line, place = parcel.order
        while self._leaving:
            oldest = self._leaving[0]()
            if oldest is not None and oldest.order > (line - LAYERS_BEHIND, place):
                break
            self._leaving.popleft()
            if oldest is not None:
                oldest.leave()

    def look_ahead(self, parcel: _Lined) -> None:
        """Start fetching what backward needs after a parcel, a whole layer ahead, as a layer's
        backward takes about as long as the next one's copy; drop what was fetched in vain."""
        line = parcel.line()
        after = [ref() for ref in line.after(parcel)] if line else []
        coming = [later for later in after if isinstance(later, HostParcel)]
        for on_device in (ref() for ref in (*self._ahead, *self._leaving)):
            if on_device is not None and on_device is not parcel and on_device not in coming:
                on_device.leave()
        self._leaving = deque(ref for ref in self._leaving if ref() in coming)
        for later in coming:
            later.prefetch()
        self._ahead = [weakref.ref(later) for later in coming]


class _Line:
    """Parcels of one frame in the order in which its recomputation needs them."""

    def __init__(self, before: "weakref.ref[_Line] | None", number: int) -> None:
        self.parcels: list[weakref.ref[_Lined]] = []
        self.number = number
        self.before = before  # the line made before this one: backward needs it next

    def after(self, parcel: _Lined) -> list[weakref.ref[_Lined]]:
        """What is needed next: the rest of the line, then all of the line before."""
        place = next(i for i, ref in enumerate(self.parcels) if ref() is parcel)
        before = self.before() if self.before else None
        return self.parcels[place + 1 :] + (before.parcels if before else [])


class DeviceParcel(_Lined):
    """Kept tensors of a frame that stay on the device, beside others on the host."""

    def __init__(self, memory: HostMemory, tensors: Tensors) -> None:
        self._memory, self._resident = memory, Resident(tensors)

    def get(self) -> Tensors:
        """The tensors; starts fetching those of the next layer."""
        self._memory.look_ahead(self)
        return self._resident.get()


class HostParcel(_Lined):
    """Offloaded tensors. The buffer is reused once the parcel is gone."""

    def __init__(self, memory: HostMemory, tensors: Tensors, buffer: Tensor) -> None:
        self._memory, self._buffer = memory, buffer
        # their dtypes and shapes, and strides if these leave no gaps
        self._likes = [torch.empty_like(x, device="meta") for x in tensors]
        self._watch = Watch(tensors)
        self.on_device: Tensors | None = tensors  # before the copy to the host and after that back
        self._copied = self._copy(self._views(), tensors)

    def _copy(self, dests: Sequence[Tensor], sources: Sequence[Tensor]) -> torch.cuda.Event | None:
        """Copy tensors on the memory's stream; returns the end of it."""
        stream = self._memory.stream
        if stream is not None:  # the sources' writers, and the dests' last users
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for dest, source in zip(dests, sources, strict=True):
                dest.copy_(source, non_blocking=True)
            return None if stream is None else stream.record_event()

    def _views(self) -> list[Tensor]:
        """The buffer as tensors of the right shapes, strides and dtypes."""
        return [
            self._buffer.view(x.dtype).as_strided(x.shape, x.stride(), offset // x.itemsize)
            for offset, x in zip(_offsets(self._likes), self._likes, strict=False)
        ]

    def leave(self) -> None:
        """Free the device's memory, once the copy has ended."""
        if self.on_device is not None and self._copied is not None:
            torch.cuda.current_stream(self._memory.stream.device).wait_event(self._copied)
        self.on_device = None

    def prefetch(self) -> None:
        """Start copying the tensors back to the device, unless they are still there."""
        if self.on_device is not None:
            return
        device = "cpu" if self._memory.stream is None else self._memory.stream.device
        self.on_device = tuple(  # empty_like would change strides of axes of length 1
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
            for x in self._likes
        )
        self._copied = self._copy(self.on_device, self._views())

    def get(self) -> Tensors:
        """The tensors on the device; starts fetching those of the next layer."""
        self._watch.check()
        self.prefetch()
        tensors = self.on_device
        self.leave()
        self._memory.look_ahead(self)
        return tensors

    def __del__(self) -> None:
        """Let a copy end that nobody waited for, before its memory is used again."""
        for tensor in self.on_device or ():
            if tensor.is_cuda:
                tensor.record_stream(self._memory.stream)


def _offsets(tensors) -> list[int]:
    """Each tensor's offset in a buffer, then the buffer's size."""
    sizes = (-(-x.nbytes // _ALIGNMENT) * _ALIGNMENT for x in tensors)
    return [*accumulate(sizes, initial=0)]


def _pinned(num_bytes: int, stream: torch.cuda.Stream | None) -> Tensor:
    """A byte buffer, page-locked by hand while it is referenced, because torch's own allocator
    rounds up to powers of two. Without a stream it is not locked."""
    buffer = torch.empty(num_bytes, dtype=torch.uint8)
    if stream is not None and num_bytes:
        address = buffer.data_ptr()
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))
        weakref.finalize(buffer, _unpin, address, stream).atexit = False  # CUDA shuts down earlier
    return buffer


def _unpin(address: int, stream: torch.cuda.Stream) -> None:
    stream.synchronize()  # copies may be in flight
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))
