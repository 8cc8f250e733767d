"""The LM head and loss beside its peers: as a table, and as a picture."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from megatron_burst.cli.bench_loss import LossRow
from megatron_burst.plan.units import in_units

_TIME, _MEMORY = "µs a token", "GiB besides the gradients"


def loss_table(rows: Sequence[LossRow]) -> str:
    """Markdown: one line a head and implementation, beside Megatron's fused loss where it ran."""
    head = (
        "tokens", "h x V", "TP", "impl", "ms (min-max)", "of Megatron's fused",
        "of the matmul rate", "GiB", "errors of loss, dX, dW", "status",
    )  # fmt: skip
    lines = [head, ["---"] * len(head)]
    for row in sorted(rows, key=lambda row: (row.ranks, row.hidden, row.vocab, row.tokens)):
        native = next((r for r in rows if _head(r) == _head(row) and _is_native(r) and r.ms), None)
        measured = ["-"] * 4
        if row.ms:
            measured = [
                f"{_ms(row.ms)} ({_ms(row.ms_min)}-{_ms(row.ms_max)})",
                f"{row.ms / native.ms:.2f}" if native else "-",
                f"{row.gemm_efficiency:.2f}",
                "-" if row.peak_gib is None else f"{row.peak_gib:.2f}",
            ]
        errors = (row.error_loss, row.error_dhidden, row.error_dweight)
        shown = "-" if None in errors else ", ".join(f"{error:.1e}" for error in errors)
        status = row.status if row.status == "ok" else f"{row.status}: {_short(row.note)}"
        size = f"{row.hidden} x {in_units(row.vocab)}"
        lines.append(
            [in_units(row.tokens), size, f"{row.ranks}", row.impl, *measured, shown, status]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _ms(time: float) -> str:
    return f"{time:.0f}" if time >= 100 else f"{time:.1f}"


def _short(note: str) -> str:
    """A reason that fits a table; the CSV has all of it."""
    return textwrap.shorten(note.replace("|", "/"), 60, placeholder=" ...")


def _head(row: LossRow) -> tuple:
    return row.tokens, row.hidden, row.vocab, row.dtype, row.ranks


def _is_native(row: LossRow) -> bool:
    return row.impl == "megatron:fused"


def draw_if_possible(rows: Sequence[LossRow], stem: Path) -> list[Path]:
    """Write `STEM_loss.png`: time a token and memory where it was measured, for each head.

    Returns:
        the file, or nothing where Matplotlib is missing or nothing ran.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return []
    newest = {(_head(row), row.impl): row for row in rows if row.ms}.values()
    heads = sorted({(row.hidden, row.vocab, row.ranks) for row in newest})
    if not heads:
        return []
    names = list(dict.fromkeys(row.impl for row in newest))
    kinds = [_TIME, *([_MEMORY] if any(row.peak_gib is not None for row in newest) else [])]
    figure = Figure(figsize=(5.5 * len(kinds), 2.8 * len(heads)), layout="constrained")
    panels = figure.subplots(len(heads), len(kinds), squeeze=False)
    for line, (hidden, vocab, ranks) in zip(panels, heads, strict=True):
        these = [r for r in newest if (r.hidden, r.vocab, r.ranks) == (hidden, vocab, ranks)]
        for axis, what in zip(line, kinds, strict=True):
            _lines(axis, what, these, names)
            axis.set(xscale="log", xlabel="tokens", ylabel=what)
            axis.set_title(f"h {hidden}, V {in_units(vocab)}, TP {ranks}")
            tokens = sorted({row.tokens for row in these})
            axis.set_xticks(tokens, [in_units(number) for number in tokens])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
            axis.set_ylim(0, None)
        line[0].legend(fontsize=7, loc="lower right", ncols=2)
    path = stem.with_name(f"{stem.name}_loss.png")
    figure.savefig(path, dpi=130)
    return [path]


def _lines(axis, what: str, rows: Sequence[LossRow], names: Sequence[str]) -> None:
    """Time or memory of each implementation, which has its colour in all panels."""
    for name in dict.fromkeys(row.impl for row in rows):
        line = sorted((r for r in rows if r.impl == name), key=lambda row: row.tokens)
        if what == _TIME:
            values = [1e3 * row.ms / row.tokens for row in line]
        else:
            values = [float("nan") if row.peak_gib is None else row.peak_gib for row in line]
        tokens, color = [row.tokens for row in line], f"C{names.index(name)}"
        axis.plot(tokens, values, "o-", label=name, color=color)
