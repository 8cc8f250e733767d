"""The schedule that costs least by simulation: what `auto` can choose where a machine is known."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_burst.plan.attention import AttentionCall, attention_time
from megatron_burst.plan.buffers import buffer_bytes
from megatron_burst.plan.hardware import GIB, Hardware
from megatron_burst.plan.layout import Layout
from megatron_burst.plan.schedule import Direction

_TIE = 1.01  # within measurements' spread the one with smaller buffers is taken


@dataclass(frozen=True, slots=True)
class Chosen:
    """A way to run a call, and what speaks for it.

    Attributes:
        call: with `intra`, `heads_per_round` and `circulate` settled.
        seconds: forward and backward.
        num_bytes: of its buffers.
        reason: in words, beside the next best mode.
    """

    call: AttentionCall
    seconds: float
    num_bytes: float
    reason: str


@lru_cache(maxsize=1024)
def choose_call(
    call: AttentionCall, hardware: Hardware, most_bytes: float = float("inf")
) -> Chosen:
    """The fastest way to run a call whose buffers fit; of equally fast ones the smallest.

    A pure function of what all ranks know alike (shape, topology, machine's figures), so they
    agree without a broadcast.

    Args:
        call: options that are not "auto" or None stay as they are.
        hardware: of all ranks.
        most_bytes: of buffers on a rank.

    Raises:
        BurstError: if what was asked for cannot run.
    """
    found = [
        (sum(attention_time(way, hardware, d).seconds for d in Direction), buffer_bytes(way), way)
        for way in ways(call)
    ]
    smallest = min(found, key=lambda one: one[1])
    fitting = [one for one in found if one[1] <= most_bytes] or [smallest]
    least = min(one[0] for one in fitting)
    near = [one for one in fitting if one[0] <= least * _TIE]
    seconds, num_bytes, best = min(near, key=lambda one: one[1])
    reason = f"{1e3 * seconds:.3g} ms, {num_bytes / GIB:.2f} GiB"
    others = [one for one in found if one[2].intra != best.intra]
    if others:
        second = min(others, key=lambda one: one[0])
        reason += f"; {second[2].intra} {1e3 * second[0]:.3g} ms, {second[1] / GIB:.2f} GiB"
    return Chosen(best, seconds, num_bytes, reason)


def ways(call: AttentionCall) -> Iterator[AttentionCall]:
    """Every way to run a call that its options leave open."""
    one_host = len(set(call.topology.host_of)) == 1
    together = one_host and call.layout is not Layout.STRIPED
    heads, ranks = call.shape.heads_kv, call.topology.cp_size
    intras = [call.intra]
    if call.intra == "auto":
        intras = ["ring"] + ["gather"] * together + ["a2a"] * (together and heads % ranks == 0)
    for intra in intras:
        if intra == "ring":
            circulates = ["kv", "q"] if call.circulate == "auto" else [call.circulate]
            yield from (replace(call, intra=intra, circulate=c) for c in circulates)
            continue
        most = heads if intra == "gather" else heads // ranks
        counts = [n for n in range(1, most + 1) if most % n == 0]
        if call.heads_per_round is not None:
            counts = [call.heads_per_round]
        yield from (replace(call, intra=intra, heads_per_round=n) for n in counts)
