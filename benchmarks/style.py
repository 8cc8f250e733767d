"""What all pictures of results share: colours of implementations; words for GPUs and days."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zlib import crc32

BURST, MEGATRON = "#2a78b8", "#c2410c"
INK = "#12344d"  # marks on bars
# what has no implementation of its own: kinds of rows or of kernels, ranks
SERIES = (
    BURST, "#0f766e", "#6d28d9", "#a16207", MEGATRON, "#e0a07c", "#8a8a86", "#be185d", "#4d7c0f",
    "#0ea5e9",
)  # fmt: skip
_MODES = {  # names share a colour if they are the same, or a peer's like of another picture
    # burst: blue for what it does by default, paler for documents that start at any token
    BURST: "burst, burst:auto, burst:all",
    "#7fb2dc": "burst:auto@zigzag",
    "#0f766e": "burst:gather", "#5eb5ac": "burst:gather@zigzag",
    "#6d28d9": "burst:ring", "#a78bfa": "burst:ring@zigzag",
    "#5a9e1f": "burst:a2a", "#b2dd8b": "burst:a2a@zigzag",
    "#4338ca": "burst:inter=ring", "#c7a4f5": "burst:inter=ring@zigzag",
    "#3b6b12": "burst:inter=a2a", "#d4e157": "burst:inter=a2a@zigzag",
    "#be185d": "burst:backend=cudnn",
    "#1e3a5f": "burst:none", "#22d3ee": "burst:half", "#93b4e8": "burst:all-half-layers",
    "#14532d": "burst:all-offload", "#c026d3": "burst:selective", "#34a58e": "burst:off",
    "#0b2545": "burst:forward", "#a21caf": "burst:recompute", "#22b8cf": "burst:plain",
    # Megatron's ring is TransformerEngine's p2p
    MEGATRON: "te:p2p, megatron, megatron:full, megatron:fused",
    "#d97706": "te:a2a, tp, megatron:full-keep, again",
    "#92400e": "te:a2a+p2p, megatron:selective",
    "#e0a07c": "te:all_gather, megatron:off, megatron:unfused",
    "#4d7c0f": "liger", "#84cc16": "quack", "#a16207": "cce", "#525250": "torch",
    "#000000": "ceiling:auto", "#78716c": "ceiling:cudnn", "#8a8a86": "other order",
}  # fmt: skip
_WORDS = {
    "burst": "burst", "te": "TransformerEngine", "ceiling": "kernel alone", "one_gpu": "one GPU",
    "auto": "", "zigzag": "documents at any token", "p2p": "ring", "a2a": "all-to-all",
    "all_gather": "gather", "a2a+p2p": "all-to-all and ring", "backend=cudnn": "on cuDNN",
    "inter=ring": "ring between nodes", "inter=a2a": "all-to-all between nodes",
    "cudnn": "cuDNN", "fa4": "FlashAttention-4",
}  # fmt: skip
_COLOURS = {name: colour for colour, names in _MODES.items() for name in names.split(", ")}
_OTHERS = (
    "#db2777", "#475569", "#15803d", "#7c2d12", "#b45309", "#86198f", "#0891b2", "#9f1239",
    "#155e75", "#ca8a04", "#f472b6", "#94a3b8", "#4c1d95", "#713f12",
)  # fmt: skip


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """Colours of what one picture shows: implementations, or their modes as "impl:mode". A mode
    of the table above has its own unless another one of the picture has that already; no two share
    one while there are others."""
    names = list(dict.fromkeys(names))
    known = {name: _COLOURS.get(name.replace("intra=", "")) for name in names}
    colours: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (known[name] is None, name)):
        first = crc32(name.encode()) % len(_OTHERS)
        wanted = [*filter(None, [known[name]]), *_OTHERS[first:], *_OTHERS[:first]]
        colours[name] = next((each for each in wanted if each not in colours.values()), wanted[0])
    return {name: colours[name] for name in names}


def words_of(name: str) -> str:
    """What a legend calls an implementation or its mode."""
    impl, _, mode = name.partition(":")
    mode, _, layout = mode.partition("@")
    how = _WORDS.get(mode, mode.replace("_", "-").replace("=", " "))
    return ", ".join(filter(None, (_WORDS.get(impl, impl), how, _WORDS.get(layout, layout))))


def colour_of(name: str) -> str:
    """The colour of one of these where no other can have it."""
    return colours_of([name])[name]


def measured_on(rows: Iterable[Any]) -> str:
    """GPUs and days of rows: "4 x H200, 2026-11-21 to 2026-11-23", "2 emulated nodes x 2 H200"."""
    rows = list(rows)
    places = {_place(row) for row in rows}
    (nodes, count), *others = places or {(1, 1)}
    where = "" if others or count == 1 else f"{count} x "
    if nodes > 1 and not others:
        emulated = any("of one machine" in row.link for row in rows)
        where = f"{nodes} {'emulated ' * emulated}nodes x {count // nodes} "
    gpus = sorted({where + gpu_of(row.gpu) for row in rows})
    days = sorted({row.date[:10] for row in rows if row.date})
    when = " to ".join(dict.fromkeys((days[0], days[-1]))) if days else ""
    return ", ".join(filter(None, [" and ".join(gpus), when]))


def _place(row: Any) -> tuple[int, int]:
    return getattr(row, "nodes", 1), getattr(row, "ranks", None) or getattr(row, "gpus", 1)


def mark_impossible(axis: Any, x: float, y: float, colour: str, **where: Any) -> None:
    """A cross for what could not run; the legend says so once."""
    axis.plot(x, y, "x", color=colour, clip_on=False, **where)
    axis.plot([], [], "x", color="black", label="not possible")


def legend_below(figure: Any, columns: int = 6, **style: Any) -> None:
    """One legend for all panels, below them: never on data."""
    handles: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    count = min(len(handles), columns) or 1
    where = {"loc": "outside lower center", "ncols": count, **style}
    figure.legend(handles.values(), handles.keys(), **where)


def gpu_of(gpu: str) -> str:
    """A GPU's name without its maker, memory, clock and temperature."""
    name = gpu.partition(";")[0].removeprefix("NVIDIA ")
    preset = name.removeprefix("predicted for ")
    return f"predicted for {preset.upper()}" if preset != name else name.partition(" ")[0]


def optional(draw: Callable[..., list[Path]]) -> Callable[..., list[Path]]:
    """The same function, which draws no picture where Matplotlib is missing."""

    @wraps(draw)
    def drawn(*args: Any) -> list[Path]:
        return draw(*args) if find_spec("matplotlib") else []

    return drawn


@contextmanager
def picture(path: Path, width: float, height: float, dpi: int = 130) -> Iterator[Any]:
    """A Matplotlib figure, written when its block ends."""
    from matplotlib.figure import Figure  # which may be missing

    figure = Figure(figsize=(width, height), layout="constrained")
    yield figure
    figure.savefig(path, dpi=dpi)
