"""What a measurement depends on besides its options: software and the state of the device."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from megatron_burst.installed import find_megatron
from megatron_burst.version import __version__

_PACKAGES = {"te": "transformer-engine", "fa4": "flash-attn-4"}


def software() -> dict[str, str]:
    """Versions of what takes part, by name; all hosts of a job should have the same."""
    found = {"burst": __version__, "python": platform.python_version(), "torch": torch.__version__}
    if megatron := find_megatron():  # a checkout has no distribution
        found["megatron-core"] = megatron.version
    for name, package in _PACKAGES.items():  # what it is called here, and its distribution
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def versions() -> str:
    """`software` in words, for example "burst 0.1.0; python 3.12.1; torch 2.11.0; nccl 2.28.9".

    On GPUs also "cudnn", and "connections N": CUDA_DEVICE_MAX_CONNECTIONS, on which overlap
    depends.
    """
    found = software()
    if torch.cuda.is_available():
        found["cudnn"] = _cudnn_version()
        found["connections"] = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "default")
    return "; ".join(f"{name} {number}" for name, number in found.items())


def _cudnn_version() -> str:
    """Of the one that torch calls; TransformerEngine may have loaded another."""
    try:
        number = torch.backends.cudnn.version() or 0
    except RuntimeError:  # the two do not get along
        return "unknown"
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def gpu_state(device: torch.device) -> str:
    """Name, clock and temperature of a device, as far as it tells."""
    if device.type != "cuda":
        return "CPU"
    name = torch.cuda.get_device_name(device)
    try:
        clock, heat = torch.cuda.clock_rate(device), torch.cuda.temperature(device)
    except Exception:  # NVML is missing, or closed as in some containers: each in its own way
        return name
    return f"{name}; {clock} MHz, {heat} C"
