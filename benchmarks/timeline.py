"""What one GPU does during one forward and backward pass of burst attention, as CSV and picture.

torchrun --nproc-per-node 4 -m benchmarks.timeline record --seq 131072 --heads 32/8 OUT.csv
python -m benchmarks.timeline draw OUT.csv docs/timeline.png --title "4 x H200, 2026-11-21: ..."
"""

import csv
import os
from math import inf
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch.profiler import ProfilerActivity, profile
from typer import Argument, Option

from benchmarks.cases import one_head_count
from benchmarks.impls import burst_config
from benchmarks.runner import App
from benchmarks.style import SERIES, legend_below, picture
from megatron_burst.attention import burst_attention

KINDS = (  # what a kernel's name contains, what it is, its colour; the first that fits counts
    ("nccl", "NCCL", SERIES[4]),
    ("barrier", "barrier of the ranks", SERIES[5]),
    ("ashattentionforward", "attention forward", SERIES[0]),
    ("ashattentionbackwardsm", "attention backward", SERIES[1]),
    ("ashattentionbackward", "attention: prepare, convert", SERIES[2]),
    ("flash", "attention", SERIES[0]),
    ("_kernel", "merge, sum", SERIES[7]),
    ("ptop", "copy between GPUs", SERIES[3]),
    ("mem", "copy, fill", SERIES[8]),
    ("", "other", SERIES[6]),
)
app = App()


@app.command()
def record(
    out: Path,
    seq: Annotated[int, Option(help="tokens of the whole sequence")] = 65536,
    heads: Annotated[str, Option(help="query heads / KV heads")] = "32/8",
    modes: Annotated[
        str, Option(help="configurations, separated by ;")
    ] = "intra=gather,transfer=pull;intra=gather,transfer=send;intra=ring",
    nodes: Annotated[int, Option(help="pretend so many, with sockets between them")] = 1,
) -> None:
    """Profile one pass of each mode on every rank; rank 0 writes its own."""
    if out.exists():
        raise typer.BadParameter(f"OUT must be a new file, because measurements stay; got {out}")
    if nodes > 1:  # before NCCL starts
        node = int(os.environ["RANK"]) * nodes // int(os.environ["WORLD_SIZE"])
        os.environ["NCCL_HOSTID"] = f"pretended-{node}"
        modes = ";".join(f"{mode},nodes={nodes}" for mode in modes.split(";"))
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    num_q, num_kv = one_head_count(heads, "benchmarks.timeline")
    q, k, v, dout = (
        torch.randn(seq // dist.get_world_size(), 1, h, 128, device="cuda").bfloat16()
        for h in (num_q, num_kv, num_kv, num_q)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    rows = []
    for mode in modes.split(";"):
        for _ in range(3):
            _one_pass(leaves, dout, mode)
        # CUDA's activities alone: with the CPU's the GPU waits for launches that a run hides
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            _one_pass(leaves, dout, mode)
        rows += [(mode, *row) for row in _kernels(profiler)]
    if dist.get_rank() == 0:
        with out.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["mode", "stream", "name", "start_us", "duration_us"])
            writer.writerows(rows)
    dist.destroy_process_group()


def _one_pass(leaves, dout, mode) -> None:
    dist.barrier()
    torch.cuda._sleep(100_000_000)  # the CPU runs ahead, as it does in training
    out = burst_attention(*leaves, qkv_format="sbhd", config=burst_config(mode))
    torch.autograd.grad(out, leaves, dout)
    torch.cuda.synchronize()


def _kernels(profiler) -> list[tuple]:
    cuda, every = torch.autograd.DeviceType.CUDA, profiler.profiler.kineto_results.events()
    events = [one for one in every if one.device_type() == cuda and one.duration_ns() > 0]
    first = max(event.end_ns() for event in events if "spin" in event.name())  # ranks have met
    rows = [
        (
            event.device_resource_id(), event.name()[:80], (event.start_ns() - first) / 1e3,
            event.duration_ns() / 1e3,
        )
        for event in events if event.start_ns() >= first
    ]  # fmt: skip
    return sorted(rows, key=lambda row: row[2])


@app.command()
def draw(
    source: Path,
    path: Annotated[Path, Argument(metavar="PICTURE")],
    title: Annotated[str, Option(help="GPUs, day and problem, which the CSV lacks")],
) -> None:
    """One panel a mode, one line a stream, which is named for what it carries."""
    with source.open() as file:
        rows = list(csv.DictReader(file))
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    with picture(path, 14, 2.2 * len(modes) + 1) as figure:
        axes = figure.subplots(len(modes), 1, squeeze=False)[:, 0]
        for axis, mode in zip(axes, modes, strict=True):
            _panel(axis, mode, [row for row in rows if row["mode"] == mode])
        legend_below(figure, columns=5)
        figure.suptitle(title)


def _panel(axis, mode: str, rows: list[dict]) -> None:
    first = min(float(row["start_us"]) for row in rows if _kind(row["name"])[1] != "other")
    streams = list(dict.fromkeys(row["stream"] for row in rows))
    for row in rows:
        _, label, colour = _kind(row["name"])
        span = ((float(row["start_us"]) - first) / 1e3, float(row["duration_us"]) / 1e3)
        place = streams.index(row["stream"]) - 0.4, 0.8
        axis.broken_barh([span], place, color=colour, label=label)
    end = max(float(row["start_us"]) + float(row["duration_us"]) for row in rows) - first
    axis.set(title=f"{mode}: {end / 1e3:.1f} ms", xlabel="ms", xlim=(0, None))
    axis.set_yticks(range(len(streams)), [lane_of(rows, stream) for stream in streams])


def lane_of(rows: list[dict], stream: str) -> str:
    """What a stream carries: kernels, or transfers, which are of gradients if none begins before
    attention's backward."""

    def begins(kind: str, **where: str) -> float:
        chosen = (row for row in rows if all(row[name] == value for name, value in where.items()))
        starts = (float(r["start_us"]) for r in chosen if kind in _kind(r["name"])[1])
        return min(starts, default=inf)

    if begins("attention", stream=stream) < inf:
        return "kernels"
    before = begins("", stream=stream) < begins("attention backward")
    return f"transfers of {'inputs' if before else 'gradients'}"


def _kind(name: str) -> tuple[str, str, str]:
    return next(kind for kind in KINDS if kind[0] in name.lower())


if __name__ == "__main__":
    app()
