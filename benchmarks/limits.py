"""What the hardware allows: a table of docs/benchmarks/comparison.md, which `benchmarks.show docs`
makes; and what one GPU reaches without attention, as CSV:

python -m benchmarks.limits --out limits.csv     a matrix product, and a copy in its own memory
"""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

import torch
import typer

from benchmarks import sheets
from benchmarks.facts import stamp
from benchmarks.rows import read
from benchmarks.runner import App, Out, check_out, save
from benchmarks.tables import repetitions, spread
from megatron_burst.tools.hardware_file import preset_of
from megatron_burst.tools.speeds import Run, matmul, times_ms
from megatron_burst.tools.terminal import Device
from megatron_burst.tools.world import World, started

RESULTS = Path(__file__).parent / "results"
_LINK = re.compile(r"ring ([\d.]+), all-to-all ([\d.]+) GB/s (on one|between 2)")
FOUR = "attention_4xh200_one_node+peers_4xh200_one_node"
_MEMORY_GBS = 4800.0  # of an H200, in its data sheet
_SIDES = {"cuda": (4096, 8192, 16384), "cpu": (256,)}
_COPIED = {"cuda": (2**30, 2**32), "cpu": (2**20,)}  # bytes
Lines = Iterator[tuple[str, ...]]
app = App()


def sheet(name: str, kind=sheets.ATTENTION_CSV) -> list:
    """The rows of a CSV of benchmarks/results, or of several, joined by "+"."""
    return read([RESULTS / f"{one}.csv" for one in name.split("+")], kind)


def machine() -> Lines:
    """What was measured of the machines, with the data sheets' figures."""
    yield "what", "data sheet", "measured", "rows"
    yield from _gpu()
    yield from _links()


def _gpu() -> Lines:
    gpu = preset_of("NVIDIA H200", "limits").gpu
    peak = f"{gpu.peak_tflops:.0f}"
    square = sorted({row.matmul_tflops for row in sheet("loss_h200", sheets.LOSS_CSV) if row.ms})
    rows = "`loss_h200.csv`, `matmul_tflops`"
    yield "matrix product, bf16, TFLOP/s", peak, _span(square), rows
    own, rows = "gpu_limits_1xh200", _files("gpu_limits_1xh200")
    for row in {(row.what, row.size): row for row in sheet(own, sheets.LIMITS_CSV)}.values():
        span = _span([row.rate * row.ms / ms for ms in (row.ms_max, row.ms, row.ms_min)])
        if row.what == "matmul":
            yield f"matrix product of side {row.size}, bf16, TFLOP/s", peak, span, rows
        else:
            what = f"copy of {row.size >> 30} GiB in the H200's memory, GB/s read and written"
            yield what, f"{_MEMORY_GBS:.0f}", span, rows
    causal = [row for row in sheet(FOUR) if (row.impl, row.mode) == ("ceiling", "auto") and row.ms]
    for pass_, name in (("fwd", "forward"), ("fwd_bwd", "forward and backward")):
        span = _span([row.tflops_per_gpu for row in causal if row.pass_ == pass_])
        what = f"FlashAttention-4 alone, causal, {name}, TFLOP/s"
        yield what, peak, span, f"{_files(FOUR)}, `ceiling`"


def _links() -> Lines:
    for gpus, names in (("H200", "attention_4xh200_one_node+attention_2xh200_one_node"),
                        ("H100", "before_2xh100")):  # fmt: skip
        rings, exchanges = zip(*map(rates, sheet(names)), strict=True)
        for way, values in (("ring shift", rings), ("all-to-all", exchanges)):
            what = f"NVLink, {gpus}, {way} by NCCL, GB/s a rank"
            yield what, "450", _span(values), _files(names)
    for gpus in ("H200", "H100"):
        assumed = f"assumed: {preset_of(gpus, 'limits').gpu.host_gbs:.0f}"
        rows = f"`machines/{gpus.lower()}.toml`"
        yield f"copies to host memory, {gpus}, GB/s", "64", assumed, rows
    rings, _ = zip(*map(rates, sheet("attention_2x2xh200")), strict=True)
    what = "sockets between emulated nodes, ring shift, GB/s a rank"
    yield what, "", _span(rings), "`attention_2x2xh200.csv`"


def _files(name: str) -> str:
    """Those of `sheet`, for a page."""
    return ", ".join(f"`{one}.csv`" for one in name.split("+"))


def rates(row: sheets.Row) -> tuple[float, float]:
    """Measured ring shift and all-to-all of a row's run, GB/s a rank."""
    speeds = _LINK.match(row.link)
    return float(speeds[1]), float(speeds[2])


def _span(values) -> str:
    digits = 0 if max(values) > 50 else 1
    least, most = (f"{bound:.{digits}f}" for bound in (min(values), max(values)))
    return f"{median(values):.{digits}f} ({least}-{most})"


@app.command()
def main(out: Out = Path("gpu_limits.csv"), device: Device = None) -> None:
    """Measure a matrix product and a copy on one GPU."""
    with started("benchmarks.limits", device) as world:
        check_out(out, world, sheets.LIMITS_CSV)
        for row in limit_rows(world):
            save(out, world, [row], sheets.LIMITS_CSV)
            typer.echo(f"{row.what} {row.size}: {row.rate:.0f}")


def limit_rows(world: World) -> Iterator[sheets.LimitRow]:
    """All operations, one after another."""
    kind = world.device.type
    for side in _SIDES[kind]:
        run, flops = matmul(world, side, torch.bfloat16)
        yield limit_row("matmul", side, run, flops / 1e9, world)
    for count in _COPIED[kind]:
        source = torch.ones(count, dtype=torch.uint8, device=world.device)
        target = torch.empty_like(source)
        yield limit_row("copy", count, partial(target.copy_, source), 2 * count / 1e6, world)


def limit_row(what: str, size: int, run: Run, work: float, world: World) -> sheets.LimitRow:
    """Times one; `work` divided by milliseconds is its rate."""
    ms = times_ms(run, world, reps=10)
    rate = work / median(ms)
    return sheets.LimitRow(
        **stamp(world.device), what=what, size=size, **spread(ms), rate=rate, note=repetitions(ms)
    )


if __name__ == "__main__":
    app()
