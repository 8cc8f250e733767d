"""The schedule that costs least by simulation: what `auto` can choose where a machine is known."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_burst.plan.asked import check_asked, misses
from megatron_burst.plan.attention import AttentionCall
from megatron_burst.plan.attention_time import pass_time
from megatron_burst.plan.buffers import buffer_bytes
from megatron_burst.plan.hardware import GIB, Hardware
from megatron_burst.schedule.call import Direction
from megatron_burst.schedule.layout import Layout

_TIE = 1.01  # within measurements' spread the one with smaller buffers is taken


@dataclass(frozen=True, slots=True)
class Chosen:
    """A way to run a call, and what speaks for it.

    Attributes:
        call: with `intra`, `inter`, `heads_per_round` and `circulate` settled.
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
    check_ways(call)
    found = [
        (sum(pass_time(way, hardware, d).seconds for d in Direction), buffer_bytes(way), way)
        for way in ways(call)
    ]
    smallest = min(found, key=lambda one: one[1])
    fitting = [one for one in found if one[1] <= most_bytes] or [smallest]
    least = min(one[0] for one in fitting)
    near = [one for one in fitting if one[0] <= least * _TIE]
    seconds, num_bytes, best = min(near, key=lambda one: one[1])
    reason = f"{1e3 * seconds:.3g} ms, {num_bytes / GIB:.2f} GiB"
    others = [one for one in found if _mode(one[2]) != _mode(best)]
    if others:
        second = min(others, key=lambda one: one[0])
        reason += f"; {_mode(second[2])} {1e3 * second[0]:.3g} ms, {second[1] / GIB:.2f} GiB"
    return Chosen(best, seconds, num_bytes, reason)


def _mode(call: AttentionCall) -> str:
    return f"{call.mode} over all ranks" if call.arranged.spans_nodes else call.mode


def check_ways(call: AttentionCall) -> None:
    """Refuse a call whose options leave no way open, for what its own way does not have."""
    if next(ways(call), None) is None:
        check_asked(call)


def ways(call: AttentionCall) -> Iterator[AttentionCall]:
    """Every way to run a call that its options leave open."""
    return (way for way in _every_way(call) if misses(way) is None)


def _every_way(call: AttentionCall) -> Iterator[AttentionCall]:
    nodes, heads = call.topology.inter_size, call.shape.heads_kv
    if call.inter in ("a2a", "flat"):
        yield from _ways_inside(call)
        return
    nested = call if nodes == 1 else replace(call, inter="ring")
    yield from _ways_inside(nested)
    over_all = nodes > 1 and call.inter == call.intra == "auto"
    if over_all and call.layout is not Layout.STRIPED and heads % call.topology.cp_size == 0:
        yield from _in_rounds(replace(call, inter="a2a", intra="a2a"))


def _ways_inside(call: AttentionCall) -> Iterator[AttentionCall]:
    """Every way inside the rows of ranks, between which it is settled how it goes."""
    topology, heads = call.arranged, call.shape.heads_kv
    intras = [call.mode if call.inter in ("a2a", "flat") else call.intra]
    if intras == ["auto"]:
        in_order = call.layout is not Layout.STRIPED and not topology.spans_nodes
        in_order = in_order and topology.cp_size > 1
        exchange = in_order and topology.intra_size > 1 and heads % topology.intra_size == 0
        intras = ["ring"] + ["gather"] * in_order + ["a2a"] * exchange
    for intra in intras:
        way = replace(call, intra=intra)
        if intra == "ring" or topology.inter_size > 1:
            circulates = ["kv", "q"] if call.circulate == "auto" else [call.circulate]
            one_each = [replace(way, circulate=circulate) for circulate in circulates]
        else:
            one_each = [way]
        for one in one_each:
            yield from [one] if intra == "ring" else _in_rounds(one)


def _in_rounds(call: AttentionCall) -> Iterator[AttentionCall]:
    """A call that gathers or exchanges, with every number of heads a round."""
    if call.heads_per_round is not None or not call.pieces:
        yield call
        return
    most = call.shape.heads_kv // (call.arranged.intra_size if call.intra == "a2a" else 1)
    for heads in range(1, most + 1):
        if most % heads == 0:
            yield replace(call, heads_per_round=heads)
