"""Cost of an attention call: simulated time, and memory besides its inputs and outputs."""

import gc
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import inf

from megatron_burst.resolve import circulating_share, resolve, reuses_remote
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.modes import program_of
from megatron_burst.schedule.program import Program
from megatron_burst.schedule.spec import Circulate, Direction, Spec
from megatron_burst.schedule.topology import Link, Topology, pretend_nodes
from megatron_burst.tools.hardware import Hardware
from megatron_burst.tools.simulate.buffers import kept_bytes, passing_bytes
from megatron_burst.tools.simulate.kernels import Timer
from megatron_burst.tools.simulate.sample import Sample
from megatron_burst.tools.simulate.timing import Timeline, simulate

_MANY_NODES = 8, 16  # times of more nodes are extrapolated from these
_MOST_NODES = 4  # more nodes need no more buffers; a test compares
# kernels whose causal tiles may have more keys than queries
_RECTANGULAR = ("auto", "fa4", "flash", "triton", "reference")


@dataclass(frozen=True)
class AttentionCall(Spec):
    """How a call runs, and what else its time depends on."""

    backend: str = "auto"  # attention kernel, or several joined by commas, the fastest first
    # GPUs of a node per rank of this group, including those that run other groups' rings at the
    # same time: the tensor-parallel size
    neighbours: int = 1
    overlap: bool = True  # whether transfers are hidden
    # ranks that trade rows for heads before and after, as TransformerEngine's all-to-alls do; the
    # call has what they hold then: all rows of the ranks, fewer heads
    traders: Topology | None = None


def run_by(call: AttentionCall, backend: str) -> AttentionCall:
    """The call with another attention kernel."""
    rectangular = backend.partition(",")[0] in _RECTANGULAR
    kernel = replace(call.kernel, rectangular_causal=rectangular)
    return replace(call, backend=backend, kernel=kernel)


def on_cudnn(call: AttentionCall, hardware: Hardware) -> AttentionCall:
    """The call with cuDNN's attention, at the first kernel's speed where its own is not known."""
    is_known = any(kernel.backend == "cudnn" for kernel in hardware.kernels)
    return replace(run_by(call, "cudnn"), backend="cudnn" if is_known else "auto")


def by_auto(call: AttentionCall, hardware: Hardware) -> AttentionCall:
    """The call with the kernel that burst chooses: the first that the hardware lists, but on Hopper
    cuDNN for grouped heads of which queries and values differ in dimension, in outputs that it can
    count.

    Elsewhere, and for documents and windows, such heads have Triton, whose speed is not known: the
    first kernel stands for it, and is faster.
    """
    shape, mask = call.shape, call.mask
    differ = shape.heads_q != shape.heads_kv and shape.dim_qk != shape.dim_v
    has_cudnn = hardware.gpu.capability == 9 and not (mask.documents or mask.windowed)
    return on_cudnn(call, hardware) if differ and has_cudnn and not shape.exceeds_int32 else call


def resolved(call: AttentionCall) -> AttentionCall:
    """The call as burst runs it: without open choices.

    Raises:
        BurstError: if what was asked for cannot run.
    """
    result = resolve(call)[0]
    assert isinstance(result, AttentionCall)
    return result


def program(call: AttentionCall, cp_rank: int, direction: Direction) -> Program:
    """The program that the engine runs on a rank for a resolved call."""
    spec = call.program_spec(cp_rank, direction)
    return program_of(Spec(**{field.name: getattr(spec, field.name) for field in fields(Spec)}))


def left_bytes(call: AttentionCall) -> int:
    """Memory of other nodes' K and V kept until backward, of a resolved call."""
    if not reuses_remote(call):
        return 0
    shape = call.shape
    rows = round(circulating_share(call) * shape.rows_kv)
    others = call.mode_topology.inter_size - 1
    return others * rows * (shape.dim_qk + shape.dim_v) * shape.itemsize


@lru_cache(maxsize=4096)  # on few nodes many calls are equal
def attention_time(
    call: AttentionCall,
    hardware: Hardware,
    direction: Direction,
    pass_tflop: float = inf,
    ranks: range | None = None,
    with_spans: bool = False,
    sample: Sample | None = None,
    tokens: int | None = None,
) -> Timeline:
    """Simulate one pass of a resolved call.

    Args:
        pass_tflop: work without a pause (`KernelSpeed`); infinite in training.
        ranks: to simulate; None: as many as the time depends on.
        with_spans: whether to record what happened.
        sample: the documents; None: one. With documents ranks differ.
        tokens: of the whole sequence, if the call stands for one on more nodes.

    Raises:
        BurstError: if the call cannot run this way.
    """
    timer = Timer(
        hardware, call.backend, pass_tflop, sample, tokens, call.kernel.rectangular_causal
    )
    some = _simulated(call) if ranks is None else ranks
    collects = gc.isenabled()
    gc.disable()  # many new objects trigger it repeatedly; the simulation breaks its own cycles
    try:
        programs = {rank: program(call, rank, direction) for rank in some}
        return simulate(programs, timer, _inter_share(call, hardware), call.overlap, with_spans)
    finally:
        if collects:
            gc.enable()


