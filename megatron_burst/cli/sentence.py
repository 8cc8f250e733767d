"""How a command refuses."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import typer

from megatron_burst.errors import BurstError


def pick[T](names: Sequence[str], known: Mapping[str, T], must: str) -> tuple[T, ...]:
    """What is known by a list of names; none named means all.

    Args:
        names: what was asked for.
        known: by name.
        must: who asks, what must hold and why.

    Raises:
        BurstError: if a name is not known.
    """
    unknown = [name for name in names if name not in known]
    if unknown:
        raise BurstError(f"{must}; got {unknown[0]!r}; choose among {', '.join(known)}")
    return tuple(known[name] for name in names or known)


@contextmanager
def in_one_sentence() -> Iterator[None]:
    """A refusal ends the command with its sentence, said by one rank, and code 1."""
    try:
        yield
    except BurstError as error:
        if os.environ.get("RANK", "0") == "0":
            typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
