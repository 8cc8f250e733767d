"""Rows of the LM head and loss: their columns, as a table, and as a picture."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from benchmarks.cells import check_named, markdown, milliseconds, time_and_peak
from benchmarks.ratios import Ratio
from benchmarks.rows import Sheet
from benchmarks.style import colours_of, legend_below, mark_impossible, measured_on
from megatron_burst.tools.units import in_units

_IN_PAGES = {  # implementations, in the order of their columns
    "burst:recompute": "`burst:recompute`", "burst:forward": "`burst:forward`",
    "burst:plain": "`burst:plain`", "megatron:fused": "Megatron, fused", "torch": "torch",
    "liger": "Liger", "quack": "QuACK", "cce": "CCE",
}  # fmt: skip
_GONE = "burst:auto"  # a mode of earlier commits
_LEFT_OUT = _GONE, "megatron:unfused", "torch:linear"  # which loss-rows.md tells of
_MEASURED = (
    "ms (min-max)", "of Megatron's fused", "of the matmul rate", "GiB", "errors of loss, dX, dW",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRow:
    """One implementation's measurement of one head; fields are columns.

    Attributes:
        date, versions, gpu: see `results.Row`.
        ranks: that share the vocabulary.
        tokens, hidden, vocab, dtype: see `LossCase`.
        impl: name of the implementation.
        ms, ms_min, ms_max: forward and backward, on the slowest rank: median and spread.
        gemm_efficiency: three GEMMs' operations / ms / the measured rate of a square matmul.
        matmul_tflops: that rate.
        peak_gib: memory above inputs, weight, dX and one float32 gradient of the weight, which is
            main_grad for those who add to it; a second one counts.
        error_loss, error_dhidden, error_dweight: |x - truth| / |truth| of the first 1024 tokens.
        status: "ok" or "failed".
        note: the reason if it is not ok.
    """

    date: str
    versions: str
    gpu: str
    ranks: int
    tokens: int
    hidden: int
    vocab: int
    dtype: str
    impl: str
    ms: float | None = None
    ms_min: float | None = None
    ms_max: float | None = None
    gemm_efficiency: float | None = None
    matmul_tflops: float | None = None
    peak_gib: float | None = None
    error_loss: float | None = None
    error_dhidden: float | None = None
    error_dweight: float | None = None
    status: str = "ok"
    note: str = ""


LOSS_CSV = Sheet("benchmarks.loss", LossRow, ("ms_min", "ms_max", "gemm_efficiency"))


def loss_table(rows: Sequence[LossRow]) -> str:
    """Markdown: one line a head and implementation, beside Megatron's fused loss where it ran."""
    lines = [("tokens", "h x V", "TP", "impl", *_MEASURED, "status")]
    for row in sorted(rows, key=_line):
        status = row.status if row.status == "ok" else f"{row.status}: {_short(row.note)}"
        size = f"{row.hidden} x {in_units(row.vocab)}"
        lines.append((
            in_units(row.tokens), size, f"{row.ranks}", row.impl, *_measured(row, rows), status
        ))  # fmt: skip
    return markdown(lines)


def every_run(rows: Sequence[LossRow], size: str) -> str:
    """Markdown: a line for each row of one size, by ranks, tokens and day; arguments as of
    `heads_by_tokens`."""
    lines = [("day", "tokens, GPUs (TP)", "impl", *_MEASURED)]
    for row in sorted(_of_size(rows, size), key=lambda row: (_line(row), row.date[:10])):
        cells = [row.date[:10], f"{in_units(row.tokens)}, {row.ranks}", row.impl]
        lines.append((*cells, *_measured(row, rows)))
    return markdown(lines)


def native_of(row: LossRow, rows: Sequence[LossRow]) -> LossRow | None:
    """Megatron's fused loss of the same head and day, if it ran: of several the nearest in time."""
    about, at = (_head(row), row.date[:10]), datetime.fromisoformat(row.date)
    found = (
        each for each in rows
        if (_head(each), each.date[:10]) == about and each.impl == "megatron:fused" and each.ms
    )  # fmt: skip
    return min(found, key=lambda one: abs(datetime.fromisoformat(one.date) - at), default=None)


def _measured(row: LossRow, rows: Sequence[LossRow]) -> list[str]:
    """Cells below `_MEASURED`."""
    ratio = Ratio.of(native_of(row, rows), row)
    cells = [time_and_peak(row), "-", "-", "-"]
    if row.ms:
        cells = [
            "{} ({}-{})".format(*map(milliseconds, (row.ms, row.ms_min, row.ms_max))),
            f"{ratio.value:.2f}" if ratio else "-",
            f"{row.gemm_efficiency:.2f}",
            "-" if row.peak_gib is None else f"{row.peak_gib:.2f}",
        ]
    errors = (row.error_loss, row.error_dhidden, row.error_dweight)
    return [*cells, "-" if None in errors else ", ".join(f"{error:.1e}" for error in errors)]


