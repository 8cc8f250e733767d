"""Rows of the LM head and loss as tables, and as a picture."""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

from benchmarks import style as look
from benchmarks.sheets import LossRow
from benchmarks.tables import (
    Ratio,
    check_named,
    crossed,
    listed,
    milliseconds,
    shown,
    time_and_peak,
)
from megatron_burst.tools.units import in_units

_IN_PAGES = {  # implementations, in the order of their columns
    "burst:recompute": "`burst:recompute`", "burst:forward": "`burst:forward`",
    "burst:plain": "`burst:plain`", "megatron:fused": "Megatron, fused", "torch": "torch",
    "liger": "Liger", "quack": "QuACK", "cce": "CCE",
}  # fmt: skip
_GONE = "burst:auto"  # a mode of earlier commits
_LEFT_OUT = _GONE, "megatron:unfused", "torch:linear"


def loss_table(rows: Sequence[LossRow]) -> str:
    """Markdown: one line a head and implementation, beside Megatron's fused loss where it ran."""
    columns = {
        "tokens": lambda row: in_units(row.tokens),
        "h x V": lambda row: f"{row.hidden} x {in_units(row.vocab)}",
        "TP": lambda row: row.ranks,
        "impl": lambda row: row.impl,
        **_measured(rows),
        "status": lambda row: "ok" if row.status == "ok" else f"{row.status}: {_short(row.note)}",
    }
    return listed(columns, sorted(rows, key=_line))


def native_of(row: LossRow, rows: Sequence[LossRow]) -> LossRow | None:
    """Megatron's fused loss of the same head and day, if it ran: of several the nearest in time."""
    about, at = (_head(row), row.date[:10]), datetime.fromisoformat(row.date)
    found = (
        each for each in rows
        if (_head(each), each.date[:10]) == about and each.impl == "megatron:fused" and each.ms
    )  # fmt: skip
    return min(found, key=lambda one: abs(datetime.fromisoformat(one.date) - at), default=None)


def _measured(rows: Sequence[LossRow]) -> dict[str, Callable[[LossRow], str]]:
    """Columns of a row's figures beside others'."""

    def times(row: LossRow) -> str:
        if not row.ms:
            return time_and_peak(row)
        return "{} ({}-{})".format(*map(milliseconds, (row.ms, row.ms_min, row.ms_max)))

    def to_native(row: LossRow) -> str:
        ratio = Ratio.of(native_of(row, rows), row)
        return shown(ratio and ratio.value, 2)

    def errors(row: LossRow) -> str:
        found = row.error_loss, row.error_dhidden, row.error_dweight
        return "-" if None in found else ", ".join(f"{error:.1e}" for error in found)

    return {
        "ms (min-max)": times,
        "of Megatron's fused": to_native,
        "of the matmul rate": lambda row: shown(row.gemm_efficiency if row.ms else None, 2),
        "GiB": lambda row: shown(row.peak_gib if row.ms else None, 2),
        "errors of loss, dX, dW": errors,
    }


def heads_by_tokens(rows: Sequence[LossRow], size: str) -> str:
    """Markdown: a line for each number of tokens and ranks, a column an implementation, with
    milliseconds and GiB of its last row; of heads of one size, "4096x128K"."""
    of_size = _of_size(rows, size)
    cells = {(row.ranks, row.tokens, row.impl): row for row in of_size}
    names = {*_IN_PAGES, *_LEFT_OUT}
    check_named("implementation", (row.impl for row in of_size), names, "loss_table.py")
    measured = {impl for *_, impl in cells}
    impls = {impl: name for impl, name in _IN_PAGES.items() if impl in measured}
    keys = sorted({key[:2] for key in cells})
    lines = {(ranks, tokens): [f"{in_units(tokens)}, {ranks}"] for ranks, tokens in keys}
    return crossed(
        ["tokens, GPUs (TP)"], lines, impls,
        lambda line, impl: time_and_peak(cells.get((*line, impl))),
    )  # fmt: skip


def _of_size(rows: Sequence[LossRow], size: str) -> list[LossRow]:
    return [row for row in rows if f"{row.hidden}x{in_units(row.vocab)}" == size]


def _short(note: str) -> str:
    """A reason shortened for a table; the CSV has all of it."""
    return textwrap.shorten(note.replace("|", "/"), 60, placeholder=" ...")


def _head(row: LossRow) -> tuple:
    return row.tokens, row.hidden, row.vocab, row.dtype, row.ranks


@look.optional
def draw_loss(rows: Sequence[LossRow], stem: Path) -> list[Path]:
    """Write `STEM_loss.png`: for each head and number of tokens a line with the time of each
    implementation beside the fastest one's, and with its memory where that was measured; returns
    the file, or nothing where Matplotlib is missing or nothing ran."""
    newest = list({(_head(row), row.impl): row for row in rows if row.impl != _GONE}.values())
    ran = [row for row in newest if row.ms]
    if not ran:
        return []
    lines = sorted({_line(row) for row in ran})
    has_memory = any(row.peak_gib is not None for row in ran)
    path = stem.with_name(f"{stem.name}_loss.png")
    with look.picture(path, 7 + 4 * has_memory, 0.32 * len(lines) + 1.8) as figure:
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
        look.legend_below(figure)
        figure.suptitle(f"LM head and loss, forward and backward: {look.measured_on(ran)}")
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
    colours = look.colours_of(names)
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
            look.mark_impossible(axis, 1, y, style["color"], transform=edge)
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
