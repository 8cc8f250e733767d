"""What a plan shows of attention: how burst runs it, and what it gains over Megatron's own."""

from collections.abc import Iterator

from megatron_burst.comm.grid import grid
from megatron_burst.resolve import describe_mode, resolve
from megatron_burst.schedule.spec import Direction
from megatron_burst.schedule.topology import Link
from megatron_burst.tools.hardware import GIB
from megatron_burst.tools.job.candidate import Candidate
from megatron_burst.tools.job.peer import gain
from megatron_burst.tools.job.strategy import Job, Strategy, attention_call, open_call
from megatron_burst.tools.simulate.call import pass_time, sent_bytes
from megatron_burst.tools.units import digits

_MEANT = {
    "gather": "each rank copies the others' keys and values, a few KV heads at a time",
    "ring": "keys and values travel from rank to rank",
    "a2a": "ranks exchange rows of all heads for all rows of some heads, and back",
}
_LINKS = {Link.INTRA: "NVLink", Link.INTER: "the network"}


def _which(job: Job) -> str:
    """Which layers the lines about attention are about, if not all."""
    if job.model.windows:
        return " without a window"
    return " with softmax attention" if job.model.linear else ""


def attention_lines(job: Job, strategy: Strategy) -> Iterator[str]:
    """How one layer's attention runs, on which ranks, and how long it takes."""
    call = attention_call(job, strategy)
    assert call.intra
    runs = f"attention of a layer{_which(job)} runs as {describe_mode(call)}: {_MEANT[call.intra]}"
    if call.a2a_backward_heads:
        runs += f"; in backward {_MEANT['a2a']}"
    if call.intra == "ring" or call.mode_topology.inter_size > 1:
        runs += f"; backward circulates {resolve(open_call(job, strategy)).reasons['circulate']}"
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


def gain_lines(job: Job, best: Candidate, step: float) -> Iterator[str]:
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
