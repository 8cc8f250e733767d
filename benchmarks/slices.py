"""Training steps, from embedding to optimizer, of models of real widths with few layers, as CSV.

python -m benchmarks.slices measure OUT.csv --gpus 8     on GPUs; --tiny: anywhere
python -m benchmarks.slices predict OUT.csv --gpus 8     what the planner says

Each run is examples/pretrain_gpt.py under torchrun (`slice_cases.py`). The most telling runs come
first; a row is written when its run is over.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer
from typer import Option

from benchmarks import slice_cases as cases
from benchmarks.facts import planner_stamp, stamp
from benchmarks.impls import pick
from benchmarks.rows import append, check_appendable
from benchmarks.runner import App, Budget, Machine, OutFile, Words, best_device, clock
from benchmarks.sheets import SLICES_CSV, SliceRow
from megatron_burst.errors import require
from megatron_burst.tools.hardware import GIB, Hardware
from megatron_burst.tools.hardware_file import hardware as hardware_of
from megatron_burst.tools.job.candidate import candidate
from megatron_burst.tools.job.strategy import Job, Strategy
from megatron_burst.tools.terminal import Nodes
from megatron_burst.tools.units import in_units

ROOT = Path(__file__).resolve().parents[1]
_ON_GPU = """
--bf16 --transformer-impl transformer_engine --no-gradient-accumulation-fusion
--no-masked-softmax-fusion --no-persist-layer-norm
"""
_ON_CPU = "--distributed-backend gloo --use-cpu-initialization"
LONGEST_S = 200  # of a run
app = App()


def training(gpus: int, flags: Sequence[str], log: Path, nodes: int = 1) -> list[str]:
    """The training command with these flags, which may set other sizes; steps go to `log`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(gpus)]
    program = ["-m", "megatron_burst", str(ROOT / "examples" / "pretrain_gpt.py")]
    if nodes > 1:  # each part of the ranks is a node to NCCL, and so to burst
        named = f"export NCCL_HOSTID=pretended-$((LOCAL_RANK * {nodes} / {gpus}))"
        shell = ["--no-python", "bash", "-c", f'{named}; exec "$@"', "-", sys.executable]
        program = [*shell, *program]
    device = (_ON_GPU if torch.cuda.is_available() else _ON_CPU).split()
    command += [*program, "--context-parallel-size", str(gpus), *flags, *device]
    return [*command, "--step-log", str(log)]


