"""The Typer app; heavy imports wait until a command runs."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from megatron_burst.tools.doctor import doctor
from megatron_burst.tools.plan import plan
from megatron_burst.tools.plan_options import presets_by_family
from megatron_burst.tools.terminal import Device, Nodes, check_writable, in_one_sentence, writing
from megatron_burst.version import __version__

_CALIBRATION = Path("calibration.toml")
_HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, context_settings=_HELP,
    rich_markup_mode="rich",
)  # fmt: skip
app.command(epilog=presets_by_family())(plan)
app.command()(doctor)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"megatron-burst {__version__}")
        raise typer.Exit


_VERSION = Option(
    "--version", help="show the version and exit", callback=_show_version, is_eager=True
)


@app.callback()
def main(version: Annotated[bool, _VERSION] = False) -> None:
    """BurstAttention: context parallelism for Megatron-LM."""


@app.command()
def calibrate(
    out: Annotated[Path, Option(metavar="FILE", help="TOML file to write")] = _CALIBRATION,
    name: Annotated[
        str | None, Option(metavar="NAME", help="name of the machine; default: its GPU's name")
    ] = None,
    budget_s: Annotated[
        float, Option(min=0, metavar="S", help="seconds after which no new measurement starts")
    ] = 150.0,
    nodes: Nodes = None,
    device: Device = None,
) -> None:
    """Measure the kernels and links of this machine.

    Run it alone, or under torchrun on all nodes together. `plan --hardware` reads its file.
    """
    from megatron_burst.tools.calibrate import calibrate as measure
    from megatron_burst.tools.hardware_file import to_toml
    from megatron_burst.tools.world import started

    with in_one_sentence(), started("calibrate", device, nodes) as world:
        world.refuse_together(lambda: check_writable("calibrate", "--out", out))
        figures = to_toml(measure(world, name, budget_s, world.progress.say))
        if world.rank == 0:
            with writing("calibrate", "--out", out):
                out.write_text(figures, encoding="utf-8")
            typer.echo(figures, nl=False)
            typer.echo(f"written to {out}", err=True)
