"""The demo's table and pictures: losses side by side, and where the bytes went."""

import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from draw_program import save_picture
from rich.console import Group
from rich.table import Table

from megatron_burst.resolve import resolve
from megatron_burst.schedule.modes import program_of
from megatron_burst.schedule.spec import AttentionShape, Direction, Spec
from megatron_burst.schedule.topology import Link, pretend_nodes


def environment() -> dict[str, str]:
    """Environment of the training processes: they find the package from any working directory."""
    threads = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    lone_gpu = {"CUDA_VISIBLE_DEVICES": ""} if torch.cuda.device_count() == 1 else {}
    return {**threads, **os.environ, "PYTHONWARNINGS": "ignore", **lone_gpu}


@dataclass(frozen=True)
class Report:
    """What both runs logged, and what is known of them in advance."""

    model: dict[str, int]
    cp_size: int
    logs: list[list[dict]]  # of CP=1 and of burst, one dict per step
    seconds: list[float]

    def series(self, name: str) -> list[list[float]]:
        """One quantity of both runs, by step."""
        return [[step[name] for step in log] for log in self.logs]

    def largest_difference(self, name: str, steps: int | None = None) -> float:
        """Largest difference between the two runs, over the first steps or all."""
        ours, theirs = (values[:steps] for values in self.series(name))
        return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))

    def tokens_per_s(self, run: int) -> float:
        """Median over the steps after the first few."""
        values = sorted(self.series("tokens/s")[run][3:] or self.series("tokens/s")[run])
        return values[len(values) // 2]

    @property
    def on_gpus(self) -> bool:
        """Whether the processes have GPUs: each needs its own."""
        return torch.cuda.device_count() > 1

    @property
    def shape(self) -> AttentionShape:
        """Shape of one layer's attention on one rank."""
        model, dim = self.model, self.model["hidden-size"] // self.model["num-attention-heads"]
        return AttentionShape(
            batch=model["micro-batch-size"],
            tokens=model["seq-length"] // self.cp_size,
            heads_q=model["num-attention-heads"],
            heads_kv=model["num-query-groups"],
            dim_qk=dim,
            dim_v=dim,
            itemsize=2 if self.on_gpus else 4,
            stat_bytes=4,
            grad_bytes=4,
        )

    def spec(self, direction: Direction, cp_rank: int = 0, inter: str | None = None) -> Spec:
        """Spec of one layer's attention in one pass on two nodes; `inter` None: as auto chooses."""
        nodes, pulled = pretend_nodes(self.cp_size, 2), None if self.on_gpus else False
        spec = Spec(nodes, self.shape, inter=inter, pulled=pulled)
        return replace(resolve(spec)[0], cp_rank=cp_rank, direction=direction)

    def bytes_per_step(self, inter: str | None) -> tuple[Counter, int]:
        """Bytes that attention sends per training step: all ranks by link; the maximum of one rank
        between nodes."""
        calls = self.model["num-layers"] * (
            self.model["global-batch-size"] // self.model["micro-batch-size"]
        )
        total, busiest = Counter(), 0
        for rank in range(self.cp_size):
            sent: Counter[Link] = Counter()
            for direction in Direction:
                sent.update(program_of(self.spec(direction, rank, inter)).sent_bytes())
            busiest = max(busiest, sent[Link.INTER] * calls)
            total.update({link: amount * calls for link, amount in sent.items()})
        return total, busiest


def choices_in(output: Path) -> list[str]:
    """What each `auto` chose, from the line that the run logged once, without its log prefix."""
    parts = [line.partition("burst attention: ") for line in output.read_text().splitlines()]
    return [choices for _, _, choices in parts if "; backend " in choices]


def tables(report: Report) -> Group:
    """What both runs logged, what their processes share, and what topology awareness saves."""
    cores = f"{report.cp_size} processes share the cores of one machine: only GPUs tell speeds"
    on_cpu = [] if report.on_gpus else [cores]
    return Group(_runs(report), *on_cpu, _bytes(report))


def _runs(report: Report) -> Table:
    """Both runs side by side, and how far apart they are."""
    made = Table(title="CP=1 (Megatron's attention) against burst attention", show_lines=False)
    made.add_column("")
    made.add_column("CP=1", justify="right")
    made.add_column(f"CP={report.cp_size} burst", justify="right")
    losses = report.series("lm loss")
    for label, at in (("loss, first step", 0), ("loss, last step", -1)):
        made.add_row(label, *(f"{values[at]:.6f}" for values in losses))
    made.add_row("tokens/s (median)", *(f"{report.tokens_per_s(run):,.0f}" for run in (0, 1)))
    made.add_row("seconds, start to end", *(f"{seconds:.0f}" for seconds in report.seconds))
    made.add_section()
    last = abs(losses[1][-1] / losses[0][-1] - 1)
    norms = report.series("grad norm")
    relative = max(abs(b / a - 1) for a, b in zip(*(n[:10] for n in norms), strict=True))
    for label, text in (
        ("largest loss difference, steps 1-10", f"{report.largest_difference('lm loss', 10):.1e}"),
        ("largest loss difference, all steps", f"{report.largest_difference('lm loss'):.1e}"),
        ("loss difference at the end", f"{last:.4%}"),
        ("largest grad norm difference, steps 1-10", f"{relative:.1e} of it"),
        (
            "largest grad norm difference, all steps",
            f"{report.largest_difference('grad norm'):.1e}",
        ),
    ):
        made.add_row(label, "", text)
    return made


def _bytes(report: Report) -> Table:
    """Bytes of burst's run, which knows the nodes, against one ring over all ranks (counted)."""
    made = Table(title="burst attention's bytes a step: why it follows the nodes")
    made.add_column("")
    made.add_column("one ring over all ranks", justify="right")
    made.add_column("burst attention", justify="right")
    (ours, our_busiest), (flat, flat_busiest) = map(report.bytes_per_step, (None, "flat"))
    for link in Link:
        where = "inside nodes" if link is Link.INTRA else "between nodes"
        made.add_row(
            f"{where}, all ranks", *(f"{sent[link] / 2**20:.2f} MiB" for sent in (flat, ours))
        )
    busiest = (flat_busiest, our_busiest)
    made.add_row("between nodes, busiest rank", *(f"{sent / 2**20:.2f} MiB" for sent in busiest))
    return made


def save_pictures(report: Report, folder: Path) -> list[Path]:
    """Write loss.png, and schedule.png: what one rank of burst's run does in a layer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    ours, theirs = report.series("lm loss")
    axes.plot(range(1, len(ours) + 1), ours, lw=4, alpha=0.35, label="CP=1, Megatron's attention")
    axes.plot(
        range(1, len(theirs) + 1), theirs, lw=1.2, label=f"CP={report.cp_size}, burst attention"
    )
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Same seeds, same text")
    axes.grid(alpha=0.3)
    axes.legend()
    loss, schedule = folder / "loss.png", folder / "schedule.png"
    figure.savefig(loss, dpi=140)
    save_picture([report.spec(direction) for direction in Direction], schedule)
    return [loss, schedule]
