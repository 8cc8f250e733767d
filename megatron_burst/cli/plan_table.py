"""What the planner found, as tables on the terminal."""

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from megatron_burst.plan.attention import AttentionCall
from megatron_burst.plan.attention_time import attention_time
from megatron_burst.plan.choose import choose_circulate
from megatron_burst.plan.choose_half import Rates, choose_half
from megatron_burst.plan.cost import a2a_bytes, gather_bytes, link_bytes
from megatron_burst.plan.flags import megatron_flags
from megatron_burst.plan.flat import flat_cost
from megatron_burst.plan.gather import GatherSchedule
from megatron_burst.plan.hardware import GIB
from megatron_burst.plan.memory import Memory
from megatron_burst.plan.schedule import Direction, Schedule
from megatron_burst.plan.search import Candidate, loses
from megatron_burst.plan.step import half_call
from megatron_burst.plan.strategy import Job, attention_call
from megatron_burst.plan.topology import Link, Topology
from megatron_burst.plan.units import in_units

_LAYOUTS = 10  # of those that lose


def show(job: Job, found: Sequence[Candidate], top: int) -> None:
    """Print the best, the others, and what the best consists of.

    Args:
        job: the job.
        found: candidates, the best first.
        top: how many to show; 0: the best alone, with a line on how it was chosen.
    """
    console = Console(soft_wrap=False)
    console.print(
        f"{job.model.name}: {job.model.params / 1e9:.2f} B weights, {in_units(job.seq)} tokens, "
        f"{job.batch} sequences a step, {job.gpus} GPUs, {job.gpus_per_host} a host, "
        f"{job.hardware.name}",
        highlight=False,
    )
    best = found[0]
    fitting = [one for one in found if one.fits]
    if note := idle_hosts(job):
        console.print(f"[yellow]warning[/yellow]: {note}", highlight=False)
    if not top:
        console.print(_why_best(found), highlight=False)
    elif len(found) > 1:
        title = f"{len(found)} strategies, {len(fitting)} fit in memory; the best {top}"
        console.print(_candidates(fitting[:top] or found[:top], best, title))
        losing = _other_layouts(found, {one.strategy.layout for one in fitting[:top]})
        if losing:
            console.print(_candidates(losing, best, "other layouts, each with its best policy"))
    if not best.fits:
        console.print(f"[red]does not fit[/red]: {loses(best, best)}")
    _show_best(console, job, best)


def _why_best(found: Sequence[Candidate]) -> str:
    """How the best was chosen, in a line."""
    best, fitting = found[0], [one for one in found if one.fits]
    if len(found) == 1:
        return "the only strategy with what is given"
    if not fitting:
        return f"none of {len(found)} strategies fits; the nearest: {best.strategy.layout}"
    why = f"chosen: the fastest of {len(found)} strategies, of which {len(fitting)} fit in memory"
    others = [one for one in fitting if one.strategy.layout != best.strategy.layout]
    if others:
        why += f"; {others[0].strategy.layout} would be {loses(others[0], best)}"
    return f"{why}; --search shows them"


def idle_hosts(job: Job) -> str:
    """What it costs that the GPUs are no multiple of a host's; "" where they are."""
    most = job.hardware.host.gpus
    if job.on_host == job.gpus or most <= job.on_host or job.gpus % most == 0:
        return ""
    hosts, last = job.gpus // job.on_host, job.gpus % most
    uneven = Topology((tuple(range(most + last)),), (0,) * most + (1,) * last)
    return (
        f"{job.gpus} GPUs are no multiple of a host's {most}: planned as {hosts} hosts with "
        f"{job.on_host} each, {most - job.on_host} idle on each; start {job.on_host} ranks on each "
        f"host. A group of ranks over hosts of {most} and {last} would be a flat ring: "
        f"{flat_cost(uneven)}"
    )


