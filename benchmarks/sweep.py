"""Shared by the run loops: options, the output file, the time budget, the loop."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, Literal

from typer import Option, Typer

from benchmarks.rows import ATTENTION_CSV, Sheet, append, check_appendable
from megatron_burst.tools.world import World, timed_ms

Out = Annotated[Path, Option(help="CSV to append to")]
Dtype = Annotated[
    Literal["bfloat16", "float16", "float32", "float64"] | None,
    Option(help="default: bfloat16 on GPUs, float32 on CPU"),
]
Budget = Annotated[float | None, Option(min=0, help="start nothing new after so many s")]


def new_app() -> Typer:
    """A command line, like that of `megatron-burst`."""
    names = {"help_option_names": ["-h", "--help"]}
    return Typer(add_completion=False, pretty_exceptions_enable=False, context_settings=names)


def usual_dtype(world: World) -> str:
    """The default dtype."""
    return "bfloat16" if world.device.type == "cuda" else "float32"


def check_out(path: Path | None, world: World, sheet: Sheet = ATTENTION_CSV) -> None:
    """Refuse a file that cannot be appended to, on all ranks, before time is spent."""
    if path:
        world.refuse_together(lambda: check_appendable(path, sheet))


def save(
    path: Path | None, world: World, rows: Sequence[Any], sheet: Sheet = ATTENTION_CSV
) -> None:
    """Add rows to the file, if there is one."""
    if path and world.rank == 0:
        append(path, rows, sheet)


def clock(budget_s: float | None) -> Callable[[], bool]:
    """Returns a function: have this many seconds passed since now? None: never."""
    return partial(_is_over, budget_s, monotonic())


def _is_over(budget_s: float | None, started: float) -> bool:
    return budget_s is not None and monotonic() - started > budget_s


def sweep(
    problems: Sequence[Any],
    rows_of: Callable[[Any], list],
    world: World,
    out_of_time: Callable[[], bool],
    say: Callable[[str], None] | None = None,
) -> list:
    """The rows of one problem after another, until time is up; on every rank.

    Args:
        problems: in order.
        rows_of: measures one.
        world: all ranks.
        out_of_time: asked on rank 0 before each.
        say: takes lines of what is under way, on rank 0; None: shows the world's progress.
    """
    say = (say or world.progress.say) if world.rank == 0 else lambda text: None
    rows = []
    for number, problem in enumerate(problems):
        if world.decide(out_of_time()):
            say(f"time is up: {len(problems) - number} problems were not started")
            break
        say(f"{number + 1} of {len(problems)}: {problem}")
        rows += rows_of(problem)
    world.progress.end()
    return rows


def interleave(
    runs: Mapping[str, Callable[[], object]],
    reps: Mapping[str, int],
    world: World,
    out_of_time: Callable[[], bool],
    before: Callable[[str], object] | None = None,
) -> dict[str, list[float]]:
    """Milliseconds of the slowest rank for each repetition of each run.

    Runs take turns, so that clocks and heat are shared; every other turn is in reverse order, so
    that none always follows the same one.

    Args:
        runs: what is timed, by name.
        reps: repetitions of each.
        world: all ranks.
        out_of_time: asked on rank 0 after each turn; stops the repetitions.
        before: called with the name before each repetition, untimed.
    """
    mine: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(max((reps[name] for name in runs), default=0)):
        if turn and world.decide(out_of_time()):
            break
        for name in list(runs)[:: -1 if turn % 2 else 1]:
            if turn < reps[name]:
                world.progress.now(f"{name}: repetition {turn + 1} of {reps[name]}")
                if before:
                    before(name)
                mine[name].append(timed_ms(runs[name], world))
    everyone = world.gather(mine)
    return {
        name: [max(times) for times in zip(*(theirs[name] for theirs in everyone), strict=True)]
        for name in runs
    }
