"""Shows what was measured, as Markdown and pictures beside the first CSV.

python -m benchmarks.show table benchmarks/results/attention_4xh200_one_node.csv
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from benchmarks import curves_table, limits, loss_table, recompute_table
from benchmarks.cells import markdown
from benchmarks.rows import ATTENTION_CSV, PACKED_CSV, RECOMPUTE_CSV, Sheet, is_packed, read
from benchmarks.steps_table import Lines, frontier_lines, overview_lines, slice_lines
from benchmarks.sweep import new_app
from benchmarks.tables import library_table, markdown_table
from megatron_burst.errors import BurstError
from megatron_burst.tools.terminal import in_one_sentence

app = new_app()
ROOT = Path(__file__).parents[1]
_TABLE = re.compile(  # a line that names a kind of table and its rows, and the table below it
    r"(?P<mark>^<!-- benchmarks\.show (?P<kind>\w+) (?P<words>[^>]+) -->\n)"
    r"\n*(?:^\|.*\n)*\n*(?:^Rows: .*\n)?\n*",
    re.MULTILINE,
)
Csvs = Annotated[list[Path], Argument(help="CSV files of one kind")]


@app.command()
def table(
    csvs: Csvs,
    pass_: Annotated[Literal["fwd", "fwd_bwd"], Option("--pass", help="which pass")] = "fwd_bwd",
) -> None:
    """Attention, packed documents and windows too: burst beside TransformerEngine's best mode and
    the kernel alone."""
    with in_one_sentence():
        typer.echo(markdown_table(_attention(csvs), pass_))


@app.command()
def libraries(csvs: Csvs) -> None:
    """Attention and packed documents: burst beside torch's context parallelism, DeepSpeed's
    Ulysses, yunchang and TransformerEngine, as far as they were measured."""
    with in_one_sentence():
        typer.echo(library_table(_attention(csvs)))


@app.command()
def docs(files: Annotated[list[Path], Argument(help="Markdown files, such as README.md")]) -> None:
    """Make tables of documents again, below lines such as <!-- benchmarks.show table A.csv -->."""
    with in_one_sentence():
        for path in files:
            path.write_text(refreshed(path.read_text(encoding="utf-8")), encoding="utf-8")


def refreshed(text: str) -> str:
    """A document with the tables that it names as they are today.

    Raises:
        BurstError: if a CSV is missing, or there is no such kind of table.
    """

    def made(found: re.Match) -> str:
        if (make := _TABLES.get(found["kind"])) is None:
            raise BurstError(
                f"benchmarks.show: a mark must name one of {', '.join(_TABLES)}, because these are "
                f"the tables that it makes; got {found['mark']}; correct it"
            )
        return f"{found['mark']}\n{make(found['words'].split())}\n\n"

    return _TABLE.sub(made, text)


def _of_attention(table_of: Callable[[Sequence[Any]], str], csvs: Sequence[str]) -> str:
    lines = table_of(_attention([ROOT / csv for csv in csvs])).splitlines()
    table = "\n".join(line for line in lines if line.startswith("|"))
    return f"{table}\n\n{lines[-1]}"


def _of_steps(lines_of: Callable[[Path, Sequence[str]], Lines], words: Sequence[str]) -> str:
    return markdown(lines_of(ROOT / words[0], words[1:]))


def _of_heads(table_of: Callable[[Sequence[Any], str], str], words: Sequence[str]) -> str:
    return table_of(read([ROOT / words[0]], loss_table.LOSS_CSV), words[1])


_TABLES: dict[str, Callable[[Sequence[str]], str]] = {
    "table": partial(_of_attention, partial(markdown_table, pass_="fwd_bwd")),
    "libraries": partial(_of_attention, library_table),
    "frontier": partial(_of_steps, frontier_lines),
    "overview": partial(_of_steps, overview_lines),
    "slices": partial(_of_steps, slice_lines),
    "recompute": lambda words: recompute_table.modes_by_length(
        read([ROOT / csv for csv in words], RECOMPUTE_CSV)
    ),
    "loss": partial(_of_heads, loss_table.heads_by_tokens),
    "loss_rows": partial(_of_heads, loss_table.every_run),
    "limits": lambda words: markdown(limits.TABLES[words[0]]()),
}


def _attention(csvs: Sequence[Path]) -> list[Any]:
    """Rows of files of either kind."""
    return [
        row for csv in csvs for row in read([csv], PACKED_CSV if is_packed(csv) else ATTENTION_CSV)
    ]


@app.command()
def plot(csvs: Csvs) -> None:
    """Attention, packed documents and windows too: TFLOP/s and memory over the length, drawn."""
    with in_one_sentence():
        rows = _attention(csvs)
        try:
            from benchmarks.plots import draw
        except ModuleNotFoundError as error:
            raise _no_matplotlib("plot", error) from None
        _echo(draw(rows, csvs[0].with_suffix("")))


@app.command()
def gains(
    picture: Annotated[Path, Argument(help="what is written, such as docs/gains.png")], csvs: Csvs
) -> None:
    """Attention, packed documents and windows too: time and memory beside TransformerEngine's."""
    with in_one_sentence():
        rows = _attention(csvs)
        try:
            from benchmarks.gains import draw_gains
        except ModuleNotFoundError as error:
            raise _no_matplotlib("gains", error) from None
        draw_gains(rows, picture)
        typer.echo(picture)


@app.command()
def recompute(csvs: Csvs) -> None:
    """Recomputation: time and memory of each mode."""
    _show(csvs, RECOMPUTE_CSV, recompute_table.trade_table, recompute_table.draw_if_possible)


@app.command()
def loss(csvs: Csvs) -> None:
    """The LM head and loss, compared with peers."""
    _show(csvs, loss_table.LOSS_CSV, loss_table.loss_table, loss_table.draw_if_possible)


@app.command()
def curves(csvs: Csvs) -> None:
    """Loss curves: how far apart runs are at the end."""
    _show(csvs, curves_table.CURVES_CSV, curves_table.curves_table, curves_table.draw_if_possible)


def _show(csvs: list[Path], sheet: Sheet, table, draw) -> None:
    with in_one_sentence():
        rows = read(csvs, sheet)
        typer.echo(table(rows))
        _echo(draw(rows, csvs[0].with_suffix("")))


def _no_matplotlib(command: str, error: ModuleNotFoundError) -> BurstError:
    return BurstError(
        f"benchmarks.show {command}: Matplotlib must be installed, because it draws the "
        f"pictures; got {error}; pip install matplotlib"
    )


def _echo(files: list[Path]) -> None:
    for path in files:
        typer.echo(path)


if __name__ == "__main__":
    app()
