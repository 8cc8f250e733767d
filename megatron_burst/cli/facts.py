"""What a measurement depends on besides its options: software and the state of the device."""

import ctypes
import os
import platform
import subprocess
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

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
    """`software` in words, for example "burst 0.1.0; python 3.12.1; torch 2.11.0; commit 1a2b3c4".

    On GPUs also "cudnn", of the libraries that are loaded, and "connections N":
    CUDA_DEVICE_MAX_CONNECTIONS, on which overlap depends.
    """
    found = {**software(), "commit": commit()}
    if torch.cuda.is_available():
        found["cudnn"] = " and ".join(loaded_cudnn()) or "not loaded"
        found["connections"] = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "default")
    return "; ".join(f"{name} {number}" for name, number in found.items())


@lru_cache
def commit() -> str:
    """The commit that runs, and whether other files differ from it than predictions and results.

    In a copy of a checkout, whose git does not know, MEGATRON_BURST_COMMIT tells.
    """
    if told := os.environ.get("MEGATRON_BURST_COMMIT"):
        return told
    folder, status = Path(__file__).parents[2], ["status", "--porcelain", "--untracked-files=no"]
    apart = [":!benchmarks/predictions", ":!benchmarks/results"]
    head, changes = (
        subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True).stdout.strip()
        for words in (["rev-parse", "--short=12", "HEAD"], [*status, "--", ".", *apart])
    )
    return f"{head or 'unknown'}{' with changes' if changes else ''}"


def loaded_cudnn(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Versions of the cuDNN libraries in this process, as they tell them themselves.

    Torch and TransformerEngine may each have loaded one of their own.

    Args:
        maps: lists the files that the process has mapped.
    """
    if not maps.is_file():
        return []
    words = [line.split() for line in maps.read_text().splitlines()]
    files = {word[-1] for word in words if Path(word[-1]).name.startswith("libcudnn.so")}
    numbers = {ctypes.CDLL(file).cudnnGetVersion() for file in sorted(files)}
    return [f"{n // 10000}.{n // 100 % 100}.{n % 100}" for n in sorted(numbers)]


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
