"""The planner's predictions for problems not yet measured, as a benchmark CSV.

python -m benchmarks.predict attention --ranks 8 --preset one-node --out attention_8xh200.csv
python -m benchmarks.predict packed --ranks 4 --seq 64K,1M --heads 64/8 --out packed_4xh200.csv
python -m benchmarks.predict recompute --ranks 8 --seq 1M --layers 1 --out recompute_8xh200.csv
python -m benchmarks.predict published [--auto]     others' set-ups, as they ran, or as burst would

Options are those of `benchmarks.attention`, `.packed` and `.recompute`. Commit the CSV, measure,
and compare: python -m benchmarks.validate_plan MEASURED.csv --predictions PREDICTED.csv
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args

import typer
from typer import Option

from benchmarks.cases import Case, Grid, Pass, head_counts, numbers, one_head_count, problems
from benchmarks.documents import multiple_for
from benchmarks.facts import planner_stamp
from benchmarks.impls import Impl, impls_of
from benchmarks.layers import ATTENTION, Mode, modes_of
from benchmarks.packed import packed_impls
from benchmarks.packed_cases import grid_of
from benchmarks.planned import predict
from benchmarks.rows import append, check_appendable
from benchmarks.runner import App, Machine, Out
from benchmarks.sheets import PREDICTED_CSV, PREDICTED_PACKED_CSV, Sheet
from benchmarks.tables import markdown
from megatron_burst.tools.hardware_file import hardware as hardware_of
from megatron_burst.tools.hardware_file import preset
from megatron_burst.tools.job.candidate import Candidate, candidate
from megatron_burst.tools.job.hugging_face import PRESETS
from megatron_burst.tools.job.strategy import Job, Strategy
from megatron_burst.tools.units import in_units, whole_numbers

_WHO, _M = "predict.py", 1 << 20
_IMPLS = "burst:auto", "burst:auto@zigzag", "te:p2p", "ceiling"  # of packed samples
app = App()
Ranks = Annotated[int, Option(min=1)]
_LINK = "'ring 4.5, all-to-all 6.5 GB/s between 2 nodes of one machine', if known"
Link = Annotated[str, Option(help=_LINK)]


def _write(
    out: Path, hardware: str, problems: Iterable[dict[str, Any]], sheet: Sheet = PREDICTED_CSV,
    **same: Any,
) -> None:  # fmt: skip
    """Append rows with the predictions of the problems that have one."""
    machine = hardware_of(hardware)
    check_appendable(out, sheet)
    stamp = planner_stamp(machine.name)
    unmade = {"date": "", "versions": "", "gpu": ""} | same
    rows = (sheet.kind(**unmade, **columns) for columns in problems)
    made = ((row, predict(row, machine)) for row in rows)  # None: of others it knows nothing
    done = [replace(row, **stamp, ms=one.ms, peak_gib=one.gib) for row, one in made if one]
    append(out, done, sheet)
    typer.echo(f"{len(done)} predictions, {stamp['versions']}, were appended to {out}")


def _columns(cases: Iterable[Case], impls: Iterable[Impl]) -> Iterator[dict[str, Any]]:
    """Of both passes of each case with each implementation."""
    for case, one, pass_ in product(cases, impls, get_args(Pass)):
        yield case.columns() | {"impl": one.name, "mode": one.mode, "pass_": pass_}


@app.command()
def attention(
    out: Out,
    ranks: Ranks,
    nodes: int = 1,
    seq: str = "",
    heads: str = "",
    preset: str = "",
    impl: list[str] | None = None,
    hardware: Machine = "h200",
    link: Link = "",
) -> None:
    """Problems of `benchmarks.attention`, forward and both passes."""
    cases, usual = problems(preset, Grid(numbers(seq, "--seq", _WHO), head_counts(heads, _WHO)))
    columns = _columns(cases, impls_of(tuple(impl or usual)))
    _write(out, hardware, columns, nodes=nodes, ranks=ranks, link=link)


@app.command()
def packed(
    out: Out,
    ranks: Ranks,
    nodes: int = 1,
    seq: str = "128K",
    heads: str = "64/8",
    documents: str = "drawn",
    impl: Annotated[list[str] | None, Option(help="burst:..., te:p2p or ceiling")] = None,
    hardware: Machine = "h200",
    link: Link = "",
) -> None:
    """Documents of `benchmarks.packed`, forward and both passes."""
    cases = grid_of(seq, heads, documents, "").cases()
    cases = [replace(case, multiple=multiple_for(ranks)) for case in cases]
    columns = _columns(cases, packed_impls(tuple(impl or _IMPLS)))
    _write(out, hardware, columns, PREDICTED_PACKED_CSV, nodes=nodes, ranks=ranks, link=link)


@app.command()
def recompute(
    out: Out,
    ranks: Ranks,
    nodes: int = 1,
    seq: str = "64K",
    layers: int = 4,
    heads: str = "32/8",
    hidden: int = 4096,
    ffn: int = 14336,
    mode: list[str] | None = None,
    hardware: Machine = "h200",
    link: Link = "",
) -> None:
    """Problems of `benchmarks.recompute`, and attention's forward alone."""
    counts, note = one_head_count(heads, _WHO), f"{layers} layers, hidden {hidden}, ffn {ffn}"
    modes = modes_of(mode or ())
    alone = [Mode(impl, ATTENTION) for impl in dict.fromkeys(one.impl for one in modes)]
    columns = (
        Case(tokens, 1, *counts).columns() | {"impl": one.impl, "mode": one.name}
        | {"pass_": "fwd" if one.name == ATTENTION else "fwd_bwd"}
        for tokens, one in product(whole_numbers(seq, "--seq", _WHO), [*modes, *alone])
    )  # fmt: skip
    _write(out, hardware, columns, nodes=nodes, ranks=ranks, link=link, note=note)


