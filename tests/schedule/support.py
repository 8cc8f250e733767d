"""The tables of docs/masks.md: which mode supports which mask in which layout, by `check_mask`; and
which kernel supports which mask, by `Capability`."""

from itertools import product

from megatron_burst.errors import BurstError
from megatron_burst.kernels.backends import backends
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import DOCUMENTS, SLICES, WINDOWS, Mask, check_mask
from megatron_burst.schedule.modes import MODES

MASKS = {
    "causal": Mask.CAUSAL,
    "full": Mask.FULL,
    "window, left": Mask(4096, 0),
    "window, both sides": Mask(512, 512),
    "documents, causal": Mask(right=0, documents=True),
    "documents, full": Mask(documents=True),
    "slices": Mask(documents=True),
    "windows in documents, left": Mask(4096, 0, documents=True),
    "windows in documents, both sides": Mask(512, 512, documents=True),
}
LAYOUTS = ("zigzag", "contiguous", "striped", "zigzag-documents")


def supports(mask: Mask, layout: Layout, mode: str, several_nodes: bool) -> bool:
    """Whether a mode supports a mask; gathered keys must be in order, which striped rows are
    not."""
    if layout is Layout.STRIPED and mode != "ring":
        return False
    if layout is Layout.DOCUMENTS and not mask.documents:
        return False
    try:
        check_mask(mask, layout, mode, one_call=mode != "ring" and not several_nodes)
    except BurstError:
        return False
    return True


def table() -> str:
    """The table in Markdown."""
    lines = [f"| mask | {' | '.join(f'`{layout}`' for layout in LAYOUTS)} |"]
    lines.append("| --- " * (len(LAYOUTS) + 1) + "|")
    for name, mask in MASKS.items():
        cells = [_cell(mask, Layout(layout)) for layout in LAYOUTS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def kernel_table() -> str:
    """Which kernel supports which mask, in Markdown."""
    every = [backend.capability for backend in backends().values()]
    lines = [f"| mask | {' | '.join(f'`{can.name}`' for can in every)} |"]
    lines.append("| --- " * (len(every) + 1) + "|")
    needs = {"causal, full": set()} | {name: {name} for name in (WINDOWS, DOCUMENTS, SLICES)}
    for name, need in needs.items():
        composed = ("several calls" if need <= can.composed else "-" for can in every)
        cells = (
            "yes" if need <= can.masks else other
            for can, other in zip(every, composed, strict=True)
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    sinks = ("yes" if can.sinks else "in a pass of their own" for can in every)
    lines.append(f"| sinks | {' | '.join(sinks)} |")
    return "\n".join(lines)


def _cell(mask: Mask, layout: Layout) -> str:
    found = []
    for mode, several in product(MODES, (True, False)):
        if supports(mask, layout, mode, several):
            if several:
                found.append(mode)
            elif mode not in found:
                found.append(f"{mode} on one node")
    return ", ".join(found) or "-"
