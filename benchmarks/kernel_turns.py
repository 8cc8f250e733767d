"""How kernels are timed in turns, and which blocks of our Triton kernels `kernels.py` tries."""

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import monotonic

import torch

from benchmarks.one_rank import tensors_of
from benchmarks.rows import append
from benchmarks.runner import device_ms, in_turn
from benchmarks.sheets import KERNELS_CSV, KernelRow
from benchmarks.tables import Ratio
from megatron_burst.kernels.triton_tiles import Blocks, KernelPass, blocks_for
from megatron_burst.kernels.visible import CAUSAL, FULL, Visible

STANDARD = "fa4"
TURNS, SHORT = 7, 256  # repetitions; rows of the problem that is only compiled
_AHEAD = 2_000_000  # cycles that the GPU waits, until the CPU has queued a run
# Rows, keys, warps. What is far behind on H200 (results/triton_blocks_h200.csv) is left out.
_NARROW = {
    KernelPass.FORWARD: [
        (128, 128, 8), (128, 128, 4), (128, 64, 4), (64, 128, 4), (64, 64, 4), (256, 64, 8),
    ],
    KernelPass.KEY_GRADS: [
        (64, 128, 8), (128, 128, 8), (64, 128, 4), (128, 64, 4), (64, 64, 4), (32, 128, 4),
    ],
    KernelPass.QUERY_GRADS: [
        (128, 128, 8), (128, 64, 8), (128, 64, 4), (64, 128, 4), (64, 64, 4), (128, 32, 4),
    ],
}  # fmt: skip
_WIDE = {
    KernelPass.FORWARD: [(128, 128, 8), (128, 64, 8), (128, 64, 4), (64, 128, 4), (64, 64, 4)],
    KernelPass.KEY_GRADS: [(64, 128, 8), (32, 128, 8), (64, 64, 4), (32, 64, 4)],
    KernelPass.QUERY_GRADS: [(128, 128, 8), (128, 64, 8), (64, 128, 4), (64, 64, 4), (64, 32, 4)],
}


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
        heads = self.heads_q, self.heads_kv
        return tensors_of(self.seq, heads, self.dim, "cuda", torch.bfloat16)

    @property
    def visible(self) -> Visible:
        return CAUSAL if self.causal else FULL

    def flops(self, backward: bool) -> float:
        """The usual count: two products forward, five backward, half of that if causal."""
        pairs = self.seq**2 * (0.5 if self.causal else 1)
        return (10 if backward else 4) * pairs * self.heads_q * self.dim


Runs = dict[str, Callable[[], object]]


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


def timed_in_turns(out: Path, case: Case, runs: Runs, backward: bool, deadline: float) -> dict:
    """Time runs in turns, write a row for each; medians by name."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    notes = {name: _attempt(run) for name, run in runs.items()}
    for turn in range(TURNS):
        for name in in_turn(runs, turn):
            if not notes[name] and (turn < 3 or monotonic() < deadline):
                times[name].append(device_ms(runs[name], torch.device("cuda"), _AHEAD))
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, **asdict(case)}
    about["direction"] = "backward" if backward else "forward"
    rows = []
    for name, ms in times.items():
        row = KernelRow(**about, what=name, note=notes[name])
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


def _attempt(run: Callable[[], object]) -> str:
    """Why a run fails, or nothing; also warms up."""
    try:
        run()
        torch.cuda.synchronize()
    except Exception as error:  # too large for shared memory, say: it becomes a row with a note
        return str(error).partition("\n")[0] or type(error).__name__
    return ""


def save(out: Path, rows: list[KernelRow]) -> None:
    """Add rows to the CSV, and print them."""
    append(out, rows, KERNELS_CSV)
    for row in rows:
        kind = "causal" if row.causal else "full"
        name = f"{row.direction:8} {kind:6} {row.seq:6} {row.heads_q}/{row.heads_kv} d{row.dim}"
        if row.ms is None:
            print(f"{name} {row.what:34} {row.note}", flush=True)
            continue
        ratio = Ratio(row.ratio, row.ratio_least, row.ratio_most) if row.ratio else ""
        print(f"{name} {row.what:34} {row.ms:8.2f} ms {row.tflops:5.0f} {ratio}", flush=True)


def candidates(dim: int, tma: bool) -> list[tuple[KernelPass, Blocks]]:
    """What is tried for a head dimension; up to 64, four blocks in flight fit shared memory too."""
    sizes, most_stages = (_NARROW, 4) if dim <= 64 else (_WIDE, 3)
    return [
        (which, Blocks(*each, stages, tma))
        for which, every in sizes.items()
        for each, stages in product(every, range(2, most_stages + 1))
    ]


def sweep_blocks(out: Path, cases: list[Case], deadline: float) -> None:
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
            medians = timed_in_turns(out, case, runs, which is not KernelPass.FORWARD, deadline)
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
        out = torch.empty_like(q)
        return lambda: launch_forward(q, k, v, scale, visible, out, lse, choose=choose)
    return lambda: launch_backward((q, dout, lse, lse), k, v, scale, visible, grads, choose)
