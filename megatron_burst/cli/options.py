"""Options that several commands have."""

from pathlib import Path
from typing import Annotated, Literal

from typer import Option

Out = Annotated[Path, Option(help="CSV to append to")]
Dtype = Annotated[
    Literal["bfloat16", "float16", "float32", "float64"] | None,
    Option(help="default: bfloat16 on GPUs, float32 on CPU"),
]
Budget = Annotated[float | None, Option(min=0, help="start nothing new after so many s")]
Hosts = Annotated[int | None, Option(min=1, help="pretend that this machine is N hosts")]
Device = Annotated[Literal["cuda", "cpu"] | None, Option(help="default: GPUs if any")]
