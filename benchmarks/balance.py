"""Steps of packed jobs by the rule that says which document goes where: simulated, not measured.

python -m benchmarks.balance simulate benchmarks/predictions/balance_h200.csv
python -m benchmarks.balance table benchmarks/predictions/balance_h200.csv
python -m benchmarks.balance ahead      if documents of several global batches may change places

Costs are those that the planner fits for the model. A batch has as many whole documents as fill all
micro-batches of 128K tokens when they are packed in sequence; every rule gets the same. Pipelines
are simulated (1F1B), the update of weights is left out. `dp_balanced` and `default_dynamic_cp` are
Megatron's (branch dev, d48bd6be; its examples/dynamic_context_parallel compares the two).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from statistics import fmean
from time import process_time
from typing import Annotated, Any

import numpy as np
import typer
from typer import Option

from benchmarks.documents import BATCHES, draw
from benchmarks.facts import planner_stamp
from benchmarks.rows import append, check_appendable, read
from benchmarks.runner import App, Csvs, Machine, OutFile
from benchmarks.sheets import BALANCE_CSV, BalanceRow
from benchmarks.tables import markdown
from megatron_burst.balance import BatchGrid, Costs, MicroBatch, assign
from megatron_burst.balance.packing import Packs, best_fit, sequential
from megatron_burst.tools.hardware import Hardware
from megatron_burst.tools.hardware_file import hardware as hardware_of
from megatron_burst.tools.job.hugging_face import PRESETS
from megatron_burst.tools.job.step import costs_of
from megatron_burst.tools.job.strategy import Job, Strategy
from megatron_burst.tools.simulate import micro_batches as simulated

_CP, _MICRO_BATCHES = 8, 8
_DRAWN = 300  # documents for each micro-batch; no kind needs more to fill it
RULES = ("sequential", "best-fit", "dp_balanced", "default_dynamic_cp", "balanced",
         "balanced, changing CP")  # fmt: skip
_GAINS = {"x sequential": slice(1), "x best-fit": slice(1, 2), "x Megatron": slice(2, 4)}
MODELS = {name: PRESETS[name] for name in ("qwen3-8b", "qwen3-30b-a3b")}
app = App()
Dp = Annotated[list[int] | None, Option(help="default: 8 and 32")]
Packed = Annotated[int, Option(help="tokens of a packed micro-batch", min=64)]


@dataclass(frozen=True, slots=True)
class Batch:
    """One draw for a grid."""

    lengths: list[int]
    grid: BatchGrid
    costs: Costs
    packed: int  # tokens of a micro-batch that sequential and best-fit packing fill
    seed: int

    def assigned(self, rule: str) -> simulated.MicroBatches:
        """Micro-batches by a rule: of each data-parallel rank, or of all ranks in one."""
        lengths, grid, costs = self.lengths, self.grid, self.costs
        if rule == "default_dynamic_cp":
            return [list(default_dynamic_cp(self))]
        if rule.startswith("balanced"):
            sizes = grid.cp_sizes if rule.endswith("CP") else None
            return assign(lengths, grid, costs, sizes).micro_batches
        packs = {
            "sequential": lambda: sequential(lengths, self.packed),
            "best-fit": lambda: best_fit(lengths, self.packed, self.seed),
            "dp_balanced": lambda: dp_balanced(lengths, grid),
        }[rule]()
        return simulated.in_turn(packs, lengths, grid, costs)

    def step(self, rule: str) -> float:
        """Simulated seconds of a step by a rule."""
        every = self.assigned(rule)
        if rule == "default_dynamic_cp":
            return step_of_groups(every[0], self.grid)
        return simulated.step_of(every, self.grid).seconds


def dp_balanced(lengths: Sequence[int], grid: BatchGrid) -> Packs:
    """Megatron's `dp_balanced`: as they come, up to the token limit. Then the last packs with
    several documents give up some, each a new pack, until all ranks have equally many packs."""
    packs = sequential(lengths, grid.token_limit * grid.cp)
    givers = packs[::-1]
    while len(packs) % grid.dp:
        packs.append([next(pack for pack in givers if len(pack) > 1).pop()])
    return packs


def default_dynamic_cp(batch: Batch) -> Iterator[list[MicroBatch]]:
    """Megatron's `default_dynamic_cp`: micro-batches of all DP x CP ranks (a power of two), in
    which sub-groups of several sizes, powers of two, have documents each."""
    lengths, ranks = np.array(batch.lengths), batch.grid.dp * batch.grid.cp
    left = np.argsort(-lengths, kind="stable").tolist()
    while left:
        sizes, packs, left = _sub_groups(batch, left, ranks)
        while sum(sizes) < ranks:  # the first of the narrowest gets as many ranks again
            sizes[sizes.index(min(sizes))] *= 2
        yield [
            simulated.micro_batch_of(pack, range(end - size, end), lengths, batch.costs)
            for pack, size, end in zip(packs, sizes, accumulate(sizes), strict=True)
        ]


def _sub_groups(batch: Batch, queue: list[int], ranks: int) -> tuple[list[int], Packs, list[int]]:
    """Sizes and documents of a micro-batch's sub-groups, and documents that are left over.

    The longest is on as few ranks as hold it. Each next one goes where the most that a rank works,
    length^2 / size, becomes least: into a sub-group or a new one; of equals into the narrowest. It
    is left over where that is above 1.05 times the longest's length times the token limit."""
    lengths, limit = batch.lengths, batch.grid.token_limit
    longest, new = lengths[queue[0]], 1 << np.arange(ranks.bit_length())
    sizes = np.append(np.ones(ranks, dtype=np.int64), new)  # of sub-groups, then of new ones
    tokens = np.append(np.full(ranks, np.inf), np.zeros(len(new)))  # of a rank
    work = np.zeros(len(sizes))
    most, packs, left = longest**2 / int(new[new * limit >= longest][0]), [], []
    for document in queue:
        length = lengths[document]
        after = np.maximum(most, work + length**2 / sizes)
        after[(tokens + length / sizes > limit) | (after > longest * limit * 1.05)] = np.inf
        after[ranks:][new > ranks - sizes[: len(packs)].sum()] = np.inf
        at = int(np.lexsort((sizes, after))[0])
        if after[at] == np.inf:
            left.append(document)
            continue
        if at >= ranks:
            sizes[len(packs)], tokens[len(packs)], at = sizes[at], 0, len(packs)
            packs.append([])
        packs[at].append(document)
        tokens[at] += length / sizes[at]
        work[at] += length**2 / sizes[at]
        most = max(most, float(work[at]))
    return sizes[: len(packs)].tolist(), packs, left


