"""What a machine has, asked by one script that only reads; the same here and over ssh."""

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

GPU_FIELDS = (
    "index", "uuid", "name", "compute_cap", "driver_version", "memory.total", "memory.used",
    "clocks.sm", "clocks.max.sm", "clocks_throttle_reasons.active", "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total", "temperature.gpu", "mig.mode.current", "compute_mode",
)  # fmt: skip
_MARK = "== "
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

    def without(self, section: str) -> "Survey":
        """The survey with a section empty."""
        return Survey(self.sections | {section: ""})

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


def survey_here(run: Runner, timeout_s: float) -> Survey | Answer:
    """This machine's survey, or what went wrong."""
    answer = run(["sh", "-c", SCRIPT], timeout_s)
    return parse_survey(answer.out) or answer
