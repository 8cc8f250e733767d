"""What the planner found, as tables on the terminal."""

from collections.abc import Sequence
from itertools import zip_longest

from rich.console import Console
from rich.table import Table

from megatron_burst.recompute.later_plan import choose_later
from megatron_burst.resolve import how_it_runs, resolve
from megatron_burst.schedule.grid import grid
from megatron_burst.schedule.spec import Direction
from megatron_burst.schedule.topology import Link
from megatron_burst.tools.hardware import GIB
from megatron_burst.tools.job.candidate import ROOMY, Candidate, loses
from megatron_burst.tools.job.memory import Memory
from megatron_burst.tools.job.peer import gain
from megatron_burst.tools.job.strategy import Job, Strategy, attention_call, open_call
from megatron_burst.tools.plan_flags import Shown, show_flags
from megatron_burst.tools.plan_kept import show_kept
from megatron_burst.tools.simulate.call import pass_time, sent_bytes
from megatron_burst.tools.terminal import new_console, say
from megatron_burst.tools.units import in_units

_TOP, _LAYOUTS = 8, 10  # strategies that are shown: the best, and of those that lose


def show(shown: Shown) -> None:
    """Print the best, the others, and what the best consists of."""
    console = new_console()
    job, found, best = shown.job, shown.found, shown.found[0]
    say(
        console,
        f"{job.model.name}: {job.model.params / 1e9:.2f} B weights, {in_units(job.seq)} tokens, "
        f"{job.batch} sequence{'s' * (job.batch > 1)} per step"
        f"{' (default)' * shown.usual_batch}, {job.gpus} GPUs, {job.on_node} "
        f"per node, {job.hardware.name}",
    )
    if read := shown.script.in_words:
        say(console, f"read from the script: {read}")
    if job.packing and job.packing.sample:
        again = f"; {shown.repeated}" if shown.repeated else ""
        say(console, f"packed documents have {job.share:.1%} of a causal sequence's pairs{again}")
    for note in shown.warnings:
        say(console, note, "warning: ", "yellow")
    if shown.others and len(found) > 1:
        _show_candidates(console, found)
    else:
        say(console, _why_best(found))
    if shown.no_room:
        say(console, shown.no_room, "does not fit: ", "red")
    _show_best(console, job, best)
    if shown.with_keep:
        say(console, shown.with_keep)
    show_flags(console, shown)


def _show_candidates(console: Console, found: Sequence[Candidate]) -> None:
    best, fitting = found[0], [one for one in found if one.fits]
    title = f"{len(found)} strategies, {len(fitting)} fit in memory; the best {_TOP}"
    console.print(_candidates(fitting[:_TOP] or found[:_TOP], best, title))
    firsts = {one.strategy.layout: one for one in reversed(found)}
    told = {one.strategy.layout for one in fitting[:_TOP]}
    losing = [one for one in found if firsts[one.strategy.layout] is one]
    if losing := [one for one in losing if one.strategy.layout not in told][:_LAYOUTS]:
        console.print(_candidates(losing, best, "other layouts, each with its best policy"))


def _why_best(found: Sequence[Candidate]) -> str:
    """How the best was chosen, in a line."""
    best, fitting = found[0], [one for one in found if one.fits]
    if len(found) == 1:
        return "the only strategy with the given options"
    if not fitting:
        return f"none of {len(found)} strategies fits; the closest: {best.strategy.layout}"
    roomy = [one for one in fitting if not one.is_tight]
    room = f"need at most {ROOMY:.0%} of the memory" if roomy else "fit in memory"
    count = len(roomy or fitting)
    why = f"chosen: the fastest of {len(found)} strategies, of which {count} {room}"
    others = [one for one in fitting if one.strategy.layout != best.strategy.layout]
    if others:
        why += f"; {others[0].strategy.layout} would be {loses(others[0], best)}"
    return f"{why}; --search shows them"


