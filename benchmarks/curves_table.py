"""Loss curves of runs that see the same samples, and of one that sees them in another order: as a
table, and as a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from statistics import fmean

from benchmarks.sheets import CurveRow
from benchmarks.style import colour_of, legend_below, measured_on, optional, picture
from benchmarks.tables import markdown

_END = 10  # the end of a run is its last tenth
# What burst is compared with; the second, without keeping and fused loss, where no GPU is: Megatron
# has no context parallelism there.
PEERS = "megatron", "burst-plain"


type Curve = Mapping[int, float]  # losses by step


@dataclass(frozen=True, slots=True)
class Overlay:
    """Loss curves for one kind of sample."""

    sample: str
    name: str
    peer: Curve  # Megatron's curve; its name
    burst: Curve  # burst's, of the same batches
    other: Curve  # the peer's, of batches in another order
    again: Curve  # the peer's own, a second time; empty if it was not run

    def apart(self, curve: Curve) -> dict[int, float]:
        """How far another curve is from the peer's, by step."""
        return {step: abs(curve[step] - loss) for step, loss in self.peer.items() if step in curve}

    def at_the_end(self, curve: Curve) -> tuple[float, float]:
        """Over the last tenth of the steps: the mean of |difference|, and |difference| of the
        means; NaN of a curve that is not there."""
        common = sorted(self.apart(curve))
        if not common:
            return nan, nan
        last = common[-max(1, len(common) // _END) :]
        mean = abs(fmean(curve[step] for step in last) - fmean(self.peer[step] for step in last))
        return fmean(self.apart(curve)[step] for step in last), mean


def overlays(rows: Sequence[CurveRow]) -> list[Overlay]:
    """Of each kind of sample of which all three runs have steps; of equal steps the newest row
    counts."""
    curves: dict[tuple[str, str, str], dict[int, float]] = {}
    for row in rows:
        if row.loss is not None:
            curves.setdefault((row.sample, row.impl, row.order), {})[row.step] = row.loss
    found = []
    for sample in dict.fromkeys(row.sample for row in rows):
        for peer in PEERS:
            names = (peer, "same"), ("burst", "same"), (peer, "other")
            three = [curves.get((sample, *name)) for name in names]
            if all(three):
                again = curves.get((sample, peer, "again"), {})
                found.append(Overlay(sample, peer, *three, again))
                break
    return found


def curves_table(rows: Sequence[CurveRow]) -> str:
    """Markdown: how far Megatron itself, burst and another order of the text are from Megatron's
    curve at the end."""
    head = ("sample", "steps", "loss", "apart", "again", "burst", "other order", "burst / other")
    lines = [head]
    for overlay in overlays(rows):
        last = max(overlay.apart(overlay.burst))
        loss = f"{overlay.peer[last]:.4f}"
        ends = map(overlay.at_the_end, (overlay.again, overlay.burst, overlay.other))
        for how, again, burst, other in zip(("each step", "means"), *ends, strict=True):
            figures = [again, burst, other, burst / other if other else nan]
            told = ["-" if isnan(figure) else f"{figure:.2g}" for figure in figures]
            lines.append((overlay.sample, str(last), loss, how, *told))
    return markdown(lines)


@optional
def draw_curves(rows: Sequence[CurveRow], stem: Path) -> list[Path]:
    """Write `STEM.png`: curves on top, their distance below, one column a kind of sample; returns
    the file, or nothing where Matplotlib is missing or nothing has three runs."""
    found, path = overlays(rows), stem.with_name(f"{stem.name}.png")
    if not found:
        return []
    with picture(path, 6 * len(found), 6.5) as figure:
        panels = figure.subplots(2, len(found), squeeze=False, sharex="col", height_ratios=(3, 2))
        for upper, lower, overlay in zip(*panels, found, strict=True):
            _losses(upper, overlay)
            _differences(lower, overlay)
        legend_below(figure)
        figure.suptitle(f"losses in training: {measured_on(row for row in rows if row.gpu)}")
    return [path]


def _losses(axis, overlay: Overlay) -> None:
    curves = ("other order", overlay.other), (overlay.name, overlay.peer), ("burst", overlay.burst)
    for name, curve in curves:
        # burst's lies in the peer's, which is seen on both sides of it
        style = {"lw": 5, "alpha": 0.4} if curve is overlay.peer else {"lw": 0.9}
        axis.plot(curve.keys(), curve.values(), label=name, color=colour_of(name), **style)
    axis.set(title=f"{overlay.sample} samples", ylabel="loss of the step's batch")
    axis.grid(alpha=0.3)


def _differences(axis, overlay: Overlay) -> None:
    others = {"other order": overlay.other, "again": overlay.again, "burst": overlay.burst}
    for name, curve in ((name, curve) for name, curve in others.items() if curve):
        apart, label = overlay.apart(curve), f"{overlay.name} again" if name == "again" else name
        axis.semilogy(apart.keys(), apart.values(), label=label, lw=0.9, color=colour_of(name))
    axis.set(xlabel="step", ylabel=f"|difference| from {overlay.name}")
    axis.grid(alpha=0.3)
