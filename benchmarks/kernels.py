"""Each attention kernel on one GPU, forward and backward, against FlashAttention-4 in one run.

python benchmarks/kernels.py OUT.csv                  time all backends
python benchmarks/kernels.py SWEEP.csv --sweep        time blocks of our Triton kernels

Runs take turns, so that clocks and heat are shared: a ratio is of two runs of one turn. Kernels are
compiled beforehand in as many processes as there are cores, which share their caches. Cases come in
the order of their weight; what time is not left for is left out. Rows are written as they come.
"""

import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Annotated

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its own folder alone

from benchmarks.candidates import candidates
from benchmarks.ratios import Ratio
from benchmarks.rows import Sheet, append, check_appendable
from megatron_burst.kernels.backends import backends
from megatron_burst.kernels.interface import QuerySide
from megatron_burst.kernels.triton_tiles import Blocks, KernelPass, blocks_for
from megatron_burst.kernels.visible import CAUSAL, FULL, Visible
from megatron_burst.tools.speeds import problem_of
from megatron_burst.tools.terminal import in_one_sentence

HEADS = ((32, 8), (32, 32))
STANDARD = "fa4"
COMPILED = ("fa4", "triton")  # those that compile, and keep on disk what they have compiled
TURNS, SHORT = 7, 256  # repetitions; rows of the problem that is only compiled


@dataclass(frozen=True)
class Case:
    """One problem, in bf16, batch 1."""

    seq: int
    heads_q: int
    heads_kv: int
    dim: int
    causal: bool

    def tensors(self) -> list[torch.Tensor]:
        """q, k, v, dout."""
        counts = self.heads_q, self.heads_kv, self.heads_kv, self.heads_q
        return [
            torch.randn(1, self.seq, n, self.dim, device="cuda", dtype=torch.bfloat16)
            for n in counts
        ]

    @property
    def visible(self) -> Visible:
        return CAUSAL if self.causal else FULL

    def flops(self, backward: bool) -> float:
        """The usual count: two products forward, five backward, half of that if causal."""
        pairs = self.seq**2 * (0.5 if self.causal else 1)
        return (10 if backward else 4) * pairs * self.heads_q * self.dim


@dataclass(frozen=True)
class Row:
    """One line of the CSV; times in milliseconds, `ratio` is the speed beside the standard's."""

    gpu: str
    torch: str
    seq: int
    heads_q: int
    heads_kv: int
    dim: int
    causal: bool
    direction: str
    what: str
    ms: float | None = None
    ms_least: float | None = None
    ms_most: float | None = None
    tflops: float | None = None
    ratio: float | None = None
    ratio_least: float | None = None
    ratio_most: float | None = None
    note: str = ""


KERNELS_CSV = Sheet("benchmarks/kernels.py", Row)
ChunkSegments = dict[str, Callable[[], object]]


def main(
    out: Annotated[Path, typer.Argument(help="the CSV; rows are appended")],
    sweep: Annotated[bool, typer.Option(help="try blocks of the Triton kernels")] = False,
    budget_s: Annotated[float, typer.Option(min=0, help="seconds for everything")] = 85,
    only: Annotated[str, typer.Option(help="backends, with commas; all if left out")] = "",
    dims: Annotated[str, typer.Option(help="head dimensions, with commas")] = "128,64",
    seqs: Annotated[str, typer.Option(help="lengths, with commas")] = "16384,8192,32768",
) -> None:
    """Measure on the current GPU."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("kernels are timed on a CUDA GPU, and this machine has none")
    with in_one_sentence():
        check_appendable(out, KERNELS_CSV, "OUT")
    deadline = monotonic() + budget_s
    cases = [
        Case(seq, *heads, dim, causal)
        for dim, causal, seq, heads in product(
            map(int, dims.split(",")), (True, False), map(int, seqs.split(",")), HEADS
        )
    ]
    if sweep:
        _sweep(out, [case for case in cases if case.heads_kv < case.heads_q], deadline)
        return
    asked = [name for name in only.split(",") if name]
    names = _usable(asked) if asked else _able(cases[0])
    variants = {replace(case, seq=SHORT) for case in cases}
    jobs = [(run_once, case, name) for case in variants for name in names if name in COMPILED]
    print(*compile_all(jobs, deadline - budget_s / 3), sep="\n")
    for case in cases:
        if monotonic() > deadline:
            print(f"no time was left for {case}")
            continue
        for backward in (False, True):
            _measure(out, case, _runs(case, names, backward), backward, deadline)


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


def _runs(case: Case, names: list[str], backward: bool) -> ChunkSegments:
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
    """Forward and backward of a backend, in a process that may lack what others have.

    Raises:
        RuntimeError: its package cannot be used here, and why.
    """
    if reason := backends()[name].missing():
        raise RuntimeError(reason)
    for backward in (False, True):
        _runs(case, [name], backward)[name]()
    torch.cuda.synchronize()


def compile_all(jobs: list[tuple], deadline: float) -> list[str]:
    """Run jobs in processes that fill the compilers' caches; returns what failed."""
    failures = []
    workers = max(1, min(len(jobs), (os.cpu_count() or 1) - 1, 24))
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        futures = {pool.submit(*job): job for job in jobs}
        for future in as_completed(futures):
            if error := future.exception():
                reason = str(error).partition("\n")[0]
                failures.append(f"{futures[future][1:]}: {type(error).__name__}: {reason}")
            if monotonic() > deadline:
                pool.shutdown(wait=False, cancel_futures=True)
                break
    return failures


