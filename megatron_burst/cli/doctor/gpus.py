"""GPUs, as nvidia-smi describes them: state, memory, NVLink."""

import re
from dataclasses import dataclass

from megatron_burst.cli.doctor.record import Check, Status
from megatron_burst.cli.doctor.survey import GPU_FIELDS, Survey

_BUSY_SHARE = 0.05  # of memory: what drivers and idle contexts take stays below
_MIB_PER_GIB = 1024
# nvmlClocksThrottleReasons of nvml.h: those that no healthy GPU has
_THROTTLES = {0x8: "hardware slowdown", 0x20: "heat (software)", 0x40: "heat", 0x80: "power brake"}


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; numbers are None where the driver does not tell."""

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
    return [gpu for line in survey.lines("gpus") if (gpu := _gpu(line)) is not None]


def _gpu(line: str) -> Gpu | None:
    values = [value.strip() for value in line.split(",")]
    if len(values) != len(GPU_FIELDS) or not values[0].isdigit():
        return None
    index, uuid, name, cap, driver, *rest = values
    memory, used, clock, max_clock, throttles, ecc, errors, heat, mig, mode = rest
    return Gpu(
        int(index), uuid, name, _number(cap), driver, _number(memory), _number(used),
        _number(clock), _number(max_clock), _bits(throttles), ecc, _number(errors), _number(heat),
        mig, mode,
    )  # fmt: skip


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # [N/A], [Not Supported]
        return None


def _bits(text: str) -> int:
    return int(text, 16) if re.fullmatch(r"0x[0-9a-fA-F]+", text) else 0


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
        return [Check("gpus", Status.SKIP, f"nvidia-smi lists no GPU; it says: {said}")]
    kinds = sorted({gpu.name for gpu in gpus})
    memory = (gpus[0].memory_mib or 0) / _MIB_PER_GIB
    what = f"{len(gpus)} x {', '.join(kinds)}, {memory:.0f} GiB, driver {gpus[0].driver}"
    mixed = Status.WARN if len(kinds) > 1 else Status.OK
    change = "give a job GPUs of one kind: the slowest sets the pace" if len(kinds) > 1 else ""
    found = [Check("gpus", mixed, what, change)]
    return found + [check(gpus, survey) for check in (_ecc, _clocks, _modes, _memory)]


def _ecc(gpus: list[Gpu], survey: Survey) -> Check:
    bad = [gpu.index for gpu in gpus if gpu.ecc_errors]
    off = [gpu.index for gpu in gpus if gpu.ecc == "Disabled"]
    if bad:
        return Check(
            "ecc", Status.FAIL, f"GPUs {bad} had memory errors that ECC could not correct",
            "have these GPUs reset or replaced: results cannot be trusted",
        )  # fmt: skip
    if off:
        return Check("ecc", Status.WARN, f"ECC is off on GPUs {off}", "have it switched on")
    return Check("ecc", Status.OK, "no uncorrected error")


def _clocks(gpus: list[Gpu], survey: Survey) -> Check:
    slowed = {
        gpu.index: ", ".join(why for bit, why in _THROTTLES.items() if gpu.throttles & bit)
        for gpu in gpus
        if gpu.throttles & sum(_THROTTLES)
    }
    if slowed:
        what = "; ".join(f"GPU {index}: {why}" for index, why in slowed.items())
        change = "look at cooling and power: one slow GPU slows all ranks down"
        return Check("clocks", Status.WARN, f"slowed down by {what}", change)
    top = sorted({gpu.max_clock_mhz for gpu in gpus if gpu.max_clock_mhz})
    now = [gpu.clock_mhz for gpu in gpus if gpu.clock_mhz]
    hot = [gpu.heat_c for gpu in gpus if gpu.heat_c]
    figures = f"at {min(now, default=0):.0f} to {max(now, default=0):.0f} MHz now"
    what = f"{figures}, at most {'/'.join(f'{mhz:.0f}' for mhz in top)} MHz"
    what += f", {max(hot):.0f} C" if hot else ""
    if len(top) > 1:
        change = "set the same application clocks, or leave the slow GPUs out"
        return Check("clocks", Status.WARN, f"GPUs differ: {what}", change)
    return Check("clocks", Status.OK, what)


def _modes(gpus: list[Gpu], survey: Survey) -> Check:
    split = [gpu.index for gpu in gpus if gpu.mig == "Enabled"]
    closed = [gpu.index for gpu in gpus if gpu.compute_mode == "Prohibited"]
    if closed:
        what = f"compute mode Prohibited on GPUs {closed}"
        return Check("modes", Status.FAIL, what, "ask for compute mode Default")
    if split:
        what = f"MIG is on on GPUs {split}: no NVLink and no peer access between slices"
        return Check("modes", Status.FAIL, what, "ask for whole GPUs")
    return Check("modes", Status.OK, f"compute mode {gpus[0].compute_mode}")


def _memory(gpus: list[Gpu], survey: Survey) -> Check:
    taken = [gpu.index for gpu in gpus if gpu.index not in free_gpus(survey)]
    if taken:
        what = f"GPUs {taken} are in use by other processes"
        return Check("free", Status.WARN, what, "wait for them, or leave these GPUs out")
    return Check("free", Status.OK, f"all {len(gpus)} GPUs are free")


@dataclass(frozen=True, slots=True)
class Matrix:
    """What `nvidia-smi topo -m` prints.

    Attributes:
        cells: relation of two devices: X, NV#, PIX, PXB, PHB, NODE or SYS.
        names: device of each NIC label.
    """

    cells: dict[tuple[str, str], str]
    names: dict[str, str]

    @property
    def gpus(self) -> list[str]:
        """Labels of GPUs, in order."""
        return [row for row, column in self.cells if row == column and row.startswith("GPU")]

    @property
    def nics(self) -> list[str]:
        """Labels of NICs, in order."""
        return [row for row, column in self.cells if row == column and not row.startswith("GPU")]


def matrix_of(survey: Survey) -> Matrix:
    """The matrix of links between GPUs and NICs; empty where there is none."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in survey.lines("topology")]
    cells: dict[tuple[str, str], str] = {}
    names: dict[str, str] = {}
    columns: list[str] = []
    for line in lines:
        words = line.split()
        legend = re.fullmatch(r"\s*(NIC\d+):\s*(\S+)\s*", line)
        if legend:
            names[legend[1]] = legend[2]
        elif not columns and words[0] == "GPU0":
            columns = [word for word in words if re.fullmatch(r"(GPU|NIC)\d+|mlx\S+", word)]
        elif words[0] in columns:
            cells |= {
                (words[0], column): cell for column, cell in zip(columns, words[1:], strict=False)
            }
    return Matrix(cells, names)


