"""The cost function and simulated steps of balanced micro-batches against measured ones.

python -m benchmarks.balance_measured micro-batches OUT.csv
torchrun --nproc-per-node 2 -m benchmarks.balance_measured micro-batches OUT.csv
torchrun --nproc-per-node 4 -m benchmarks.balance_measured steps STEPS.csv --costs OUT.csv --dp 2
python -m benchmarks.balance_measured table OUT.csv

Both passes of layers of a middle pipeline stage: on one GPU what one rank of 1 to 8 computes, on
several all their sub-groups at once. Coefficients are fitted to a few regular micro-batches; the
others are drawn. Steps leave out gradients' sums over ranks and the optimizer.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
from typer import Option, echo

from benchmarks.balance import Batch, fills
from benchmarks.documents import BATCHES, draw
from benchmarks.facts import now, stamp
from benchmarks.frontier_cases import MODELS, Layers, ModelName
from benchmarks.rows import check_appendable, read
from benchmarks.runner import App, Budget, Csvs, OutFile, Reps, clock, save, usual_dtype
from benchmarks.sheets import COSTS_CSV, STEPS_CSV, CostRow, StepRow
from benchmarks.tables import markdown, spread
from megatron_burst.balance import BatchGrid, Costs, Measured, fit, pairs_of
from megatron_burst.errors import BurstError, require
from megatron_burst.tools.simulate.micro_batches import MicroBatches
from megatron_burst.tools.terminal import Device
from megatron_burst.tools.units import whole_number
from megatron_burst.tools.world import World, started, timed_ms

_WHO, _ALONE = "benchmarks.balance_measured", 8
_FITTED = ((1, 1), (4, 4), (8, 4), (32, 32), (64, 16))  # a share of the tokens, how many such
_MICRO_BATCHES = 8  # of a step
# "sequential" is Megatron's `dp_balanced`, where documents fill all micro-batches in sequence
_RULES = "sequential", "default_dynamic_cp", "balanced", "balanced, changing CP"
app = App()
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

    def times(self, runs: Sequence[Callable[[], object]]) -> list[dict[str, Any]]:
        """Columns of each run's row: milliseconds of the slowest rank, measured in turns."""
        for run in (*runs, *runs):
            run()
        own = [[timed_ms(run, self.world) for run in runs] for _ in range(self.reps)]
        facts = stamp(self.world.device) | self.columns | {"reps": self.reps}
        return [facts | spread(ms) for ms in np.max(self.world.gather(own), axis=0).T.tolist()]

    def step(self, lengths: np.ndarray, every: MicroBatches) -> Callable[[], object]:
        """Micro-batches of this rank one after the other; `every`: of equal parts of the ranks."""
        part, rank = divmod(self.world.rank, self.world.size // len(every))
        some = [next(one for one in slot if rank in one.ranks) for slot in every[part]]
        runs = [self.layers.micro_batch(lengths[[*one.documents]].tolist(), one.cp) for one in some]
        return lambda: [run() for run in runs]


def drawn(bench: Bench, count: int, cp: int) -> Iterator[tuple[str, list[int]]]:
    """Micro-batches on `cp` ranks: their kind and lengths. Some that are to be fitted, then `count`
    whose documents are drawn and that are 40 to 100 % full."""
    whole, multiple = bench.tokens * cp, 2 * bench.ranks
    for share, some in _FITTED:
        length = max(whole // share // multiple, 1) * multiple
        yield "fitted", [length] * min(some, whole // length)
    for number in range(count):
        kind = list(BATCHES)[number % len(BATCHES)]
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
        runs = [bench.layers.micro_batch(one, cp) for cp, (_, one) in zip(sizes, some, strict=True)]
        for cp, (kind, lengths), columns in zip(sizes, some, bench.times(runs), strict=True):
            columns |= {"cp": cp, "kind": kind, "documents": len(lengths), "tokens": sum(lengths)}
            yield CostRow(**columns, area=int(pairs_of(np.array(lengths)).sum()))


def step_rows(bench: Bench, draws: int, costs: Costs) -> Iterator[list[StepRow]]:
    """Measure steps by each rule, in turns."""
    grid = BatchGrid(bench.world.size // bench.ranks, bench.ranks, _MICRO_BATCHES, bench.tokens)
    whole, multiple = bench.tokens * grid.cp, 2 * bench.world.size
    for kind, seed in product(BATCHES, range(draws)):
        lengths = padded(draw(kind, 300 * grid.slots, seed, whole - multiple), multiple)
        lengths = lengths[: fills(lengths, whole, grid.slots)]
        batch = Batch(lengths.tolist(), grid, costs, whole, seed)
        rules = _RULES if grid.cp > 1 else _RULES[:-1]
        times = bench.times([bench.step(lengths, batch.assigned(rule)) for rule in rules])
        facts = {"kind": kind, "seed": seed, "dp": grid.dp, "documents": len(lengths)}
        facts |= {"tokens": int(lengths.sum())}
        yield [
            StepRow(**columns | facts, rule=rule, simulated_ms=1e3 * batch.step(rule))
            for columns, rule in zip(times, rules, strict=True)
        ]


def bench_of(
    world: World, model: str, layers: int | None, tokens: int, reps: int, dp: int = 1
) -> Bench:
    """Build the layers; BurstError if the ranks are no `dp` groups of equal size."""
    require(_WHO, [(
        world.size % dp == 0,
        "--dp must divide the ranks, because context-parallel groups have equally many",
        f"--dp {dp} and {world.size} ranks", f"pass --dp {world.size}",
    )])  # fmt: skip
    from benchmarks.stack import PackedLayers, start

    start(world.device.type == "cpu", world.size)
    sizes, dtype = MODELS[model], usual_dtype(world)
    sizes = replace(sizes, layers=layers or min(sizes.layers, 4))
    built = PackedLayers(sizes, getattr(torch, dtype), world.size == 1, tokens)
    how = "one rank's part" if world.size == 1 else "group"
    ranks = _ALONE if world.size == 1 else world.size // dp
    columns = {"run": now(), "gpus": world.size, "how": how, "model": model, "layers": sizes.layers}
    return Bench(built, world, ranks, tokens, reps, columns)


def costs_in(rows: Sequence[CostRow]) -> Costs:
    """Fitted to the regular micro-batches of the latest run; BurstError if there are too few."""
    last = max((row.run for row in rows), default="")
    return fit([
        Measured(row.tokens, row.area, row.cp, row.ms / 1e3)
        for row in rows if row.run == last and row.kind == "fitted"
    ])  # fmt: skip


def table_of(rows: Sequence[CostRow]) -> str:
    """Median and worst error of drawn micro-batches at each size, as Markdown."""
    head = "run", "how", "CP", "micro-batches", "median error", "worst error", "of"
    lines: list[Sequence[object]] = [head]
    for run in dict.fromkeys(row.run for row in rows):
        some = [row for row in rows if row.run == run]
        try:
            costs = costs_in(some)
        except BurstError as error:
            lines.append((run, error))
            continue
        measured = [row for row in some if row.kind != "fitted"]
        sizes = sorted({row.cp for row in measured})
        lines += [_line(costs, [row for row in measured if row.cp == cp], cp) for cp in sizes]
        lines += [_line(costs, measured, "all")] if measured else []
    return markdown(lines)


def _line(costs: Costs, rows: Sequence[CostRow], cp: object) -> Sequence[object]:
    error_of = {row: 1e3 * costs.seconds(row.tokens, row.area, row.cp) / row.ms - 1 for row in rows}
    worst = max(rows, key=lambda row: abs(error_of[row]))
    middle, first = median(map(abs, error_of.values())), rows[0]
    what = f"{worst.kind}: {worst.documents} documents, {worst.tokens} tokens, CP {worst.cp}"
    errors = f"{middle:.1%}", f"{error_of[worst]:+.1%}"
    return first.run, first.how, cp, len(rows), *errors, what


def step_line(row: StepRow) -> str:
    """A measured step beside the simulated one."""
    error = f"{row.simulated_ms / row.ms - 1:+.1%}"
    return (
        f"{row.kind} {row.seed}, {row.rule}: {row.ms:.1f} ms measured, {row.simulated_ms:.1f} "
        f"simulated ({error})"
    )


@app.command("micro-batches")
def micro_batches(
    out: OutFile,
    model: ModelName = "qwen3-8b",
    layers: Layers = None,
    tokens: Tokens = "16K",
    count: Annotated[int, Option(min=1, help="drawn, at each size")] = 30,
    reps: Reps = 3,
    budget_s: Budget = None,
    device: Device = None,
) -> None:
    """Measure micro-batches at each size, then compare them with the cost function."""
    check_appendable(out, COSTS_CSV, "OUT")
    shard, rows, over = whole_number(tokens, "--tokens", _WHO), [], clock(budget_s)
    with started(_WHO, device) as world:
        bench = bench_of(world, model, layers, shard, reps)
        sizes = BatchGrid(1, bench.ranks, 1, shard).cp_sizes
        for row in micro_batch_rows(bench, count, sizes):
            rows += save(out, world, [row], COSTS_CSV)
            if row.cp == sizes[-1] and world.decide(over()):
                world.progress.say(f"time is up after {len(rows)} micro-batches")
                break
        if world.rank == 0:
            echo(table_of(rows))


@app.command()
def steps(
    out: OutFile,
    costs: Annotated[Path, Option(help="what micro-batches wrote on as many GPUs")],
    model: ModelName = "qwen3-8b",
    layers: Layers = None,
    tokens: Tokens = "16K",
    dp: Annotated[int, Option(min=1, help="data-parallel ranks")] = 1,
    draws: Annotated[int, Option(min=1, help="of each kind of documents")] = 2,
    reps: Reps = 3,
    budget_s: Budget = None,
    device: Device = None,
) -> None:
    """Measure steps of data-parallel ranks, each a context-parallel group of equally many GPUs."""
    check_appendable(out, STEPS_CSV, "OUT")
    shard, over = whole_number(tokens, "--tokens", _WHO), clock(budget_s)
    with started(_WHO, device) as world:
        bench = bench_of(world, model, layers, shard, reps, dp)
        for rows in step_rows(bench, draws, costs_in(read([costs], COSTS_CSV))):
            save(out, world, rows, STEPS_CSV)
            if world.rank == 0:
                echo("\n".join(map(step_line, rows)))
            if world.decide(over()):
                break


@app.command()
def table(csvs: Csvs) -> None:
    """Errors of the cost function at each size, as Markdown."""
    echo(table_of(read(csvs, COSTS_CSV)))


if __name__ == "__main__":
    app()
