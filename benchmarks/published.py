"""Published measurements against the planner's predictions for the same setups, in Markdown.

python benchmarks/published.py            as they ran: nested rings
python benchmarks/published.py --auto     as burst would

BurstEngine (arXiv 2509.19836, plot_code/burst_attn/burst_exp.xlsx of its repository): A800-80G,
8 a node, one sequence, ZeRO-3, nested rings, layers recomputed; whole: attention's output kept,
half: that of the later half, none. Ulysses: untied_ulysses (H100-80G, 8 a node, FSDP, layers
recomputed, inputs offloaded, FlashAttention-3).
"""

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from megatron_burst.tools.hardware_file import preset
from megatron_burst.tools.job.candidate import Candidate, candidate
from megatron_burst.tools.job.hugging_face import PRESETS
from megatron_burst.tools.job.strategy import Job, Strategy
from megatron_burst.tools.units import in_units

_M = 1 << 20


@dataclass(frozen=True, slots=True)
class Published:
    """A published measurement.

    Attributes:
        who: whose.
        model: preset.
        seq: tokens, on all GPUs together.
        gpus: of `hardware`, 8 a node.
        hardware: preset.
        strategy: like theirs.
        tokens: a second and GPU, as published.
        gb: 1e9 bytes, as published; None where it is not.
    """

    who: str
    model: str
    seq: int
    gpus: int
    hardware: str
    strategy: Strategy
    tokens: float | None
    gb: float | None = None


def _burst_engine(model: str, seq: int, gpus: int, **rows: tuple[float, float | None]):
    for keep, (tokens, gb) in rows.items():
        strategy = Strategy(cp=gpus, keep=keep, fsdp="torch", intra="ring")
        yield Published(f"BurstEngine, {keep}", model, seq, gpus, "a800", strategy, tokens, gb)


_ULYSSES = Strategy(cp=8, offload_inputs=True, fsdp="torch")
_ON_HOST = Strategy(cp=8, keep="all", offload=True, offload_inputs=True, fsdp="torch")
_MEGATRON = Strategy(tp=2, cp=4, keep="all", offload=True, offload_inputs=True)
PUBLISHED = (
    *_burst_engine("burstengine-7b", 2 * _M, 32, all=(100.1, 55.4), half=(92.41, 49.6)),
    *_burst_engine("burstengine-7b", 2 * _M, 32, none=(79.54, None)),
    *_burst_engine("burstengine-14b", _M, 32, all=(118.36, 54.0), half=(108.82, 45.9)),
    *_burst_engine("burstengine-14b", _M, 32, none=(94.81, 41.45)),
    *_burst_engine("burstengine-7b", 4 * _M, 64, all=(50.28, 56.3), half=(46.5, 48.8)),
    *_burst_engine("burstengine-7b", 4 * _M, 64, none=(35.8, None)),
    *_burst_engine("burstengine-14b", 2 * _M, 64, all=(60.49, 51.0), half=(55.67, 43.2)),
    *_burst_engine("burstengine-14b", 2 * _M, 64, none=(44.4, None)),
    Published("Ulysses, recomputed", "llama3-8b", _M, 8, "h100", _ULYSSES, 475.3),
    Published("burst, kept on host, FSDP", "llama3-8b", _M, 8, "h100", _ON_HOST, None),
    Published("burst, kept on host, Megatron", "llama3-8b", _M, 8, "h100", _MEGATRON, None),
)


def predicted(row: Published) -> Candidate:
    """The planner's prediction for it.

    Raises:
        BurstError: if its sizes do not fit.
    """
    job = Job(PRESETS[row.model], row.seq, row.gpus, 8, 1, preset(row.hardware))
    return candidate(job, row.strategy)


def line(row: Published) -> str:
    """One row of the table."""
    found = predicted(row)
    gb, time = found.memory.peak / 1e9, found.time
    tokens = f"| {time.tokens} |"
    if row.tokens:
        error = time.tokens_per_gpu / row.tokens - 1
        tokens = f"{row.tokens:.4g} | {time.tokens} | {error:+.1%}"
    memory = f"{row.gb:.1f} | {gb:.1f} | {gb / row.gb - 1:+.0%}" if row.gb else f"| {gb:.1f} |"
    where = f"{row.gpus} x {row.hardware}"
    return (
        f"| {row.who} | {row.model} | {in_units(row.seq)} | {where} | {tokens} | "
        f"{time.mfu:.1%} | {memory} |"
    )


def main(
    auto: Annotated[
        bool, typer.Option("--auto", help="rings as burst's `auto` would run them instead")
    ] = False,
) -> None:
    """Print the table."""
    typer.echo(
        "| | model | seq | GPUs | tok/s/GPU published | predicted | | MFU predicted | "
        "GB published | predicted | |\n" + "| --- " * 11 + "|"
    )
    for row in PUBLISHED:
        strategy = replace(row.strategy, intra="auto") if auto else row.strategy
        typer.echo(line(replace(row, strategy=strategy)))


if __name__ == "__main__":
    typer.run(main)
