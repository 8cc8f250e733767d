"""Each attention kernel on one GPU, forward and backward, against FlashAttention-4 in one run.

python -m benchmarks.kernels OUT.csv                  time all backends
python -m benchmarks.kernels SWEEP.csv --sweep        time blocks of our Triton kernels
python -m benchmarks.kernels ROWS.csv --table         the table of docs/backends.md

Runs take turns, so that clocks and heat are shared: a ratio is of two runs of one turn. Kernels are
compiled beforehand in as many processes as there are cores, which share their caches. Cases come in
the order of their weight; what time is not left for is left out. Rows are written as they come.
"""

from dataclasses import replace
from itertools import product
from operator import attrgetter
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Annotated

import torch
import typer
from typer import Option

from benchmarks.kernel_turns import SHORT, Case, Runs, compile_all, sweep_blocks, timed_in_turns
from benchmarks.rows import check_appendable, read
from benchmarks.runner import App, OutFile
from benchmarks.sheets import KERNELS_CSV, KernelRow
from benchmarks.tables import Ratio, crossed
from megatron_burst.kernels.backends import backends
from megatron_burst.kernels.interface import QuerySide
from megatron_burst.tools.speeds import problem_of

HEADS = ((32, 8), (32, 32))
COMPILED = ("fa4", "triton")  # those that compile, and keep on disk what they have compiled
_line = attrgetter("dim", "causal", "direction")  # of the table
_problem = attrgetter("dim", "causal", "direction", "seq", "heads_q", "heads_kv", "what")
app = App()


@app.command()
def main(
    out: OutFile,
    sweep: Annotated[bool, Option(help="try blocks of the Triton kernels")] = False,
    budget_s: Annotated[float, Option(min=0, help="seconds for everything")] = 85,
    only: Annotated[str, Option(help="backends, with commas; all if left out")] = "",
    dims: Annotated[str, Option(help="head dimensions, with commas")] = "128,64",
    seqs: Annotated[str, Option(help="lengths, with commas")] = "16384,8192,32768",
    shown: Annotated[bool, Option("--table", help="print the table of the CSV's rows")] = False,
) -> None:
    """Measure on the current GPU."""
    if shown:
        print(table(out))
        return
    if not torch.cuda.is_available():
        raise typer.BadParameter("kernels are timed on a CUDA GPU, and this machine has none")
    check_appendable(out, KERNELS_CSV, "OUT")
    deadline = monotonic() + budget_s
    cases = [
        Case(seq, *heads, dim, causal)
        for dim, causal, seq, heads in product(
            map(int, dims.split(",")), (True, False), map(int, seqs.split(",")), HEADS
        )
    ]
    if sweep:
        sweep_blocks(out, [case for case in cases if case.heads_kv < case.heads_q], deadline)
        return
    requested = [name for name in only.split(",") if name]
    names = _usable(requested) if requested else _able(cases[0])
    variants = {replace(case, seq=SHORT) for case in cases}
    jobs = [(run_once, case, name) for case in variants for name in names if name in COMPILED]
    print(*compile_all(jobs, deadline - budget_s / 3), sep="\n")
    for case in cases:
        if monotonic() > deadline:
            print(f"no time was left for {case}")
            continue
        for backward in (False, True):
            timed_in_turns(out, case, _runs(case, names, backward), backward, deadline)


def _usable(names: list[str]) -> list[str]:
    """The requested backends that can be used here; prints why others cannot."""
    reasons = {name: backends()[name].missing() for name in names}
    for name, reason in reasons.items():
        if reason:
            print(f"{name} is left out: {reason}")
    return [name for name in names if not reasons[name]]


def _able(case: Case) -> list[str]:
    """Backends for GPUs that are here and can do a case."""
    problem = problem_of(*replace(case, seq=1).tensors()[:3])
    named = backends().items()
    return [
        name for name, b in named
        if b.capability.devices and not (b.capability.refusal(problem) or b.missing())
    ]  # fmt: skip


def _runs(case: Case, names: list[str], backward: bool) -> Runs:
    """Forward or backward of each backend, on the same tensors."""
    q, k, v, dout = case.tensors()
    scale, runs = case.dim**-0.5, {}
    for name in names:
        backend = backends()[name]
        runs[name] = lambda b=backend: b.forward(q, k, v, scale, case.visible)
        if backward:
            out, lse = backend.forward(q, k, v, scale, case.visible)
            side = QuerySide(q, dout, lse, None, out)
            runs[name] = lambda b=backend, s=side: b.backward(s, k, v, scale, case.visible)
    return runs


def run_once(case: Case, name: str) -> None:
    """Both passes of a backend, in a process of its own; RuntimeError if it cannot be used here."""
    if reason := backends()[name].missing():
        raise RuntimeError(reason)
    for backward in (False, True):
        _runs(case, [name], backward)[name]()
    torch.cuda.synchronize()


def table(path: Path) -> str:
    """A line for each head dimension, mask and direction; a column for each kernel.

    A cell has medians over lengths and heads, TFLOP/s and the speed beside FlashAttention-4's, and
    the least and most of that in any turn. Of equal problems the newest row counts; what failed is
    left out. BurstError if it is no CSV of this benchmark, or has no row."""
    measured = [row for row in read([path], KERNELS_CSV) if row.tflops]
    newest = {_problem(row): row for row in measured}
    cells: dict[tuple, list[KernelRow]] = {}
    for row in newest.values():
        cells.setdefault((_line(row), row.what), []).append(row)
    lines = {
        (dim, causal, direction): [dim, "causal" if causal else "full", direction]
        for (dim, causal, direction), _ in cells
    }
    in_lines = sorted(cells, key=lambda key: list(lines).index(key[0]))
    kernels = {name: f"`{name}`" for _, name in in_lines}
    head = ["head dimension", "mask", "direction"]
    return crossed(head, lines, kernels, lambda *key: _cell(cells.get(key, [])))


def _cell(rows: list[KernelRow]) -> str:
    if not rows:
        return "-"
    speed = f"{median(row.tflops for row in rows):.0f}"
    if not all(row.ratio for row in rows):
        return speed
    least, most = min(row.ratio_least for row in rows), max(row.ratio_most for row in rows)
    ratio = Ratio(median(row.ratio for row in rows), least, most)
    return speed if least == most == 1 else f"{speed}, {ratio}"


if __name__ == "__main__":
    app()
