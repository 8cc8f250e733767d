"""Shows what was measured, as Markdown and pictures beside the first CSV.

python -m benchmarks.show table benchmarks/results/attention_4xh200_one_node.csv
"""

from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from benchmarks import loss_table, recompute_table
from benchmarks.rows import ATTENTION_CSV, PACKED_CSV, RECOMPUTE_CSV, Sheet, read
from benchmarks.sweep import new_app
from benchmarks.tables import markdown_table
from megatron_burst.cli.terminal import in_one_sentence
from megatron_burst.errors import BurstError

app = new_app()
Csvs = Annotated[list[Path], Argument(help="CSV files of one kind")]


@app.command()
def table(
    csvs: Csvs,
    pass_: Annotated[Literal["fwd", "fwd_bwd"], Option("--pass", help="which pass")] = "fwd_bwd",
) -> None:
    """Attention: burst beside TransformerEngine's best mode and the ceiling."""
    with in_one_sentence():
        rows = read(csvs, ATTENTION_CSV)
        typer.echo(markdown_table(rows, pass_))


@app.command()
def packed(
    csvs: Csvs,
    pass_: Annotated[Literal["fwd", "fwd_bwd"], Option("--pass", help="which pass")] = "fwd_bwd",
) -> None:
    """Packed documents and windows: burst beside TransformerEngine's best mode and the ceiling."""
    with in_one_sentence():
        typer.echo(markdown_table(read(csvs, PACKED_CSV), pass_))


@app.command()
def plot(csvs: Csvs) -> None:
    """Attention: TFLOP/s and memory over the sequence length, drawn."""
    with in_one_sentence():
        rows = read(csvs, ATTENTION_CSV)
        try:
            from benchmarks.plots import draw
        except ModuleNotFoundError as error:
            raise BurstError(
                "benchmarks.show plot: Matplotlib must be installed, because it draws the "
                f"pictures; got {error}; pip install matplotlib"
            ) from None
        _echo(draw(rows, csvs[0].with_suffix("")))


@app.command()
def recompute(csvs: Csvs) -> None:
    """Recomputation: time and memory of each mode."""
    _show(csvs, RECOMPUTE_CSV, recompute_table.trade_table, recompute_table.draw_if_possible)


@app.command()
def loss(csvs: Csvs) -> None:
    """The LM head and loss, beside its peers."""
    _show(csvs, loss_table.LOSS_CSV, loss_table.loss_table, loss_table.draw_if_possible)


def _show(csvs: list[Path], sheet: Sheet, table, draw) -> None:
    with in_one_sentence():
        rows = read(csvs, sheet)
        typer.echo(table(rows))
        _echo(draw(rows, csvs[0].with_suffix("")))


def _echo(files: list[Path]) -> None:
    for path in files:
        typer.echo(path)


if __name__ == "__main__":
    app()