def step_of_groups(micro_batches: Sequence[Sequence[MicroBatch]], grid: BatchGrid) -> float:
    """Seconds of a step whose micro-batches are of all DP x CP ranks, in sub-groups of any sizes: a
    rank waits only for those with which it shares documents or experts, and for other stages."""
    clocks = np.zeros((grid.pp, grid.dp * grid.cp))
    ends: dict[tuple[str, int, int], np.ndarray] = {}
    runs = simulated.one_f_one_b([1.0] * len(micro_batches), grid.pp)
    for stage, number, what, start, stop in runs:
        before = what, number, stage - 1 if what == "forward" else stage + 1
        ready = np.maximum(clocks[stage], ends.get(before, 0.0))
        ready = ready.reshape(-1, grid.ep).max(axis=1).repeat(grid.ep)
        for one in micro_batches[number]:
            own = ready[one.ranks.start : one.ranks.stop]
            own[:] = own.max() + (stop - start) * one.seconds
        clocks[stage] = ends[what, number, stage] = ready
    return float(clocks.max())


def fills(lengths: Sequence[int], limit: int, packs: int) -> int:
    """How many documents, from the first on, fill so many packs in sequence."""
    return list(accumulate(map(len, sequential(lengths, limit))))[packs - 1]


def case_of(name: str, dp: int, pp: int, packed: int, machine: Hardware) -> tuple[BatchGrid, Costs]:
    """The grid and the planner's costs of one of `MODELS`; its token limit is what is packed."""
    model = MODELS[name]
    strategy = Strategy(cp=_CP, dp=dp, pp=pp, ep=8 if model.experts else 1, recompute="selective")
    costs = costs_of(Job(model, packed, dp * _CP * pp, 8, dp, machine), strategy)
    assert costs  # sequences are long
    return BatchGrid(dp, _CP, _MICRO_BATCHES, packed // _CP, pp, strategy.ep), costs


def batches(kind: str, grid: BatchGrid, costs: Costs, packed: int, draws: int) -> Iterator[Batch]:
    """Draws that fill a grid in sequence."""
    for seed in range(draws):
        lengths = draw(kind, _DRAWN * grid.slots, seed, packed)
        yield Batch(lengths[: fills(lengths, packed, grid.slots)], grid, costs, packed, seed)


def measure(drawn: Sequence[Batch], rules: Sequence[str], **columns: Any) -> Iterator[BalanceRow]:
    """A row for each rule."""
    grid = drawn[0].grid
    best = [assign(b.lengths, b.grid, b.costs, b.grid.cp_sizes) for b in drawn]
    for rule in rules:
        began = process_time()
        steps = [batch.step(rule) for batch in drawn]
        cpu_ms = 1e3 * (process_time() - began) / len(drawn)
        yield BalanceRow(
            **columns, dp=grid.dp, cp=grid.cp, pp=grid.pp, ep=grid.ep,
            micro_batches=grid.micro_batches, token_limit=grid.token_limit, draws=len(drawn),
            num_documents=fmean(len(b.lengths) for b in drawn), rule=rule, step_s=fmean(steps),
            bound_s=fmean(one.bound for one in best), longest_s=fmean(one.longest for one in best),
            cpu_ms=cpu_ms, note="",
        )  # fmt: skip


def mixed(drawn: list[Batch]) -> list[Batch]:
    """The same batches, with each other's documents."""
    every = np.sort(np.concatenate([one.lengths for one in drawn]))[::-1]
    turn, at = np.divmod(np.arange(len(every)), len(drawn))
    step = np.where(turn % 2, len(drawn) - 1 - at, at)
    return [replace(one, lengths=every[step == n].tolist()) for n, one in enumerate(drawn)]


@app.command()
def simulate(
    out: OutFile,
    dp: Dp = None,
    pp: Annotated[list[int] | None, Option(help="default: 1 and 4")] = None,
    packed: Packed = 128 << 10,
    limit: Annotated[list[float] | None, Option(help="token limit / packed: 1 and 1.5")] = None,
    draws: Annotated[int, Option(min=1)] = 5,
    rule: Annotated[list[str] | None, Option(help=f"default: {', '.join(RULES)}")] = None,
    hardware: Machine = "h200",
) -> None:
    """Append a row for each case and rule."""
    check_appendable(out, BALANCE_CSV, "OUT")
    machine = hardware_of(hardware)
    cases = product(MODELS, BATCHES, limit or (1.0, 1.5), dp or (8, 32), pp or (1, 4))
    for name, kind, more, ranks, stages in cases:
        grid, costs = case_of(name, ranks, stages, packed, machine)
        gpus = ranks * _CP * stages
        grid = replace(grid, token_limit=int(packed * more) // _CP)
        columns = planner_stamp(machine.name) | {"model": name, "documents": kind, "gpus": gpus}
        drawn = list(batches(kind, grid, costs, packed, draws))
        append(out, list(measure(drawn, rule or RULES, **columns)), BALANCE_CSV)
        typer.echo(f"{name}, {kind}, {gpus} GPUs, PP {stages}, limit {grid.token_limit}: done")


@app.command()
def ahead(
    count: Annotated[int, Option("--ahead", min=2, help="batches")] = 4,
    dp: Dp = None,
    packed: Packed = 128 << 10,
    hardware: Machine = "h200",
) -> None:
    """What steps gain if documents of several global batches may change places, as Markdown.

    The documents of the batches, from the longest on, are given to the steps in turns, back and
    forth; then each step is assigned as usual. Steps are means over as many draws as batches."""
    machine, lines = hardware_of(hardware), []
    for name, kind, ranks, stages in product(MODELS, BATCHES, dp or (8, 32), (1, 4)):
        grid, costs = case_of(name, ranks, stages, packed, machine)
        drawn = list(batches(kind, grid, costs, packed, count))
        plain, other = (fmean(b.step(RULES[-1]) for b in some) for some in (drawn, mixed(drawn)))
        figures = f"{plain:.2f}", f"{other:.2f}", f"{plain / other:.3f}"
        lines.append((name, kind, ranks, stages, *figures))
    head = "model", "documents", "DP", "PP", "step, s", "looking ahead, s", "times as fast"
    typer.echo(markdown([head, *lines]))


@app.command()
def table(csvs: Csvs) -> None:
    """Markdown: each rule's step over the bound's."""
    typer.echo(table_of(read(csvs, BALANCE_CSV)))


def table_of(rows: Sequence[BalanceRow]) -> str:
    """A line for each case: the bound over each rule's step, gains of the better balanced one."""
    cases: dict[tuple[object, ...], dict[str, BalanceRow]] = {}
    for row in rows:
        key = (row.model, row.documents, row.gpus, row.pp, row.token_limit * row.cp >> 10)
        cases.setdefault(key, {})[row.rule] = row
    head = ["model", "documents", "GPUs", "PP", "limit, K", *RULES, *_GAINS, "longest / bound"]
    lines = []
    for key, by_rule in cases.items():
        steps, bounds = (
            np.array([getattr(by_rule.get(rule), name, None) for rule in RULES], dtype=float)
            for name in ("step_s", "bound_s")
        )
        ours = np.fmin.reduce(steps[4:])
        gains = [np.fmin.reduce(steps[some]) / ours for some in _GAINS.values()]
        first = next(iter(by_rule.values()))
        figures = (*bounds / steps, *gains, first.longest_s / first.bound_s)
        lines.append((*key, *(f"{figure:.2f}".replace("nan", "") for figure in figures)))
    return markdown([head, *lines])


if __name__ == "__main__":
    app()
