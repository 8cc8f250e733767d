"""GPUs, as nvidia-smi describes them: state, memory, NVLink."""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

from megatron_burst.cli.doctor.report import Check, Status, ok, skip, warn
from megatron_burst.cli.doctor.survey import GPU_FIELDS, Survey

_BUSY_SHARE = 0.05  # of memory: what drivers and idle contexts take stays below
# nvmlClocksThrottleReasons of nvml.h: those that no healthy GPU has
_THROTTLES = {0x8: "hardware slowdown", 0x20: "heat (software)", 0x40: "heat", 0x80: "power brake"}


def _whole(text: str) -> int:
    return int(text, 0) if re.fullmatch(r"0x[0-9a-fA-F]+|\d+", text) else 0


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # [N/A], [Not Supported]
        return None


_READERS = {int: _whole, str: str, float | None: _number}


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, in the order of GPU_FIELDS; numbers are None where the driver does not tell."""

    index: int
    uuid: str
    name: str
    compute_cap: float | None
    driver: str
    memory_mib: float | None
    used_mib: float | None
    clock_mhz: float | None
    max_clock_mhz: float | None
    throttles: int
    ecc: str
    ecc_errors: float | None
    heat_c: float | None
    mig: str
    compute_mode: str


def gpus_of(survey: Survey) -> list[Gpu]:
    """The GPUs; none where nvidia-smi is missing or answers otherwise."""
    lines = ([cell.strip() for cell in line.split(",")] for line in survey.lines("gpus"))
    readers = [_READERS[field.type] for field in fields(Gpu)]
    return [
        Gpu(*(read(cell) for read, cell in zip(readers, cells, strict=True)))
        for cells in lines
        if len(cells) == len(GPU_FIELDS) and cells[0].isdigit()
    ]


def free_gpus(survey: Survey) -> list[int]:
    """Indices of GPUs on which nothing runs."""
    busy = {line.split(",")[0].strip() for line in survey.lines("processes")}
    return [
        gpu.index
        for gpu in gpus_of(survey)
        if gpu.uuid not in busy and (gpu.used_mib or 0) <= _BUSY_SHARE * (gpu.memory_mib or 1e9)
    ]


def check_state(survey: Survey) -> list[Check]:
    """Clocks, heat, ECC, modes and memory of the GPUs."""
    gpus = gpus_of(survey)
    if not gpus:
        said = survey.word("gpus") or "nothing"
        return [skip("gpus", f"nvidia-smi lists no GPU; it says: {said}")]
    kinds = sorted({gpu.name for gpu in gpus})
    memory = (gpus[0].memory_mib or 0) / 1024
    what = f"{len(gpus)} x {', '.join(kinds)}, {memory:.0f} GiB, driver {gpus[0].driver}"
    found = [ok("gpus", what)]
    if len(kinds) > 1:
        found = [warn("gpus", what, "give a job GPUs of one kind: the slowest sets the pace")]
    taken = [gpu.index for gpu in gpus if gpu.index not in free_gpus(survey)]
    free = ok("free", f"all {len(gpus)} GPUs are free")
    if taken:
        what = f"GPUs {taken} are in use by other processes"
        free = warn("free", what, "wait for them, or leave these GPUs out")
    found += [_faults("ecc", gpus, "no uncorrected error"), _clocks(gpus)]
    return [*found, _faults("modes", gpus, f"compute mode {gpus[0].compute_mode}"), free]


class _Fault(NamedTuple):
    """What some GPUs may have: its check, whether a GPU has it, how bad it is, what to say."""

    name: str
    has: Callable[[Gpu], object]
    status: Status
    what: str
    change: str


_FAULTS = (
    _Fault("ecc", lambda gpu: gpu.ecc_errors, Status.FAIL,
           "GPUs {} had memory errors that ECC could not correct",
           "have these GPUs reset or replaced: results cannot be trusted"),
    _Fault("ecc", lambda gpu: gpu.ecc == "Disabled", Status.WARN, "ECC is off on GPUs {}",
           "have it switched on"),
    _Fault("modes", lambda gpu: gpu.compute_mode == "Prohibited", Status.FAIL,
           "compute mode Prohibited on GPUs {}", "ask for compute mode Default"),
    _Fault("modes", lambda gpu: gpu.mig == "Enabled", Status.FAIL,
           "MIG is on on GPUs {}: no NVLink and no peer access between slices",
           "ask for whole GPUs"),
)  # fmt: skip


def _faults(name: str, gpus: list[Gpu], fine: str) -> Check:
    """The first fault of a check that any GPU has."""
    for fault in _FAULTS:
        having = [gpu.index for gpu in gpus if fault.has(gpu)]
        if fault.name == name and having:
            return Check(name, fault.status, fault.what.format(having), fault.change)
    return ok(name, fine)


def _clocks(gpus: list[Gpu]) -> Check:
    reasons = {
        gpu.index: ", ".join(why for bit, why in _THROTTLES.items() if gpu.throttles & bit)
        for gpu in gpus
    }
    slowed = [f"GPU {index}: {why}" for index, why in reasons.items() if why]
    if slowed:
        change = "look at cooling and power: one slow GPU slows all ranks down"
        return warn("clocks", f"slowed down by {'; '.join(slowed)}", change)
    top = sorted({gpu.max_clock_mhz for gpu in gpus if gpu.max_clock_mhz})
    now = [gpu.clock_mhz for gpu in gpus if gpu.clock_mhz]
    hot = [gpu.heat_c for gpu in gpus if gpu.heat_c]
    what = f"at {min(now, default=0):.0f} to {max(now, default=0):.0f} MHz now"
    what += f", at most {'/'.join(f'{mhz:.0f}' for mhz in top)} MHz"
    what += f", {max(hot):.0f} C" if hot else ""
    if len(top) > 1:
        change = "set the same application clocks, or leave the slow GPUs out"
        return warn("clocks", f"GPUs differ: {what}", change)
    return ok("clocks", what)


@dataclass(frozen=True, slots=True)
class Matrix:
    """What `nvidia-smi topo -m` prints: the relation of two devices (X, NV#, PIX, PXB, PHB, NODE or
    SYS), and the device of each NIC label."""

    cells: dict[tuple[str, str], str]
    names: dict[str, str]

    def labels(self, gpus: bool) -> list[str]:
        """Labels of GPUs, or of NICs, in order."""
        rows = [row for row, column in self.cells if row == column]
        return [row for row in rows if row.startswith("GPU") is gpus]


def matrix_of(survey: Survey) -> Matrix:
    """The matrix of links between GPUs and NICs; empty where there is none."""
    cells: dict[tuple[str, str], str] = {}
    names: dict[str, str] = {}
    columns: list[str] = []
    for line in survey.lines("topology"):
        line = re.sub(r"\x1b\[[0-9;]*m", "", line)
        first, *rest = line.split()
        if legend := re.fullmatch(r"\s*(NIC\d+):\s*(\S+)\s*", line):
            names[legend[1]] = legend[2]
        elif not columns and first == "GPU0":
            columns = [word for word in line.split() if re.fullmatch(r"(GPU|NIC)\d+|mlx\S+", word)]
        elif first in columns:
            cells |= {(first, column): cell for column, cell in zip(columns, rest, strict=False)}
    return Matrix(cells, names)


def check_nvlink(survey: Survey) -> Check:
    """NVLink between all GPUs, and as many live links on each."""
    matrix = matrix_of(survey)
    gpus = matrix.labels(gpus=True)
    if len(gpus) < 2:
        return skip("nvlink", "no two GPUs to join")
    pairs = [(a, b) for a in gpus for b in gpus if a < b]
    without = [pair for pair in pairs if not matrix.cells[pair].startswith("NV")]
    if without:
        a, b = without[0]
        what = f"{len(without)} of {len(pairs)} pairs of GPUs have no NVLink; {a} and {b} are"
        change = "keep context parallelism to GPUs that NVLink joins, or pass --burst-intra ring"
        return warn("nvlink", f"{what} joined by {matrix.cells[a, b]}", change)
    live = _live_links(survey)
    if len(set(live.values())) > 1:
        most = max(live.values())
        fewer = ", ".join(f"GPU {gpu}: {n}" for gpu, n in live.items() if n < most)
        what = f"some GPUs have fewer than {most} live links: {fewer}"
        return warn("nvlink", what, "have these GPUs looked at: their rings are slow")
    kinds = sorted({matrix.cells[pair] for pair in pairs})
    return ok("nvlink", f"{'/'.join(kinds)} between all {len(gpus)} GPUs")


def _live_links(survey: Survey) -> dict[str, int]:
    """Links that are up, by GPU."""
    live: dict[str, int] = {}
    for line in survey.lines("nvlink"):
        if gpu := re.match(r"GPU (\d+):", line):
            live[gpu[1]] = 0
        elif live and re.search(r"Link \d+: [\d.]+ GB/s", line):
            live[next(reversed(live))] += 1
    return live
