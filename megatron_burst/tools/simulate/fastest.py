"""The ways to run a call, and which simulates fastest."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_burst.errors import BurstError
from megatron_burst.plan.asked import check_asked, misses
from megatron_burst.plan.attention import AttentionCall
from megatron_burst.plan.choose_heads import most_heads
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import check_mask
from megatron_burst.schedule.spec import Direction
from megatron_burst.tools.hardware import GIB, Hardware
from megatron_burst.tools.simulate.call import buffer_bytes, pass_time

_TIE = 1.01  # within measurement noise, smaller buffers win


@dataclass(frozen=True, slots=True)
class Chosen:
    """A way to run a call, and the reasons for it."""

    call: AttentionCall  # with `intra`, `inter`, `heads_per_round` and `circulate` resolved
    seconds: float  # forward and backward
    num_bytes: float  # of its buffers
    reason: str  # as text, compared with the next best mode


@lru_cache(maxsize=1024)
def choose_call(call: AttentionCall, hardware: Hardware) -> Chosen:
    """The fastest way to run a call; among equally fast ones, that with the smallest buffers.

    A pure function of what is the same on all ranks (shape, topology, the machine's figures), so
    they agree without a broadcast.

    Args:
        call: options that are not "auto" or None stay as they are.
        hardware: of all ranks.

    Raises:
        BurstError: if what was asked for cannot run.
    """
    found = [
        (sum(pass_time(way, hardware, d).seconds for d in Direction), buffer_bytes(way), way)
        for way in ways(call)
    ]
    if not found:  # refuses what this way does not have
        check_asked(call)
    least = min(one[0] for one in found)
    near = [one for one in found if one[0] <= least * _TIE]
    seconds, num_bytes, best = min(near, key=lambda one: one[1])
    reason = f"{1e3 * seconds:.3g} ms, {num_bytes / GIB:.2f} GiB"
    others = [one for one in found if _mode(one[2]) != _mode(best)]
    if others:
        second = min(others, key=lambda one: one[0])
        reason += f"; {_mode(second[2])} {1e3 * second[0]:.3g} ms, {second[1] / GIB:.2f} GiB"
    return Chosen(best, seconds, num_bytes, reason)


def _mode(call: AttentionCall) -> str:
    return f"{call.mode} over all ranks" if call.arranged.spans_nodes else call.mode


def ways(call: AttentionCall) -> Iterator[AttentionCall]:
    """Every way to run a call that its options leave open."""
    return (way for way in _every_way(call) if _has_mask(way) and misses(way) is None)


def _has_mask(call: AttentionCall) -> bool:
    """Whether its mode supports its mask in its layout."""
    if call.topology.cp_size == 1:
        return True
    try:
        check_mask(call.mask, call.layout, call.mode, call.arranged.inter_size == 1)
    except BurstError:
        return False
    return True


def _every_way(call: AttentionCall) -> Iterator[AttentionCall]:
    nodes, heads = call.topology.inter_size, call.shape.heads_q
    if call.inter in ("a2a", "flat"):
        yield from _ways_inside(call)
        return
    yield from _ways_inside(call if nodes == 1 else replace(call, inter="ring"))
    over_all = nodes > 1 and call.inter == call.intra == "auto"
    if over_all and call.layout is not Layout.STRIPED and heads % call.topology.cp_size == 0:
        yield from _in_rounds(replace(call, inter="a2a", intra="a2a"))


def _ways_inside(call: AttentionCall) -> Iterator[AttentionCall]:
    """Every way inside the rows of ranks, with the mode between them resolved."""
    topology, heads = call.arranged, call.shape.heads_q
    intras = [call.mode if call.inter in ("a2a", "flat") else call.intra]
    if intras == ["auto"]:
        in_order = call.layout is not Layout.STRIPED and not topology.spans_nodes
        in_order = in_order and topology.cp_size > 1
        a2a = in_order and topology.intra_size > 1 and heads % topology.intra_size == 0
        intras = ["ring"] + ["gather"] * in_order + ["a2a"] * a2a
    for intra in intras:
        circulates = [call.circulate]
        if call.circulate == "auto" and (intra == "ring" or topology.inter_size > 1):
            circulates = ["kv", "q"]
        for circulate in circulates:
            way = replace(call, intra=intra, circulate=circulate)
            yield from [way] if intra == "ring" else _in_rounds(way)


def _in_rounds(call: AttentionCall) -> Iterator[AttentionCall]:
    """A gather or all-to-all call, with every number of heads per round."""
    if call.heads_per_round is not None or not call.pieces:
        yield call
        return
    most = most_heads(call.shape, call.arranged, call.intra)
    for heads in range(1, most + 1):
        if most % heads == 0:
            yield replace(call, heads_per_round=heads)