class Published(NamedTuple):
    """Of GPUs, 8 a node, with a strategy like theirs; `tokens` a second and GPU, 1e9 bytes."""

    who: str
    model: str
    seq: int
    gpus: int
    hardware: str
    strategy: Strategy
    tokens: float | None
    gb: float | None = None


def _burst_engine(model: str, seq: int, gpus: int, *figures: tuple[float, float | None]):
    """With attention's results kept, half of them, and none."""
    for keep, (tokens, gb) in zip(("all", "half", "none"), figures, strict=True):
        strategy = Strategy(cp=gpus, keep=keep, fsdp="torch", intra="ring")
        who, name = f"BurstEngine, {keep}", f"burstengine-{model}"
        yield Published(who, name, seq, gpus, "a800", strategy, tokens, gb)


_ULYSSES = Strategy(cp=8, offload_inputs=True, fsdp="torch")
_ON_HOST = Strategy(cp=8, keep="all", offload=True, offload_inputs=True, fsdp="torch")
_MEGATRON = Strategy(tp=2, cp=4, keep="all", offload=True, offload_inputs=True)
PUBLISHED = (
    *_burst_engine("7b", 2 * _M, 32, (100.1, 55.4), (92.41, 49.6), (79.54, None)),
    *_burst_engine("14b", _M, 32, (118.36, 54.0), (108.82, 45.9), (94.81, 41.45)),
    *_burst_engine("7b", 4 * _M, 64, (50.28, 56.3), (46.5, 48.8), (35.8, None)),
    *_burst_engine("14b", 2 * _M, 64, (60.49, 51.0), (55.67, 43.2), (44.4, None)),
    Published("Ulysses, recomputed", "llama3-8b", _M, 8, "h100", _ULYSSES, 475.3),
    Published("burst, kept on host, FSDP", "llama3-8b", _M, 8, "h100", _ON_HOST, None),
    Published("burst, kept on host, Megatron", "llama3-8b", _M, 8, "h100", _MEGATRON, None),
)


def predicted(row: Published) -> Candidate:
    """The planner's prediction for it; BurstError if its sizes do not fit."""
    job = Job(PRESETS[row.model], row.seq, row.gpus, 8, 1, preset(row.hardware))
    return candidate(job, row.strategy)


def _line(row: Published) -> tuple[str, ...]:
    plan = predicted(row)
    gb, time = plan.memory.peak / 1e9, plan.time
    tokens = ("", f"{time.tokens}", "")
    if row.tokens:
        error = time.tokens_per_gpu / row.tokens - 1
        tokens = f"{row.tokens:.4g}", f"{time.tokens}", f"{error:+.1%}"
    memory = ("", f"{gb:.1f}", "")
    if row.gb:
        memory = f"{row.gb:.1f}", f"{gb:.1f}", f"{gb / row.gb - 1:+.0%}"
    where = f"{row.gpus} x {row.hardware}"
    return row.who, row.model, in_units(row.seq), where, *tokens, f"{time.mfu:.1%}", *memory


@app.command()
def published(
    auto: Annotated[bool, Option("--auto", help="rings as burst's `auto` would run them")] = False,
) -> None:
    """Published measurements against predictions for the same set-ups, as they ran, in Markdown.

    BurstEngine (arXiv 2509.19836, plot_code/burst_attn/burst_exp.xlsx of its repository): A800-80G,
    8 a node, one sequence, ZeRO-3, nested rings, layers recomputed; whole: attention's output kept,
    half: that of the later half, none. Ulysses: untied_ulysses (H100-80G, 8 a node, FSDP, layers
    recomputed, inputs offloaded, FlashAttention-3)."""
    intra = {"intra": "auto"} if auto else {}
    rows = [row._replace(strategy=replace(row.strategy, **intra)) for row in PUBLISHED]
    head = ("", "model", "seq", "GPUs", "tok/s/GPU published", "predicted", "", "MFU predicted",
            "GB published", "predicted", "")  # fmt: skip
    typer.echo(markdown([head, *map(_line, rows)]).replace("|  |", "| |"))


if __name__ == "__main__":
    app()
