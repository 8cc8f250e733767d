"""What `megatron-burst calibrate` measured, put in place of a preset's figures."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_burst.errors import BurstError
from megatron_burst.plan.hardware import (
    MIB,
    Curve,
    Hardware,
    KernelSpeed,
    LinkSpeed,
    preset,
    preset_names,
)

_LINKS = {"intra": "intra", "copy_engine": "pull", "inter": "inter"}  # theirs: ours
_BOTH = ("forward", "backward")
_LEAST = 0.05  # of a message's time is its bytes', however noisy the measured latency is


def is_calibration(table: Mapping[str, Any]) -> bool:
    """Whether TOML is calibrate's: it names its GPU."""
    return isinstance(table.get("gpu"), str)


def calibrated(table: Mapping[str, Any], name: str) -> Hardware:
    """The preset of the measured GPU with what was measured in place of its figures.

    Speeds of kernels are those of the longest sequence: shorter calls never reach the power limit
    that training runs at.

    Args:
        table: of the TOML.
        name: of the file, for complaints.

    Raises:
        BurstError: if a figure is missing, or there is no preset of the GPU.
    """
    try:
        base = _preset_of(str(table["gpu"]), name)
        matmul, memory = float(table["matmul_tflops"]), float(table["memory_gib"])
        kernels = _kernels(table.get("kernels", ()))
        rates = [row["gb_per_s"] for row in table.get("links", ()) if row["kind"] == "host"]
        links = {
            ours: _link(rows, _per_card(base, theirs))
            for theirs, ours in _LINKS.items()
            if (rows := [row for row in table.get("links", ()) if row["kind"] == theirs])
        }
        machine = str(table["name"])
    except BurstError:  # a ValueError too, but a sentence already
        raise
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise BurstError(
            f"hardware: {name} must hold name, gpu, memory_gib, matmul_tflops, [[kernels]] and "
            f"[[links]] as calibrate writes them, because they replace a preset's figures; got a "
            f"wrong or missing {error}; run megatron-burst calibrate again"
        ) from error
    host_gbs = max(rates, default=base.gpu.host_gbs)
    gpu = replace(base.gpu, memory_gib=memory, matmul_tflops=matmul, host_gbs=host_gbs)
    measured = {(kernel.backend, kernel.head_dim) for kernel in kernels}
    others = [k for k in base.kernels if (k.backend, k.head_dim) not in measured]
    return replace(
        base, name=machine, gpu=gpu, links=replace(base.links, **links),
        kernels=(*kernels, *others), sources={**base.sources, "measured": name},
    )  # fmt: skip


def _preset_of(gpu: str, name: str) -> Hardware:
    for known in sorted(preset_names(), key=len, reverse=True):
        if known.partition("-")[0].upper() in gpu.upper():
            return preset(known)
    raise BurstError(
        f"hardware: {name} must be of a GPU that there is a preset of, because calibrate does not "
        f"measure everything; got {gpu!r}; describe it in a TOML file like those of "
        "megatron_burst/plan/machines"
    )


def _kernels(rows: Sequence[Mapping[str, Any]]) -> tuple[KernelSpeed, ...]:
    longest: dict[tuple, dict[str, Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["seq"]):
        longest.setdefault((row["backend"], row["head_dim"]), {})[row["direction"]] = row
    return tuple(
        KernelSpeed(
            str(backend), int(head_dim), *(Curve(((1.0, float(by[d]["tflops"])),)) for d in _BOTH)
        )
        for (backend, head_dim), by in longest.items()
        if set(by) == set(_BOTH)
    )


def _per_card(base: Hardware, kind: str) -> float:
    """Ranks that shared a network card while all of them sent."""
    return max(1.0, base.host.gpus / base.host.nics) if kind == "inter" else 1.0


def _link(rows: Sequence[Mapping[str, Any]], ranks: float) -> LinkSpeed:
    """A link from messages whose GB/s include the time to start."""
    latency_us = min(float(row["latency_us"]) for row in rows)
    points = []
    for row in sorted(rows, key=lambda row: row["message_bytes"]):
        num_bytes = float(row["message_bytes"])
        seconds = num_bytes / (float(row["gb_per_s"]) * 1e9)
        moving = max(seconds - latency_us * 1e-6, seconds * _LEAST)
        points.append((num_bytes / MIB, ranks * num_bytes / moving / 1e9))
    return LinkSpeed(latency_us, Curve(tuple(points)))