def start(command: Sequence[str], output: Path) -> subprocess.Popen:
    """Run it, with all its output in a file."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with output.open("w") as file:
        environment = {**os.environ, "PYTHONPATH": paths}
        return subprocess.Popen(command, stdout=file, stderr=file, env=environment)


def steps_in(log: Path) -> list[dict]:
    """What each step so far has logged."""
    text = log.read_text().rpartition("\n")[0] if log.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def run(what: cases.Slice, impl: str, gpus: int, folder: Path, nodes: int = 1) -> SliceRow:
    """Train; the row, also of a run that failed."""
    log, output = folder / f"{what.name}-{what.seq}-{impl}.jsonl", folder / "output.txt"
    flags = [*what.flags, *what.rope(gpus), *cases.flags_of(impl, gpus)]
    if what.documents:
        lengths = log.with_suffix(".txt")
        lengths.write_text(" ".join(map(str, what.lengths(gpus))))
        flags += ["--document-lengths", str(lengths)]
    process = start(training(gpus, flags, log, nodes), output)
    try:
        code = process.wait(LONGEST_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its workers
        process.wait()
        code = None
    steps = steps_in(log)[cases.WARM_UP :]
    facts = stamp(best_device()[0])
    if not steps:
        reason = f"took over {LONGEST_S} s" if code is None else reason_in(output)
        return cases.row_of(what, impl, gpus, [], status="failed", note=reason, **facts)
    notes = [f"{len(steps)} steps"]
    notes += [f"{nodes} emulated nodes"] * (nodes > 1)
    notes += ["RoPE not fused"] * bool(what.rope(gpus))
    return cases.row_of(
        what, impl, gpus, [1e3 * step["seconds"] for step in steps],
        peak_gib=steps[-1].get("peak GiB"), loss=steps[-1]["lm loss"],
        note=", ".join(notes), **facts,
    )  # fmt: skip


def reason_in(output: Path) -> str:
    """Why a run failed: the first error (C++'s too), torchrun's exit code, or the last words."""
    every = (line.strip() for line in output.read_text(errors="replace").splitlines())
    lines = [line for line in every if line.strip("=-")]  # torchrun ends with such a line
    codes = [line for line in lines if line.startswith("exitcode")]
    errors = [
        line for line in lines if "Error: " in line or line.startswith(("error: ", "what(): "))
    ]
    return [*errors[:1], *codes[:1], *lines[-1:], "it said nothing"][0][:300]


Gpus = Annotated[int, Option(min=1, help="all of them one context-parallel group")]
Only = Annotated[Words, Option(help="repeatable, e.g. 8b-1M:burst; default: all")]


@app.command()
def measure(
    out: OutFile,
    gpus: Gpus = 8,
    only: Only = None,
    tiny: Annotated[bool, Option("--tiny", help="small sizes, to try this out")] = False,
    budget_s: Budget = None,
    nodes: Nodes = 1,
) -> None:
    """Train each, and append its row."""
    runs = (*cases.RUNS, *cases.SEED_RUNS) if only else cases.RUNS  # seeds: only if named
    runs = cases.TINY_RUNS if tiny else runs
    every = {f"{what.name}-{in_units(what.seq)}:{impl}": (what, impl) for what, impl in runs}
    must = "slices: --only must name a run that there is, because each has sizes of its own"
    check_appendable(out, SLICES_CSV, "OUT")
    require("slices", [(
        gpus % nodes == 0,
        "--nodes must divide --gpus, because each emulated node has equally many",
        f"{nodes} and {gpus}", "choose another",
    )])  # fmt: skip
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # under CP Megatron refuses others
    is_over, rows = clock(budget_s), []
    with TemporaryDirectory() as folder:
        for what, impl in pick(only or (), every, must):
            if is_over():
                typer.echo(f"time is up: {what.name}, {in_units(what.seq)}, {impl} was not started")
                continue
            row = cases.beside_megatron(run(what, impl, gpus, Path(folder), nodes), rows)
            rows.append(row)
            append(out, [row], SLICES_CSV)
            result = f"{impl}: {row.status}, {result_of(row)}"
            typer.echo(f"{what.name}, {in_units(what.seq)} tokens, {result}")


def result_of(row: SliceRow) -> str:
    """A row's result in words."""
    return f"{row.ms:.0f} ms, {row.tflops_per_gpu:.3g} TFLOP/s" if row.ms else row.note


@app.command()
def predict(out: OutFile, gpus: Gpus = 8, hardware: Machine = "h200") -> None:
    """Append what the planner says of burst's runs; of Megatron's attention it knows nothing."""
    check_appendable(out, SLICES_CSV, "OUT")
    machine = hardware_of(hardware)
    for what in (what for what, impl in cases.RUNS if impl == "burst"):
        row = predicted(what, "burst", gpus, machine)
        append(out, [row], SLICES_CSV)
        time = f"{row.ms:.0f} ms" if row.ms else row.note
        typer.echo(f"{what.name}, {in_units(what.seq)}: {time}, {row.peak_gib:.1f} GiB")


def predicted(what: cases.Slice, impl: str, gpus: int, machine: Hardware) -> SliceRow:
    """What the planner says of a slice, with whole nodes: of `burst`, or of `tp`."""
    job = Job(what.model, what.seq, gpus, min(gpus, machine.node.gpus), 1, machine)
    strategy = Strategy(tp=gpus) if impl == "tp" else Strategy(cp=gpus, keep="all")
    plan = candidate(job, strategy)
    return cases.row_of(
        what, impl, gpus, [1e3 * plan.time.seconds] if plan.time else [],
        **planner_stamp(machine.name), peak_gib=plan.memory.peak / GIB,
        status="ok" if plan.fits else "failed", note="" if plan.fits else "it does not fit",
    )  # fmt: skip


if __name__ == "__main__":
    app()
