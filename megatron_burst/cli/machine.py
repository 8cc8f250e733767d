"""`megatron-burst calibrate` and `doctor`: options in, calls out. Heavy imports wait for a run."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Option

from megatron_burst.cli.sentence import in_one_sentence

Device = Annotated[Literal["cuda", "cpu"] | None, Option(help="default: GPUs if any")]


def calibrate(
    out: Annotated[Path, Option(help="TOML to write")] = Path("calibration.toml"),
    name: Annotated[str | None, Option(help="of the machine; default: its GPU's")] = None,
    budget_s: Annotated[float, Option(help="start nothing new after so many s")] = 150.0,
    hosts: Annotated[int | None, Option(help="pretend that this machine is N hosts")] = None,
    device: Device = None,
) -> None:
    """Measure this machine's kernels and links; alone or under torchrun, on all hosts together."""
    from megatron_burst.cli.calibrate import calibrate as measure
    from megatron_burst.cli.world import started
    from megatron_burst.plan.calibration import to_toml, write_calibration

    with in_one_sentence(), started(device, hosts) as world:
        found = measure(world, name, budget_s, lambda text: typer.echo(text, err=True))
        if world.rank == 0:
            write_calibration(found, out)
            typer.echo(to_toml(found), nl=False)
            typer.echo(f"written to {out}", err=True)
