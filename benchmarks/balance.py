"""Steps of packed jobs by the rule that says which document goes where: simulated, not measured.

python benchmarks/balance.py simulate benchmarks/predictions/balance_h200.csv
python benchmarks/balance.py table benchmarks/predictions/balance_h200.csv

Costs are those that the planner fits for the model. A batch has as many whole documents as fill all
micro-batches of 128K tokens when they are packed in sequence; every rule gets the same. Pipelines
are simulated (1F1B), the update of weights is left out. See docs/how-to/balance.md.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from statistics import fmean
from time import process_time
from typing import Annotated

import typer
from typer import Argument, Option

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its own folder alone

from benchmarks.balance_documents import KINDS, draw
from benchmarks.balance_peers import dynamic_cp, fills, wlb
from benchmarks.facts import commit
from benchmarks.rows import Sheet, append, check_appendable, read
from megatron_burst.balance import BatchGrid, Costs, assign
from megatron_burst.balance.packing import best_fit, sequential
from megatron_burst.tools.hardware import Hardware
from megatron_burst.tools.hardware_file import hardware as hardware_of
from megatron_burst.tools.job.costs import costs_of
from megatron_burst.tools.job.hugging_face import PRESETS
from megatron_burst.tools.job.layers import Experts
from megatron_burst.tools.job.model import Model
from megatron_burst.tools.job.strategy import Job, Strategy
from megatron_burst.tools.simulate.micro_batches import in_turn, step_of
from megatron_burst.tools.terminal import in_one_sentence

_CP, _MICRO_BATCHES = 8, 8
_DRAWN = 300  # documents for each micro-batch; no kind needs more to fill it
RULES = "sequential", "best-fit", "WLB", "dynamic CP", "balanced", "balanced, changing CP"
# Qwen/Qwen3-30B-A3B
_MOE = Model("qwen3-30b-a3b", layers=48, hidden=2048, heads_q=32, heads_kv=4, dim_qk=128, dim_v=128,
             ffn=6144, vocab=151936, experts=Experts(count=128, active=8, ffn=768))  # fmt: skip
MODELS = {"qwen3-8b": PRESETS["qwen3-8b"], "qwen3-30b-a3b": _MOE}
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceRow:
    """One rule's mean over draws of a batch.

    Attributes:
        date, versions, gpu: when, by which commit's planner, of which GPU.
        documents: kind of the draw.
        gpus: DP x CP x PP.
        token_limit: of a rank's shard of a micro-batch; sequential and best-fit pack 128K tokens.
        draws: batches, with seeds from 0 on.
        step_s: simulated step; None where a rule does not apply.
        bound_s: of the same draws, with all work spread perfectly at the best sizes.
        longest_s: of a rank that has little besides the longest document.
        cpu_ms: process time of the rule, the least over draws.
        note: why there is no step.
    """

    date: str
    versions: str
    gpu: str
    model: str
    documents: str
    gpus: int
    dp: int
    cp: int
    pp: int
    ep: int
    micro_batches: int
    token_limit: int
    draws: int
    num_documents: float
    rule: str
    step_s: float | None
    bound_s: float
    longest_s: float
    cpu_ms: float | None
    note: str = ""


BALANCE_CSV = Sheet("benchmarks/balance.py simulate", BalanceRow)


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


def measure(
    drawn: Sequence[Batch], rules: Sequence[str], **columns: object
) -> Iterator[BalanceRow]:
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


@app.command()
def simulate(
    out: Annotated[Path, Argument(help="CSV to append to")],
    dp: Annotated[list[int] | None, Option(help="default: 8 and 32")] = None,
    pp: Annotated[list[int] | None, Option(help="default: 1 and 4")] = None,
    packed: Annotated[int, Option(help="tokens of a packed micro-batch", min=64)] = 128 << 10,
    limit: Annotated[list[float] | None, Option(help="token limit / packed: 1 and 1.5")] = None,
    draws: Annotated[int, Option(min=1)] = 5,
    rule: Annotated[list[str] | None, Option(help=f"default: {', '.join(RULES)}")] = None,
    hardware: Annotated[str, Option(help="preset or TOML of calibrate's")] = "h200",
) -> None:
    """Append a row for each case and rule."""
    with in_one_sentence():
        check_appendable(out, BALANCE_CSV, "OUT")
        machine, now = hardware_of(hardware), datetime.now(UTC).isoformat(timespec="seconds")
        cases = product(MODELS, KINDS, limit or (1.0, 1.5), dp or (8, 32), pp or (1, 4))
        for name, kind, more, ranks, stages in cases:
            grid, costs = case_of(name, ranks, stages, packed, machine)
            gpus = ranks * _CP * stages
            grid = replace(grid, token_limit=int(packed * more) // _CP)
            columns = {
                "date": now, "versions": f"planner at commit {commit()}", "model": name,
                "gpu": f"predicted for {machine.name}", "documents": kind, "gpus": gpus,
            }  # fmt: skip
            rows = list(
                measure(list(batches(kind, grid, costs, packed, draws)), rule or RULES, **columns)
            )
            append(out, rows, BALANCE_CSV)
            typer.echo(f"{name}, {kind}, {gpus} GPUs, PP {stages}, limit {grid.token_limit}: done")


@app.command()
def table(paths: Annotated[list[Path], Argument(help="of the command simulate")]) -> None:
    """Markdown: each rule's step over the bound's."""
    with in_one_sentence():
        typer.echo("\n".join(lines_of(read(paths, BALANCE_CSV))))


def lines_of(rows: Sequence[BalanceRow]) -> list[str]:
    """A line for each case: the bound over each rule's step; of the two balanced ones the better,
    its gains, and the longest document's step over the bound."""
    cases: dict[tuple[object, ...], dict[str, BalanceRow]] = {}
    for row in rows:
        key = (row.model, row.documents, row.gpus, row.pp, row.token_limit * row.cp >> 10)
        cases.setdefault(key, {})[row.rule] = row
    head = ["model", "documents", "GPUs", "PP", "limit, K", *RULES, "x sequential", "x best-fit",
            "longest / bound"]  # fmt: skip
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for key, found in cases.items():
        steps = {rule: row.step_s for rule, row in found.items() if row.step_s}
        first = next(iter(found.values()))
        ours = min(seconds for rule, seconds in steps.items() if rule.startswith("balanced"))
        cells = [
            f"{found[rule].bound_s / steps[rule]:.2f}" if rule in steps else "" for rule in RULES
        ]
        gains = [f"{steps[rule] / ours:.2f}" for rule in ("sequential", "best-fit")]
        longest = f"{first.longest_s / first.bound_s:.2f}"
        lines.append(f"| {' | '.join([*map(str, key), *cells, *gains, longest])} |")
    return lines


if __name__ == "__main__":
    app()
