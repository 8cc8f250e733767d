"""What one GPU reaches without attention: a matrix product and a copy in its own memory, as CSV.

python -m benchmarks.gpu_limits --out limits.csv
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median

import torch
import typer

from benchmarks.facts import gpu_state, versions
from benchmarks.results import repetitions
from benchmarks.rows import Sheet
from benchmarks.sweep import Out, check_out, new_app, save
from megatron_burst.tools.speeds import Run, matmul, times_ms
from megatron_burst.tools.terminal import Device, in_one_sentence
from megatron_burst.tools.world import World, started

_WHO = "benchmarks.gpu_limits"
_SIDES = {"cuda": (4096, 8192, 16384), "cpu": (256,)}
_COPIED = {"cuda": (2**30, 2**32), "cpu": (2**20,)}  # bytes
app = new_app()


@dataclass(frozen=True, slots=True)
class LimitRow:
    """One operation of one size; fields are columns.

    Attributes:
        date, versions, gpu: when, of what took part, of the device.
        what: "matmul", a square bf16 product, or "copy", of a tensor in the device's memory.
        size: the product's side, or bytes that are copied.
        ms, ms_min, ms_max: median and spread over repetitions.
        rate: TFLOP/s of a product; GB/s of a copy, which reads and writes each byte.
        note: each repetition.
    """

    date: str
    versions: str
    gpu: str
    what: str
    size: int
    ms: float
    ms_min: float
    ms_max: float
    rate: float
    note: str


LIMITS_CSV = Sheet("benchmarks.gpu_limits", LimitRow)


@app.command()
def main(out: Out = Path("gpu_limits.csv"), device: Device = None) -> None:
    """Measure on one GPU."""
    with in_one_sentence(), started(_WHO, device) as world:
        check_out(out, world, LIMITS_CSV)
        for row in rows(world):
            save(out, world, [row], LIMITS_CSV)
            typer.echo(f"{row.what} {row.size}: {row.rate:.0f}")


def rows(world: World) -> Iterator[LimitRow]:
    """All operations, one after another."""
    kind = world.device.type
    for side in _SIDES[kind]:
        run, flops = matmul(world, side, torch.bfloat16)
        yield _row("matmul", side, run, flops / 1e9, world)
    for count in _COPIED[kind]:
        source = torch.ones(count, dtype=torch.uint8, device=world.device)
        target = torch.empty_like(source)
        yield _row("copy", count, partial(target.copy_, source), 2 * count / 1e6, world)


def _row(what: str, size: int, run: Run, work: float, world: World) -> LimitRow:
    """Times one; `work` divided by milliseconds is its rate."""
    ms = times_ms(run, world, reps=10)
    return LimitRow(
        datetime.now(UTC).isoformat(timespec="seconds"), versions(), gpu_state(world.device),
        what, size, median(ms), min(ms), max(ms), work / median(ms), repetitions(ms),
    )  # fmt: skip


if __name__ == "__main__":
    app()
