"""Runs peers' programs: `python -m conformance.run --te CHECKOUT --megatron-lm CHECKOUT`.

Each program has processes of its own. One that ends early or hangs is started again with the cases
that are left; what was running then has failed.
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

from conformance.results import Outcome, forget, read, running, table, verdicts, write
from conformance.suites import MEGATRON, PINNED, TE, Suite, named

ROOT = Path(__file__).parent.parent
_SWITCHES = ("-q", "-p", "conformance.plugin", "-p", "no:cacheprovider", "-o", "addopts=")


@dataclass(frozen=True, slots=True)
class Place:
    """Where programs run: checkouts by variable, the folder of results, GPUs or none, and how many
    ranks on how many nodes, which are emulated if there are several."""

    checkouts: dict[str, Path]
    out: Path
    gpus: int
    ranks: int
    nodes: int
    end: float

    @property
    def results(self) -> Path:
        """The CSV."""
        return self.out / "results.csv"

    def file_of(self, suite: Suite) -> Path:
        """The program."""
        return (ROOT if suite.is_own else self.checkouts[suite.checkout]) / suite.path

    def folder_of(self, suite: Suite) -> Path:
        """Of its temporary files, beside its log: programs run side by side."""
        return self.out / suite.name.replace(" ", "_").replace(",", "")

    def missing(self, suite: Suite) -> str:
        """Why a suite cannot run here; empty if it can."""
        if self.ranks not in suite.ranks:
            return f"not with {self.ranks} ranks"
        if 0 < self.gpus * self.nodes < self.ranks:
            return f"needs {self.ranks // self.nodes} GPUs"
        if suite.checkout not in self.checkouts:
            return f"no checkout: {PINNED[suite.checkout]}, then {suite.checkout}=its folder"
        if not self.file_of(suite).is_file():
            return f"{suite.path} is not in {self.checkouts[suite.checkout]}"
        if suite.checkout == TE and not find_spec("transformer_engine"):
            return "TransformerEngine is not installed"
        return "needs a GPU" if suite.needs_gpu and not self.gpus else ""


def main() -> int:
    """Run the selected suites and print the table; 1 if anything failed or did not run."""
    options = _options()
    place = _place(options)
    place.out.mkdir(parents=True, exist_ok=True)
    suites = list(named(tuple(options.only)))
    if not options.resume:
        place.results.unlink(missing_ok=True)
    forget(place.results, {suite.name for suite in suites})
    lacking = {suite: place.missing(suite) for suite in suites}
    for suite, why in lacking.items():
        if why:
            print(f"conformance: {suite.name} is not run: {why}", flush=True)
    ready = [suite for suite in suites if not lacking[suite]]
    with ThreadPoolExecutor(options.lanes) as lanes:
        list(lanes.map(lambda suite: run(suite, place), ready))
    rows = read(place.results)
    (place.out / "table.md").write_text(table(rows) + "\n")
    print(table(rows))
    failed = {(row.suite, row.case) for row in rows if row.outcome == "failed"}
    for suite, case in sorted(failed):
        print(f"failed: {suite}: {case}")
    return 1 if failed or not ready else 0


def run(suite: Suite, place: Place) -> None:
    """Run one suite until all its cases have finished or its time is up."""
    end = min(time.monotonic() + suite.limit_s, place.end)
    if suite.launch == "script":
        write(place.results, Outcome(suite.name, "", "selected"))
        if suite.path in _through(suite, place):
            return
    while time.monotonic() < end and not _run_on(suite, place, end):
        pass
    rows = [row for row in read(place.results) if row.suite == suite.name]
    found = {row.outcome for row in rows}
    if place.ranks in suite.attends and "passed" in found and "attended" not in found:
        _fail(suite, place, "all", "burst never attended: it was not in place")


def _run_on(suite: Suite, place: Place, end: float) -> bool:
    """Run the remaining cases; returns whether the suite is done."""
    before = len(_through(suite, place))
    code = _run_once(suite, place, end)
    if time.monotonic() >= end:
        return True  # what was running counts as not run
    if suite.launch == "script":
        outcome = "failed" if code else "passed"
        write(place.results, Outcome(suite.name, suite.path, outcome))
        return True
    case = running(row for row in read(place.results) if row.suite == suite.name)
    if case:
        _fail(suite, place, case, f"ended or hung while it ran (exit status {code})")
    if code == 0 or (suite.launch == "pytest" and code == 1):  # all ran, some may have failed
        return True
    if len(_through(suite, place)) > before:
        return False
    _fail(suite, place, "all", f"exit status {code} without any case; see its log")
    return True


def _fail(suite: Suite, place: Place, case: str, why: str) -> None:
    write(place.results, Outcome(suite.name, case, "failed", detail=why))


def _through(suite: Suite, place: Place) -> dict[str, Outcome]:
    return verdicts(row for row in read(place.results) if row.suite == suite.name)


def _run_once(suite: Suite, place: Place, end: float) -> int:
    """The exit status; for a program ended by its time limit, that of the signal."""
    folder = place.folder_of(suite)
    folder.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".log").open("ab") as output:
        process = subprocess.Popen(
            command_of(suite, place), cwd=place.checkouts[suite.checkout],
            env=environment_of(suite, place), stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            return _wait(process, suite, place, end)
        finally:
            _end(process)


def _wait(process: subprocess.Popen, suite: Suite, place: Place, end: float) -> int:
    """Wait while the suite has time left and outcomes keep coming."""
    known, since = 0, time.monotonic()
    patience = suite.case_s if place.gpus else 10 * suite.case_s
    while True:
        try:
            return process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            rows = sum(row.suite == suite.name for row in read(place.results))
            now = time.monotonic()
            if rows != known:
                known, since = rows, now
            if now > end or now - since > patience:
                return -signal.SIGKILL


def _end(process: subprocess.Popen) -> None:
    """End what is left of it, and all that it has started: torchrun's ranks, and the torchrun of
    a peer's test, have sessions of their own."""
    for pid in [process.pid, *_descendants(process.pid)]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _descendants(pid: int) -> list[int]:
    """Processes that a process has started, and those that these have."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parent = status.read_text().rpartition(")")[2].split()[1]
            parents.setdefault(int(parent), []).append(int(status.parent.name))
    found = []
    for child in parents.get(pid, []):
        found += [child, *_descendants(child)]
    return found


def command_of(suite: Suite, place: Place) -> list[str]:
    """The command line of a suite."""
    file = str(place.file_of(suite))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node",
                str(place.ranks), "--master-port", str(_free_port())]  # fmt: skip
    if suite.launch == "script":
        return [*torchrun, file]
    pytest = ["-m", "pytest", *_SWITCHES, f"--rootdir={place.checkouts[suite.checkout]}",
              file]  # fmt: skip
    # after a failure ranks may be in different cases: the others run again from the next one on
    return [*torchrun, *pytest, "-x"] if suite.launch == "torchrun" else [sys.executable, *pytest]


def environment_of(suite: Suite, place: Place) -> dict[str, str]:
    """Its environment: processes that it starts find burst in place too (sitecustomize)."""
    checkout = place.checkouts[suite.checkout]
    folders = [ROOT / "conformance" / "site", ROOT]
    if suite.checkout == TE:
        folders += [checkout / "tests/pytorch/attention", checkout / "tests/pytorch"]
    else:
        folders.insert(1, checkout)  # both have a package `tests`
    path = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {
        "PYTHONPATH": ":".join(path),
        "CONFORMANCE_SUITE": suite.name,
        "CONFORMANCE_RESULTS": str(place.results),
        "CONFORMANCE_RANKS": str(place.ranks),
        "TE_PATH": str(checkout),
        "PYTHONUNBUFFERED": "1",
        "NCCL_NVLS_ENABLE": "0",
    }
    if suite.checkout == MEGATRON:  # whose conftest has one folder of checkpoints for all
        own |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        own |= {"PYTEST_DEBUG_TEMPROOT": str(place.folder_of(suite))}
    else:  # -m would find the checkout's transformer_engine, not built, before the installed one
        own["PYTHONSAFEPATH"] = "1"
    if not place.gpus:
        own["CONFORMANCE_ON_CPU"] = "1"
    if place.nodes > 1:  # sockets between them, on one machine
        own |= {"CONFORMANCE_NODES": str(place.nodes), "NCCL_SOCKET_IFNAME": "lo"}
        own["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    return {**os.environ, **own, **dict(suite.environment)}


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make conformance", description=__doc__)
    for variable in (TE, MEGATRON):
        flag = f"--{variable.lower().replace('_', '-')}"
        default = os.environ.get(variable) or None
        parser.add_argument(flag, type=Path, default=default, help=PINNED[variable])
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2, help="processes")
    parser.add_argument("--nodes", type=int, choices=(1, 2), default=1,
                        help="emulated; where ranks share GPUs, as many as share one")  # fmt: skip
    parser.add_argument("--out", type=Path, help="folder; default .cache/conformance-RANKS")
    parser.add_argument("--lanes", type=int, default=1, help="programs at a time")
    parser.add_argument("--resume", action="store_true", help="only what has not passed before")
    parser.add_argument("--limit-s", type=int, default=3600, help="seconds for all programs")
    parser.add_argument("--only", nargs="*", default=[], help="words of programs' names")
    return parser.parse_args()


def _place(options: argparse.Namespace) -> Place:
    given = {TE: options.te, MEGATRON: options.megatron_lm}
    checkouts = {name: Path(path).resolve() for name, path in given.items() if path}
    out = options.out or ROOT / ".cache" / f"conformance-{options.ranks}"
    gpus, end = _gpus(), time.monotonic() + options.limit_s
    nodes = -(-options.ranks // gpus) if 0 < gpus < options.ranks else options.nodes
    return Place(checkouts, out.resolve(), gpus, options.ranks, nodes, end)


def _gpus() -> int:
    """The number of GPUs that programs may use, found without torch."""
    if not shutil.which("nvidia-smi"):
        return 0
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len(list(takewhile(lambda number: number[:1] not in ("", "-"), visible.split(","))))
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


if __name__ == "__main__":
    sys.exit(main())
