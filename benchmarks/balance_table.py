"""What `benchmarks.balance_measured` writes: rows, the costs fitted to them, and their errors."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.rows import Sheet
from megatron_burst.balance import Costs, Measured, fit
from megatron_burst.errors import BurstError

_WHO = "benchmarks/balance_measured.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow:
    """Fields that all rows have; fields are columns.

    Attributes:
        run: when it began.
        gpus: that ran.
        how: "group", or "one rank's part": of a group that is not there, without transfers.
        kind: of drawn documents; "fitted": a regular micro-batch that coefficients are fitted to.
        ms: median over repetitions of the slowest rank's, with minimum and maximum.
    """

    run: str
    date: str
    versions: str
    gpu: str
    gpus: int
    how: str
    model: str
    layers: int
    kind: str
    documents: int
    tokens: int
    ms: float
    ms_min: float
    ms_max: float
    reps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow(MeasuredRow):
    """A micro-batch of so many documents, tokens and (query, key) pairs, on `cp` ranks."""

    cp: int
    area: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow(MeasuredRow):
    """A step of a draw by a rule, on `dp` context-parallel groups; simulated with costs that were
    fitted to micro-batches."""

    seed: int
    rule: str
    simulated_ms: float
    dp: int


COSTS_CSV = Sheet(_WHO, CostRow)
STEPS_CSV = Sheet(_WHO, StepRow)


def costs_in(rows: Sequence[CostRow]) -> Costs:
    """Fitted to the regular micro-batches of the latest run.

    Raises:
        BurstError: if there are too few.
    """
    last = max((row.run for row in rows), default="")
    return fit([
        Measured(row.tokens, row.area, row.cp, row.ms / 1e3)
        for row in rows if row.run == last and row.kind == "fitted"
    ])  # fmt: skip


def table_of(rows: Sequence[CostRow]) -> str:
    """Median and worst error of drawn micro-batches at each size, as Markdown."""
    lines = ["| run | how | CP | micro-batches | median error | worst error | of |",
             "| --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for run in dict.fromkeys(row.run for row in rows):
        some = [row for row in rows if row.run == run]
        try:
            costs = costs_in(some)
        except BurstError as error:
            lines.append(f"| {run} | {error} |")
            continue
        drawn = [row for row in some if row.kind != "fitted"]
        sizes = sorted({row.cp for row in drawn})
        lines += [_line(costs, [row for row in drawn if row.cp == cp]) for cp in sizes]
        if drawn:
            lines.append(_line(costs, drawn, "all"))
    return "\n".join(lines)


def _line(costs: Costs, rows: Sequence[CostRow], cp: str = "") -> str:
    error_of = {row: 1e3 * costs.seconds(row.tokens, row.area, row.cp) / row.ms - 1 for row in rows}
    worst = max(rows, key=lambda row: abs(error_of[row]))
    middle, first = median(map(abs, error_of.values())), rows[0]
    cells = first.run, first.how, cp or first.cp, len(rows), f"{middle:.1%}"
    of = f"{worst.kind}: {worst.documents} documents, {worst.tokens} tokens, CP {worst.cp}"
    return f"| {' | '.join(map(str, cells))} | {error_of[worst]:+.1%} | {of} |"


def step_line(row: StepRow) -> str:
    """A measured step beside the simulated one."""
    error = f"{row.simulated_ms / row.ms - 1:+.1%}"
    return (
        f"{row.kind} {row.seed}, {row.rule}: {row.ms:.1f} ms measured, {row.simulated_ms:.1f} "
        f"simulated ({error})"
    )
