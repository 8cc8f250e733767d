"""Inputs of checkpoints in host memory: of one frame, or of all that run in a context."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_burst.recompute.keeping import Frame, Parcel, Resident
from megatron_burst.recompute.offload import host_memory

_LEAST = 1 << 10  # elements of an input worth offloading
# the limit of host memory in GiB, in a tuple, while all checkpoints offload
_LIMIT: ContextVar[tuple[float | None] | None] = ContextVar("inputs on host", default=None)


@contextmanager
def all_on_host(limit_gib: float | None) -> Iterator[None]:
    """While it lasts, torch's non-reentrant checkpoints offload their functions' inputs."""
    token = _LIMIT.set((limit_gib,))
    try:
        yield
    finally:
        _LIMIT.reset(token)


def all_go_to_host() -> bool:
    """Whether checkpoints offload their inputs now."""
    return _LIMIT.get() is not None


def saved_inputs(frame: Frame):
    """Context in which a checkpoint saves its inputs: on the host if all do."""
    limit = _LIMIT.get()
    return nullcontext() if limit is None else offloaded_inputs(frame, *limit)


def offloaded_inputs(frame: Frame, limit_gib: float | None) -> saved_tensors_hooks:
    """Context that saves tensors on the host, as inputs of a frame's recomputation; small ones and
    those without a gradient stay on the device."""

    def pack(x: Tensor) -> Parcel:
        if not (x.requires_grad and x.is_contiguous() and x.numel() >= _LEAST):
            return Resident((x,))
        return host_memory(x.device, limit_gib).pack((x.detach(),), input_of=frame)

    return saved_tensors_hooks(pack, lambda parcel: parcel.get()[0])
