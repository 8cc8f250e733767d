"""Draws docs/masks.png: three masks of slices, the rank of each query, the work of each rank."""

from pathlib import Path

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from megatron_burst import slices
from megatron_burst.masks.slice_checks import work_of_ranks
from megatron_burst.schedule.layout import Layout, positions

TOKENS, RANKS = 256, 4
COLORS = ("#1f3d66", "#c2410c", "#4d7c0f", "#7c3aed")
MASKS = {
    "prefix-LM: a prefix seen both ways": slices.prefix_lm(96, TOKENS),
    "block-causal: 8 frames": slices.block_causal([TOKENS // 8] * 8),
    "images in a causal text": slices.causal_with_spans([(32, 80), (144, 208)], TOKENS),
}


def holders() -> np.ndarray:
    """The rank that holds each position, in zigzag."""
    found = np.zeros(TOKENS, dtype=int)
    for rank in range(RANKS):
        for span in positions(Layout.ZIGZAG, rank, RANKS, TOKENS // RANKS):
            found[span.start : span.stop] = rank
    return found


def image(made) -> np.ndarray:
    """[TOKENS, TOKENS]: 0 where a key is masked, else 1 + the rank of the query."""
    seen, row = np.zeros((TOKENS, TOKENS), dtype=int), holders() + 1
    for q_start, q_stop, k_start, k_stop, kind in made.tolist():
        for query in range(q_start, q_stop):
            stop = k_stop - (q_stop - 1 - query) * (kind & slices.CAUSAL > 0)
            start = k_start + (query - q_start) * (kind & slices.INVERSE > 0)
            seen[query, start:stop] = row[query]
    return seen


def main() -> None:
    figure = Figure(figsize=(12, 5.4), layout="constrained")
    axes = figure.subplots(2, len(MASKS), height_ratios=(4, 1))
    colors = ListedColormap(["#f4f4f2", *COLORS])
    for (name, made), above, below in zip(MASKS.items(), *axes, strict=True):
        above.imshow(image(made), cmap=colors, vmin=0, vmax=RANKS, interpolation="nearest")
        above.set_title(name, fontsize=12)
        above.set_xlabel("key")
        above.set_ylabel("query")
        work = np.array(work_of_ranks(made, RANKS, Layout.ZIGZAG, TOKENS)) / 1000
        below.barh([f"rank {rank}" for rank in range(RANKS)], work, color=COLORS)
        below.axvline(work.mean(), color="black", lw=1, ls="--")
        below.invert_yaxis()
        ratio = work.max() / work.mean()
        below.set_xlabel(f"thousand pairs; the most is {ratio:.2f} times the mean")
    figure.savefig(Path(__file__).with_name("masks.png"), dpi=110)


if __name__ == "__main__":
    main()
