"""Emulates nodes on one machine, whose processes share GPUs where there are fewer than ranks.

NCCL refuses two ranks on one GPU only within a node, and nodes are what NCCL_HOSTID says.
"""

import os
import sys
from pathlib import Path

from megatron_burst.imports import when_imported

# Of TransformerEngine: it makes tensors on the device of its rank's number.
_BY_RANK = ("run_cp_thd_tail_padding.py",)


def install() -> None:
    """Do so in this process, if CONFORMANCE_NODES asks; imports no torch."""
    nodes = int(os.environ.get("CONFORMANCE_NODES", "1"))
    if nodes == 1:
        return
    if "RANK" in os.environ:
        node = int(os.environ["RANK"]) * nodes // int(os.environ["WORLD_SIZE"])
        os.environ["NCCL_HOSTID"] = f"pretended-{node}"  # before NCCL starts
    when_imported("torch", _share)


def _share() -> None:
    """Let a peer's test find a device for each rank, and number them as if they were its own."""
    import torch

    count, set_device = torch.cuda.device_count, torch.cuda.set_device
    ranks = int(os.environ["CONFORMANCE_RANKS"])

    def device_count() -> int:
        asked_by = sys._getframe(1).f_globals.get("__name__", "")
        inside = asked_by.partition(".")[0] == "torch"  # it asks each device for its properties
        return count() if inside else max(count(), ranks)

    def set_existing_device(device) -> None:
        set_device(device % count() if isinstance(device, int) and device > 0 else device)

    torch.cuda.device_count, torch.cuda.set_device = device_count, set_existing_device
    if Path(sys.argv[0]).name in _BY_RANK:
        torch.device = _existing(torch.device, count)


def _existing(kind: type, count) -> type:
    """A class in the place of torch.device whose instances are torch's own, of devices there
    are."""

    class Instances(type):
        def __instancecheck__(cls, one) -> bool:
            return isinstance(one, kind)

    class Device(metaclass=Instances):
        def __new__(cls, *given, **named):
            made = kind(*given, **named)
            return (
                kind("cuda", made.index % count()) if made.type == "cuda" and made.index else made
            )

    Device.__module__, Device.__qualname__ = "torch", "device"  # by which pickle finds it
    return Device
