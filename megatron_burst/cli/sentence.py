"""How a command refuses."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

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


def check_writable(who: str, option: str, path: Path) -> None:
    """Refuse a file that could not be written, before anything is computed.

    Args:
        who: refuses.
        option: that named the file.
        path: of the file; it may be there.

    Raises:
        BurstError: if its folder is missing, it is a folder, or the system will not write it.
    """
    if not path.parent.is_dir() or path.is_dir():
        raise BurstError(
            f"{who}: {option} must name a file in a folder that is there, because results go "
            f"there; got {path}; make the folder, or choose another path"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise unwritable(who, option, path, "it is write-protected")


def unwritable(who: str, option: str, path: Path, reason: str) -> BurstError:
    """That the system does not write a file."""
    return BurstError(
        f"{who}: {option} must name a file that can be written, because results go there; got "
        f"{path}: {reason}; choose another path"
    )


@contextmanager
def in_one_sentence() -> Iterator[None]:
    """A refusal ends the command with its sentence, said by one rank, and code 2."""
    try:
        yield
    except BurstError as error:
        if os.environ.get("RANK", "0") == "0":
            typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
