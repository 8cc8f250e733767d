"""What a machine has, asked by one script that only reads; the same here and over ssh."""

import re
import shlex
import subprocess
from collections.abc import Sequence

GPU_FIELDS = (
    "index", "name", "driver_version", "memory.total", "memory.used", "clocks.max.sm",
    "clocks_throttle_reasons.active", "ecc.errors.uncorrected.volatile.total", "mig.mode.current",
    "compute_mode",
)  # fmt: skip
_MARK = "== "
_COMMANDS = {  # by section; every one prints, none writes, stops or changes anything
    "gpus": f"nvidia-smi --query-gpu={','.join(GPU_FIELDS)} --format=csv,noheader,nounits 2>&1",
    "topology": "nvidia-smi topo -m 2>/dev/null",
    "hcas": """for port in /sys/class/infiniband/*/ports/*; do
  [ -d "$port" ] || continue
  name=${port#/sys/class/infiniband/}
  echo "${name%%/*}|${port##*/}|$(cat "$port/state" "$port/link_layer" "$port/rate" | tr '\\n' '|')"
done 2>/dev/null""",
    "route": "ip -o -4 route show default 2>/dev/null",
    "shm": "df -Pk /dev/shm 2>/dev/null | awk 'END { print $4 }'",
    "memlock": "ulimit -l",
    "nofile": "ulimit -n",
    "end": "echo",
}  # fmt: skip
SCRIPT = "\n".join(f"echo '{_MARK}{name}'\n{command}" for name, command in _COMMANDS.items())


class Survey(dict[str, str]):
    """The sections of the script's output, by name; empty where a command was missing. Of a machine
    that did not answer only the section "error"."""

    def lines(self, section: str) -> list[str]:
        """The lines of a section that hold something."""
        return [line for line in self.get(section, "").splitlines() if line.strip()]

    def word(self, section: str) -> str:
        """The first line of a section, or ""."""
        return next(iter(self.lines(section)), "").strip()


def survey_of(timeout_s: float, reach: Sequence[str] = ()) -> Survey:
    """The survey of this machine, or of the node that a command reaches, within `timeout_s`."""
    command = ["sh", "-c", SCRIPT]
    try:
        done = subprocess.run(
            [*reach, shlex.join(command)] if reach else command, capture_output=True, text=True,
            timeout=timeout_s, errors="replace", stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Survey(error=f"no answer within {timeout_s:g} s")
    except OSError as error:
        return Survey(error=str(error))
    lines = (done.stderr.strip() or done.stdout).splitlines() or [f"exit status {done.returncode}"]
    return parse_survey(done.stdout) or Survey(error=lines[-1])


def parse_survey(text: str) -> Survey | None:
    """The sections; None if the script did not reach its end."""
    parts = re.split(rf"^{_MARK}(\w+)\n", text, flags=re.MULTILINE)  # a login's words come first
    survey = Survey(zip(parts[1::2], parts[2::2], strict=True))
    return survey if "end" in survey else None


def gpus_of(survey: Survey) -> list[dict[str, str]]:
    """The GPUs, by the names of `GPU_FIELDS`; none where nvidia-smi lists none."""
    rows = ([cell.strip() for cell in line.split(",")] for line in survey.lines("gpus"))
    whole = (cells for cells in rows if len(cells) == len(GPU_FIELDS) and cells[0].isdigit())
    return [dict(zip(GPU_FIELDS, cells, strict=True)) for cells in whole]


def number(cell: str) -> float:
    """Of a cell of nvidia-smi's; 0 where the driver does not tell ([N/A], [Not Supported])."""
    if re.fullmatch("0x[0-9a-fA-F]+", cell):
        return int(cell, 16)
    return float(cell) if re.fullmatch(r"\d+(\.\d+)?", cell) else 0.0


def links_of(survey: Survey) -> dict[tuple[str, str], str]:
    """What joins a GPU and another one or an HCA, as `nvidia-smi topo -m` says it: X, NV#, PIX,
    PXB, PHB, NODE or SYS; HCAs by their names."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", survey.get("topology", ""))
    names = dict(re.findall(r"^\s*(NIC\d+): *(\S+)", text, re.MULTILINE))
    lines = [line.split() for line in text.splitlines() if line.strip().startswith("GPU")]
    head = next(iter(lines), [])
    columns = [names.get(word, word) for word in head if re.fullmatch(r"[GN].*\d|mlx\S+", word)]
    return {
        (row[0], column): cell for row in lines[1:]
        for column, cell in zip(columns, row[1:], strict=False)
    }  # fmt: skip
