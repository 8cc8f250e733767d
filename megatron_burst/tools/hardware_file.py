"""Hardware from TOML: presets, files in their format, and output of `megatron-burst calibrate`."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from importlib.resources import files
from json import dumps

from megatron_burst.errors import BurstError, nearest
from megatron_burst.files import Reader, excerpt
from megatron_burst.tools.hardware import (
    MIB,
    Calibration,
    Curve,
    Hardware,
    KernelRow,
    KernelSpeed,
    LinkRow,
    LinkSpeed,
)

_FOLDER = files("megatron_burst.tools") / "machines"
_LINKS = {"intra": "intra", "copy_engine": "pull", "inter": "inter"}  # measured: the planner's
_LEAST = 0.05  # least share of a message's time spent on bytes, however noisy the measured latency


def to_toml(calibration: Calibration) -> str:
    """The calibration as TOML: scalars, then an array of tables for each list."""
    values = asdict(calibration)
    tables = {name: values.pop(name) for name in ("kernels", "links")}
    blocks = [["# Written by `megatron-burst calibrate`.", *_lines(values)]]
    blocks += [[f"[[{name}]]", *_lines(row)] for name, rows in tables.items() for row in rows]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _lines(values: Mapping[str, object]) -> list[str]:
    # a JSON string is a TOML basic string, except for surrogate pairs and DEL
    return [
        f"{key} = {dumps(one, ensure_ascii=False)}".replace("\x7f", "\\u007f")
        for key, one in values.items()
    ]


def preset_names() -> tuple[str, ...]:
    """Names of the presets."""
    names = (entry.name for entry in _FOLDER.iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def preset_text(name: str) -> str:
    """The TOML of a preset, one of `preset_names()`."""
    return (_FOLDER / f"{name}.toml").read_text()


@lru_cache(maxsize=64)
def preset(name: str) -> Hardware:
    """A preset by its name."""
    return parse_hardware(preset_text(name), f"the preset {name}")


def hardware(name_or_path: str) -> Hardware:
    """A preset by name, else the TOML file of that path.

    Raises:
        BurstError: if it is neither, cannot be read, or lacks or has too many figures.
    """
    names = preset_names()
    if name_or_path.lower() in names:
        return preset(name_or_path.lower())
    if not os.path.exists(name_or_path):
        raise BurstError(
            "hardware: --hardware must be a preset or a readable TOML file, because speeds come "
            f"from it; got {excerpt(name_or_path)!r}{nearest(name_or_path.lower(), names)} (No "
            f"such file); choose one of {', '.join(names)} or a file that megatron-burst calibrate "
            "wrote"
        )
    return parse_hardware(_reader(name_or_path).text(), name_or_path)


def parse_hardware(text: str, name: str) -> Hardware:
    """Hardware from TOML like a preset's, or from what calibrate wrote; a refusal names the file.

    Raises:
        BurstError: if it is no TOML, or lacks or has too many figures.
    """
    reader = _reader(name)
    table = reader.toml(text)
    if isinstance(table.get("gpu"), str):  # calibrate names the GPU, presets describe it
        return _measured(reader.typed(Calibration, table), name)
    result: Hardware = reader.typed(Hardware, table)
    return result


def _reader(name: str) -> Reader:
    why = "the planner uses all figures and no others"
    return Reader("hardware", name, why, "correct the file", most=64 << 10)


def _measured(calibration: Calibration, name: str) -> Hardware:
    """The preset of the measured GPU, with measured figures in place of its own.

    Speeds of kernels are those of the longest sequence: shorter calls never reach the power limit
    that training runs at.
    """
    base = preset_of(calibration.gpu, name)
    links = {}
    for kind, ours in _LINKS.items():
        if rows := [row for row in calibration.links if row.kind == kind]:
            # ranks that shared a network card while all sent
            ranks = max(1.0, base.node.gpus / base.node.nics) if kind == "inter" else 1.0
            links[ours] = _link(rows, ranks)
    copies = [row.gb_per_s for row in calibration.links if row.kind == "host"]
    gpu = replace(
        base.gpu, memory_gib=calibration.memory_gib, matmul_tflops=calibration.matmul_tflops,
        host_gbs=max(copies, default=base.gpu.host_gbs),
    )  # fmt: skip
    kernels = _kernels(calibration.kernels, base.kernels)
    measured = {(kernel.backend, kernel.head_dim) for kernel in kernels}
    others = [k for k in base.kernels if (k.backend, k.head_dim) not in measured]
    return replace(
        base, name=calibration.name, gpu=gpu, links=replace(base.links, **links),
        kernels=(*kernels, *others), sources={**base.sources, "measured": name},
    )  # fmt: skip


def preset_of(gpu: str, name: str) -> Hardware:
    """The preset of a GPU with this device name; `name`: the file that names it, for errors.

    Raises:
        BurstError: if there is none.
    """
    for known in sorted(preset_names(), key=len, reverse=True):
        if known.partition("-")[0].upper() in gpu.upper():
            return preset(known)
    raise BurstError(
        f"hardware: {name} must be for a GPU with a preset, because calibration does not "
        f"measure everything; got {gpu!r}; describe it in a TOML file like those of "
        "megatron_burst/tools/machines"
    )


def _kernels(rows: Sequence[KernelRow], known: Sequence[KernelSpeed]) -> list[KernelSpeed]:
    """Kernels measured in both directions; what is not measured is as in those that are known."""
    before = {(kernel.backend, kernel.head_dim): kernel for kernel in known}
    longest: dict[tuple[str, int], dict[str, Curve]] = {}
    for row in sorted(rows, key=lambda row: row.seq):
        speed = Curve(((1.0, row.tflops),))
        longest.setdefault((row.backend, row.head_dim), {})[row.direction] = speed
    kernels = []
    for key, by in longest.items():
        if len(by) == 2:
            new = KernelSpeed(*key, by["forward"], by["backward"])
            old = before.get(key, new)
            kernels.append(replace(old, forward=new.forward, backward=new.backward))
    return kernels


def _link(rows: Sequence[LinkRow], ranks: float) -> LinkSpeed:
    """A link from messages whose GB/s include the time to start."""
    latency_us = min(row.latency_us for row in rows)
    points = []
    for row in sorted(rows, key=lambda row: row.message_bytes):
        seconds = row.message_bytes / (row.gb_per_s * 1e9)
        moving = max(seconds - latency_us * 1e-6, seconds * _LEAST)
        points.append((row.message_bytes / MIB, ranks * row.message_bytes / moving / 1e9))
    return LinkSpeed(latency_us, Curve(tuple(points)))