@lru_cache(maxsize=4096)
def pass_time(
    call: AttentionCall, hardware: Hardware, direction: Direction, sample: Sample | None = None,
    pass_tflop: float = inf,
) -> Timeline:  # fmt: skip
    """`attention_time` on any number of nodes, without spans; by default in training."""
    if call.traders:
        base = pass_time(replace(call, traders=None), hardware, direction, sample, pass_tflop)
        seconds = base.seconds + _trade_seconds(call, call.traders, hardware)
        return replace(base, seconds=seconds)
    if sample:  # each shard's work depends on its documents
        even = call.layout is Layout.DOCUMENTS or call.intra == "a2a"
        ranks = _simulated(call) if even else range(call.topology.cp_size)
        return attention_time(call, hardware, direction, pass_tflop, ranks, sample=sample)
    tokens = call.shape.tokens * call.topology.cp_size if call.mask.documents else None
    (base, times), *more = (
        (attention_time(part, hardware, direction, pass_tflop, tokens=tokens), times)
        for part, times in _on_few(call, direction)
    )
    if not more:
        return base
    ((less, _),) = more
    waits = [(link, max(wait + times * (wait - less.exposed(link)), 0.0))
             for link, wait in base.waits]  # fmt: skip
    return Timeline(base.seconds + times * (base.seconds - less.seconds), (), tuple(waits))


def _trade_seconds(call: AttentionCall, traders: Topology, hardware: Hardware) -> float:
    """Of q, k and v there and the output back, or of their gradients: nothing hides them. Each is
    copied twice, to and from what is sent."""
    shape, ranks, nodes = call.shape, traders.cp_size, traders.inter_size
    heads = shape.heads_q + shape.heads_kv
    num_bytes = shape.batch * shape.tokens * heads * (shape.dim_qk + shape.dim_v) * shape.itemsize
    seconds = hardware.links.intra.seconds(num_bytes * (1 / nodes - 1 / ranks))
    if nodes > 1:
        share = hardware.inter_share(call.neighbours)
        seconds = max(seconds, hardware.links.inter.seconds(num_bytes * (1 - 1 / nodes), share))
    return seconds + Timer(hardware).memory(4 * num_bytes)


def sent_bytes(call: AttentionCall, direction: Direction) -> dict[Link, int]:
    """Bytes that the first rank sends in a pass, by link."""
    (base, times), *more = (
        (program(part, 0, direction).sent_bytes(), times)
        for part, times in _on_few(call, direction)
    )
    less = more[0][0] if more else base
    return {link: round(sent + times * (sent - less[link])) for link, sent in base.items()}


def _on_few(call: AttentionCall, direction: Direction) -> list[tuple[AttentionCall, float]]:
    """The call as a pass sees it, or on two smaller numbers of nodes and how often to add their
    difference: each further node is one more step of each round."""
    backward = direction is Direction.BACKWARD
    call = replace(call, circulate=call.circulate if backward else Circulate.KV, resends=False)
    few, more = _MANY_NODES
    nodes = call.mode_topology.inter_size
    if call.inter != "ring" or nodes <= more:
        return [(call, 0.0)]
    times = (nodes - more) / (more - few)
    return [(_on_nodes(call, more), times), (_on_nodes(call, few), 0.0)]


def _on_nodes(call: AttentionCall, count: int) -> AttentionCall:
    """A resolved call on another number of nodes in nested rings."""
    return replace(call, topology=pretend_nodes(count * call.mode_topology.intra_size, count))


def _simulated(call: AttentionCall) -> range:
    """Ranks to simulate: the first and the last of a group in which all do the same; on many nodes
    the last one, which the others wait for.

    In zigzag the first rank's tiles have half of the queries and all keys, the last one's all
    queries and half of the keys; the others' times are in between. In an all-to-all over all nodes
    ranks have equal tiles.
    """
    topology = call.mode_topology
    nested = topology.inter_size == len(set(topology.node_of)) or call.intra == "a2a"
    even = call.layout in (Layout.ZIGZAG, Layout.DOCUMENTS) or call.mask.full
    if topology.cp_size <= 2 or not (nested and even):
        return range(topology.cp_size)
    last = topology.cp_size - 1
    first = 0 if topology.inter_size < _MANY_NODES[0] else last
    return range(first, last + 1, last)


def _inter_share(call: AttentionCall, hardware: Hardware) -> float:
    """A rank's share of a network card: all of a node send at once, in a flat ring only one."""
    topology = call.mode_topology
    flat_ring = topology.spans_nodes and call.intra == "ring"
    together = 1 if flat_ring else max(map(topology.node_of.count, set(topology.node_of)))
    return hardware.inter_share(together * call.neighbours)


@lru_cache(maxsize=4096)
def buffer_bytes(call: AttentionCall) -> int:
    """Memory that a rank needs in backward besides q, k, v, out and their gradients.

    What its group keeps from call to call, plus the peak of backward. The forward pass needs less,
    except for its output in float32 where results are merged.
    """
    if call.mode_topology.inter_size > _MOST_NODES:
        return buffer_bytes(_on_nodes(call, _MOST_NODES))
    programs = [program(call, 0, direction) for direction in Direction]
    return kept_bytes(programs) + passing_bytes(programs[-1], call.backend)
