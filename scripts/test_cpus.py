"""Runs the tests with the marker `numeric` as other processors would round, on this one:

    python scripts/test_cpus.py [pytest's arguments]

Each setting below makes torch, oneDNN or MKL run the kernels of an older or another processor. What
this one lacks is skipped by name. Ends with a line for each run; fails if one of them fails.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).parents[1]
_VECTORS = ["DEFAULT", "AVX2", "AVX512"]  # each processor has those before its own
# Threads that wait must not keep a core from those that work. MKL, whose number of threads is
# torch's too, would otherwise have no more than there are cores.
_ALWAYS = {"OMP_WAIT_POLICY": "passive", "MKL_DYNAMIC": "FALSE"}


class Setting(NamedTuple):
    """A variable and its value, what the processor and torch must have, and numbers of threads."""

    variable: str
    value: str
    needs: frozenset[str] = frozenset()
    threads: tuple[int, ...] = (2,)


SETTINGS = (
    Setting("ATEN_CPU_CAPABILITY", "default", threads=(2, 1, 4)),
    Setting("ATEN_CPU_CAPABILITY", "avx2", frozenset({"AVX2"})),
    Setting("ATEN_CPU_CAPABILITY", "avx512", frozenset({"AVX512"})),
    Setting("ONEDNN_MAX_CPU_ISA", "AVX2", frozenset({"AVX2", "oneDNN"})),
    Setting("MKL_CBWR", "AVX2", frozenset({"AVX2", "MKL"})),
    Setting("MKL_CBWR", "COMPATIBLE", frozenset({"MKL"}), (2, 1, 4)),
)


def present() -> set[str]:
    """What this processor and its torch have."""
    own = torch.backends.cpu.get_cpu_capability()
    found = set(_VECTORS[: _VECTORS.index(own) + 1] if own in _VECTORS else [])
    libraries = {"MKL": torch.backends.mkl, "oneDNN": torch.backends.mkldnn}
    return found | {name for name, library in libraries.items() if library.is_available()}


def numeric_files() -> list[str]:
    """Those with the marker; the others need not be imported."""
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    return [f"{file.relative_to(ROOT)}" for file in tests if "mark.numeric" in file.read_text()]


def run(setting: Setting, threads: int, arguments: list[str]) -> tuple[bool, str]:
    """Whether all tests pass, and pytest's last line."""
    variables = {setting.variable: setting.value}
    variables |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), f"{threads}")
    # a setting of the caller's would be a second one
    own = {name: x for name, x in os.environ.items() if name not in {s.variable for s in SETTINGS}}
    options = "-q -p no:cacheprovider -m numeric -n 2 --dist worksteal".split()
    last = ""
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *numeric_files(), *arguments], cwd=ROOT,
        env=own | _ALWAYS | variables, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        for line in process.stdout or ():
            print(line, end="", flush=True)
            last = line.strip() or last
    return process.returncode == 0, last


def main() -> None:
    """Run all settings, then print a line for each."""
    lines, failed, has = [], False, present()
    for setting in SETTINGS:
        name, missing = f"{setting.variable}={setting.value}", sorted(setting.needs - has)
        if missing:
            lines.append(f"{name}: skipped, as there is no {' and no '.join(missing)} here")
        for threads in () if missing else setting.threads:
            print(f"\n{name}, {threads} threads", flush=True)
            passed, last = run(setting, threads, sys.argv[1:])
            lines.append(f"{name}, {threads} threads: {last}")
            failed |= not passed
    print("", *lines, sep="\n")
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
