"""What one rank of a context-parallel group computes, on one GPU: nothing is sent.

python -m benchmarks.one_rank OUT.csv --ranks 2,4,8

The last rank runs its own programs: kernels, merges, sums and copies, on memory that holds noise
where others' keys would be. Beside it, in turns, the kernel alone computes as much: the whole
sequence with as many heads as one of the ranks has on average. With 1 rank both are the same call.
"""

from typing import Annotated

import torch
from torch import Tensor
from typer import Option

from benchmarks.cases import one_head_count
from benchmarks.facts import stamp
from benchmarks.rows import append, check_appendable
from benchmarks.runner import App, OutFile, best_device, on_one
from benchmarks.sheets import RANK_CSV, RankRow
from benchmarks.tables import Ratio, spread
from megatron_burst.comm.group import GroupMemory
from megatron_burst.comm.transport import DONE, FlatBuffers, OneQueue, Placement, Queues, SentSlots
from megatron_burst.engine.passes import Passes
from megatron_burst.kernels.backends import choose_backend, kernel_of
from megatron_burst.kernels.interface import QuerySide
from megatron_burst.kernels.visible import CAUSAL
from megatron_burst.resolve import resolve
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.spec import AttentionShape, Spec
from megatron_burst.schedule.topology import pretend_nodes
from megatron_burst.tools.speeds import problem_of
from megatron_burst.tools.units import whole_number, whole_numbers

_WHO, _TURNS = "benchmarks.one_rank", 7
app = App()


class Silent:
    """A carrier that sends nothing."""

    overlaps = True

    def __init__(self, cp_rank: int) -> None:
        self.cp_rank, self._memory = cp_rank, GroupMemory()
        self._streams: dict = {}
        self._noisy: set[tuple[int, int]] = set()  # memory, by place and length

    def buffers(self, use, count: int, num_bytes: int, where: Placement) -> FlatBuffers:
        memory = self._memory.buffers(use, count, num_bytes, where)
        for flat in memory.flats:
            place = flat.data_ptr(), len(flat)
            if len(flat) and place not in self._noisy:  # as zeros would be computed faster
                self._noisy.add(place)
                flat[: len(flat) // 2 * 2].view(torch.bfloat16).normal_()
        return memory

    def slots(self, cargo, count: int, num_bytes: int, where: Placement) -> SentSlots:
        return SentSlots(self.buffers(cargo, count, num_bytes, where), count, lambda *_: DONE)

    def send(self, link, cargo, sends, recvs):
        return DONE

    def run(self, *_: object) -> None:
        """Note nothing: no other rank is waited for."""

    def queues(self, device: torch.device) -> OneQueue | Queues:
        if device.type != "cuda":
            return OneQueue(Placement(device))
        return Queues(device, self._streams)


def tensors_of(rows: int, heads: tuple[int, int], dim: int, device, dtype) -> list[Tensor]:
    """q, k, v, dout."""
    counts = heads[0], heads[1], heads[1], heads[0]
    return [torch.randn(1, rows, n, dim, device=device, dtype=dtype) for n in counts]


def passes_of_last(
    carrier: Silent, ranks: int, q: Tensor, k: Tensor, v: Tensor, layout: Layout = Layout.ZIGZAG
) -> Passes:
    """The last rank's passes over its rows, [1, s_local, heads, d], causal; nothing is sent."""
    mask = Mask(right=0, documents=layout is Layout.DOCUMENTS)
    backend, _ = choose_backend(problem_of(q, k, v, mask=mask), "auto")
    (_, rows, heads, dim), heads_kv = q.shape, k.shape[2]
    shape = AttentionShape(1, rows, heads, heads_kv, dim, dim, q.dtype.itemsize, 4, 4)
    opened = Spec(pretend_nodes(ranks, 1), shape, layout, mask, kernel_of(backend, q.device))
    return Passes(resolve(opened)[0], backend, carrier, dim**-0.5, q.dtype)


def rank_runs(ranks: int, seq: int, heads: tuple[int, int], dim: int, device, dtype):
    """(the passes of the last rank, those of the kernel alone, mode, backend)."""
    q, k, v, dout = tensors_of(seq // ranks, heads, dim, device, dtype)
    passes = passes_of_last(Silent(ranks - 1), ranks, q, k, v)
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


@app.command()
def main(
    out: OutFile,
    ranks: Annotated[str, Option(help="sizes of the group, with commas")] = "2,4,8",
    seq: Annotated[str, Option(help="tokens of the whole sequence")] = "64K",
    heads: Annotated[str, Option(help="query heads / KV heads")] = "32/8",
    dim: Annotated[int, Option(help="of a head")] = 128,
) -> None:
    """Measure both passes of the last rank, and of the kernel alone."""
    check_appendable(out, RANK_CSV, "OUT")
    sizes, tokens = whole_numbers(ranks, "--ranks", _WHO), whole_number(seq, "--seq", _WHO)
    counts, (device, dtype) = one_head_count(heads, _WHO), best_device()
    for size in sizes:
        rank, kernel, mode, backend = rank_runs(size, tokens, counts, dim, device, dtype)
        times = on_one({"rank": rank, "kernel": kernel}, _TURNS, device)
        ratio = Ratio.paired(*times.values()).value
        rows = [
            RankRow(
                **stamp(device), ranks=size, seq=tokens, heads_q=counts[0], heads_kv=counts[1],
                dim=dim, dtype=str(dtype).removeprefix("torch."), what=what, mode=mode,
                backend=backend, **spread(ms), ratio=ratio if what == "rank" else 1.0,
                reps=len(ms),
            )
            for what, ms in times.items()
        ]  # fmt: skip
        append(out, rows, RANK_CSV)
        print(f"{size} ranks: {rows[0].ms:.2f} ms, the kernel alone {rows[1].ms:.2f}: {ratio:.3f}")


if __name__ == "__main__":
    app()
