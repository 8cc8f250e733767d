"""Steps of packed jobs by the rule that says which document goes where: simulated, not measured.

python -m benchmarks.balance simulate benchmarks/predictions/balance_h200.csv
python -m benchmarks.balance table benchmarks/predictions/balance_h200.csv
python -m benchmarks.balance ahead      if documents of several global batches may change places

Costs are those that the planner fits for the model. A batch has as many whole documents as fill all
micro-batches of 128K tokens when they are packed in sequence; every rule gets the same. Pipelines
are simulated (1F1B), the update of weights is left out. Other projects' rules are for comparison
only. See docs/how-to/balance.md.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, product
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
from megatron_burst.balance import BatchGrid, Costs, assign, pairs_of
from megatron_burst.balance.packing import Packs, best_fit, sequential
from megatron_burst.tools.hardware import Hardware
from megatron_burst.tools.hardware_file import hardware as hardware_of
from megatron_burst.tools.job.hugging_face import PRESETS
from megatron_burst.tools.job.step import costs_of
from megatron_burst.tools.job.strategy import Job, Strategy
from megatron_burst.tools.simulate.micro_batches import in_turn, step_of

_CP, _MICRO_BATCHES = 8, 8
_DRAWN = 300  # documents for each micro-batch; no kind needs more to fill it
RULES = "sequential", "best-fit", "WLB", "dynamic CP", "balanced", "balanced, changing CP"
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

    def step(self, rule: str) -> float | None:
        """Simulated seconds of a step by a rule; None if it leaves documents over."""
        lengths, grid, costs = self.lengths, self.grid, self.costs
        if rule == "dynamic CP":
            return dynamic_cp(lengths, grid, costs)
        if rule.startswith("balanced"):
            sizes = grid.cp_sizes if rule.endswith("CP") else None
            return step_of(assign(lengths, grid, costs, sizes).micro_batches, grid).seconds
        packs = {
            "sequential": lambda: sequential(lengths, self.packed),
            "best-fit": lambda: best_fit(lengths, self.packed, self.seed),
            "WLB": lambda: wlb(lengths, grid, costs),
        }[rule]()
        return step_of(in_turn(packs, lengths, grid, costs), grid).seconds if packs else None


def wlb(lengths: Sequence[int], grid: BatchGrid, costs: Costs) -> Packs:
    """WLB-LLM's packing of variable length (2503.17924, algorithm 1): the longest first to the
    micro-batch with the least work, or, if it does not fit there, with the fewest tokens. Without
    its queue, which delays long documents to later steps: the batch stays whole."""
    packs: Packs = [[] for _ in range(grid.slots)]
    work, tokens = np.zeros(grid.slots), np.zeros(grid.slots, dtype=np.int64)
    limit = grid.token_limit * grid.cp
    for document in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        length = lengths[document]
        pack = int(work.argmin())
        if tokens[pack] + length > limit:
            pack = int(tokens.argmin())
        if tokens[pack] + length > limit:
            return []
        packs[pack].append(document)
        tokens[pack] += length
        area = int(pairs_of(np.int64(length)))
        work[pack] += costs.seconds(length, area, grid.cp) - costs.fixed
    return packs


def dynamic_cp(lengths: Sequence[int], grid: BatchGrid, costs: Costs) -> float:
    """Seconds of a step with Megatron-Core's own scheduler of `--hybrid-context-parallel`.

    After each of its groups of samples all ranks of DP x CP wait for each other. Samples of a rank
    run one after the other; a group's fixed time counts once, as if they were packed."""
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    class Ranks:
        def size(self) -> int:
            return grid.dp * grid.cp

    scheduler = BalancedCPScheduler(grid.token_limit, Ranks())
    _, groups = scheduler.get_groups_and_subsamples(list(enumerate(lengths)), None)
    seen: list[int] = []
    step = 0.0
    for group in groups:
        ranks_of = Counter(chain(*group))
        seen += ranks_of
        work = {
            d: costs.seconds(lengths[d], int(pairs_of(np.int64(lengths[d]))), count) - costs.fixed
            for d, count in ranks_of.items()
        }
        step += max(0.0, *(costs.fixed + sum(map(work.get, documents)) for documents in group))
    assert sorted(seen) == list(range(len(lengths)))
    return step


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
    """A row for each rule; Megatron's scheduler, which is slow, gets the first draw alone."""
    first = drawn[0]
    best = [assign(b.lengths, b.grid, b.costs, b.grid.cp_sizes) for b in drawn]
    for rule in rules:
        some = drawn[:1] if rule == "dynamic CP" else drawn
        steps, times, note = [], [], ""
        if rule == "dynamic CP" and first.grid.pp > 1:
            note = "Megatron's scheduler has no pipeline"
        for batch in () if note else some:
            began = process_time()
            steps.append(batch.step(rule))
            times.append(1e3 * (process_time() - began))
        if None in steps:
            steps, times, note = [], [], "leaves documents over"
        yield BalanceRow(
            **columns, dp=first.grid.dp, cp=first.grid.cp, pp=first.grid.pp, ep=first.grid.ep,
            micro_batches=first.grid.micro_batches, token_limit=first.grid.token_limit,
            draws=len(some), num_documents=fmean(len(b.lengths) for b in some), rule=rule,
            step_s=fmean(steps) if steps else None,
            bound_s=fmean(one.bound for one in best[: len(some)]),
            longest_s=fmean(one.longest for one in best[: len(some)]),
            cpu_ms=min(times) if times else None, note=note,
        )  # fmt: skip


def mixed(drawn: list[Batch]) -> list[Batch]:
    """The same batches, with each other's documents."""
    every = np.sort(np.concatenate([one.lengths for one in drawn]))[::-1]
    turn, at = np.divmod(np.arange(len(every)), len(drawn))
    step = np.where(turn % 2, len(drawn) - 1 - at, at)
    return [
        Batch(every[step == number].tolist(), one.grid, one.costs, one.packed, one.seed)
        for number, one in enumerate(drawn)
    ]


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
    stamp = planner_stamp(machine.name)
    cases = product(MODELS, BATCHES, limit or (1.0, 1.5), dp or (8, 32), pp or (1, 4))
    for name, kind, more, ranks, stages in cases:
        grid, costs = case_of(name, ranks, stages, packed, machine)
        gpus = ranks * _CP * stages
        grid = replace(grid, token_limit=int(packed * more) // _CP)
        columns = stamp | {"model": name, "documents": kind, "gpus": gpus}
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
        plain, other = (
            fmean(one.step("balanced, changing CP") or 0.0 for one in some)
            for some in (drawn, mixed(drawn))
        )
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
    head = ["model", "documents", "GPUs", "PP", "limit, K", *RULES, "x sequential", "x best-fit",
            "longest / bound"]  # fmt: skip
    lines = []
    for key, by_rule in cases.items():
        steps = {rule: row.step_s for rule, row in by_rule.items() if row.step_s}
        first = next(iter(by_rule.values()))
        ours = min(seconds for rule, seconds in steps.items() if rule.startswith("balanced"))
        shares = {rule: f"{by_rule[rule].bound_s / step:.2f}" for rule, step in steps.items()}
        cells = [shares.get(rule, "") for rule in RULES]
        gains = [f"{steps[rule] / ours:.2f}" for rule in ("sequential", "best-fit")]
        lines.append((*key, *cells, *gains, f"{first.longest_s / first.bound_s:.2f}"))
    return markdown([head, *lines])


if __name__ == "__main__":
    app()
