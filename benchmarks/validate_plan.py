"""Predictions of the planner beside measured rows: a table, a picture, and what was fitted.

python benchmarks/validate_plan.py benchmarks/results/attention_4xh200_one_host.csv \
    benchmarks/results/ablation_4xh200_one_host.csv --hardware h200 \
    --table docs/planner_errors.md --picture docs/planner_errors.png

Speeds of the preset were fitted to the rows of 64K and 256K tokens only; the others are predicted.
Rows of other implementations and failures are not predicted, and counted as such.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from matplotlib.figure import Figure

from megatron_burst.cli.cases import in_kilo
from megatron_burst.cli.results import Row, read
from megatron_burst.plan.attention import AttentionCall, attention_time
from megatron_burst.plan.buffers import buffer_bytes
from megatron_burst.plan.cost import AttentionShape
from megatron_burst.plan.hardware import GIB, Hardware
from megatron_burst.plan.hardware_file import hardware as hardware_of
from megatron_burst.plan.kernel_time import Timer
from megatron_burst.plan.mask import Mask, Span, Tile
from megatron_burst.plan.schedule import Direction
from megatron_burst.plan.topology import pretend_hosts

FITTED = (64 << 10, 256 << 10)
_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Compared:
    """A row and what was predicted for it; memory where it was measured and is burst's."""

    row: Row
    ms: float
    gib: float | None

    @property
    def error(self) -> float:
        """Relative error of the predicted time."""
        return self.ms / self.row.ms - 1

    @property
    def memory_error(self) -> float | None:
        """Relative error of the predicted memory."""
        return self.gib / self.row.peak_gib - 1 if self.gib and self.row.peak_gib else None

    @property
    def fitted(self) -> bool:
        """Whether speeds were fitted to rows of its length."""
        return self.row.seq in FITTED


def compare(row: Row, hardware: Hardware) -> Compared | None:
    """The prediction for a row, or None where the planner has nothing to say."""
    if row.status != "ok" or row.impl not in ("burst", "ceiling"):
        return None
    call = _call(row)
    if row.impl == "ceiling":
        return Compared(row, 1e3 * _ceiling(call, row, hardware), None)
    work = call.tflop(Direction.FORWARD)
    seconds = attention_time(call, hardware, Direction.FORWARD, work).seconds
    gib = None
    if row.pass_ == "fwd_bwd":
        work += call.tflop(Direction.BACKWARD)
        seconds += attention_time(call, hardware, Direction.BACKWARD, work).seconds
        if call.backend == "auto":  # other kernels' own memory is not known
            gib = buffer_bytes(call) / GIB
    return Compared(row, 1e3 * seconds, gib)


def _call(row: Row) -> AttentionCall:
    itemsize = _ITEMSIZE[row.dtype]
    wide = max(4, itemsize)
    shape = AttentionShape(
        row.batch, row.seq // row.ranks, row.heads_q, row.heads_kv,
        row.head_dim_qk, row.head_dim_v, itemsize, wide, wide,
    )  # fmt: skip
    call = AttentionCall(
        shape, pretend_hosts(row.ranks, row.hosts), mask=Mask(row.mask),
        again=True,  # the rows in results/ are from when every backward exchanged Q, K and V again
    )  # fmt: skip
    if row.impl == "ceiling":
        return call
    for option in row.mode.split(","):
        call = _with_option(call, option)
    return call


def _with_option(call: AttentionCall, option: str) -> AttentionCall:
    name, _, value = option.partition("=")
    match name:
        case "auto" | "deterministic":
            return call
        case "overlap":
            return replace(call, overlap=value != "false")
        case "transfer":
            return replace(call, pulled=value == "pull")
        case "heads_per_round":
            return replace(call, heads_per_round=int(value))
        case "pieces":
            return replace(call, pieces=value != "false")
        case "intra" | "inter" | "circulate" | "backend":
            return replace(call, **{name: value})
        case "ring" | "gather":
            return replace(call, intra=name)
    raise ValueError(f"unknown option {option!r}")


