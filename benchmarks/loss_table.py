"""Rows of the LM head and loss: their columns, as a table, and as a picture."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cells import markdown
from benchmarks.ratios import Ratio
from benchmarks.rows import Sheet
from benchmarks.style import colour_of, legend_below, measured_on
from megatron_burst.tools.units import in_units

_TIME, _MEMORY = "µs a token", "GiB besides the gradients"


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
    head = (
        "tokens", "h x V", "TP", "impl", "ms (min-max)", "of Megatron's fused",
        "of the matmul rate", "GiB", "errors of loss, dX, dW", "status",
    )  # fmt: skip
    lines = [head]
    for row in sorted(rows, key=lambda row: (row.ranks, row.hidden, row.vocab, row.tokens)):
        native = next((r for r in rows if _head(r) == _head(row) and _is_native(r) and r.ms), None)
        measured = ["-"] * 4
        if row.ms:
            measured = [
                f"{_ms(row.ms)} ({_ms(row.ms_min)}-{_ms(row.ms_max)})",
                f"{Ratio.of(native, row).value:.2f}" if native else "-",
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
    return markdown(lines)


def _ms(time: float) -> str:
    return f"{time:.0f}" if time >= 100 else f"{time:.1f}"


def _short(note: str) -> str:
    """A reason shortened for a table; the CSV has all of it."""
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
    kinds = [_TIME, *([_MEMORY] if any(row.peak_gib is not None for row in newest) else [])]
    figure = Figure(figsize=(5.5 * len(kinds), 2.8 * len(heads)), layout="constrained")
    panels = figure.subplots(len(heads), len(kinds), squeeze=False)
    for line, (hidden, vocab, ranks) in zip(panels, heads, strict=True):
        these = [r for r in newest if (r.hidden, r.vocab, r.ranks) == (hidden, vocab, ranks)]
        for axis, what in zip(line, kinds, strict=True):
            _lines(axis, what, these)
            axis.set(xscale="log", xlabel="tokens", ylabel=what)
            axis.set_title(f"h {hidden}, V {in_units(vocab)}, TP {ranks}")
            tokens = sorted({row.tokens for row in these})
            axis.set_xticks(tokens, [in_units(number) for number in tokens])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
            axis.set_ylim(0, None)
    legend_below(figure, columns=5)
    figure.suptitle(measured_on(newest))
    path = stem.with_name(f"{stem.name}_loss.png")
    figure.savefig(path, dpi=130)
    return [path]


def _lines(axis, what: str, rows: Sequence[LossRow]) -> None:
    """Time or memory of each implementation."""
    for name in dict.fromkeys(row.impl for row in rows):
        line = sorted((r for r in rows if r.impl == name), key=lambda row: row.tokens)
        if what == _TIME:
            values = [1e3 * row.ms / row.tokens for row in line]
        else:
            values = [float("nan") if row.peak_gib is None else row.peak_gib for row in line]
        tokens = [row.tokens for row in line]
        axis.plot(tokens, values, "o-", label=name, color=colour_of(name))
