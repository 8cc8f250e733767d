"""The Typer app: one sub-app or command a line."""

from typing import Annotated

import typer

from megatron_burst.cli import machine
from megatron_burst.cli.plan import plan
from megatron_burst.version import __version__

_HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, context_settings=_HELP)
app.command()(machine.bench)
app.command()(plan)
app.command()(machine.calibrate)
app.command()(machine.doctor)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"megatron-burst {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", help="show it and exit", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """BurstAttention as the context parallelism of Megatron-LM."""
