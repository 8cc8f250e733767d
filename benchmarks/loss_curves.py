"""Loss curves of training on real text: Megatron with TransformerEngine's ring beside burst.

python -m benchmarks.loss_curves OUT.csv --gpus 2     on GPUs; --tiny: anywhere
python -m benchmarks.show curves OUT.csv              table and picture

Each run is examples/pretrain_gpt.py under torchrun: two layers of Llama-3-8B's widths with 32K
tokens a step, or all of Llama-3.2-1B with 16K or 64K, from the same weights, on text in bytes,
whole or packed of documents. Megatron runs with the text in another order too, the yardstick for a
difference, and again with nothing changed: its gradients are not bitwise the same. Burst keeps
attention's results and has the fused loss; Megatron recomputes nothing and has its own.
"""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import Annotated

import torch
import typer
from typer import Option

from benchmarks.facts import now, stamp
from benchmarks.impls import pick
from benchmarks.rows import append, check_appendable
from benchmarks.runner import App, Budget, OutFile, Words, best_device, clock
from benchmarks.sheets import CURVES_CSV, CurveRow
from benchmarks.slice_cases import IMPLS, RECOMPUTE, Slice
from benchmarks.slices import ROOT, Gpus, reason_in, start, steps_in, training
from benchmarks.style import colour_of, legend_below, measured_on, optional, picture
from benchmarks.tables import markdown
from megatron_burst.errors import require

CLASSES = 258  # bytes and the end of a document
MODELS = {
    "8b": Slice("8b", 32 << 10, 2, 4096, 14336, 32, 8, CLASSES),
    "llama3.2-1b": Slice("llama3.2-1b", 16 << 10, 16, 2048, 8192, 32, 8, CLASSES),
    "llama3.2-1b-64k": Slice("llama3.2-1b-64k", 64 << 10, 16, 2048, 8192, 32, 8, CLASSES),
}
_UNNAMED = "8b", "tiny"  # models that rows do not name
TINY = Slice("tiny", 256, 2, 64, 128, 4, 2, CLASSES)
FLAGS = {
    "burst": f"{IMPLS['burst']} {RECOMPUTE}",
    "megatron": IMPLS["megatron-own-loss"],
    "burst-plain": "--context-parallel-impl burst",
}
_DATA_SEEDS = {"same": 1234, "again": 1234, "other": 4321}
# What burst is compared with; the second, without keeping and fused loss, where no GPU is: Megatron
# has no context parallelism there.
PEERS = "megatron", "burst-plain"
_END = 10  # the end of a run is its last tenth
app = App()
_NOT_READ = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


@dataclass(frozen=True, slots=True)
class Run:
    """A training on "whole" or "packed" samples, in an order: "same", the same "again", "other"."""

    sample: str
    impl: str
    order: str

    def __str__(self) -> str:
        return f"{self.sample}:{self.impl}{'' if self.order == 'same' else f'-{self.order}'}"


def runs(peer: str) -> tuple[Run, ...]:
    """All of them, the most telling first; a kind of sample can be shown after its first three."""
    three = (peer, "same"), ("burst", "same"), (peer, "other")
    first = tuple(Run(sample, *one) for sample in ("whole", "packed") for one in three)
    return (*first, Run("whole", peer, "again"), Run("packed", peer, "again"))


def text_files() -> list[Path]:
    """Source code of Python's library, without tests, and of PyTorch: 50 MB; 300 steps see 10."""
    library = Path(sysconfig.get_path("stdlib"))
    every = sorted(library.rglob("*.py"))
    ours = (path for path in every if _NOT_READ.isdisjoint(path.relative_to(library).parts))
    return [*ours, *sorted(Path(torch.__file__).parent.rglob("*.py"))]


