"""What all pictures of results share: one colour for each implementation and mode, and words for
the GPUs and days of their rows."""

from collections.abc import Iterable
from typing import Any
from zlib import crc32

BURST, MEGATRON = "#2a78b8", "#c2410c"
_COLOURS = {
    # burst: blue for what it does by default, then by mode
    "burst": BURST, "burst:auto": BURST, "burst:all": BURST,
    "burst:gather": "#0f766e", "burst:ring": "#6d28d9", "burst:a2a": "#0ea5e9",
    "burst:auto@zigzag": "#7fb2dc", "burst:gather@zigzag": "#5eb5ac",
    "burst:ring@zigzag": "#a78bfa",
    "burst:a2a@zigzag": "#7dd3fc", "burst:recompute": "#6d28d9", "burst:plain": "#0ea5e9",
    "burst:none": "#1e3a5f", "burst:forward": "#1e3a5f", "burst:half": "#0ea5e9",
    "burst:all-half-layers": "#7fb2dc",
    "burst:all-offload": "#0f766e", "burst:selective": "#6d28d9", "burst:off": "#5eb5ac",
    "again": "#d97706", "other order": "#8a8a86",
    # Megatron's ring is TransformerEngine's p2p
    "te:p2p": MEGATRON, "megatron": MEGATRON, "tp": "#d97706", "te:a2a": "#d97706",
    "te:a2a+p2p": "#92400e", "te:all_gather": "#e0a07c",
    "megatron:full": MEGATRON, "megatron:fused": MEGATRON, "megatron:full-keep": "#d97706",
    "megatron:selective": "#92400e", "megatron:off": "#e0a07c", "megatron:unfused": "#e0a07c",
    "liger": "#4d7c0f", "quack": "#65a30d", "cce": "#a16207", "torch": "#525250",
    "ceiling:auto": "#000000", "ceiling:cudnn": "#78716c", "burst:backend=cudnn": "#be185d",
}  # fmt: skip
_OTHERS = ("#be185d", "#475569", "#15803d", "#7c2d12", "#4338ca", "#b45309", "#0e7490", "#86198f")


def colour_of(name: str) -> str:
    """The colour of an implementation, or of its mode as "impl:mode", in every picture."""
    return _COLOURS.get(name) or _OTHERS[crc32(name.encode()) % len(_OTHERS)]


def measured_on(rows: Iterable[Any]) -> str:
    """The GPUs of rows and the days of their runs: "4 x H200, 2026-11-21 to 2026-11-23"."""
    rows = list(rows)
    counts = {getattr(row, "ranks", None) or getattr(row, "gpus", 1) for row in rows}
    (count,) = counts if len(counts) == 1 else (1,)
    gpus = sorted({f"{count} x " * (count > 1) + _short(row.gpu) for row in rows})
    days = sorted({row.date[:10] for row in rows if row.date})
    when = " to ".join(dict.fromkeys((days[0], days[-1]))) if days else ""
    return ", ".join(filter(None, [" and ".join(gpus), when]))


def legend_below(figure: Any, columns: int = 6, **style: Any) -> None:
    """One legend for all panels, below them: never on data."""
    handles: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    count = min(len(handles), columns) or 1
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=count, **style
    )


def _short(gpu: str) -> str:
    """A GPU's name without its maker, memory, clock and temperature."""
    words = gpu.partition(";")[0].removeprefix("NVIDIA ").split()
    return words[0] if words else gpu