def _measure(out: Path, case: Case, runs: ChunkSegments, backward: bool, deadline: float) -> dict:
    """Time runs in turns, write a row for each; medians by name."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    notes = {name: _attempt(run) for name, run in runs.items()}
    for turn in range(TURNS):
        for name in list(runs)[:: -1 if turn % 2 else 1]:
            if not notes[name] and (turn < 3 or monotonic() < deadline):
                times[name].append(_timed_ms(runs[name]))
    about = _about(case, "backward" if backward else "forward")
    rows = []
    for name, ms in times.items():
        row = Row(**about, what=name, note=notes[name])
        if ms:
            row = replace(
                row, ms=median(ms), ms_least=min(ms), ms_most=max(ms),
                tflops=case.flops(backward) / median(ms) / 1e9,
            )  # fmt: skip
            if standard := times.get(STANDARD):
                turns = min(len(standard), len(ms))  # time may have run out in a turn
                middle, least, most = Ratio.paired(ms[:turns], standard[:turns])
                row = replace(row, ratio=middle, ratio_least=least, ratio_most=most)
        rows.append(row)
    save(out, rows)
    return {name: median(ms) for name, ms in times.items() if ms}


def _about(case: Case, direction: str) -> dict:
    gpu = torch.cuda.get_device_name()
    return {"gpu": gpu, "torch": torch.__version__, **asdict(case), "direction": direction}


def _attempt(run: Callable[[], object]) -> str:
    """Why a run fails, or nothing; also warms up."""
    try:
        run()
        torch.cuda.synchronize()
    except Exception as error:  # too large for shared memory, say: it becomes a row with a note
        return str(error).partition("\n")[0] or type(error).__name__
    return ""


def _timed_ms(run: Callable[[], object]) -> float:
    """Milliseconds of one run on the GPU, which waits until the CPU has queued it."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(2_000_000)
    first.record()
    run()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last)


def save(out: Path, rows: list[Row]) -> None:
    """Add rows to the CSV, and print them."""
    append(out, rows, KERNELS_CSV)
    for row in rows:
        kind = "causal" if row.causal else "full"
        name = f"{row.direction:8} {kind:6} {row.seq:6} {row.heads_q}/{row.heads_kv} d{row.dim}"
        if row.ms is None:
            print(f"{name} {row.what:34} {row.note}", flush=True)
            continue
        spread = (
            f"{row.ratio:.2f} ({row.ratio_least:.2f}-{row.ratio_most:.2f})" if row.ratio else ""
        )
        print(f"{name} {row.what:34} {row.ms:8.2f} ms {row.tflops:5.0f} {spread}", flush=True)


def _sweep(out: Path, cases: list[Case], deadline: float) -> None:
    """Time one kernel's blocks at a time, the others as in the table; print the best."""
    tma = torch.cuda.get_device_capability()[0] >= 9
    tried = {case: candidates(case.dim, tma) for case in cases}
    variants = {replace(case, seq=SHORT): each for case, each in tried.items()}
    jobs = [(_run_blocks, case, *each) for case, every in variants.items() for each in every]
    started = monotonic()
    failures = compile_all(jobs, deadline - (deadline - started) / 3)
    print(f"compiled in {monotonic() - started:.0f} s, {len(failures)} of {len(jobs)} do not fit")
    for case in cases:
        for which in KernelPass:
            if monotonic() > deadline:
                print(f"no time was left for {which.value} of {case}")
                continue
            blocks = {str(b): b for of, b in tried[case] if of is which}
            runs = {name: _run_with(case, which, b) for name, b in blocks.items()}
            medians = _measure(out, case, runs, which is not KernelPass.FORWARD, deadline)
            for name in sorted(medians, key=medians.__getitem__)[:3]:
                print(f"best {which.value}: {name} {medians[name]:.2f} ms", flush=True)


def _run_blocks(case: Case, which: KernelPass, blocks: Blocks) -> None:
    _run_with(case, which, blocks)()
    torch.cuda.synchronize()


def _run_with(case: Case, which: KernelPass, blocks: Blocks) -> Callable[[], object]:
    """Forward, or the whole backward, with other blocks for one kernel than the table's."""
    from megatron_burst.kernels.triton_backward import launch_backward
    from megatron_burst.kernels.triton_forward import launch_forward

    q, k, v, dout = case.tensors()
    lse = torch.full((1, case.heads_q, case.seq), 10.0, device="cuda")  # of thousands of keys
    grads = tuple(map(torch.empty_like, (q, k, v)))

    def choose(of: KernelPass, *problem: object) -> Blocks:
        return blocks if of is which else blocks_for(of, *problem)

    scale, visible = case.dim**-0.5, case.visible
    if which is KernelPass.FORWARD:
        return lambda: launch_forward(
            q, k, v, scale, visible, torch.empty_like(q), lse, choose=choose
        )
    return lambda: launch_backward((q, dout, lse, lse), k, v, scale, visible, grads, choose)


if __name__ == "__main__":
    typer.run(main)
