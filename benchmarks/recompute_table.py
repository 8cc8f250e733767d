"""Time against memory of ways to recompute: as a table, and as a picture."""

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path

from benchmarks.cells import check_named, markdown, time_and_peak
from benchmarks.ratios import Ratio
from benchmarks.rows import Row
from benchmarks.style import colours_of, legend_below, measured_on
from megatron_burst.tools.units import in_units

_FULL = {"burst": "none", "megatron": "full"}  # the mode that recomputes everything
_A_LINE = 3  # panels
_NAMES = {  # of modes in pages, in their order
    "megatron:full": "full recomputation, Megatron + TE p2p", "burst:none": "full recomputation",
    "burst:half": "`--burst-keep half`",
    "burst:all-half-layers": "`--burst-keep all`, half of the layers",
    "burst:all": "`--burst-keep all`",
    "burst:all-offload": "`--burst-keep all --burst-keep-offload results`",
    "megatron:full-keep": "`--burst-keep all` with Megatron's TE p2p",
    "burst:selective": "selective (attention only)",
    "megatron:selective": "selective, Megatron + TE p2p", "burst:off": "no recomputation",
    "megatron:off": "no recomputation, Megatron + TE p2p",
    "burst:attention": "attention's forward alone",
}  # fmt: skip
_LEFT_OUT = ("megatron:attention",)


def trade_table(rows: Sequence[Row]) -> str:
    """Markdown: one line a length and mode, with time and memory beside full recomputation's."""
    head = ("S", "mode", "ms (min-max)", "of full recompute", "TFLOP/s per GPU", "GiB", "status")
    lines = [head]
    for row in sorted(rows, key=lambda row: row.seq):
        full = next((r for r in rows if r.seq == row.seq and _is_full(r, row.impl) and r.ms), None)
        measured = ["-"] * 4
        if row.ms:
            measured = [
                f"{row.ms:.1f} ({row.ms_min:.1f}-{row.ms_max:.1f})",
                f"{Ratio.of(full, row).value:.3f}" if full else "-",
                f"{row.tflops_per_gpu:.3g}",
                "-" if row.peak_gib is None else f"{row.peak_gib:.2f}",
            ]
        status = row.status if row.status == "ok" else f"{row.status}: {row.note}"
        lines.append([in_units(row.seq), f"{row.impl}:{row.mode}", *measured, status])
    return markdown(lines)


def modes_by_length(rows: Sequence[Row]) -> str:
    """Markdown: a line a mode, a column a length, with milliseconds and GiB of its last row."""
    cells = {(f"{row.impl}:{row.mode}", row.seq): row for row in rows if row.ms}
    check_named("mode", (mode for mode, _ in cells), {*_NAMES, *_LEFT_OUT}, "recompute_table.py")
    lengths = sorted({seq for _, seq in cells})
    layers = {row.seq: int(row.note.split()[0]) for row in cells.values()}
    heads = (f"{in_units(n)}, {layers[n]} layer{'s' * (layers[n] > 1)}" for n in lengths)
    lines = [("ms, GiB", *heads)]
    for mode, name in _NAMES.items():
        lines.append((name, *(time_and_peak(cells.get((mode, seq))) for seq in lengths)))
    return markdown(lines)


def _is_full(row: Row, impl: str) -> bool:
    return (row.impl, row.mode) == (impl, _FULL[impl])


def draw_if_possible(rows: Sequence[Row], stem: Path) -> list[Path]:
    """Write `STEM_trade.png`, memory across and time upwards, one panel a length.

    Returns:
        the file, or nothing where Matplotlib is missing or nothing has both figures.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return []
    able = [row for row in rows if row.ms and row.peak_gib is not None]
    lengths = sorted({row.seq for row in able})
    if not lengths:
        return []
    colours = colours_of(f"{row.impl}:{row.mode}" for row in able)
    across = min(len(lengths), _A_LINE)
    lines = ceil(len(lengths) / across)
    figure = Figure(figsize=(4 * across + 1, 4 * lines + 0.8), layout="constrained")
    panels = [figure.add_subplot(lines, across, 1 + i) for i in range(len(lengths))]
    for axis, seq in zip(panels, lengths, strict=True):
        for row in (row for row in able if row.seq == seq):
            _point(axis, row, colours)
        axis.set(title=f"{in_units(seq)} tokens", xlabel="peak GiB above weights and gradients")
        axis.set(ylabel="ms, forward + backward")
        axis.margins(0.08)
        axis.set_xlim(0, 1.06 * max(row.peak_gib for row in able if row.seq == seq))
        axis.grid(alpha=0.3)
    legend_below(figure, fontsize=8)
    figure.suptitle(f"layers with their ways to recompute: {measured_on(able)}")
    path = stem.with_name(f"{stem.name}_trade.png")
    figure.savefig(path, dpi=130)
    return [path]


def _point(axis, row: Row, colours: Mapping[str, str]) -> None:
    """Burst's in circles, Megatron's in squares."""
    name = f"{row.impl}:{row.mode}"
    low, high = row.ms - row.ms_min, row.ms_max - row.ms
    axis.errorbar(
        row.peak_gib, row.ms, [[low], [high]], marker="o" if row.impl == "burst" else "s",
        color=colours[name], linestyle="none", capsize=3, label=name,
    )  # fmt: skip