def make_text(prefix: Path, files: Sequence[Path], gpus: int) -> None:
    """Write Megatron's data set of documents that packing can shard."""
    command = [sys.executable, str(ROOT / "examples" / "data.py"), "--multiple", str(2 * gpus)]
    command += [str(prefix), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    require("loss_curves", [(
        not done.returncode, "text must become a data set, because runs train on it",
        ["no reason", *done.stderr.splitlines()][-1], "run examples/data.py by itself",
    )])  # fmt: skip


def flags_of(run: Run, what: Slice, steps: int, text: Path) -> list[str]:
    """Megatron's, and those of examples/pretrain_gpt.py.

    As in examples/demo.py the embedding's deviation and Adam's epsilon keep rounding errors small:
    with Megatron's, differences of 1e-4 grew a thousandfold (loss_curves_2xh200_defaults.csv)."""
    shared = f"""
    --train-iters {steps} --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine
    --lr-warmup-iters {steps // 3} --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95
    --adam-eps 1e-6 --embedding-init-method-std 1.0
    --rotary-base 500000 --seed 1234 --data-seed {_DATA_SEEDS[run.order]} --data-path {text}
    """.split()
    packing = ["--pack-documents"] if run.sample == "packed" else []
    return [*what.shape, *shared, *packing, *FLAGS[run.impl].split()]


def train(
    run: Run, what: Slice, gpus: int, steps: int, text: Path, out: Path, longest_s: float
) -> str:
    """Train, appending rows as steps end; what became of it, in words."""
    log, output = text.with_name("steps.jsonl"), text.with_name("output.txt")
    log.unlink(missing_ok=True)
    process = start(training(gpus, flags_of(run, what, steps, text), log), output)
    begun, done, is_over = monotonic(), 0, False
    while not is_over:
        sleep(0.5)
        is_over = process.poll() is not None
        if not is_over and monotonic() - begun > longest_s:
            process.terminate()  # torchrun ends its workers
            process.wait()
            is_over = True
        logged = steps_in(log)
        rows = [_row(run, what, gpus, n, step) for n, step in enumerate(logged[done:], done)]
        append(out, rows, CURVES_CSV)
        done = len(logged)
    if done < steps:
        note = f"{done} steps of {steps}: {reason_in(output)}"
        append(out, [_row(run, what, gpus, 0, None, note)], CURVES_CSV)
        return f"{run}: {note}"
    return f"{run}: {steps} steps, loss {logged[-1]['lm loss']:.4f}, {monotonic() - begun:.0f} s"


def _row(run: Run, what: Slice, gpus: int, number: int, step: dict | None, note="") -> CurveRow:
    """Of a step, or of a run that was cut short; the first has what the run depends on."""
    logged = {"step": 0}
    if step:
        logged = {"step": step["iteration"], "loss": step["lm loss"], "ms": 1e3 * step["seconds"]}
        logged["grad_norm"] = step["grad norm"]
    return CurveRow(
        **({"date": now()} if number else stamp(best_device()[0])), gpus=gpus,
        sample=run.sample if what.name in _UNNAMED else f"{run.sample}, {what.name}",
        impl=run.impl, order=run.order, note=note, **logged,
    )  # fmt: skip


@app.command()
def main(
    out: OutFile,
    gpus: Gpus = 2,
    steps: Annotated[int, Option(min=10, help="of each run")] = 300,
    only: Annotated[Words, Option(help="repeatable, e.g. packed:burst; default: all")] = None,
    tiny: Annotated[bool, Option("--tiny", help="small sizes, to try this out")] = False,
    run_s: Annotated[float, Option(min=1, help="a run that takes longer is ended")] = 120,
    budget_s: Budget = None,
    model: Annotated[str, Option(help=f"one of {', '.join(MODELS)}")] = "8b",
) -> None:
    """Train all, and append rows as steps end."""
    check_appendable(out, CURVES_CSV, "OUT")
    peer = PEERS[0] if torch.cuda.is_available() else PEERS[1]
    every = {str(run): run for run in runs(peer)}
    must = "loss_curves: --only must name a run that there is, because each is its own command"
    wanted = pick(only or (), every, must)
    must = "loss_curves: --model must name a model that there is, because its sizes are listed"
    (what,) = (TINY,) if tiny else pick((model,), MODELS, must)
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # under CP Megatron refuses others
    with TemporaryDirectory() as folder:
        is_over, text = clock(budget_s), Path(folder) / "text"
        make_text(text, text_files()[: 200 if tiny else None], gpus)
        for run in wanted:
            if is_over():
                typer.echo(f"time is up: {run} was not started")
                continue
            typer.echo(train(run, what, gpus, steps, text, out, run_s))


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
        """Mean |difference| in the last tenth of the steps, and that of means; NaN without any."""
        common = sorted(self.apart(curve))
        if not common:
            return nan, nan
        last = common[-max(1, len(common) // _END) :]
        mean = abs(fmean(curve[step] for step in last) - fmean(self.peer[step] for step in last))
        return fmean(self.apart(curve)[step] for step in last), mean


def overlays(rows: Sequence[CurveRow]) -> list[Overlay]:
    """Of each kind of sample that has all three runs; of equal steps the newest row counts."""
    curves: dict[tuple[str, str, str], dict[int, float]] = {}
    for row in rows:
        if row.loss is not None:
            curves.setdefault((row.sample, row.impl, row.order), {})[row.step] = row.loss
    complete = []
    for sample in dict.fromkeys(row.sample for row in rows):
        for peer in PEERS:
            names = (peer, "same"), ("burst", "same"), (peer, "other")
            three = [curves.get((sample, *name)) for name in names]
            if all(three):
                again = curves.get((sample, peer, "again"), {})
                complete.append(Overlay(sample, peer, *three, again))
                break
    return complete


def curves_table(rows: Sequence[CurveRow]) -> str:
    """Markdown: how far runs are from Megatron's curve at the end."""
    head = ("sample", "steps", "loss", "apart", "again", "burst", "other order", "burst / other")
    lines = [head]
    for overlay in overlays(rows):
        last = max(overlay.apart(overlay.burst))
        loss = f"{overlay.peer[last]:.4f}"
        ends = map(overlay.at_the_end, (overlay.again, overlay.burst, overlay.other))
        for how, again, burst, other in zip(("each step", "means"), *ends, strict=True):
            figures = [again, burst, other, burst / other if other else nan]
            cells = ["-" if isnan(figure) else f"{figure:.2g}" for figure in figures]
            lines.append((overlay.sample, str(last), loss, how, *cells))
    return markdown(lines)


@optional
def draw_curves(rows: Sequence[CurveRow], stem: Path) -> list[Path]:
    """Write `STEM.png`: curves, below them their distance, a column a kind of sample."""
    drawn, path = overlays(rows), stem.with_name(f"{stem.name}.png")
    if not drawn:
        return []
    with picture(path, 6 * len(drawn), 6.5) as figure:
        panels = figure.subplots(2, len(drawn), squeeze=False, sharex="col", height_ratios=(3, 2))
        for upper, lower, overlay in zip(*panels, drawn, strict=True):
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


if __name__ == "__main__":
    app()
