"""The cost function and simulated steps of balanced micro-batches against measured ones.

python -m benchmarks.balance_measured micro-batches OUT.csv
torchrun --nproc-per-node 2 -m benchmarks.balance_measured micro-batches OUT.csv
torchrun --nproc-per-node 4 -m benchmarks.balance_measured steps STEPS.csv --costs OUT.csv --dp 2
python -m benchmarks.balance_measured table OUT.csv

Forward and backward of layers of a middle pipeline stage. On one GPU also what one rank of 2, 4
and 8 computes, without transfers; on several, which are one context-parallel group, on all their
sub-groups at once. Coefficients are fitted to a few regular micro-batches; the others are drawn.
Steps leave out gradients' sums over ranks and the optimizer.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
from typer import Argument, Option, echo

from benchmarks.balance_documents import KINDS, draw
from benchmarks.balance_peers import fills
from benchmarks.balance_table import (
    COSTS_CSV,
    STEPS_CSV,
    CostRow,
    StepRow,
    costs_in,
    step_line,
    table_of,
)
from benchmarks.facts import gpu_state, versions
from benchmarks.frontier_cases import MODELS, Layers, ModelName
from benchmarks.rows import check_appendable, read
from benchmarks.sweep import Budget, clock, new_app, save, usual_dtype
from megatron_burst.balance import BatchGrid, Costs, MicroBatch, assign, pairs_of
from megatron_burst.balance.packing import sequential
from megatron_burst.errors import require
from megatron_burst.tools.simulate.micro_batches import MicroBatches, in_turn, step_of
from megatron_burst.tools.terminal import Device, in_one_sentence
from megatron_burst.tools.units import whole_number
from megatron_burst.tools.world import World, started, timed_ms

_WHO, _ALONE = "benchmarks.balance_measured", 8
_FITTED = ((1, 1), (4, 4), (8, 4), (32, 32), (64, 16))  # a share of the tokens, how many such
_MICRO_BATCHES = 8  # of a step
app = new_app()
Tokens = Annotated[str, Option(help="that a rank holds of a micro-batch")]


@dataclass(frozen=True)
class Bench:
    """What runs, and where."""

    layers: Any  # PackedLayers
    world: World
    ranks: int  # of a context-parallel group, there or not
    tokens: int  # that a rank holds of a micro-batch
    reps: int
    columns: dict[str, object]

    def times(self, run: Callable[[], None]) -> list[float]:
        """Milliseconds of the slowest rank, of each repetition."""
        for _ in range(2):
            run()
        own = [timed_ms(run, self.world) for _ in range(self.reps)]
        return [max(each) for each in zip(*self.world.gather(own), strict=True)]

    def step(self, lengths: np.ndarray, some: Sequence[MicroBatch]) -> Callable[[], None]:
        """Micro-batches of this rank one after the other."""
        runs = [
            self.layers.micro_batch(lengths[list(one.documents)].tolist(), one.cp) for one in some
        ]

        def run() -> None:
            for each in runs:
                each()

        return run

    def now(self) -> dict[str, Any]:
        """Columns of any row."""
        when = datetime.now(UTC).isoformat(timespec="seconds")
        return {"date": when, "gpu": gpu_state(self.world.device), **self.columns}


def drawn(bench: Bench, count: int, cp: int) -> Iterator[tuple[str, list[int]]]:
    """Micro-batches on `cp` ranks: their kind and lengths. Some that are to be fitted, then `count`
    whose documents are drawn and that are 40 to 100 % full."""
    whole, multiple = bench.tokens * cp, 2 * bench.ranks
    for share, some in _FITTED:
        length = max(whole // share // multiple, 1) * multiple
        yield "fitted", [length] * min(some, whole // length)
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        room = int(np.random.default_rng((cp, number)).uniform(0.4, 1.0) * whole)
        lengths = padded(draw(kind, 300, 1000 * cp + number, room - multiple), multiple)
        yield kind, lengths[: int(np.searchsorted(np.cumsum(lengths), room, "right"))].tolist()


def padded(lengths: Sequence[int], multiple: int) -> np.ndarray:
    """As any size of the group shards them."""
    return -(-np.array(lengths) // multiple) * multiple


def micro_batch_rows(bench: Bench, count: int, sizes: Sequence[int]) -> Iterator[CostRow]:
    """Measure micro-batches at each context-parallel size, in turns."""
    each = [list(drawn(bench, count, cp)) for cp in sizes]
    for some in zip(*each, strict=True):
        for cp, (kind, lengths) in zip(sizes, some, strict=True):
            times = bench.times(bench.layers.micro_batch(lengths, cp))
            yield CostRow(
                **bench.now(), cp=cp, kind=kind, documents=len(lengths), tokens=sum(lengths),
                area=int(pairs_of(np.array(lengths)).sum()), ms=median(times), ms_min=min(times),
                ms_max=max(times), reps=len(times),
            )  # fmt: skip


def step_rows(bench: Bench, draws: int, costs: Costs) -> Iterator[StepRow]:
    """Measure steps packed in sequence, balanced, and with changing sizes."""
    grid = BatchGrid(bench.world.size // bench.ranks, bench.ranks, _MICRO_BATCHES, bench.tokens)
    whole, multiple = bench.tokens * grid.cp, 2 * grid.cp
    dp_rank, cp_rank = divmod(bench.world.rank, grid.cp)
    for kind, seed in product(KINDS, range(draws)):
        lengths = padded(draw(kind, 300 * grid.slots, seed, whole - multiple), multiple)
        lengths = lengths[: fills(lengths, whole, grid.slots)]
        for rule, every in rules_of(lengths, grid, costs).items():
            own = [next(one for one in slot if cp_rank in one.ranks) for slot in every[dp_rank]]
            times = bench.times(bench.step(lengths, own))
            yield StepRow(
                **bench.now(), kind=kind, seed=seed, rule=rule, documents=len(lengths),
                tokens=int(lengths.sum()), simulated_ms=1e3 * step_of(every, grid).seconds,
                ms=median(times), ms_min=min(times), ms_max=max(times), reps=len(times), dp=grid.dp,
            )  # fmt: skip


def rules_of(lengths: np.ndarray, grid: BatchGrid, costs: Costs) -> dict[str, MicroBatches]:
    """Micro-batches of each data-parallel rank, by rule."""
    packs = sequential(lengths, grid.token_limit * grid.cp)
    found = {"sequential": in_turn(packs, lengths, grid, costs)}
    found["balanced"] = assign(lengths, grid, costs).micro_batches
    if grid.cp > 1:
        changing = assign(lengths, grid, costs, grid.cp_sizes)
        found["balanced, changing CP"] = changing.micro_batches
    return found


def bench_of(
    world: World, model: str, layers: int | None, tokens: int, reps: int, dp: int = 1
) -> Bench:
    """Build the layers.

    Raises:
        BurstError: if the ranks are no `dp` groups of equal size.
    """
    from benchmarks.stack import start

    require(_WHO, [(
        world.size % dp == 0,
        "--dp must divide the ranks, because context-parallel groups have equally many",
        f"--dp {dp} and {world.size} ranks", f"pass --dp {world.size}",
    )])  # fmt: skip
    start(world.device.type == "cpu", world.size // dp)
    from benchmarks.balance_layers import PackedLayers

    sizes, dtype = MODELS[model], usual_dtype(world)
    sizes = replace(sizes, layers=layers or min(sizes.layers, 4))
    built = PackedLayers(sizes, getattr(torch, dtype), world.size == 1, tokens)
    how = "one rank's part" if world.size == 1 else "group"
    ranks = _ALONE if world.size == 1 else world.size // dp
    columns = {
        "run": datetime.now(UTC).isoformat(timespec="seconds"), "versions": versions(),
        "gpus": world.size, "how": how, "model": model, "layers": sizes.layers,
    }  # fmt: skip
    return Bench(built, world, ranks, tokens, reps, columns)


@app.command("micro-batches")
def micro_batches(
    out: Annotated[Path, Argument(help="CSV to append to")],
    model: ModelName = "qwen3-8b",
    layers: Layers = None,
    tokens: Tokens = "16K",
    count: Annotated[int, Option(min=1, help="drawn, at each size")] = 30,
    reps: Annotated[int, Option(min=1)] = 3,
    budget_s: Budget = None,
    device: Device = None,
) -> None:  # fmt: skip
    """Measure micro-batches at each size, then compare them with the cost function."""
    with in_one_sentence():
        check_appendable(out, COSTS_CSV, "OUT")
        held, rows, over = whole_number(tokens, "--tokens", _WHO), [], clock(budget_s)
        with started(_WHO, device) as world:
            bench = bench_of(world, model, layers, held, reps)
            sizes = BatchGrid(1, bench.ranks, 1, held).cp_sizes
            for row in micro_batch_rows(bench, count, sizes):
                save(out, world, [row], COSTS_CSV)
                rows.append(row)
                if row.cp == sizes[-1] and world.decide(over()):
                    world.progress.say(f"time is up after {len(rows)} micro-batches")
                    break
            if world.rank == 0:
                echo(table_of(rows))


@app.command()
def steps(
    out: Annotated[Path, Argument(help="CSV to append to")],
    costs: Annotated[Path, Option(help="what micro-batches wrote on as many GPUs")],
    model: ModelName = "qwen3-8b",
    layers: Layers = None,
    tokens: Tokens = "16K",
    dp: Annotated[int, Option(min=1, help="data-parallel ranks")] = 1,
    draws: Annotated[int, Option(min=1, help="of each kind of documents")] = 2,
    reps: Annotated[int, Option(min=1)] = 3,
    budget_s: Budget = None,
    device: Device = None,
) -> None:  # fmt: skip
    """Measure steps of data-parallel ranks, each a context-parallel group of equally many GPUs."""
    with in_one_sentence():
        check_appendable(out, STEPS_CSV, "OUT")
        held, over = whole_number(tokens, "--tokens", _WHO), clock(budget_s)
        with started(_WHO, device) as world:
            bench = bench_of(world, model, layers, held, reps, dp)
            fitted = costs_in(read([costs], COSTS_CSV))
            for row in step_rows(bench, draws, fitted):
                save(out, world, [row], STEPS_CSV)
                if world.rank == 0:
                    echo(step_line(row))
                if world.decide(over()):
                    break


@app.command()
def table(csvs: Annotated[list[Path], Argument(help="that micro-batches wrote")]) -> None:
    """Errors of the cost function at each size, as Markdown."""
    with in_one_sentence():
        echo(table_of(read(csvs, COSTS_CSV)))


if __name__ == "__main__":
    app()
