"""What the planner found, on the terminal: the answer first, then what it consists of."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from rich.console import Console
from rich.table import Table

from megatron_burst.comm.grid import grid
from megatron_burst.recompute.later_plan import choose_later
from megatron_burst.schedule.modes import describe_mode
from megatron_burst.schedule.spec import Direction
from megatron_burst.schedule.topology import Link
from megatron_burst.tools.hardware import GIB
from megatron_burst.tools.job.candidate import ROOMY, Candidate, slower_part
from megatron_burst.tools.job.flags import OFFLOADED
from megatron_burst.tools.job.memory import NAMES, Memory
from megatron_burst.tools.job.peer import GAIN_ERROR, GAIN_EXCESS_BETWEEN, gain
from megatron_burst.tools.job.strategy import Job, Strategy, attention_call
from megatron_burst.tools.plan_flags import Shown, show_flags
from megatron_burst.tools.plan_kept import show_kept
from megatron_burst.tools.plan_notes import links_in_words, mfu_doubt
from megatron_burst.tools.simulate.call import pass_time, sent_bytes
from megatron_burst.tools.terminal import new_console, say
from megatron_burst.tools.units import digits, in_units

_TOP = 8  # strategies that are shown
_SMALL = 0.005  # share of a sum below which a part is left out
_LINKS = {Link.INTRA: "NVLink", Link.INTER: "the network"}


def show(shown: Shown) -> None:
    """Print whether it fits and how fast it is, the others, parts of the best, and flags."""
    console = new_console()
    if shown.no_room:
        say(console, shown.no_room, "does not fit: ", "red")
    _show_answer(console, shown)
    for note in shown.warnings:
        say(console, note, "warning: ", "yellow")
    if shown.others and len(shown.candidates) > 1:
        _show_others(console, shown.job, shown.candidates)
    else:
        say(console, _why_best(shown.candidates))
    best = shown.candidates[0].strategy
    say(console, f"{best.layout}, {best.policy}")
    if meant := _meant(best):
        say(console, meant)
    if shown.verbose or not shown.others:
        _show_parts(console, shown)
    if shown.with_keep:
        say(console, shown.with_keep)
    if shown.candidates[0].fits:
        show_flags(console, shown)


def _show_answer(console: Console, shown: Shown) -> None:
    """Speed, memory and how far the speed may be off; then of what job."""
    job, best = shown.job, shown.candidates[0]
    gib = f"{best.memory.peak / GIB:.1f} of {job.hardware.gpu.usable_bytes / GIB:.1f} GiB"
    sequences = f"{job.batch} sequence{'s' * (job.batch > 1)} of {in_units(job.seq)} tokens"
    sequences += " (the default)" * shown.usual_batch
    model = f"{job.model.name} ({job.model.params / 1e9:.2f} B weights)"
    if time := best.time:
        bounds, doubts = mfu_doubt(job, best)
        speed = f"{time.tokens} tokens/s per GPU ({time.tokens_per_gpu * job.gpus:,.0f} on all)"
        say(console, f"{speed}, MFU {time.mfu:.1%}{bounds}, {gib}", "fits: ", "green")
        for doubt in doubts:
            say(console, doubt, "MFU", "bold")
        alike = ", if micro-batches are full and alike" if job.packing else ""
        say(console, f"a step takes {digits(time.seconds, 4)} s{alike}: {sequences}, {model}")
    else:
        say(console, f"a GPU needs {gib}: {sequences}, {model}")
    gpus = f"{job.gpus} GPUs ({job.hardware.name}), {job.on_node} a node"
    say(console, f"{gpus}; assumes {links_in_words(job)}")
    if read := shown.script.in_words:
        say(console, f"read from the script: {read}")
    if job.packing and job.packing.sample:
        again = f"; {shown.repeated}" if shown.repeated else ""
        say(console, f"packed documents have {job.share:.1%} of a causal sequence's pairs{again}")


def _show_others(console: Console, job: Job, candidates: Sequence[Candidate]) -> None:
    """The best of each layout, and other recomputation in the layout of the best."""
    best, firsts = candidates[0], {}
    for one in candidates:  # the best first
        strategy = one.strategy
        own = strategy.layout == best.strategy.layout and one.fits
        firsts.setdefault((strategy.layout, own and (strategy.recompute, strategy.keep)), one)
    fitting = sum(one.fits for one in candidates)
    console.print(
        f"\n{len(candidates)} strategies, {fitting} fit in memory; the best of each kind:"
    )
    sizes = ("tp", "cp", "pp", "dp", *(("ep",) if job.model.experts else ()))
    table, before = Table(box=None, padding=(0, 1, 0, 0)), ""
    words = "recompute", "keep", "on host", "most of it"
    for name in (*map(str.upper, sizes), *words[:3], "tok/s/GPU", "GiB", "slower", *words[3:]):
        table.add_column(name, justify="left" if name in words else "right")
    for one in [*firsts.values()][:_TOP]:
        strategy, time = one.strategy, one.time
        kept = strategy.keep if strategy.recompute == "full" else ""
        host = OFFLOADED.get((strategy.offload, strategy.offload_inputs), "")
        slower, why = ("", "") if one is best else slower_part(one, best)
        table.add_row(
            *(str(getattr(strategy, size)) for size in sizes), strategy.recompute, kept, host,
            time.tokens if time else "", f"{one.memory.peak / GIB:.1f}", slower,
            '"' if why and why == before else why,
        )  # fmt: skip
        before = why
    console.print(table)
    console.print()


def _why_best(candidates: Sequence[Candidate]) -> str:
    """How the best was chosen, in a line."""
    best = candidates[0]
    if len(candidates) == 1:
        return "the only strategy with the given options"
    if not best.fits:
        return f"of {len(candidates)} strategies, this one lacks the least:"
    alike = [one for one in candidates if one.fits and one.is_tight == best.is_tight]
    room = "fit" if best.is_tight else f"leave {1 - ROOMY:.0%} of memory"
    why = f"fastest of {len(alike)} that {room}"
    for other in [one for one in alike if one.strategy.layout != best.strategy.layout][:1]:
        why += f"; next: {other.strategy.layout}, {slower_part(other, best)[0]} slower"
    return f"{why} (--search)"


def _show_parts(console: Console, shown: Shown) -> None:
    """Time and memory of the best by part, and its attention."""
    job, best = shown.job, shown.candidates[0]
    parts = {("a GPU's memory", "GiB"): _memory_rows(job, best.memory, shown.verbose)}
    if time := best.time:
        unit, many = ("s", 1.0) if time.seconds >= 1 else ("ms", 1e3)
        rows = [(name, many * seconds) for name, seconds in time.parts]
        parts = {("a step's time", unit): _large(rows, many * time.seconds, shown.verbose)} | parts
    table = Table(box=None, padding=(0, 3, 0, 0))
    for name, unit in parts:
        table.add_column(name)
        table.add_column(unit, justify="right", no_wrap=True)
    cells = [[(name, f"{number:.2f}") for name, number in rows] for rows in parts.values()]
    for pairs in zip_longest(*cells, fillvalue=("", "")):
        table.add_row(*(cell for pair in pairs for cell in pair))
    console.print(table)
    if best.strategy.keep == "auto":
        show_kept(console, job, best.strategy)
    if best.strategy.cp > 1 and job.model.full_layers:
        for line in _attention_lines(job, best.strategy, shown.verbose):
            say(console, line)
        if best.time:
            say(console, _gain(job, best.strategy))


Rows = list[tuple[str, float]]


def _large(rows: Rows, whole: float, is_all: bool) -> Rows:
    """Rows that are more than a small share of the whole; the others as one."""
    some = [row for row in rows if row[1] > (0 if is_all else _SMALL * whole)]
    rest = sum(number for _, number in rows) - sum(number for _, number in some)
    return [*some, ("the rest", rest)] if rest > _SMALL * whole else some


def _meant(strategy: Strategy) -> str:
    """What a policy's short words say, in a sentence; "" of one without recomputation."""
    if strategy.recompute == "selective":
        return "backward recomputes the feed-forward of each layer"
    if strategy.recompute != "full":
        return ""
    some = strategy.again_layers is not None
    layers = f"the first {strategy.again_layers} layers of a stage" if some else "every layer"
    but = {
        "none": "", "all": " but attention", "half": " but attention of the sequence's later half",
        "auto": " but what the table of --burst-keep auto below keeps",
    }[strategy.keep]  # fmt: skip
    inputs = "layers' inputs"
    waiting = ["its results"] * strategy.offload + [inputs] * strategy.offload_inputs
    where = f"; {' and '.join(waiting)} wait in host memory" if waiting else ""
    return f"backward recomputes {layers}{but}{where}"


