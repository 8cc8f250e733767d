"""What one rank of a context-parallel group computes, on one GPU: nothing is sent.

python benchmarks/one_rank.py OUT.csv --ranks 2,4,8

The last rank runs its own programs: kernels, merges, sums and copies, on memory that holds noise
where others' keys would be. Beside it, in turns, the kernel alone computes as much: the whole
sequence with as many heads as one of the ranks has on average. With 1 rank both are the same call.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its own folder alone

from benchmarks.facts import gpu_state, versions
from benchmarks.ratios import Ratio
from benchmarks.rows import Sheet, append, check_appendable
from megatron_burst.comm.carrier import OVER, Memory, OneQueue, Queues, SentSlots, Where
from megatron_burst.comm.group import GroupMemory
from megatron_burst.engine.passes import Passes
from megatron_burst.kernels.backends import choose_backend, kernel_of
from megatron_burst.kernels.interface import QuerySide
from megatron_burst.kernels.visible import CAUSAL
from megatron_burst.resolve import resolve
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.spec import AttentionShape, Spec
from megatron_burst.schedule.topology import pretend_nodes
from megatron_burst.tools.speeds import problem_of
from megatron_burst.tools.terminal import in_one_sentence
from megatron_burst.tools.units import whole_number, whole_numbers

_WHO, _TURNS = "benchmarks/one_rank.py", 7


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """One measurement of both passes; fields are columns.

    Attributes:
        what: "rank", or "kernel": the kernel alone.
        mode: of the rank.
        ms: median over repetitions, with minimum and maximum.
        ratio: ms of the kernel / ms of the rank, median over turns.
    """

    date: str
    versions: str
    gpu: str
    ranks: int
    seq: int
    heads_q: int
    heads_kv: int
    dim: int
    dtype: str
    what: str
    mode: str
    backend: str
    ms: float
    ms_min: float
    ms_max: float
    ratio: float
    reps: int


RANK_CSV = Sheet(_WHO, RankRow)


class Silent:
    """A carrier that sends nothing."""

    overlaps = True

    def __init__(self, cp_rank: int) -> None:
        self.cp_rank, self._memory = cp_rank, GroupMemory()
        self._streams: dict = {}
        self._noisy: set[tuple[int, int]] = set()  # memory, by place and length

    def buffers(self, use, count: int, num_bytes: int, where: Where) -> Memory:
        memory = self._memory.of(use, count, num_bytes, where)
        for flat in memory.flats:
            place = flat.data_ptr(), len(flat)
            if len(flat) and place not in self._noisy:  # as zeros would be computed faster
                self._noisy.add(place)
                flat[: len(flat) // 2 * 2].view(torch.bfloat16).normal_()
        return memory

    def slots(self, cargo, count: int, num_bytes: int, where: Where) -> SentSlots:
        return SentSlots(self.buffers(cargo, count, num_bytes, where), count, lambda *_: OVER)

    def send(self, link, cargo, sends, recvs):
        return OVER

    def run(self, *_: object) -> None:
        """Note nothing: no other rank is waited for."""

    def queues(self, device: torch.device) -> OneQueue | Queues:
        if device.type != "cuda":
            return OneQueue(Where(device))
        return Queues(device, self._streams)


def tensors_of(rows: int, heads: tuple[int, int], dim: int, device, dtype) -> list[torch.Tensor]:
    """q, k, v, dout."""
    counts = heads[0], heads[1], heads[1], heads[0]
    return [torch.randn(1, rows, n, dim, device=device, dtype=dtype) for n in counts]


def passes_of_last(ranks: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Passes:
    """The passes of the last rank over its rows, [1, s_local, heads, d]; nothing is sent."""
    backend, _ = choose_backend(problem_of(q, k, v, mask=Mask.CAUSAL), "auto")
    (_, rows, heads, dim), heads_kv = q.shape, k.shape[2]
    shape = AttentionShape(1, rows, heads, heads_kv, dim, dim, q.dtype.itemsize, 4, 4)
    opened = Spec(pretend_nodes(ranks, 1), shape, kernel=kernel_of(backend, q.device))
    return Passes(resolve(opened)[0], backend, Silent(ranks - 1), dim**-0.5, q.dtype)


def rank_runs(ranks: int, seq: int, heads: tuple[int, int], dim: int, device, dtype):
    """(the passes of the last rank, those of the kernel alone, mode, backend)."""
    q, k, v, dout = tensors_of(seq // ranks, heads, dim, device, dtype)
    passes = passes_of_last(ranks, q, k, v)
    spec, backend = passes.spec, passes.backend

    def rank() -> None:
        out, _, left = passes.forward(q, k, v)
        passes.backward(left, out.to(dtype), dout)

    share = heads[0] // ranks, max(1, heads[1] // ranks)
    whole_q, whole_k, whole_v, whole_dout = tensors_of(seq, share, dim, device, dtype)

    def kernel() -> None:
        out, lse = backend.forward(whole_q, whole_k, whole_v, dim**-0.5, CAUSAL)
        side = QuerySide(whole_q, whole_dout, lse, None, out)
        backend.backward(side, whole_k, whole_v, dim**-0.5, CAUSAL)

    return rank, kernel, spec.intra or "", backend.capability.name


def timed_ms(run: Callable[[], None], device: torch.device) -> float:
    """Milliseconds of one run."""
    if device.type != "cuda":
        begin = datetime.now(UTC)
        run()
        return 1e3 * (datetime.now(UTC) - begin).total_seconds()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(20_000_000)  # so that the CPU has queued it all
    first.record()
    run()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last)


def main(
    out: Annotated[Path, typer.Argument(help="the CSV; rows are appended")],
    ranks: Annotated[str, typer.Option(help="sizes of the group, with commas")] = "2,4,8",
    seq: Annotated[str, typer.Option(help="tokens of the whole sequence")] = "64K",
    heads: Annotated[str, typer.Option(help="query heads / KV heads")] = "32/8",
    dim: Annotated[int, typer.Option(help="of a head")] = 128,
) -> None:
    """Measure both passes of the last rank, and of the kernel alone."""
    with in_one_sentence():
        check_appendable(out, RANK_CSV, "OUT")
        sizes, tokens = whole_numbers(ranks, "--ranks", _WHO), whole_number(seq, "--seq", _WHO)
    heads_q, heads_kv = map(int, heads.split("/"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for size in sizes:
        rank, kernel, mode, backend = rank_runs(
            size, tokens, (heads_q, heads_kv), dim, device, dtype
        )
        times: dict[str, list[float]] = {"rank": [], "kernel": []}
        for turn in range(_TURNS + 2):
            for what, run in (("rank", rank), ("kernel", kernel))[:: -1 if turn % 2 else 1]:
                times[what].append(timed_ms(run, device))
        kept = {what: some[2:] for what, some in times.items()}  # the first two compile, warm up
        ratio = Ratio.paired(*kept.values()).value
        rows = [
            RankRow(
                date=datetime.now(UTC).isoformat(timespec="seconds"), versions=versions(),
                gpu=gpu_state(device), ranks=size, seq=tokens, heads_q=heads_q, heads_kv=heads_kv,
                dim=dim, dtype=str(dtype).removeprefix("torch."), what=what, mode=mode,
                backend=backend, ms=median(ms), ms_min=min(ms), ms_max=max(ms),
                ratio=ratio if what == "rank" else 1.0, reps=len(ms),
            )
            for what, ms in kept.items()
        ]  # fmt: skip
        append(out, rows, RANK_CSV)
        print(f"{size} ranks: {rows[0].ms:.2f} ms, the kernel alone {rows[1].ms:.2f}: {ratio:.3f}")


if __name__ == "__main__":
    typer.run(main)
