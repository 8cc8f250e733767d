"""Measures what recomputation costs in time and saves in memory: the run loop and its picture."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median

from megatron_burst.cli.facts import gpu_state, versions
from megatron_burst.cli.links import link_speed
from megatron_burst.cli.modes import Mode
from megatron_burst.cli.results import Row
from megatron_burst.cli.sweep import check_out, clock, save, sweep
from megatron_burst.cli.timing import Memory, attempt, clean_up, interleave
from megatron_burst.cli.world import World
from megatron_burst.config import BurstConfig
from megatron_burst.mcore.stack import Stack, Widths, start


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run measures.

    Attributes:
        problems: sizes, in order.
        modes: what each is measured with.
        options: burst's other options.
        reps: repetitions.
        budget_s: seconds after which nothing new is started; None: no end.
        out: CSV that rank 0 appends to; None: nowhere.
    """

    problems: Sequence[Widths]
    modes: Sequence[Mode]
    options: BurstConfig = BurstConfig()
    reps: int = 5
    budget_s: float | None = None
    out: Path | None = None


def measure(plan: Plan, world: World, say: Callable[[str], None] = print) -> list[Row]:
    """Run a plan on all ranks together; returns the rows, on every rank.

    Args:
        plan: the same on all ranks.
        world: all ranks; they are one context-parallel group.
        say: tells rank 0's user how far it is.

    Raises:
        BurstError: if `plan.out` has other columns.
    """
    check_out(plan.out, world)
    start(world.device.type == "cpu", world.size)
    out_of_time, link = clock(plan.budget_s), link_speed(world)

    def rows_of(widths: Widths) -> list[Row]:
        made = _Problem(widths, plan, world, link, out_of_time).rows()
        save(plan.out, world, made)
        return made

    return sweep(plan.problems, rows_of, world, out_of_time, say)


class _Problem:
    """All modes on one problem; those of one attention share its weights."""

    def __init__(
        self, widths: Widths, plan: Plan, world: World, link: str, out_of_time: Callable[[], bool]
    ) -> None:
        self.widths, self.plan, self.world, self.link = widths, plan, world, link
        self.out_of_time = out_of_time
        self.stacks: dict[str, Stack] = {}
        self.failures: dict[str, str] = {}
        self.peaks: dict[str, float | None] = {}

    def rows(self) -> list[Row]:
        """Measure, and let everything go."""
        made = []
        for impl in dict.fromkeys(mode.impl for mode in self.plan.modes):
            modes = [mode for mode in self.plan.modes if mode.impl == impl]
            made += self._of(impl, modes)
            self.stacks.clear()
            clean_up(self.world)
        return made

    def _of(self, impl: str, modes: Sequence[Mode]) -> list[Row]:
        failure = attempt(partial(self._build, impl), self.world)
        for mode in modes:
            failure_of_it = failure or self._try_out(mode)
            if failure_of_it:
                self.failures[str(mode)] = failure_of_it
        able = {str(mode): mode for mode in modes if str(mode) not in self.failures}
        runs = {name: partial(self._run, mode) for name, mode in able.items()}
        reps = dict.fromkeys(runs, self.plan.reps)
        times = interleave(runs, reps, self.world, self.out_of_time)
        gpu = gpu_state(self.world.device)
        return [self._row(mode, times.get(str(mode)), gpu) for mode in modes]

    def _build(self, impl: str) -> None:
        self.stacks[impl] = Stack(self.widths, burst=impl == "burst")

    def _try_out(self, mode: Mode) -> str | None:
        """Run it twice: the first pass makes what lasts, the second's memory counts."""
        failure = attempt(partial(self._run, mode), self.world)
        clean_up(self.world)
        memory = Memory(self.world)
        memory.restart()
        failure = failure or attempt(partial(self._run, mode), self.world)
        self.peaks[str(mode)] = None if failure else memory.peak_gib(0)
        clean_up(self.world)
        return failure

    def _run(self, mode: Mode) -> None:
        stack = self.stacks[mode.impl]
        mode.apply(stack, self.widths, self.plan.options)
        stack.run()

    def _row(self, mode: Mode, ms: list[float] | None, gpu: str) -> Row:
        widths, world = self.widths, self.world
        measured = {"status": "failed", "note": self.failures.get(str(mode), "time was up")}
        if ms:
            middle = median(ms)
            measured = {
                "ms": middle,
                "ms_min": min(ms),
                "ms_max": max(ms),
                "tflops_per_gpu": widths.flops / world.size / middle / 1e9,
                "peak_gib": self.peaks[str(mode)],
                "note": f"{widths.layers} layers, hidden {widths.hidden}, ffn {widths.ffn}; "
                f"model FLOPs; {len(ms)} repetitions",
            }
        return Row(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=versions(), gpu=gpu, hosts=world.hosts, ranks=world.size, link=self.link,
            seq=widths.seq, batch=widths.batch, heads_q=widths.heads_q, heads_kv=widths.heads_kv,
            head_dim_qk=widths.head_dim, head_dim_v=widths.head_dim, mask="causal",
            dtype=widths.dtype, impl=mode.impl, mode=mode.name, pass_="fwd_bwd", **measured,
        )  # fmt: skip
