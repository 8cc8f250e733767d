"""The Typer app: one sub-app or command a line."""

import typer

from megatron_burst.cli import bench, machine
from megatron_burst.cli.plan import plan

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(bench.app, name="bench")
app.command()(plan)
app.command()(machine.calibrate)
app.command()(machine.doctor)


@app.callback()
def main() -> None:
    """BurstAttention as the context parallelism of Megatron-LM."""
