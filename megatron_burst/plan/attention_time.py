"""The time of a pass of an attention call, by simulation of its schedules."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from math import inf

from megatron_burst.plan.attention import AttentionCall
from megatron_burst.plan.hardware import Hardware
from megatron_burst.plan.kernel_time import Timer
from megatron_burst.plan.timing import Timeline, simulate
from megatron_burst.schedule.call import Direction
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.topology import Link

_MANY_NODES = 8, 16  # whose times tell that of more


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
    with _no_collection():
        programs = {rank: call.program(rank, direction) for rank in some}
        return simulate(programs, timer, _inter_share(call, hardware), call.overlap, with_spans)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without Python's search for cycles, which many new objects set off again and again; those
    that a simulation makes it takes apart itself."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@lru_cache(maxsize=4096)
def pass_time(call: AttentionCall, hardware: Hardware, direction: Direction) -> Timeline:
    """`attention_time` in training on any number of nodes, without spans."""
    (base, times), *more = (
        (_duration(part, hardware, direction), times) for part, times in _on_few(call, direction)
    )
    if not more:
        return base
    ((less, _),) = more
    waits = [(link, max(wait + times * (wait - less.exposed(link)), 0.0))
             for link, wait in base.waits]  # fmt: skip
    return Timeline(base.seconds + times * (base.seconds - less.seconds), (), tuple(waits))


def sent_bytes(call: AttentionCall, direction: Direction) -> dict[Link, int]:
    """Bytes that the first rank sends in a pass, by the link that they take."""
    (base, times), *more = (
        (part.program(0, direction).sent_bytes(), times) for part, times in _on_few(call, direction)
    )
    less = more[0][0] if more else base
    return {link: round(sent + times * (sent - less[link])) for link, sent in base.items()}


def _on_few(call: AttentionCall, direction: Direction) -> list[tuple[AttentionCall, float]]:
    """The call as it is resolved, or on fewer nodes and on still fewer, and how many times the
    difference has to be added: each further node is one more step of each round."""
    call = call.resolved(direction)
    few, more = _MANY_NODES
    nodes = call.arranged.inter_size
    if call.between != "ring" or nodes <= more:
        return [(call, 0.0)]
    times = (nodes - more) / (more - few)
    return [(call.on_nodes(more), times), (call.on_nodes(few), 0.0)]


@lru_cache(maxsize=4096)
def _duration(call: AttentionCall, hardware: Hardware, direction: Direction) -> Timeline:
    """Of a resolved call; many calls are alike on few nodes."""
    return attention_time(call, hardware, direction, with_spans=False)


def _simulated(call: AttentionCall) -> range:
    """Ranks to simulate: the first and the last of a group in which all do alike; on many nodes the
    last one, for which they wait.

    In zigzag the first rank's tiles have half of the queries and all keys, the last one's all
    queries and half of the keys; the others' times lie between theirs. In an all-to-all
    over all nodes ranks have equal tiles.
    """
    topology = call.arranged
    nested = topology.inter_size == len(set(topology.node_of)) or call.mode == "a2a"
    even = call.layout is Layout.ZIGZAG or call.mask is Mask.FULL
    if topology.cp_size <= 2 or not (nested and even):
        return range(topology.cp_size)
    last = topology.cp_size - 1
    return (
        range(0, last + 1, last) if topology.inter_size < _MANY_NODES[0] else range(last, last + 1)
    )


def _inter_share(call: AttentionCall, hardware: Hardware) -> float:
    """Of a network card for a rank: all of a node send at the same time, but in a flat ring one."""
    topology = call.arranged
    flat_ring = topology.spans_nodes and call.mode == "ring"
    together = 1 if flat_ring else max(map(topology.node_of.count, set(topology.node_of)))
    return hardware.inter_share(together * call.neighbours)
