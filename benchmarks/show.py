"""Shows what was measured, as Markdown and pictures beside the first CSV.

python -m benchmarks.show table benchmarks/results/attention_4xh200_one_node.csv
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from benchmarks import limits, loss_curves, loss_table, losses, sheets, steps_table
from benchmarks.compared import library_table, markdown_table
from benchmarks.facts import now
from benchmarks.rows import append, is_packed, read
from benchmarks.runner import App, Csvs
from benchmarks.tables import Ratio, markdown
from megatron_burst.errors import BurstError, require

app = App()
ROOT = Path(__file__).parents[1]
EXPECTED = Path(__file__).parent / "smoke_expected.csv"
_STEPS = {  # settings of burst's, and Megatron's that they are compared with
    "burst:off": "megatron:off", "burst:keep": "megatron:full", "burst:auto-12": "megatron:off",
}  # fmt: skip
_TABLE = re.compile(  # a line that names a kind of table and its rows, and the table below it
    r"(?P<mark>^<!-- benchmarks\.show (?P<kind>\w+) (?P<words>[^>]+) -->\n)"
    r"\n*(?:^\|.*\n)*\n*(?:^Rows: .*\n)?\n*",
    re.MULTILINE,
)


@app.command()
def table(
    csvs: Csvs,
    pass_: Annotated[Literal["fwd", "fwd_bwd"], Option("--pass", help="which pass")] = "fwd_bwd",
) -> None:
    """Attention, packed samples too: burst beside TransformerEngine's best mode and the kernel."""
    typer.echo(markdown_table(_attention(csvs), pass_))


@app.command()
def libraries(csvs: Csvs) -> None:
    """Attention and packed documents: burst beside other libraries and TransformerEngine."""
    typer.echo(library_table(_attention(csvs)))


@app.command()
def docs(files: Annotated[list[Path], Argument(help="Markdown files, such as README.md")]) -> None:
    """Make tables of documents again, below lines such as <!-- benchmarks.show table A.csv -->."""
    for path in files:
        path.write_text(refreshed(path.read_text(encoding="utf-8")), encoding="utf-8")


def refreshed(text: str) -> str:
    """A document with the tables that it names as they are today."""

    def made(found: re.Match) -> str:
        make = _TABLES.get(found["kind"])
        require("benchmarks.show", [(
            make, f"a mark must name one of {', '.join(_TABLES)}, because these are the tables "
            "that it makes", found["mark"], "correct it",
        )])  # fmt: skip
        return f"{found['mark']}\n{make(found['words'].split())}\n\n"

    return _TABLE.sub(made, text)


def _attention(csvs: Sequence[Path]) -> list[Any]:
    """Rows of files of either kind."""
    return [
        row
        for csv in csvs
        for row in read([csv], sheets.PACKED_CSV if is_packed(csv) else sheets.ATTENTION_CSV)
    ]


def _of_attention(table_of: Callable[[Sequence[Any]], str], csvs: Sequence[str]) -> str:
    lines = table_of(_attention([ROOT / csv for csv in csvs])).splitlines()
    table = "\n".join(line for line in lines if line.startswith("|"))
    return f"{table}\n\n{lines[-1]}"


def _of_steps(lines_of: Callable[..., steps_table.Lines], words: Sequence[str]) -> str:
    return markdown(lines_of(ROOT / words[0], words[1:]))


def _of_rows(
    sheet: sheets.Sheet, count: int, table_of: Callable[..., str], words: Sequence[str]
) -> str:
    """Of the rows of so many files, all if it is 0; what follows them are arguments."""
    count = count or len(words)
    return table_of(read([ROOT / csv for csv in words[:count]], sheet), *words[count:])


_TABLES: dict[str, Callable[[Sequence[str]], str]] = {
    "table": partial(_of_attention, partial(markdown_table, pass_="fwd_bwd")),
    "libraries": partial(_of_attention, library_table),
    "frontier": partial(_of_steps, steps_table.frontier_lines),
    "jobs": lambda words: markdown(steps_table.job_lines(words)),
    "rates": lambda words: markdown(steps_table.rate_lines(words)),
    "slices": partial(_of_steps, steps_table.slice_lines),
    "recompute": partial(_of_rows, sheets.RECOMPUTE_CSV, 0, steps_table.modes_by_length),
    "loss": partial(_of_rows, sheets.LOSS_CSV, 1, loss_table.heads_by_tokens),
    "limits": lambda words: markdown(limits.machine()),
    "losses": lambda words: losses.table(words[0]),
}


@app.command()
def plot(csvs: Csvs) -> None:
    """Attention, packed documents and windows too: TFLOP/s and memory over the length, drawn."""
    rows = _attention(csvs)
    _echo(_plots("plot").draw(rows, csvs[0].with_suffix("")))


@app.command()
def gains(
    picture: Annotated[Path, Argument(help="what is written, such as docs/gains.png")], csvs: Csvs
) -> None:
    """Attention, packed documents and windows too: time and memory beside TransformerEngine's."""
    rows = _attention(csvs)
    _plots("gains").draw_gains(rows, picture)
    _echo([picture])


@app.command()
def recompute(csvs: Csvs) -> None:
    """Recomputation: time and memory of each mode."""
    _show(csvs, sheets.RECOMPUTE_CSV, steps_table.trade_table, steps_table.draw_trade)