def heads_by_tokens(rows: Sequence[LossRow], size: str) -> str:
    """Markdown: a line for each number of tokens and ranks, a column an implementation, with
    milliseconds and GiB of its last row.

    Args:
        rows: of any heads.
        size: of those that are shown, "4096x128K".
    """
    shown = _of_size(rows, size)
    cells = {(row.ranks, row.tokens, row.impl): row for row in shown}
    names = {*_IN_PAGES, *_LEFT_OUT}
    check_named("implementation", (row.impl for row in shown), names, "loss_table.py")
    impls = [impl for impl in _IN_PAGES if any(key[-1] == impl for key in cells)]
    lines = [["tokens, GPUs (TP)", *(_IN_PAGES[impl] for impl in impls)]]
    for ranks, tokens in sorted({key[:2] for key in cells}):
        found = (cells.get((ranks, tokens, impl)) for impl in impls)
        lines.append([f"{in_units(tokens)}, {ranks}", *map(time_and_peak, found)])
    return markdown(lines)


def _of_size(rows: Sequence[LossRow], size: str) -> list[LossRow]:
    return [row for row in rows if f"{row.hidden}x{in_units(row.vocab)}" == size]


def _short(note: str) -> str:
    """A reason shortened for a table; the CSV has all of it."""
    return textwrap.shorten(note.replace("|", "/"), 60, placeholder=" ...")


def _head(row: LossRow) -> tuple:
    return row.tokens, row.hidden, row.vocab, row.dtype, row.ranks


def draw_if_possible(rows: Sequence[LossRow], stem: Path) -> list[Path]:
    """Write `STEM_loss.png`: for each head and number of tokens a line with the time of each
    implementation beside the fastest one's, and with its memory where that was measured.

    Returns:
        the file, or nothing where Matplotlib is missing or nothing ran.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return []
    newest = list({(_head(row), row.impl): row for row in rows if row.impl != _GONE}.values())
    ran = [row for row in newest if row.ms]
    if not ran:
        return []
    lines = sorted({_line(row) for row in ran})
    has_memory = any(row.peak_gib is not None for row in ran)
    figure = Figure(figsize=(7 + 4 * has_memory, 0.32 * len(lines) + 1.8), layout="constrained")
    panels = figure.subplots(1, 1 + has_memory, squeeze=False, sharey=True)[0]
    panels[0].set_yticks(range(len(lines)), [_words(line) for line in lines])
    panels[0].set_ylim(len(lines) - 0.5, -0.5)
    _draw_times(panels[0], newest, lines)
    for axis in panels[1:]:
        _draw_memory(axis, ran, lines)
    for axis in panels:
        axis.grid(axis="x", alpha=0.3)
        for y in range(0, len(lines), 2):
            axis.axhspan(y - 0.5, y + 0.5, color="0.95", zorder=0)
    legend_below(figure)
    figure.suptitle(f"LM head and loss, forward and backward: {measured_on(ran)}")
    path = stem.with_name(f"{stem.name}_loss.png")
    figure.savefig(path, dpi=130)
    return [path]


def _line(row: LossRow) -> tuple[int, int, int, int]:
    return row.ranks, row.hidden, row.vocab, row.tokens


def _words(line: tuple[int, int, int, int]) -> str:
    ranks, hidden, vocab, tokens = line
    tp = f"TP {ranks}, " if ranks > 1 else ""
    return f"{tp}h {hidden}, V {in_units(vocab)}, {in_units(tokens)} tokens"


def _places(rows: Sequence[LossRow], lines: Sequence[tuple]) -> Iterator[tuple]:
    """Each row, how high it is drawn, so that none hides another, and its style."""
    names = list(dict.fromkeys(row.impl for row in rows))
    colours = colours_of(names)
    for row in rows:
        place = names.index(row.impl) - (len(names) - 1) / 2
        y = lines.index(_line(row)) + 0.8 * place / len(names)
        yield row, y, {"color": colours[row.impl], "label": row.impl}


def _draw_times(axis, rows: Sequence[LossRow], lines: Sequence[tuple]) -> None:
    """With the fastest and the slowest repetition; crosses at the edge for what could not run."""
    least = {line: min(row.ms for row in rows if row.ms and _line(row) == line) for line in lines}
    ran = {row.impl for row in rows if row.ms}
    for row, y, style in _places([row for row in rows if _line(row) in least], lines):
        if row.ms:
            spread = [[row.ms - row.ms_min], [row.ms_max - row.ms]]
            scale = least[_line(row)]
            spread = [[max(0.0, ms) / scale for ms in side] for side in spread]
            axis.errorbar(row.ms / scale, y, xerr=spread, fmt="o", ms=4, elinewidth=1, **style)
        else:
            edge = axis.get_yaxis_transform()
            mark_impossible(axis, 1, y, style["color"], transform=edge)
            if row.impl not in ran:  # whose colour nothing else says
                axis.plot([], [], "x", **style)
    axis.set_xlabel("time / that of the fastest, with all repetitions")


def _draw_memory(axis, rows: Sequence[LossRow], lines: Sequence[tuple]) -> None:
    for row, y, style in _places(rows, lines):
        if row.peak_gib is not None:
            axis.plot(row.peak_gib, y, "o", ms=4, **style)
    axis.set_xscale("symlog", linthresh=1)
    axis.set(xlabel="GiB besides the gradients; logarithmic from 1 on", xlim=(-0.05, None))
    axis.xaxis.set_major_formatter("{x:g}")