def _candidates(some: Sequence[Candidate], best: Candidate, title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("layout", "policy", "tok/s/GPU", "MFU", "step s", "GiB", "why not"):
        words = name in ("layout", "policy", "why not")
        table.add_column(name, justify="left" if words else "right", no_wrap=not words)
    for one in some:
        time = one.time
        speed = (time.tokens, f"{time.mfu:.1%}", _digits(time.seconds, 4)) if time else ("", "", "")
        gib = f"{one.memory.peak / GIB:.1f}"
        why = "" if one is best and one.fits else loses(one, best)
        table.add_row(one.strategy.layout, one.strategy.policy, *speed, gib, why)
    return table


def _show_best(console: Console, job: Job, best: Candidate) -> None:
    if time := best.time:
        every = time.tokens_per_gpu * job.gpus
        alike = ", if micro-batches are full and alike" if job.packing else ""
        say(
            console,
            f"a step takes {_digits(time.seconds, 4)} s{alike}: {time.tokens} tokens/s per GPU, "
            f"{every:,.0f} in all, MFU {time.mfu:.1%}",
        )
    say(console, f"{best.strategy.layout}, {best.strategy.policy}")
    parts = {("a GPU's memory", "GiB"): _memory_rows(job, best.memory)}
    if best.time:
        times = [(name, _digits(seconds, 3)) for name, seconds in best.time.parts if seconds > 0]
        times.append(("together", _digits(best.time.seconds, 4)))
        parts = {("a step's time", "s"): times} | parts
    table = Table()
    for name, unit in parts:
        table.add_column(name)
        table.add_column(unit, justify="right", no_wrap=True)
    for pairs in zip_longest(*parts.values(), fillvalue=("", "")):
        table.add_row(*(cell for pair in pairs for cell in pair))
    console.print(table)
    if best.strategy.keep == "auto":
        show_kept(console, job, best.strategy)
    if best.strategy.cp > 1 and job.model.full_layers:
        for line in _attention_lines(job, best.strategy):
            say(console, line)
        if best.time:
            say(console, _gain_line(job, best, best.time.seconds))
        if best.strategy.keep == "half":
            say(console, f"keep half: {choose_later(attention_call(job, best.strategy))}")


_MEMORY = {  # parts of `Memory` in the order of the table
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "saved": "saved activations",
    "kept": "kept for recomputation",
    "layer": "a layer in backward",
    "head": "LM head and loss",
}


def _memory_rows(job: Job, memory: Memory) -> list[tuple[str, str]]:
    """Parts that add up to the peak, the peak, and what is there at other moments only."""
    gib = memory.in_gib()
    earlier = "layer" if memory.layer < memory.head else "head"
    there = [name for name in _MEMORY if name != earlier]
    rows = [(_MEMORY[name], f"{gib[name]:.2f}") for name in there if gib[name]]
    usable = job.hardware.gpu.usable_bytes / GIB
    rows.append((f"peak, {gib['peak'] / usable:.0%} of {usable:.1f} usable", f"{gib['peak']:.2f}"))
    rows.append((f"not then: {_MEMORY[earlier]}", f"{gib[earlier]:.2f}"))
    rows.append(("not then: receive buffers", f"{gib['attention']:.2f}"))
    if gib["node"]:
        rows.append(("pinned memory of a node", f"{gib['node']:.1f}"))
    return rows


def _which(job: Job) -> str:
    """Which layers the lines about attention are about, if not all."""
    if job.model.windows:
        return " without a window"
    return " with softmax attention" if job.model.linear else ""


def _attention_lines(job: Job, strategy: Strategy) -> list[str]:
    which = f"a layer{_which(job)}"
    call = attention_call(job, strategy)
    lines = [f"attention of {which}: {how_it_runs(call)}"]
    if call.intra == "ring" or call.arranged.inter_size > 1:
        lines[0] += f"; backward circulates {resolve(open_call(job, strategy)).why['circulate']}"
    lines.append("its first context-parallel group, by global rank:")
    lines.append(grid(call.topology, range(0, strategy.cp * strategy.tp, strategy.tp)))
    sample = job.packing and job.packing.sharded(call.topology.cp_size)
    for direction in Direction:
        timeline = pass_time(call, job.hardware, direction, sample)
        sent = sent_bytes(call, direction)
        links = ", ".join(
            f"{name} {num_bytes / GIB:.3g} GiB sent, "
            f"{_digits(1e3 * timeline.exposed(link), 3)} ms waited"
            for link, name in ((Link.INTRA, "NVLink"), (Link.INTER, "network"))
            if (num_bytes := sent[link])
        )
        lines.append(f"  {direction}: {_digits(1e3 * timeline.seconds, 4)} ms; {links}")
    return lines


def _gain_line(job: Job, best: Candidate, step: float) -> str:
    """What burst, and what is kept, gains over Megatron's own context parallelism."""
    found, keep = gain(job, best.strategy), best.strategy.keep
    (ours, theirs), (least, most) = found.seconds, [x / GIB for x in found.num_bytes]
    layers = f" of layers{_which(job)}" if _which(job) else ""
    kept = beside = ""
    if keep != "none":
        too = " (Megatron's own attention can have that too)" if keep in ("all", "auto") else ""
        kept = (
            f"; with --burst-keep {keep}{too} {_digits(found.kept, 3)} s "
            f"({theirs / found.kept:.2f} times as fast as theirs without)"
        )
        beside = ", with what is kept,"
    return (
        "predicted gain over Megatron's own ring (--cp-comm-type p2p, nothing kept): "
        f"attention{layers} with its waits, recomputed alike, takes {_digits(ours, 3)} s of a step "
        f"in place of {_digits(theirs, 3)} ({found.ratio:.2f} times as fast){kept}; "
        f"{least:.2f} GiB beside its inputs and outputs{beside} in place of {most:.2f}; the step "
        f"takes {_digits(step, 4)} s in place of {_digits(found.step, 4)}"
    )


def _digits(number: float, count: int) -> str:
    """So many digits, never as a power of ten."""
    return f"{number:.{count}g}" if number < 10**count else f"{number:.0f}"