def _memory_rows(job: Job, memory: Memory, is_all: bool) -> Rows:
    """Parts that add up to the peak, the peak, and what is there at other moments only."""
    gib = memory.in_gib()
    earlier = "layer" if memory.layer < memory.head else "head"
    rows = _large(
        [(NAMES[name], gib[name]) for name in NAMES if name != earlier], gib["peak"], is_all
    )
    usable = job.hardware.gpu.usable_bytes / GIB
    rows.append((f"peak ({gib['peak'] / usable:.0%} of {usable:.1f} usable)", gib["peak"]))
    if is_all:
        rows.append((f"not at the peak: {NAMES[earlier]}", gib[earlier]))
        rows.append(("not at the peak: attention's buffers", gib["attention"]))
    if gib["node"]:
        rows.append(("pinned host memory of a node", gib["node"]))
    return rows


def _which(job: Job) -> str:
    """Which layers the lines about attention are about, if not all."""
    if job.model.windows:
        return " without a window"
    return " with softmax attention" if job.model.linear else ""


def _attention_lines(job: Job, strategy: Strategy, is_all: bool) -> Iterator[str]:
    """How one layer's attention runs, and how long it takes; also what it sends, on which ranks."""
    call = attention_call(job, strategy)
    sample = job.packing and job.packing.sharded(call.topology.cp_size)
    times = {way: pass_time(call, job.hardware, way, sample) for way in Direction}
    taken = " and ".join(f"{1e3 * time.seconds:.2f} ms {way}" for way, time in times.items())
    waits = [
        f"{1e3 * seconds:.2f} ms for {name}" for link, name in _LINKS.items()
        if (seconds := sum(time.exposed(link) for time in times.values())) > 1e-5
    ]  # fmt: skip
    waiting = f"; kernels wait {' and '.join(waits)}" if waits else ""
    yield f"attention of a layer{_which(job)}: {taken}, as {describe_mode(call)}{waiting}"
    if strategy.keep == "half":
        yield f"keep half: {choose_later(call)}"
    if not is_all:
        return
    for way in Direction:
        sent = [f"{x / GIB:.2f} GiB over {_LINKS[link]}"
                for link, x in sent_bytes(call, way).items() if x]  # fmt: skip
        yield f"in {way} a rank sends {' and '.join(sent)}"
    yield "global ranks of its first context-parallel group:"
    yield grid(call.topology, range(0, strategy.cp * strategy.tp, strategy.tp))


def _gain(job: Job, strategy: Strategy) -> str:
    """What burst's attention gains over Megatron's own if both recompute alike."""
    if job.model.sinks:
        return "no gain is predicted over Megatron's own ring: it has no attention sinks"
    predicted, error = gain(job, strategy), GAIN_ERROR
    own, other = (f"{x:.2f}" if x >= 1 else digits(x, 3) for x in predicted.seconds)
    measured = f"9 of 10 measured gains were predicted to within {error:.0%}"
    if strategy.cp * strategy.tp > job.on_node:
        error = GAIN_EXCESS_BETWEEN
        measured = f"on two emulated nodes {error:.0%} too high in the median"
    none = ", so maybe none" if predicted.ratio < 1 + error else ""
    return (
        f"predicted gain over Megatron's fastest mode ({predicted.mode}): attention{_which(job)} "
        f"takes {own} s of a step instead of {other}, {predicted.ratio:.2f} times as fast "
        f"({measured}{none})"
    )
