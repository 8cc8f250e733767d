"""What a measurement depends on besides its options: software, device state, links."""

import ctypes
import os
import platform
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache, partial
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from megatron_burst.tools.doctor.software import software
from megatron_burst.tools.speeds import shift_once, times_ms
from megatron_burst.tools.world import World

# Peers and a kernel, as their distributions are called; torch and fa4 are named anyway.
_LIBRARIES = (
    "deepspeed", "yunchang", "quack-kernels", "liger-kernel", "cut-cross-entropy", "flash-attn-3",
)  # fmt: skip
_NUM_BYTES = {"cuda": 256 << 20, "cpu": 1 << 20}


def now() -> str:
    """Date and time, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def stamp(device: torch.device) -> dict[str, str]:
    """Columns that any measured row has: when, of what, on what."""
    return {"date": now(), "versions": versions(), "gpu": gpu_state(device)}


def planner_stamp(machine: str) -> dict[str, str]:
    """The same columns of a prediction for a machine."""
    planner = f"planner at commit {commit()}"
    return {"date": now(), "versions": planner, "gpu": f"predicted for {machine}"}


def versions() -> str:
    """`software` in words, for example "burst 0.1.0; python 3.12.1; torch 2.11.0; commit 1a2b3c4".
    On GPUs also "cudnn", of the libraries that are loaded, and "connections N":
    CUDA_DEVICE_MAX_CONNECTIONS, on which overlap depends."""
    numbers = {**software()}
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            numbers[name] = version(name)
    numbers["commit"] = commit()
    if torch.cuda.is_available():
        numbers["cudnn"] = " and ".join(loaded_cudnn()) or "not loaded"
        numbers["connections"] = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "default")
    return "; ".join(f"{name} {number}" for name, number in numbers.items())


@lru_cache
def commit() -> str:
    """The checked-out commit, and whether files other than predictions and results differ. In a
    copy of a checkout, whose git does not know, MEGATRON_BURST_COMMIT tells."""
    if known := os.environ.get("MEGATRON_BURST_COMMIT"):
        return known
    folder, status = Path(__file__).parents[1], ["status", "--porcelain", "--untracked-files=no"]
    apart = [":!benchmarks/predictions", ":!benchmarks/results"]
    head, changes = (
        subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True).stdout.strip()
        for words in (["rev-parse", "--short=12", "HEAD"], [*status, "--", ".", *apart])
    )
    return f"{head or 'unknown'}{' with changes' if changes else ''}"


def loaded_cudnn(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Versions of the cuDNN libraries in this process, as they report them: torch and
    TransformerEngine may each have loaded one. `maps` lists the files that it has mapped."""
    if not maps.is_file():
        return []
    words = [line.split() for line in maps.read_text().splitlines()]
    files = {word[-1] for word in words if Path(word[-1]).name.startswith("libcudnn.so")}
    numbers = {ctypes.CDLL(file).cudnnGetVersion() for file in sorted(files)}
    return [f"{n // 10000}.{n // 100 % 100}.{n % 100}" for n in sorted(numbers)]


def gpu_state(device: torch.device) -> str:
    """A device as far as known, "NVIDIA H200; 1980 MHz, 42 C; machine 1a2b3c4d". The machine is a
    hash of the host's name and the GPU's UUID, which tells two apart and names neither."""
    if device.type != "cuda":
        return "CPU"
    name, uuid = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).uuid
    machine = f"machine {sha256(f'{platform.node()} {uuid}'.encode()).hexdigest()[:8]}"
    try:
        clock, heat = torch.cuda.clock_rate(device), torch.cuda.temperature(device)
    except Exception:  # NVML is missing, or closed as in some containers: each in its own way
        return f"{name}; {machine}"
    return f"{name}; {clock} MHz, {heat} C; {machine}"


def link_speed(world: World) -> str:
    """GB/s that leave a rank, on several nodes for others, in a ring shift and an all-to-all."""
    if world.size == 1:
        return ""
    send = torch.ones(_NUM_BYTES[world.device.type], dtype=torch.uint8, device=world.device)
    send = send[: send.numel() // world.size * world.size]
    recv = torch.empty_like(send)
    across = world.nodes > 1 and world.size % world.nodes == 0
    distance = world.size // world.nodes if across else 1
    staying = distance / world.size  # the share of an all-to-all that does not leave
    to, source = ((world.rank + sign * distance) % world.size for sign in (1, -1))
    shift = partial(shift_once, send, recv, to, source, world.group)
    exchange = partial(dist.all_to_all_single, recv, send, group=world.group)
    ring = _gbs(shift, send.numel(), world)
    all_to_all = _gbs(exchange, send.numel() * (1 - staying), world)
    where = f"between {world.nodes} nodes" if across else "on one node"
    if across and world.machines == 1:
        where += " of one machine"
    return f"ring {ring:.3g}, all-to-all {all_to_all:.3g} GB/s {where}"


def _gbs(run, num_bytes: float, world: World) -> float:
    """GB/s of the slowest rank, median over repetitions."""
    of_ranks = world.gather(times_ms(run, world))
    return num_bytes / (median(map(max, zip(*of_ranks, strict=True))) * 1e6)
