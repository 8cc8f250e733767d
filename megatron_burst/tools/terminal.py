"""What commands share: options, refusals in one sentence, and progress."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.status import Status as RichStatus
from rich.text import Text
from typer import Option

from megatron_burst.errors import BurstError
from megatron_burst.files import harmless

Nodes = Annotated[int | None, Option(min=1, metavar="N", help="treat this machine as N nodes")]
Device = Annotated[Literal["cuda", "cpu"] | None, Option(help="default: cuda if there are GPUs")]
_WIDTH = 160  # where no terminal says


def new_console() -> Console:
    """As wide as the terminal, or as tables need where there is none."""
    return Console(width=None if _is_known() else _WIDTH)


def _is_known() -> bool:
    """Whether the width of the terminal is."""
    return sys.stdout.isatty() or "COLUMNS" in os.environ


def say(console: Console, text: str, head: str = "", style: str = "") -> None:
    """A text in lines of the terminal's width; in a pipe whole."""
    line = Text(head, style=style) + Text(harmless(text), style="default")
    console.print(line, soft_wrap=not _is_known(), highlight=False)


def check_writable(who: str, option: str, path: Path) -> None:
    """Refuse an option's file that cannot be written, before anything is computed.

    Raises:
        BurstError: if its folder is missing, it is a folder, or the system will not write it.
    """
    if not path.parent.is_dir():
        raise _unwritable(who, option, path, "its folder is not there")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise _unwritable(who, option, path, "a folder" if path.is_dir() else "write-protected")


@contextmanager
def writing(who: str, option: str, path: Path) -> Iterator[None]:
    """Refuse a file that the system will not write, in one sentence."""
    try:
        yield
    except OSError as error:
        raise _unwritable(who, option, path, error.strerror or str(error)) from None


def _unwritable(who: str, option: str, path: Path, reason: str) -> BurstError:
    return BurstError(
        f"{who}: {option} must name a writable file, because results are written there; got "
        f"{path}: {reason}; choose another path"
    )


@contextmanager
def in_one_sentence(on_all_ranks: bool = False) -> Iterator[None]:
    """A refusal ends the command with its sentence, printed by one rank or all, and exit code 2."""
    try:
        yield
    except BurstError as error:
        if on_all_ranks or os.environ.get("RANK", "0") == "0":
            typer.echo(f"error: {harmless(str(error))}", err=True)
        raise typer.Exit(2) from None


@contextmanager
def without_warnings() -> Iterator[None]:
    """Keep warnings, of Python and of logging, out of a report; errors are shown."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@dataclass(slots=True)
class Progress:
    """Progress on standard error: the present activity on a terminal, elsewhere lines, if any."""

    talks: bool = False  # whether lines are printed
    status: RichStatus | None = field(default=None, repr=False)  # of a terminal

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if self.status:
            self.status.console.print(text, markup=False, highlight=False)
        elif self.talks:
            typer.echo(text, err=True)

    def now(self, text: str) -> None:
        """Show the current activity."""
        if self.status:
            self.status.update(Text(text))

    def end(self) -> None:
        """Clear the current activity: the result follows."""
        if self.status:
            self.status.stop()
            self.status, self.talks = None, True


@contextmanager
def shown(rank: int, activity: str = "starting") -> Iterator[Progress]:
    """The progress of a command, shown by the first rank. On a terminal nothing else may be printed
    before its end: Rich would send it to standard error."""
    console = Console(stderr=True)
    if rank or not console.is_terminal:
        yield Progress(talks=rank == 0)
        return
    with console.status(Text(activity)) as status:
        yield Progress(True, status)