def check_nvlink(survey: Survey) -> Check:
    """NVLink between all GPUs, and as many live links on each."""
    matrix = matrix_of(survey)
    gpus = matrix.gpus
    if len(gpus) < 2:
        return Check("nvlink", Status.SKIP, "no two GPUs to join")
    pairs = [(a, b) for a in gpus for b in gpus if a < b]
    without = [pair for pair in pairs if not matrix.cells[pair].startswith("NV")]
    if without:
        a, b = without[0]
        what = (
            f"{len(without)} of {len(pairs)} pairs of GPUs have no NVLink; {a} and {b} are joined "
            f"by {matrix.cells[a, b]}"
        )
        change = "keep context parallelism to GPUs that NVLink joins, or pass --burst-intra ring"
        return Check("nvlink", Status.WARN, what, change)
    live = _live_links(survey)
    if len(set(live.values())) > 1:
        most = max(live.values())
        fewer = ", ".join(f"GPU {gpu}: {n}" for gpu, n in live.items() if n < most)
        what = f"some GPUs have fewer than {most} live links: {fewer}"
        return Check("nvlink", Status.WARN, what, "have these GPUs looked at: their rings are slow")
    kinds = sorted({matrix.cells[pair] for pair in pairs})
    return Check("nvlink", Status.OK, f"{'/'.join(kinds)} between all {len(gpus)} GPUs")


def _live_links(survey: Survey) -> dict[str, int]:
    """Links that are up, by GPU."""
    live: dict[str, int] = {}
    for line in survey.lines("nvlink"):
        gpu = re.match(r"GPU (\d+):", line)
        if gpu:
            live[gpu[1]] = 0
        elif live and re.search(r"Link \d+: [\d.]+ GB/s", line):
            live[next(reversed(live))] += 1
    return live
