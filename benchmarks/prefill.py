"""Time to the first token of a long prompt, over context-parallel or tensor-parallel ranks, as CSV.

torchrun --nproc-per-node 8 -m benchmarks.prefill --seq 32K,64K,128K,256K --out prefill.csv
python -m benchmarks.prefill --rank-of 8     one of 8 ranks computes, on one GPU; nothing is sent

The model is that of examples/prefill.py with random weights. `burst` leaves K and V sharded by
rows, `burst-gathered` gathers them on every rank, which is in its time. `tp-v1` sums what ranks
contribute, `tp-v3` also shards rows between the products, as Megatron's sequence parallelism does.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import typer
from typer import Option

from benchmarks import runner
from benchmarks.impls import pick
from benchmarks.prefill_cases import IMPLS, MODELS, WHO, Prefill, Ranks, row_of
from benchmarks.sheets import PREFILL_CSV, PrefillRow
from megatron_burst.errors import require
from megatron_burst.tools.terminal import Device, Nodes
from megatron_burst.tools.units import in_units, whole_numbers
from megatron_burst.tools.world import attempt, clean_up, started

_REPS = 3
app = runner.App()


def measure(
    plan: runner.Plan, ranks: Ranks, dtype: torch.dtype, say: Callable[[str], None] | None = None
) -> list[PrefillRow]:
    """Run a plan of (model, length, implementation) on all ranks together; returns the rows."""
    world, out_of_time = ranks.world, runner.clock(plan.budget_s)
    runner.check_out(plan.out, world, PREFILL_CSV)

    def rows_of(case: tuple[str, int, str]) -> list[PrefillRow]:
        times, others = _measured(case, ranks, dtype, plan.reps or _REPS, out_of_time)
        clean_up(world)
        row = row_of(*case, ranks, dtype, times, **others)
        return runner.save(plan.out, world, [row], PREFILL_CSV)

    with torch.inference_mode():
        return runner.sweep(plan.cases, rows_of, world, out_of_time, say)


def _measured(
    case: tuple[str, int, str], ranks: Ranks, dtype: torch.dtype, reps: int,
    out_of_time: Callable[[], bool],
) -> tuple[list[float], dict[str, object]]:  # fmt: skip
    """Milliseconds of each repetition, and other columns of the row."""
    (name, seq, impl), world, made = case, ranks.world, []
    cuda = world.device.type == "cuda"
    build = partial(Prefill, MODELS[name], seq, impl, ranks, dtype)
    failure = attempt(lambda: made.append(build()), world)
    failure = failure or attempt(made[0].run, world)  # compiles, allocates what stays
    if failure:
        return [], {"status": "failed", "note": failure}
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    (ms,) = runner.interleave({impl: made[0].run}, reps, world, out_of_time).values()
    peak = max(world.gather(torch.cuda.max_memory_allocated())) / 2**30 if cuda else None
    return ms, {"peak_gib": peak, "kv_gib": made[0].kv_gib}


@app.command()
def main(
    seq: Annotated[str, Option(help="tokens of the prompt")] = "32K,64K,128K,256K",
    model: Annotated[str, Option(help=f"of {', '.join(MODELS)}, with commas")] = "7b,13b",
    impl: Annotated[runner.Words, Option(help=f"of {', '.join(IMPLS)}; default: all")] = None,
    rank_of: Annotated[int | None, Option(min=1, help="run one of so many ranks alone")] = None,
    reps: runner.Reps = _REPS,
    out: runner.Out = Path("prefill.csv"),
    budget_s: runner.Budget = None,
    nodes: Nodes = None,
    device: Device = None,
) -> None:
    """Time to the first token of a prompt."""
    models = pick(model.split(","), {m: m for m in MODELS}, f"{WHO}: --model must name one that "
                  "there is, because each has sizes of its own")  # fmt: skip
    impls = pick(impl or (), IMPLS, f"{WHO}: --impl must name one that there is, because each "
                 "shards a prompt in its own way")  # fmt: skip
    lengths = whole_numbers(seq, "--seq", WHO)
    with started(WHO, device, nodes) as world:
        ranks = Ranks(world, rank_of or world.size)
        _check(lengths, ranks)
        dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
        known = [name for name in impls if not (ranks.alone and name == "burst-gathered")]
        problems = [(m, s, i) for s, m, i in product(lengths, models, known)]
        plan = runner.Plan(problems, (), reps, budget_s, out)
        for row in measure(plan, ranks, dtype):
            if world.rank == 0:
                what = f"{row.model}, {in_units(row.seq)}, {row.impl}, {row.ranks} ranks"
                result = f"{row.ms / 1e3:.3f} s" if row.ms else row.note
                typer.echo(f"{what}: {result}")


def _check(lengths: Sequence[int], ranks: Ranks) -> None:
    """Refuse lengths without equal shards, and several processes that are to be one rank."""
    odd = [length for length in lengths if length % (2 * ranks.size)]
    require(WHO, [
        (not odd, "--seq must be a multiple of twice the ranks, because zigzag gives each rank two "
         "chunks", f"{next(iter(odd), 0)} on {ranks.size} ranks", "choose another"),
        (not ranks.alone or ranks.world.size == 1, "--rank-of must run on one process, because the "
         "others have no part in it", f"{ranks.world.size}", "leave torchrun out"),
    ])  # fmt: skip


if __name__ == "__main__":
    app()
