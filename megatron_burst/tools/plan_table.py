"""What the planner found, as tables on the terminal."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from rich.console import Console
from rich.table import Table

from megatron_burst.comm.grid import grid
from megatron_burst.recompute.later_plan import choose_later
from megatron_burst.resolve import resolve
from megatron_burst.schedule.modes import describe_mode
from megatron_burst.schedule.spec import Direction
from megatron_burst.schedule.topology import Link
from megatron_burst.tools.hardware import GIB
from megatron_burst.tools.job.candidate import ROOMY, Candidate, loses
from megatron_burst.tools.job.memory import NAMES, Memory
from megatron_burst.tools.job.peer import gain
from megatron_burst.tools.job.strategy import Job, Strategy, attention_call, open_call
from megatron_burst.tools.plan_flags import Shown, show_flags
from megatron_burst.tools.plan_kept import show_kept
from megatron_burst.tools.simulate.call import pass_time, sent_bytes
from megatron_burst.tools.terminal import new_console, say
from megatron_burst.tools.units import digits, in_units

_TOP, _LAYOUTS = 8, 10  # strategies that are shown: the best, and of those that lose
_RUNS = {
    "gather": "each rank copies the others' keys and values, a few KV heads at a time",
    "ring": "keys and values travel from rank to rank",
    "a2a": "ranks exchange rows of all heads for all rows of some heads, and back",
}
_LINKS = {Link.INTRA: "NVLink", Link.INTER: "the network"}


def show(shown: Shown) -> None:
    """Print the best, the others, and what the best consists of."""
    console = new_console()
    job, found, best = shown.job, shown.found, shown.found[0]
    say(
        console,
        f"{job.model.name}: {job.model.params / 1e9:.2f} B weights; {job.batch} "
        f"sequence{'s' * (job.batch > 1)} of {in_units(job.seq)} tokens a step"
        f"{' (the default)' * shown.usual_batch}; {job.gpus} GPUs ({job.hardware.name}), "
        f"{job.on_node} a node",
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
        return (
            f"none of {len(found)} strategies fits in memory; shown is the one that lacks least: "
            f"{best.strategy.layout}"
        )
    roomy = [one for one in fitting if not one.is_tight]
    room = f"need at most {ROOMY:.0%} of a GPU's memory" if roomy else "fit in memory"
    why = f"chosen: of {len(found)} strategies, {len(roomy or fitting)} {room}; the fastest of them"
    others = [one for one in fitting if one.strategy.layout != best.strategy.layout]
    if others:
        why += f". The next layout, {others[0].strategy.layout}, is {loses(others[0], best)}"
    return f"{why}. --search shows others"


def _candidates(some: Sequence[Candidate], best: Candidate, title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("layout", "policy", "tok/s/GPU", "MFU", "step s", "GiB", "why not"):
        words = name in ("layout", "policy", "why not")
        table.add_column(name, justify="left" if words else "right", no_wrap=not words)
    for one in some:
        time = one.time
        speed = (time.tokens, f"{time.mfu:.1%}", digits(time.seconds, 4)) if time else ("", "", "")
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
            f"a step takes {digits(time.seconds, 4)} s{alike}: {time.tokens} tokens/s per GPU, "
            f"{every:,.0f} on all; {time.mfu:.1%} of the peak FLOP/s (MFU)",
        )
    say(console, f"{best.strategy.layout}, {best.strategy.policy}")
    if meant := _meant(best.strategy):
        say(console, meant)
    parts = {("a GPU's memory", "GiB"): _memory_rows(job, best.memory)}
    if best.time:
        times = [(name, digits(seconds, 3)) for name, seconds in best.time.parts if seconds > 0]
        times.append(("together", digits(best.time.seconds, 4)))
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
            for line in _gain_lines(job, best, best.time.seconds):
                say(console, line)
        if best.strategy.keep == "half":
            say(console, f"keep half: {choose_later(attention_call(job, best.strategy))}")


def _meant(strategy: Strategy) -> str:
    """What a policy's short words say, in a sentence; "" of one without recomputation."""
    if strategy.recompute == "selective":
        return "backward computes the feed-forward of each layer again"
    if strategy.recompute != "full":
        return ""
    some = strategy.again_layers is not None
    where = " in host memory" if strategy.offload else ""
    but = {
        "none": "", "all": f", but not attention, whose results are kept{where}",
        "half": f", but not attention of the sequence's later half, whose results are kept{where}",
        "auto": ", but not what the table of --burst-keep auto below says",
    }[strategy.keep]  # fmt: skip
    inputs = "; layers' inputs wait in host memory" if strategy.offload_inputs else ""
    layers = f"the first {strategy.again_layers} layers of a stage" if some else "every layer"
    return f"backward computes {layers} again{but}{inputs}"


