"""How far a run is, on standard error: a bar on a terminal, a line for each problem elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import typer
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars


@dataclass(slots=True)
class Progress:
    """What a user sees of a run; nothing, where nobody looks.

    Attributes:
        talks: whether lines are printed.
        bars: of a terminal.
        number, total: problem that is under way, counted from 0, and how many there are.
    """

    talks: bool = False
    bars: Bars | None = field(default=None, repr=False)
    number: int = 0
    total: int = 1

    def say(self, text: str) -> None:
        """A line that stays."""
        if self.bars:
            self.bars.console.print(text, markup=False, highlight=False)
        elif self.talks:
            typer.echo(text, err=True)

    def begin(self, number: int, total: int) -> None:
        """A problem, counted from 0."""
        self.number, self.total = number, total

    def now(self, text: str, fraction: float = 0.0) -> None:
        """What is done at the moment, and how much of the problem is behind."""
        for task in self.bars.task_ids if self.bars else ():
            done = (self.number + fraction) / self.total
            self.bars.update(task, description=text, completed=done)

    def end(self) -> None:
        """Take the bar away: what follows is the result."""
        if self.bars:
            self.bars.stop()
            self.bars, self.talks = None, True


@contextmanager
def shown(rank: int) -> Iterator[Progress]:
    """The progress of a command; of several ranks the first one's is shown.

    Args:
        rank: of this process.
    """
    console = Console(stderr=True)
    if rank or not console.is_terminal:
        yield Progress(talks=rank == 0)
        return
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn()
    with Bars(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:
        bars.add_task("starting", total=1)
        yield Progress(True, bars)
