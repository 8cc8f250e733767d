"""The backend that carries a process group's tensors, whatever the group was made with.

`dist.get_backend` tells "undefined" of a group that was made without one, and both of a group for
CPU and GPU; TORCH_DISTRIBUTED_DEBUG=DETAIL wraps them.
"""

from datetime import timedelta

import torch
import torch.distributed as dist


def backend_of(group: dist.ProcessGroup) -> str:
    """Its name: "nccl" or "gloo", say; the GPU's where the group has two."""
    return _backend(group).name()


def seconds_of(group: dist.ProcessGroup) -> float:
    """Seconds after which the group's operations fail."""
    return _backend(group).options._timeout.total_seconds()


def set_seconds(group: dist.ProcessGroup, seconds: float) -> None:
    """Let the group's operations fail after so many seconds."""
    _backend(group)._set_default_timeout(timedelta(seconds=seconds))


def _backend(group: dist.ProcessGroup):
    kinds = {device.type: device for device in group._device_types}
    device = kinds["cuda"] if "cuda" in kinds and torch.cuda.is_available() else kinds["cpu"]
    backend = group._get_backend(device)
    return getattr(backend, "wrapped_pg", backend)
