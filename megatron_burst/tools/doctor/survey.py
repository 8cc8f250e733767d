"""What a machine has, asked by one script that only reads; the same here and over ssh."""

import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

GPU_FIELDS = (
    "index", "uuid", "name", "compute_cap", "driver_version", "memory.total", "memory.used",
    "clocks.sm", "clocks.max.sm", "clocks_throttle_reasons.active", "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total", "temperature.gpu", "mig.mode.current", "compute_mode",
)  # fmt: skip
_MARK = "== "
_BUSY_SHARE = 0.05  # of memory: what drivers and idle contexts take stays below
# Every command of it prints; none writes, stops or changes anything.
SCRIPT = f"""
echo '{_MARK}gpus'
nvidia-smi --query-gpu={",".join(GPU_FIELDS)} --format=csv,noheader,nounits 2>&1
echo '{_MARK}processes'
nvidia-smi --query-compute-apps=gpu_uuid,pid,used_memory --format=csv,noheader,nounits 2>/dev/null
echo '{_MARK}topology'
nvidia-smi topo -m 2>/dev/null
echo '{_MARK}nvlink'
nvidia-smi nvlink --status 2>/dev/null
echo '{_MARK}hcas'
for port in /sys/class/infiniband/*/ports/*; do
  [ -d "$port" ] || continue
  name=${{port#/sys/class/infiniband/}}
  echo "${{name%%/*}}|${{port##*/}}|$(cat "$port/state" "$port/link_layer" "$port/rate" |
    tr '\\n' '|')"
done 2>/dev/null
echo '{_MARK}addresses'
ip -o -4 addr show up 2>/dev/null
echo '{_MARK}route'
ip -o -4 route show default 2>/dev/null
echo '{_MARK}modules'
cut -d' ' -f1 /proc/modules 2>/dev/null | grep -E '^(nvidia_peermem|nv_peer_mem|gdrdrv)$'
echo '{_MARK}shm'
df -Pk /dev/shm 2>/dev/null | tail -n 1
echo '{_MARK}memlock'
ulimit -l
echo '{_MARK}nofile'
ulimit -n
echo '{_MARK}end'
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command said; exit status 124 where it took too long, 127 where it is missing."""

    code: int
    out: str
    error: str = ""


Runner = Callable[[Sequence[str], float], Answer]


def run_command(command: Sequence[str], timeout_s: float) -> Answer:
    """Run a command, without a shell; give up waiting after so many seconds."""
    try:
        done = subprocess.run(
            list(command), capture_output=True, text=True, timeout=timeout_s, errors="replace",
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Answer(124, "", f"no answer within {timeout_s:g} s")
    except OSError as error:
        return Answer(127, "", str(error))
    return Answer(done.returncode, done.stdout, done.stderr.strip())


@dataclass(frozen=True, slots=True)
class Survey:
    """The sections of the script's output, by name; empty where a command was missing."""

    sections: dict[str, str]

    def lines(self, section: str) -> list[str]:
        """The lines of a section that hold something."""
        return [line for line in self.sections.get(section, "").splitlines() if line.strip()]

    def word(self, section: str) -> str:
        """The first line of a section, or ""."""
        return next(iter(self.lines(section)), "").strip()


def parse_survey(text: str) -> Survey | None:
    """The sections; None if the script did not reach its end."""
    sections: dict[str, str] = {}
    name = ""
    for line in text.splitlines(keepends=True):
        if line.startswith(_MARK):
            name = line.removeprefix(_MARK).strip()
            sections[name] = ""
        elif name:  # what a login prints first is no answer
            sections[name] += line
    return Survey(sections) if "end" in sections else None


def survey_of(run: Runner, timeout_s: float, reach: Sequence[str] = ()) -> Survey | Answer:
    """The survey of this machine, or of the node that a command reaches, or what went wrong."""
    command = ["sh", "-c", SCRIPT]
    answer = run([*reach, shlex.join(command)] if reach else command, timeout_s)
    return parse_survey(answer.out) or answer


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


def _read(kind: object, text: str) -> object:
    """A cell of nvidia-smi's; [N/A] and [Not Supported] are no numbers."""
    if kind is int:
        return int(text, 0) if re.fullmatch(r"0x[0-9a-fA-F]+|\d+", text) else 0
    if kind is str:
        return text
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None


def gpus_of(survey: Survey) -> list[Gpu]:
    """The GPUs; none where nvidia-smi is missing or answers otherwise."""
    kinds = [field.type for field in fields(Gpu)]
    lines = ([cell.strip() for cell in line.split(",")] for line in survey.lines("gpus"))
    return [
        Gpu(*map(_read, kinds, cells))
        for cells in lines
        if len(cells) == len(kinds) and cells[0].isdigit()
    ]


def free_gpus(survey: Survey) -> list[int]:
    """Indices of GPUs on which nothing runs."""
    busy = {line.split(",")[0].strip() for line in survey.lines("processes")}
    return [
        gpu.index
        for gpu in gpus_of(survey)
        if gpu.uuid not in busy and (gpu.used_mib or 0) <= _BUSY_SHARE * (gpu.memory_mib or 1e9)
    ]


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
