"""The planner's predictions for problems not yet measured, as a benchmark CSV.

python benchmarks/predict.py attention --ranks 8 --preset one-node --out attention_8xh200.csv
python benchmarks/predict.py packed --ranks 4 --seq 64K,1M --heads 64/8 --out packed_4xh200.csv
python benchmarks/predict.py recompute --ranks 8 --seq 1M --layers 1 --out recompute_8xh200.csv

Options are those of `benchmarks.attention`, `.packed` and `.recompute`. Commit the CSV, measure,
and compare:
python benchmarks/validate_plan.py MEASURED.csv --predictions PREDICTED.csv
"""

import sys
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Annotated, get_args

import typer
from typer import Option

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its own folder alone

from benchmarks.cases import Case, Grid, Pass, head_counts, one_head_count, problems
from benchmarks.documents import multiple_for
from benchmarks.facts import commit
from benchmarks.impls import impls_of
from benchmarks.layers import ATTENTION, Mode, modes_of
from benchmarks.packed import packed_impls
from benchmarks.packed_cases import PackedGrid
from benchmarks.planned import predict
from benchmarks.rows import PackedRow, Row, Sheet, append, check_appendable
from benchmarks.sweep import Out
from megatron_burst.tools.hardware_file import hardware as hardware_of
from megatron_burst.tools.terminal import in_one_sentence
from megatron_burst.tools.units import whole_numbers

_WHO = "predict.py"
PREDICTED_CSV, PREDICTED_PACKED_CSV = Sheet(_WHO), Sheet(_WHO, PackedRow)
_IMPLS = "burst:auto", "burst:auto@zigzag", "te:p2p", "ceiling"  # of packed samples
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Ranks = Annotated[int, Option(min=1)]
Machine = Annotated[str, Option(help="preset or TOML of calibrate's")]
Link = Annotated[
    str, Option(help="'ring 4.5, all-to-all 6.5 GB/s between 2 nodes of one machine', if known")
]


def _write(rows: list[Row], hardware: str, out: Path, sheet: Sheet = PREDICTED_CSV) -> None:
    """Fill in predictions, and append the rows that have one."""
    machine, said = hardware_of(hardware), f"planner at commit {commit()}"
    check_appendable(out, sheet)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    done = []
    for row in rows:
        if found := predict(row, machine):  # None: of others the planner knows nothing
            gpu = f"predicted for {machine.name}"
            row = replace(row, date=now, versions=said, gpu=gpu, ms=found.ms, peak_gib=found.gib)
            done.append(row)
    append(out, done, sheet)
    typer.echo(f"{len(done)} predictions, {said}, were appended to {out}")


def _lengths(text: str) -> tuple[int, ...]:
    return whole_numbers(text, "--seq", _WHO)


def _row(**columns: object) -> Row:
    return Row(date="", versions="", gpu="", **columns)


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
    with in_one_sentence():
        grid = Grid(_lengths(seq) if seq else (), head_counts(heads, _WHO) if heads else ())
        cases, usual = problems(preset, grid)
        every = product(cases, impls_of(tuple(impl or usual)), get_args(Pass))
        rows = [
            _row(
                nodes=nodes, ranks=ranks, link=link, **asdict(case), impl=one.name, mode=one.mode,
                pass_=pass_,
            )
            for case, one, pass_ in every
        ]  # fmt: skip
        _write(rows, hardware, out)


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
    with in_one_sentence():
        kinds = tuple(documents.split(","))
        cases = PackedGrid(_lengths(seq), head_counts(heads, _WHO), kinds).cases()
        cases = [replace(case, multiple=multiple_for(ranks)) for case in cases]
        impls = packed_impls(tuple(impl or _IMPLS))
        rows = [
            PackedRow(
                date="", versions="", gpu="", nodes=nodes, ranks=ranks, link=link,
                **case.columns(), impl=one.name, mode=one.mode, pass_=pass_,
            )
            for case, one, pass_ in product(cases, impls, get_args(Pass))
        ]  # fmt: skip
        _write(rows, hardware, out, PREDICTED_PACKED_CSV)


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
    with in_one_sentence():
        heads_q, heads_kv = one_head_count(heads, _WHO)
        note = f"{layers} layers, hidden {hidden}, ffn {ffn}"
        modes = modes_of(mode or ())
        alone = [Mode(impl, ATTENTION) for impl in dict.fromkeys(one.impl for one in modes)]
        every = product(_lengths(seq), [*modes, *alone])
        rows = [
            _row(
                nodes=nodes, ranks=ranks, link=link, **asdict(Case(tokens, 1, heads_q, heads_kv)),
                impl=one.impl, mode=one.name, note=note,
                pass_="fwd" if one.name == ATTENTION else "fwd_bwd",
            )
            for tokens, one in every
        ]  # fmt: skip
        _write(rows, hardware, out)


if __name__ == "__main__":
    app()
