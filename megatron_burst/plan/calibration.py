"""What `megatron-burst calibrate` measured on a machine, as data, and the hardware it makes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from megatron_burst.errors import BurstError
from megatron_burst.plan import hardware as planned
from megatron_burst.plan.hardware import MIB, Curve, Hardware, preset, preset_names
from megatron_burst.plan.tables import TomlFile, as_tables

Kind = Literal["intra", "inter", "all_to_all", "all_gather", "copy_engine", "host"]
_LINKS = {"intra": "intra", "copy_engine": "pull", "inter": "inter"}  # measured: the planner's
_BOTH = ("forward", "backward")
_LEAST = 0.05  # of a message's time is its bytes', however noisy the measured latency is


@dataclass(frozen=True, slots=True)
class KernelSpeed:
    """How fast a rank computes causal attention; the slowest rank's median.

    Attributes:
        backend: of the kernel.
        direction: of the pass; backward without the forward that it needs.
        head_dim: width of queries, keys and values.
        seq: tokens, all on one rank.
        tflops: TFLOP/s; masked pairs do not count: 2 matmuls forward, 5 backward.
    """

    backend: str
    direction: Literal["forward", "backward"]
    head_dim: int
    seq: int
    tflops: float


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """How fast ranks move data, all of them at once; the slowest rank's median.

    Attributes:
        kind: "intra" and "inter": a ring shift inside and between nodes. "all_to_all",
            "all_gather": over the ranks of a node. "copy_engine": ranks of a node read the next
            one's symmetric memory. "host": pinned copies, the slower of both directions.
        message_bytes: that a rank sends (all_gather: receives) in the call.
        gb_per_s: message_bytes over the time of the call, start included, in 1e9 bytes a second.
        latency_us: of the same call with next to nothing in it.
    """

    kind: Kind
    message_bytes: int
    gb_per_s: float
    latency_us: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """A machine.

    Attributes:
        name: what the user calls it.
        gpu: the GPU's own name.
        memory_gib: of a GPU.
        matmul_tflops: of a large dense product; bf16 on GPUs, fp32 on CPU.
        kernels: attention.
        links: transfers.
    """

    name: str
    gpu: str
    memory_gib: float
    matmul_tflops: float
    kernels: tuple[KernelSpeed, ...] = ()
    links: tuple[LinkSpeed, ...] = ()


def to_toml(calibration: Calibration) -> str:
    """The calibration as TOML: scalars, then an array of tables for each list."""
    return "# Written by `megatron-burst calibrate`.\n" + as_tables(calibration)


def from_toml(text: str, name: str) -> Calibration:
    """The calibration in a TOML text; `name` is the file's in errors.

    Raises:
        BurstError: if it is not TOML, or holds other names or types.
    """
    return TomlFile(text, name).read(Calibration)


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write it as TOML.

    Raises:
        BurstError: if the file cannot be written.
    """
    try:
        path.write_text(to_toml(calibration), encoding="utf-8")
    except OSError as error:
        raise BurstError(
            f"calibration: {path} must be writable, because that is where figures go; got "
            f"{error.strerror}; pass another --out"
        ) from None


def hardware(found: Calibration, name: str) -> Hardware:
    """The preset of the measured GPU with what was measured in place of its figures.

    Speeds of kernels are those of the longest sequence: shorter calls never reach the power limit
    that training runs at.

    Args:
        found: what was measured.
        name: of the file, for complaints.

    Raises:
        BurstError: if there is no preset of the GPU.
    """
    base = preset_of(found.gpu, name)
    of_kind = {kind: [row for row in found.links if row.kind == kind] for kind in (*_LINKS, "host")}
    links = {
        ours: _link(rows, _per_card(base, theirs))
        for theirs, ours in _LINKS.items()
        if (rows := of_kind[theirs])
    }
    gpu = replace(
        base.gpu,
        memory_gib=found.memory_gib,
        matmul_tflops=found.matmul_tflops,
        host_gbs=max((row.gb_per_s for row in of_kind["host"]), default=base.gpu.host_gbs),
    )
    kernels = _kernels(found.kernels)
    measured = {(kernel.backend, kernel.head_dim) for kernel in kernels}
    others = [k for k in base.kernels if (k.backend, k.head_dim) not in measured]
    return replace(
        base, name=found.name, gpu=gpu, links=replace(base.links, **links),
        kernels=(*kernels, *others), sources={**base.sources, "measured": name},
    )  # fmt: skip


def preset_of(gpu: str, name: str) -> Hardware:
    """The preset of a GPU.

    Args:
        gpu: its own name.
        name: of the file that it is in, for complaints.

    Raises:
        BurstError: if there is none.
    """
    for known in sorted(preset_names(), key=len, reverse=True):
        if known.partition("-")[0].upper() in gpu.upper():
            return preset(known)
    raise BurstError(
        f"hardware: {name} must be of a GPU that there is a preset of, because not everything is "
        f"measured; got {gpu!r}; describe it in a TOML file like those of "
        "megatron_burst/plan/machines"
    )


def _kernels(rows: Iterable[KernelSpeed]) -> tuple[planned.KernelSpeed, ...]:
    longest: dict[tuple[str, int], dict[str, float]] = {}
    for row in sorted(rows, key=lambda row: row.seq):
        longest.setdefault((row.backend, row.head_dim), {})[row.direction] = row.tflops
    return tuple(
        planned.KernelSpeed(*key, *(Curve(((1.0, by[d]),)) for d in _BOTH))
        for key, by in longest.items()
        if set(by) == set(_BOTH)
    )


def _per_card(base: Hardware, kind: str) -> float:
    """Ranks that shared a network card while all of them sent."""
    return max(1.0, base.node.gpus / base.node.nics) if kind == "inter" else 1.0


def _link(rows: Sequence[LinkSpeed], ranks: float) -> planned.LinkSpeed:
    """A link from messages whose GB/s include the time to start."""
    latency_us = min(row.latency_us for row in rows)
    points = []
    for row in sorted(rows, key=lambda row: row.message_bytes):
        seconds = row.message_bytes / (row.gb_per_s * 1e9)
        moving = max(seconds - latency_us * 1e-6, seconds * _LEAST)
        points.append((row.message_bytes / MIB, ranks * row.message_bytes / moving / 1e9))
    return planned.LinkSpeed(latency_us, Curve(tuple(points)))
