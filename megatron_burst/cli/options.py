"""Options that several commands have."""

from typing import Annotated, Literal

from typer import Option

Hosts = Annotated[int | None, Option(min=1, help="pretend that this machine is N hosts")]
Device = Annotated[Literal["cuda", "cpu"] | None, Option(help="default: GPUs if any")]