def _candidates(some: Sequence[Candidate], best: Candidate, title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name, justify in (
        ("layout", "left"), ("policy", "left"), ("tok/s/GPU", "right"), ("MFU", "right"),
        ("step s", "right"), ("GiB", "right"), ("why not", "left"),
    ):  # fmt: skip
        table.add_column(name, justify=justify)
    for one in some:
        time = one.time
        speed = (time.tokens, f"{time.mfu:.1%}", _digits(time.seconds, 4)) if time else ("", "", "")
        gib = f"{one.memory.peak / GIB:.1f}"
        why = "" if one is best and one.fits else loses(one, best)
        table.add_row(one.strategy.layout, one.strategy.policy, *speed, gib, why)
    return table


def _other_layouts(found: Sequence[Candidate], shown: set[str]) -> list[Candidate]:
    """The best candidate of each layout that is not shown yet."""
    first: dict[str, Candidate] = {}
    for one in found:
        first.setdefault(one.strategy.layout, one)
    others = [one for layout, one in first.items() if layout not in shown]
    return others[:_LAYOUTS]


def _show_best(console: Console, job: Job, best: Candidate) -> None:
    table = Table(title=f"{best.strategy.layout}, {best.strategy.policy}", title_justify="left")
    for name in (*(("a step's time", "s") if best.time else ()), "a GPU's memory", "GiB"):
        table.add_column(name, justify="right" if name in ("s", "GiB") else "left")
    times = [(n, _digits(s, 3)) for n, s in best.time.parts if s > 0] if best.time else []
    if best.time:
        times.append(("together", _digits(best.time.seconds, 4)))
    memory = _memory_rows(job, best.memory)
    for index in range(max(len(times), len(memory))):
        left = times[index : index + 1] or [("", "")] * bool(times)
        cells = [*left, *memory[index : index + 1]]
        table.add_row(*(cell for pair in cells for cell in pair))
    console.print(table)
    if best.strategy.cp > 1:
        for line in _attention_lines(job, attention_call(job, best.strategy)):
            console.print(line, highlight=False)
        if best.strategy.keep == "half":
            console.print(_half_line(job, best), highlight=False)
    note = "beside the model's own" if best.fits else "of what does not fit"
    console.print(f"\n[bold]Megatron flags[/bold] ({note}):")
    flags = megatron_flags(job, best.strategy, best.memory.host)
    console.print(" \\\n    ".join(flags), highlight=False)


def _half_line(job: Job, best: Candidate) -> str:
    """What keeping half comes to, and what it takes for a run to do so."""
    call = half_call(job, best.strategy)
    how = choose_half(call)
    same = how.value == choose_half(replace(call, rates=Rates())).value
    return f"keep half: {how}" + ("" if same else "; a run does so with --burst-hardware")


def _memory_rows(job: Job, memory: Memory) -> list[tuple[str, str]]:
    parts = memory.in_gib()
    apart = ("attention", "host", "peak")
    rows = [(name, f"{gib:.2f}") for name, gib in parts.items() if name not in apart]
    gpu = job.hardware.gpu
    free = f"of {gpu.memory_gib - gpu.reserved_gib:.1f} usable"
    rows.append((f"peak, {free}", f"{parts['peak']:.2f}"))
    rows.append(("attention's buffers (not added)", f"{parts['attention']:.2f}"))
    if parts["host"]:
        rows.append(("pinned memory of a host", f"{parts['host']:.1f}"))
    return rows


def _attention_lines(job: Job, call: AttentionCall) -> list[str]:
    lines = [f"attention of a layer: {call.in_words}"]
    if call.mode == "ring" or call.arranged.inter_size > 1:
        lines[0] += f"; backward circulates {choose_circulate(call.priced, call.circulate)}"
    for direction in Direction:
        timeline = attention_time(call, job.hardware, direction)
        sent = _sent(call, direction)
        links = ", ".join(
            f"{name} {num_bytes / GIB:.3g} GiB sent, "
            f"{_digits(1e3 * timeline.exposed(link), 3)} ms waited"
            for link, name in ((Link.INTRA, "NVLink"), (Link.INTER, "network"))
            if (num_bytes := sent.get(link, 0))
        )
        lines.append(f"  {direction}: {_digits(1e3 * timeline.seconds, 4)} ms; {links}")
    return lines


def _digits(number: float, count: int) -> str:
    """So many digits, never as a power of ten."""
    return f"{number:.{count}g}" if number < 10**count else f"{number:.0f}"


def _sent(call: AttentionCall, direction: Direction) -> dict[Link, float]:
    schedule = call.schedule(0, direction)
    if isinstance(schedule, Schedule):
        return link_bytes(schedule, call.priced)
    if isinstance(schedule, GatherSchedule):
        share = call.shape.itemsize if direction is Direction.BACKWARD else 0
        return gather_bytes(schedule, call.priced, share)
    return a2a_bytes(schedule, call.priced, call.again)
