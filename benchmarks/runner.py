"""How all benchmarks run: command lines, output files, time budgets, turns of what is compared.

A benchmark declares its problems, what measures one of them, and the kind of its rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter
from typing import Annotated, Any, Literal

import torch
from typer import Argument, Option, Typer

from benchmarks.rows import append, check_appendable
from benchmarks.sheets import ATTENTION_CSV, Sheet
from megatron_burst.tools.terminal import in_one_sentence
from megatron_burst.tools.world import World, timed_ms

Out = Annotated[Path, Option(help="CSV to append to")]
OutFile = Annotated[Path, Argument(metavar="OUT", help="CSV to append to")]
Csvs = Annotated[list[Path], Argument(help="CSV files of one kind")]
Files, Words = list[Path] | None, list[str] | None  # of options that may be repeated
Dtype = Annotated[
    Literal["bfloat16", "float16", "float32", "float64"] | None,
    Option(help="default: bfloat16 on GPUs, float32 on CPU"),
]
Budget = Annotated[float | None, Option(min=0, help="start nothing new after so many s")]
Reps = Annotated[int, Option(min=1, help="repetitions")]
Machine = Annotated[str, Option(help="preset or TOML of calibrate's")]


class App(Typer):
    """A command line like that of `megatron-burst`: a refusal ends it with one sentence."""

    def __init__(self) -> None:
        names = {"context_settings": {"help_option_names": ["-h", "--help"]}}
        super().__init__(add_completion=False, pretty_exceptions_enable=False, **names)

    def command(self, name: str | None = None, **options: Any) -> Callable[[Callable], Callable]:
        register = super().command(name, **options)
        return lambda run: register(in_one_sentence()(run))


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run measures."""

    cases: Sequence[Any]  # problems, in order
    impls: Sequence[Any] | Mapping[Any, Sequence[Any]]  # for all, or for each problem
    reps: int | None = None  # repetitions, in turns; None: as many as the benchmark has usually
    budget_s: float | None = None  # seconds after which nothing new is started; None: no end
    out: Path | None = None  # CSV that rank 0 appends to; None: nowhere
    kind: Any = None  # of the problems, where a benchmark has several

    def of(self, case: Any) -> Sequence[Any]:
        """What a problem is measured with."""
        return self.impls[case] if isinstance(self.impls, Mapping) else self.impls


def usual_dtype(world: World) -> str:
    """The default dtype."""
    return "bfloat16" if world.device.type == "cuda" else "float32"


def check_out(path: Path | None, world: World, sheet: Sheet = ATTENTION_CSV) -> None:
    """Refuse a file that cannot be appended to, on all ranks, before time is spent."""
    if path:
        world.refuse_together(lambda: check_appendable(path, sheet))


def save(path: Path | None, world: World, rows: Sequence, sheet: Sheet = ATTENTION_CSV) -> list:
    """Add rows to the file, if there is one; returns them."""
    if path and world.rank == 0:
        append(path, rows, sheet)
    return list(rows)


def clock(budget_s: float | None) -> Callable[[], bool]:
    """Returns a function: have this many seconds passed since now? None: never."""
    started = monotonic()
    return lambda: budget_s is not None and monotonic() - started > budget_s


def sweep(
    problems: Sequence[Any],
    rows_of: Callable[[Any], list],
    world: World,
    out_of_time: Callable[[], bool],
    say: Callable[[str], None] | None = None,
) -> list:
    """The rows of one problem after another, on every rank, until rank 0's time is up. On rank 0
    `say` takes lines of what is under way; None: shows the world's progress."""
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
    reps: Mapping[str, int] | int,
    world: World,
    out_of_time: Callable[[], bool] = lambda: False,
    before: Callable[[str], object] | None = None,
) -> dict[str, list[float]]:
    """Milliseconds of the slowest rank for each repetition of each run, on all ranks together.

    Runs take turns, so that clocks and heat are shared; every other turn is in reverse order, so
    that none always follows the same one. `out_of_time` is asked on rank 0 after each turn, and
    stops; `before` is called with the name before each repetition, untimed."""
    counts = dict.fromkeys(runs, reps) if isinstance(reps, int) else reps
    own: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(max((counts[name] for name in runs), default=0)):
        if turn and world.decide(out_of_time()):
            break
        for name in in_turn(runs, turn):
            if turn < counts[name]:
                world.progress.now(f"{name}: repetition {turn + 1} of {counts[name]}")
                if before:
                    before(name)
                own[name].append(timed_ms(runs[name], world))
    of_ranks = world.gather(own)
    return {name: slowest(times[name] for times in of_ranks) for name in runs}


def in_turn[T](names: Mapping[T, Any] | Sequence[T], turn: int) -> list[T]:
    """Names in the order of a turn: every other one is in reverse."""
    return list(names)[:: -1 if turn % 2 else 1]


def slowest(of_ranks: Any) -> list[float]:
    """The largest of all ranks' figures, one by one."""
    return [max(each) for each in zip(*of_ranks, strict=True)]


def on_one(
    runs: Mapping[str, Callable[[], object]], turns: int, device: torch.device
) -> dict[str, list[float]]:
    """Milliseconds of runs on one device, in turns, after two that compile and warm up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + 2):
        for name in in_turn(runs, turn):
            times[name].append(device_ms(runs[name], device))
    return {name: some[2:] for name, some in times.items()}


def device_ms(run: Callable[[], object], device: torch.device, ahead: int = 20_000_000) -> float:
    """Milliseconds of one run; a GPU waits `ahead` cycles, until the CPU has queued it."""
    if device.type != "cuda":
        begin = perf_counter()
        run()
        return 1e3 * (perf_counter() - begin)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(ahead)
    first.record()
    run()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last)


def best_device() -> tuple[torch.device, torch.dtype]:
    """A GPU, if there is one, and the usual dtype."""
    if torch.cuda.is_available():
        return torch.device("cuda", 0), torch.bfloat16
    return torch.device("cpu"), torch.float32
