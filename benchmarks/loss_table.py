"""Rows of the LM head and loss as tables, and as a picture."""

import textwrap
from collections.abc import Iterator, Sequence
from datetime import datetime
from operator import attrgetter
from pathlib import Path

from benchmarks import style as look
from benchmarks import tables
from benchmarks.sheets import LossRow
from megatron_burst.tools.units import in_units

_IN_PAGES = {  # implementations, in the order of their columns
    "burst:recompute": "`burst:recompute`", "burst:forward": "`burst:forward`",
    "burst:plain": "`burst:plain`", "megatron:fused": "Megatron, fused", "torch": "torch",
    "liger": "Liger", "quack": "QuACK", "cce": "CCE",
}  # fmt: skip
_GONE = "burst:auto"  # a mode of earlier commits
_LEFT_OUT = _GONE, "megatron:unfused", "torch:linear"
_head = attrgetter("tokens", "hidden", "vocab", "dtype", "ranks")  # what implementations share
_line = attrgetter("ranks", "hidden", "vocab", "tokens")  # of tables and pictures


def loss_table(rows: Sequence[LossRow]) -> str:
    """Markdown: one line a head and implementation, beside Megatron's fused loss where it ran."""

    def times(row: LossRow) -> str:
        if not row.ms:
            return tables.time_and_peak(row)
        return "{} ({}-{})".format(*map(tables.milliseconds, (row.ms, row.ms_min, row.ms_max)))

    def of_native(row: LossRow) -> str:
        ratio = tables.Ratio.of(native_of(row, rows), row)
        return tables.shown(ratio and ratio.value, 2)

    def errors(row: LossRow) -> str:
        values = row.error_loss, row.error_dhidden, row.error_dweight
        return "-" if None in values else ", ".join(f"{error:.1e}" for error in values)

    def status(row: LossRow) -> str:
        if row.status == "ok":
            return "ok"
        reason = textwrap.shorten(row.note.replace("|", "/"), 60, placeholder=" ...")
        return f"{row.status}: {reason}"

    columns = {
        "tokens": lambda row: in_units(row.tokens),
        "h x V": lambda row: f"{row.hidden} x {in_units(row.vocab)}",
        "TP": lambda row: row.ranks,
        "impl": lambda row: row.impl,
        "ms (min-max)": times,
        "of Megatron's fused": of_native,
        "of the matmul rate": lambda row: tables.shown(row.gemm_efficiency if row.ms else None, 2),
        "GiB": lambda row: tables.shown(row.peak_gib if row.ms else None, 2),
        "errors of loss, dX, dW": errors,
        "status": status,
    }
    return tables.listed(columns, sorted(rows, key=_line))


def native_of(row: LossRow, rows: Sequence[LossRow]) -> LossRow | None:
    """Megatron's fused loss of the same head and day, if it ran: of several the nearest in time."""
    about, at = (_head(row), row.date[:10]), datetime.fromisoformat(row.date)
    peers = (
        each for each in rows
        if (_head(each), each.date[:10]) == about and each.impl == "megatron:fused" and each.ms
    )  # fmt: skip
    return min(peers, key=lambda one: abs(datetime.fromisoformat(one.date) - at), default=None)


def heads_by_tokens(rows: Sequence[LossRow], size: str) -> str:
    """Markdown: a line a number of tokens and ranks, of heads of one size such as "4096x128K"."""
    of_size = [row for row in rows if f"{row.hidden}x{in_units(row.vocab)}" == size]
    cells = {(row.ranks, row.tokens, row.impl): row for row in of_size}
    names = {*_IN_PAGES, *_LEFT_OUT}
    tables.check_named("implementation", (row.impl for row in of_size), names, "loss_table.py")
    measured = {impl for *_, impl in cells}
    impls = {impl: name for impl, name in _IN_PAGES.items() if impl in measured}
    keys = sorted({key[:2] for key in cells})
    lines = {(ranks, tokens): [f"{in_units(tokens)}, {ranks}"] for ranks, tokens in keys}
    return tables.crossed(
        ["tokens, GPUs (TP)"], lines, impls,
        lambda line, impl: tables.time_and_peak(cells.get((*line, impl))),
    )  # fmt: skip


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
            scale = least[_line(row)]
            ends = row.ms - row.ms_min, row.ms_max - row.ms
            spread = [[max(0.0, ms) / scale] for ms in ends]
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
