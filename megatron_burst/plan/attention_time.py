"""The time of a pass of an attention call, by simulation of its schedules."""

from functools import lru_cache
from math import inf

from megatron_burst.plan.attention import AttentionCall
from megatron_burst.plan.hardware import Hardware
from megatron_burst.plan.kernel_time import Timer
from megatron_burst.plan.layout import Layout
from megatron_burst.plan.mask import Mask
from megatron_burst.plan.schedule import Direction
from megatron_burst.plan.timing import Timeline, Wiring, simulate

_MANY_HOSTS = 4, 8  # whose times tell that of more
_MOST_RANKS = 8  # that are simulated one by one; in larger zigzag groups two stand for all


@lru_cache(maxsize=64)
def attention_time(
    call: AttentionCall,
    hardware: Hardware,
    direction: Direction,
    pass_tflop: float = inf,
    ranks: range | None = None,
    with_spans: bool = True,
) -> Timeline:
    """What happens in one pass of a call.

    Args:
        call: the call.
        hardware: that it runs on.
        direction: which pass.
        pass_tflop: work without pause (`KernelSpeed`); infinite in training.
        ranks: to simulate; None: as many as the time depends on.
        with_spans: whether to write down what happened.

    Raises:
        BurstError: if the call cannot run so.
    """
    timer = Timer(hardware, call.backend, pass_tflop)
    some = _simulated(call) if ranks is None else ranks
    programs = {rank: call.program(rank, direction) for rank in some}
    wiring = Wiring(hardware, _inter_share(call, hardware))
    return simulate(programs, timer, wiring, call.overlap, with_spans)


@lru_cache(maxsize=4096)
def pass_time(call: AttentionCall, hardware: Hardware, direction: Direction) -> Timeline:
    """`attention_time` in training on any number of hosts, without spans.

    Each further host is one more step of each round, like those before it.
    """
    call, hosts = call.settled(direction), call.arranged.inter_size
    few, more = _MANY_HOSTS
    if call.between != "ring" or hosts <= more:
        return _duration(call, hardware, direction)
    less, base = (_duration(call.on_hosts(count), hardware, direction) for count in _MANY_HOSTS)
    steps = (hosts - more) / (more - few)
    seconds = base.seconds + steps * (base.seconds - less.seconds)
    waits = [
        (link, max(wait + steps * (wait - less.exposed(link)), 0.0)) for link, wait in base.waits
    ]
    return Timeline(seconds, (), tuple(waits))


@lru_cache(maxsize=4096)
def _duration(call: AttentionCall, hardware: Hardware, direction: Direction) -> Timeline:
    """Of a settled call; many calls are alike on few hosts."""
    return attention_time(call, hardware, direction, with_spans=False)


def _simulated(call: AttentionCall) -> range:
    """Ranks to simulate: the first and the last of a large group in which all do alike.

    In zigzag the first rank's tiles have half of the queries and all keys, the last one's all
    queries and half of the keys; the others' times lie between theirs. Ranks that exchange heads
    over all hosts have equal tiles.
    """
    topology = call.arranged
    nested = topology.inter_size == len(set(topology.host_of)) or call.mode == "a2a"
    even = call.layout is Layout.ZIGZAG or call.mask is Mask.FULL
    if topology.cp_size > _MOST_RANKS and nested and even:
        return range(0, topology.cp_size, topology.cp_size - 1)
    return range(topology.cp_size)


def _inter_share(call: AttentionCall, hardware: Hardware) -> float:
    """Of a network card for a rank: all of a host send at the same time, but in a flat ring one."""
    topology = call.arranged
    flat_ring = topology.spans_hosts and call.mode == "ring"
    together = 1 if flat_ring else max(map(topology.host_of.count, set(topology.host_of)))
    return hardware.inter_share(together * call.neighbours)