def _ceiling(call: AttentionCall, row: Row, hardware: Hardware) -> float:
    """The kernel alone: the whole sequence, 1/P of the heads."""
    shape = replace(
        call.priced,
        heads_q=row.heads_q // row.ranks,
        heads_kv=max(1, row.heads_kv // row.ranks),
    )
    rows = Span(0, row.seq)
    tile = Tile(rows, rows, call.mask)
    work = call.tflop(Direction.FORWARD)
    seconds = Timer(hardware, pass_tflop=work).tile(tile, shape, Direction.FORWARD)
    if row.pass_ == "fwd_bwd":
        work += call.tflop(Direction.BACKWARD)
        seconds += Timer(hardware, pass_tflop=work).tile(tile, shape, Direction.BACKWARD)
    return seconds


def summary(errors: Sequence[float]) -> str:
    """Median and worst of relative errors, in per cent."""
    sizes = [abs(error) for error in errors]
    return f"{100 * median(sizes):.1f} % (median), {100 * max(sizes):.1f} % (worst)"


def table(compared: Sequence[Compared]) -> list[str]:
    """Markdown, one line a row of the CSVs."""
    lines = [
        "| seq | heads | what | pass | fitted | measured ms | predicted | error | GiB | predicted |"
        " error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in sorted(compared, key=_order):
        row, memory = one.row, one.memory_error
        gib = f"{row.peak_gib:.2f} | {one.gib:.2f} | {memory:+.1%}" if memory is not None else "| |"
        lines.append(
            f"| {in_kilo(row.seq)} | {row.heads_q}/{row.heads_kv} | {row.impl}:{row.mode} | "
            f"{row.pass_} | {'yes' if one.fitted else ''} | {row.ms:.2f} | {one.ms:.2f} | "
            f"{one.error:+.1%} | {gib} |"
        )
    return lines


def _order(one: Compared) -> tuple:
    row = one.row
    return one.fitted, row.seq, -row.heads_q, -row.heads_kv, row.pass_, row.impl, row.mode


def choices(compared: Sequence[Compared]) -> list[float]:
    """How much slower than the best measured schedule the one is that is predicted to be fastest.

    One number for each problem and pass that was measured with several schedules in one run.
    """
    problems: dict[tuple, list[Compared]] = {}
    for one in compared:
        row = one.row
        if row.impl == "burst" and not row.mode.startswith(("backend", "deterministic", "overlap")):
            key = (row.date, row.seq, row.heads_q, row.heads_kv, row.mask, row.pass_)
            problems.setdefault(key, []).append(one)
    several = [some for some in problems.values() if len(some) > 1]
    return [
        min(some, key=lambda c: c.ms).row.ms / min(c.row.ms for c in some) - 1 for some in several
    ]


def draw(compared: Sequence[Compared], path: Path) -> None:
    """Predicted against measured time, and the errors beside it."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for fitted, colour in ((True, "tab:gray"), (False, "tab:red")):
        for impl, marker in (("burst", "o"), ("ceiling", "^")):
            some = [c for c in compared if c.fitted == fitted and c.row.impl == impl]
            name = f"{impl}, {'lengths that were fitted' if fitted else 'other lengths'}"
            style = {"c": colour, "marker": marker, "s": 24, "alpha": 0.6, "label": name}
            left.scatter([c.row.ms for c in some], [c.ms for c in some], **style)
            right.scatter([c.row.ms for c in some], [100 * c.error for c in some], **style)
    ends = [min(c.row.ms for c in compared), max(c.row.ms for c in compared)]
    left.plot(ends, ends, c="0.5", lw=0.8)
    left.set(xscale="log", yscale="log", xlabel="measured ms", ylabel="predicted ms")
    right.axhspan(-10, 10, color="tab:green", alpha=0.1)
    right.axhline(0, c="0.5", lw=0.8)
    right.set(xscale="log", xlabel="measured ms", ylabel="error of the prediction, %")
    left.legend(fontsize=8)
    figure.savefig(path, dpi=110)


@app.command()
def main(
    csvs: list[Path],
    hardware: str = "h200",
    table_to: Annotated[Path | None, typer.Option("--table")] = None,
    picture: Path | None = None,
) -> None:
    """Compare every row; print medians, write the table and the picture."""
    rows = read(csvs)
    found = [compare(row, hardware_of(hardware)) for row in rows]
    compared = [one for one in found if one]
    said = [f"{len(compared)} of {len(rows)} rows are burst's or the kernel's and could run."]
    for fitted, name in ((True, "64K and 256K (speeds fitted)"), (False, "other lengths")):
        some = [one for one in compared if one.fitted == fitted]
        if some:
            memory = [one.memory_error for one in some if one.memory_error is not None]
            said.append(
                f"{name}: time {summary([one.error for one in some])} of {len(some)} rows; "
            )
            said[-1] += f"memory {summary(memory)} of {len(memory)} rows."
    if lost := choices(compared):
        near = sum(loss <= 0.03 for loss in lost)
        said.append(
            f"The schedule predicted to be the fastest of those measured is within 3 % of the best "
            f"in {near} of {len(lost)} problems; {summary(lost)} slower."
        )
    typer.echo("\n".join(said))
    if table_to:
        text = ["# The planner's predictions beside measurements", "", "\n\n".join(said), ""]
        text += table(compared)
        table_to.write_text("\n".join(text) + "\n")
    else:
        typer.echo("\n".join(table(compared)))
    if picture:
        draw(compared, picture)


if __name__ == "__main__":
    app()
