"""Time to the first token of a long prompt, over context-parallel or tensor-parallel ranks, as CSV.

torchrun --nproc-per-node 8 -m benchmarks.prefill --seq 32K,64K,128K,256K --out prefill.csv
python -m benchmarks.prefill --rank-of 8     one of 8 ranks computes, on one GPU; nothing is sent

The model of examples/prefill.py with the sizes of BurstAttention's tables, random weights, a causal
mask. `burst` leaves K and V sharded by rows, `burst-gathered` gathers them on every rank, which is
in its time. `tp-v1` sums what ranks contribute, `tp-v3` also shards rows between the products, as
Megatron's sequence parallelism does; both leave K and V sharded by heads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import typer
from typer import Option

from benchmarks.impls import pick
from benchmarks.prefill_cases import (
    IMPLS,
    MODELS,
    PREFILL_CSV,
    WHO,
    Prefill,
    PrefillRow,
    Ranks,
    row_of,
)
from benchmarks.sweep import Budget, Out, check_out, clock, interleave, new_app, save, sweep
from megatron_burst.errors import BurstError
from megatron_burst.tools.terminal import Device, Nodes, in_one_sentence
from megatron_burst.tools.units import in_units, whole_numbers
from megatron_burst.tools.world import attempt, clean_up, started

app = new_app()


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run measures: `problems` are of model, length and implementation."""

    problems: Sequence[tuple[str, int, str]]
    ranks: Ranks
    dtype: torch.dtype
    reps: int = 3
    budget_s: float | None = None
    out: Path | None = None


def measure(plan: Plan, say: Callable[[str], None] | None = None) -> list[PrefillRow]:
    """Run a plan on all ranks together; returns the rows, on every rank.

    Raises:
        BurstError: if `plan.out` has other columns.
    """
    world, out_of_time = plan.ranks.world, clock(plan.budget_s)
    check_out(plan.out, world, PREFILL_CSV)

    def rows_of(problem: tuple[str, int, str]) -> list[PrefillRow]:
        made = [_measured(plan, *problem, out_of_time)]
        clean_up(world)
        save(plan.out, world, made, PREFILL_CSV)
        return made

    with torch.inference_mode():
        return sweep(plan.problems, rows_of, world, out_of_time, say)


def _measured(plan: Plan, name: str, seq: int, impl: str, out_of_time) -> PrefillRow:
    world, made = plan.ranks.world, []
    cuda = world.device.type == "cuda"
    build = partial(Prefill, MODELS[name], seq, impl, plan.ranks, plan.dtype)
    failure = attempt(lambda: made.append(build()), world)
    failure = failure or attempt(made[0].run, world)  # compiles, allocates what stays
    row = partial(row_of, name, seq, impl, plan.ranks, plan.dtype)
    if failure:
        return row([], status="failed", note=failure)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    (ms,) = interleave({impl: made[0].run}, {impl: plan.reps}, world, out_of_time).values()
    peak = max(world.gather(torch.cuda.max_memory_allocated())) / 2**30 if cuda else None
    return row(ms, peak_gib=peak, kv_gib=made[0].kv_gib)


@app.command()
def main(
    seq: Annotated[str, Option(help="tokens of the prompt")] = "32K,64K,128K,256K",
    model: Annotated[str, Option(help=f"of {', '.join(MODELS)}, with commas")] = "7b,13b",
    impl: Annotated[list[str] | None, Option(help=f"of {', '.join(IMPLS)}; default: all")] = None,
    rank_of: Annotated[
        int | None, Option(min=1, help="run one of so many ranks alone, without the others")
    ] = None,
    reps: Annotated[int, Option(min=1)] = 3,
    out: Out = Path("prefill.csv"),
    budget_s: Budget = None,
    nodes: Nodes = None,
    device: Device = None,
) -> None:
    """Time to the first token of a prompt."""
    with in_one_sentence():
        models = pick(model.split(","), {m: m for m in MODELS}, f"{WHO}: --model must name one "
                      "that there is, because each has sizes of its own")  # fmt: skip
        impls = pick(impl or (), IMPLS, f"{WHO}: --impl must name one that there is, because each "
                     "shards a prompt in its own way")  # fmt: skip
        lengths = whole_numbers(seq, "--seq", WHO)
        with started(WHO, device, nodes) as world:
            ranks = Ranks(world, rank_of or world.size)
            _check(lengths, ranks)
            dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
            known = [name for name in impls if not (ranks.alone and name == "burst-gathered")]
            problems = [(m, s, i) for s, m, i in product(lengths, models, known)]
            for row in measure(Plan(problems, ranks, dtype, reps, budget_s, out)):
                if world.rank == 0:
                    what = f"{row.model}, {in_units(row.seq)}, {row.impl}, {row.ranks} ranks"
                    result = f"{row.ms / 1e3:.3f} s" if row.ms else row.note
                    typer.echo(f"{what}: {result}")


def _check(lengths: Sequence[int], ranks: Ranks) -> None:
    """Refuse lengths and ranks that do not fit.

    Raises:
        BurstError: if a length has no equal shards, or several processes are to be one rank.
    """
    odd = [length for length in lengths if length % (2 * ranks.size)]
    if odd:
        raise BurstError(
            f"{WHO}: --seq must be a multiple of twice the ranks, because zigzag gives each rank "
            f"two chunks; got {odd[0]} on {ranks.size} ranks; choose another"
        )
    if ranks.alone and ranks.world.size > 1:
        raise BurstError(
            f"{WHO}: --rank-of must run on one process, because the others have no part in it; "
            f"got {ranks.world.size}; leave torchrun out"
        )


if __name__ == "__main__":
    app()