@app.command()
def loss(csvs: Csvs) -> None:
    """The LM head and loss, compared with peers."""
    _show(csvs, sheets.LOSS_CSV, loss_table.loss_table, loss_table.draw_loss)


@app.command()
def curves(csvs: Csvs) -> None:
    """Loss curves: how far apart runs are at the end."""
    _show(csvs, sheets.CURVES_CSV, loss_curves.curves_table, loss_curves.draw_curves)


def _show(csvs: list[Path], sheet: sheets.Sheet, table: Callable, draw: Callable) -> None:
    rows = read(csvs, sheet)
    typer.echo(table(rows))
    _echo(draw(rows, csvs[0].with_suffix("")))


def _plots(command: str) -> Any:
    """The module that needs Matplotlib; BurstError without."""
    try:
        from benchmarks import plots
    except ModuleNotFoundError as error:
        raise BurstError(
            f"benchmarks.show {command}: Matplotlib must be installed, because it draws the "
            f"pictures; got {error}; pip install matplotlib"
        ) from None
    return plots


def _echo(files: list[Path]) -> None:
    for path in files:
        typer.echo(path)


@app.command()
def smoke(
    out: Annotated[Path, Argument(help="folder of smoke.sh's CSVs")],
    keep: Annotated[bool, Option(help="make these the expected ratios")] = False,
) -> None:
    """The ratios that benchmarks/smoke.sh measured, beside the expected ones.

    A ratio is the speed of burst, or of one of its kernels, to that of a peer in the same run. What
    is expected was measured on its row's GPU; clocks and heat move ratios by about 2 %."""
    measured = ratios(out)
    rows = read([EXPECTED], sheets.SMOKE_CSV) if EXPECTED.exists() else ()
    known = {row.what: row for row in rows}
    print(f"{'ratio':>7} {'expected':>9}   what")
    for what, (ratio, *_) in measured.items():
        row = known.get(what)
        expected = f"{row.ratio:9.3f}" if row else f"{'-':>9}"
        is_far = row and abs(ratio / row.ratio - 1) > 0.03
        print(f"{ratio:7.3f} {expected} {'!' if is_far else ' '} {what}")
    if missing := [what for what in known if what not in measured]:
        print(f"not measured: {'; '.join(missing)}")
    if keep:
        date = now()
        rows = [
            sheets.SmokeRow(what=what, ratio=ratio, gpu=gpu, date=date, versions=versions)
            for what, (ratio, gpu, versions) in measured.items()
        ]
        append(EXPECTED, rows, sheets.SMOKE_CSV)


def ratios(folder: Path) -> dict[str, tuple[float, str, str]]:
    """(ratio, GPU, versions) by what was measured; of equal ones the last."""
    files = {folder / f"{name}.csv": ratios_in for name, ratios_in in _MEASURED.items()}
    tables = (ratios_in(path) for path, ratios_in in files.items() if path.exists())
    return {what: tuple(figures) for table in tables for what, *figures in table}


def _of_kernels(path: Path) -> Iterator[tuple]:
    for row in read([path], sheets.KERNELS_CSV):
        if row.ratio and row.what != "fa4":  # to which the others' ratios are
            mask = "causal" if row.causal else "full"
            case = f"{row.seq} tokens, {row.heads_q}/{row.heads_kv}, dim {row.dim}, {mask}"
            yield f"{row.what} / fa4, {row.direction}, {case}", row.ratio, row.gpu, row.torch


def _of_ranks(path: Path) -> Iterator[tuple]:
    for row in read([path], sheets.RANK_CSV):
        if row.what == "rank":
            case = f"{row.seq} tokens, {row.heads_q}/{row.heads_kv}"
            what = f"a rank of {row.ranks} / the kernel alone, {case}"
            yield what, row.ratio, row.gpu, row.versions


def _of_losses(path: Path) -> Iterator[tuple]:
    rows = [row for row in read([path], sheets.LOSS_CSV) if row.ms]
    peers = {row.tokens: row for row in rows if row.impl == "megatron:fused"}
    for row in rows:
        if row.impl.startswith("burst") and row.tokens in peers:
            what = f"loss, {row.impl} / megatron:fused, {row.tokens} tokens, {row.vocab} classes"
            yield what, Ratio.of(row, peers[row.tokens]).value, row.gpu, row.versions


def _of_smoke_steps(path: Path) -> Iterator[tuple]:
    rows = [row for row in read([path], sheets.FRONTIER_CSV) if row.ms]
    times = {(row.documents, f"{row.impl}:{row.setting}"): row.ms for row in rows}
    for row in rows:
        own = f"{row.impl}:{row.setting}"
        peer = _STEPS.get(own)
        if other := times.get((row.documents, peer)):
            sample = "packed documents" if row.documents else "one document"
            what = f"step of {row.model}, {row.seq} tokens, {sample}, {own} / {peer}"
            yield what, other / row.ms, row.gpu, row.versions


_MEASURED = {
    "kernels": _of_kernels, "rank": _of_ranks, "loss": _of_losses, "steps": _of_smoke_steps,
}  # fmt: skip


if __name__ == "__main__":
    app()