def _memory_rows(job: Job, memory: Memory) -> list[tuple[str, str]]:
    """Parts that add up to the peak, the peak, and what is there at other moments only."""
    gib = memory.in_gib()
    earlier = "layer" if memory.layer < memory.head else "head"
    there = [name for name in NAMES if name != earlier]
    rows = [(NAMES[name], f"{gib[name]:.2f}") for name in there if gib[name]]
    usable = job.hardware.gpu.usable_bytes / GIB
    rows.append((f"peak ({gib['peak'] / usable:.0%} of {usable:.1f} usable)", f"{gib['peak']:.2f}"))
    rows.append((f"not at the peak: {NAMES[earlier]}", f"{gib[earlier]:.2f}"))
    rows.append(("not at the peak: attention's buffers", f"{gib['attention']:.2f}"))
    if gib["node"]:
        rows.append(("pinned host memory of a node", f"{gib['node']:.1f}"))
    return rows


def _which(job: Job) -> str:
    """Which layers the lines about attention are about, if not all."""
    if job.model.windows:
        return " without a window"
    return " with softmax attention" if job.model.linear else ""


def _attention_lines(job: Job, strategy: Strategy) -> Iterator[str]:
    """How one layer's attention runs, on which ranks, and how long it takes."""
    call = attention_call(job, strategy)
    assert call.intra
    runs = f"attention of a layer{_which(job)} runs as {describe_mode(call)}: {_RUNS[call.intra]}"
    if call.a2a_backward_heads:
        runs += f"; in backward {_RUNS['a2a']}"
    if call.intra == "ring" or call.mode_topology.inter_size > 1:
        runs += f"; backward circulates {resolve(open_call(job, strategy))[1]['circulate']}"
    yield runs
    yield "global ranks of its first context-parallel group:"
    yield grid(call.topology, range(0, strategy.cp * strategy.tp, strategy.tp))
    sample = job.packing and job.packing.sharded(call.topology.cp_size)
    for direction in Direction:
        timeline = pass_time(call, job.hardware, direction, sample)
        sent = " and ".join(
            f"{num_bytes / GIB:.3g} GiB over {_LINKS[link]} (kernels wait "
            f"{digits(1e3 * timeline.exposed(link), 3)} ms for it)"
            for link, num_bytes in sent_bytes(call, direction).items()
            if num_bytes
        )
        yield f"  {direction} takes {digits(1e3 * timeline.seconds, 4)} ms; a rank sends {sent}"


def _gain_lines(job: Job, best: Candidate, step: float) -> Iterator[str]:
    """What burst, and what is kept, gains over Megatron's own context parallelism in a step of so
    many seconds."""
    if job.model.sinks:
        yield "no gain is predicted over Megatron's own ring: it has no attention sinks"
        return
    found, keep = gain(job, best.strategy), best.strategy.keep
    (ours, theirs), (least, most) = found.seconds, [x / GIB for x in found.num_bytes]
    layers = f" in layers{_which(job)}" if _which(job) else ""
    layers += " (that ring has no windows)" if job.model.windows else ""
    yield (
        "predicted gain over Megatron's own ring (--cp-comm-type p2p), which keeps nothing: "
        f"attention{layers} takes {digits(ours, 3)} s of a step instead of {digits(theirs, 3)} "
        f"({found.ratio:.2f} times as fast), if both recompute it alike"
    )
    if keep != "none":
        too = " (Megatron's own attention can have that too)" if keep in ("all", "auto") else ""
        yield (
            f"with --burst-keep {keep}{too} it takes {digits(found.kept, 3)} s "
            f"({theirs / found.kept:.2f} times as fast)"
        )
    kept = " and what is kept" if keep != "none" else ""
    yield (
        f"so the step takes {digits(step, 4)} s instead of {digits(found.step, 4)}; "
        f"attention's buffers{kept} take {least:.2f} GiB of a GPU instead of {most:.2f}"
    )
