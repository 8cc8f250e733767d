"""How a command refuses."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from megatron_burst.errors import BurstError


@contextmanager
def in_one_sentence() -> Iterator[None]:
    """A refusal ends the command with its sentence, said by one rank, and code 1."""
    try:
        yield
    except BurstError as error:
        if os.environ.get("RANK", "0") == "0":
            typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
