"""Prediction for Megatron's own context parallelism: the modes of TransformerEngine's with cuDNN's
kernels, and how far predicted gains were off."""

from dataclasses import dataclass, replace

from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.spec import AttentionShape, Circulate, Direction
from megatron_burst.schedule.topology import Topology, pretend_nodes
from megatron_burst.tools.hardware import Hardware
from megatron_burst.tools.job.layer_time import recomputed
from megatron_burst.tools.job.strategy import (
    Job,
    Strategy,
    attention_call,
    busiest_layers,
    open_call,
)
from megatron_burst.tools.simulate.buffers import cudnn_workspace
from megatron_burst.tools.simulate.call import AttentionCall, on_cudnn, pass_time, resolved
from megatron_burst.tools.simulate.sample import Packing

# How far predicted gains over the fastest measured mode were off, from 32K tokens on: on one node
# in nine of ten cases; on two emulated ones too high, in the median (tests/tools/job/test_peer.py).
GAIN_ERROR, GAIN_EXCESS_BETWEEN = 0.11, 0.2


@dataclass(frozen=True, slots=True)
class Gain:
    """Attention of layers without windows in a training step, recomputation included: burst's, and
    Megatron's own in its fastest mode. Neither keeps results."""

    mode: str  # the fastest, a value of --cp-comm-type
    seconds: tuple[float, float]  # of burst, of Megatron's own

    @property
    def ratio(self) -> float:
        """Burst's speedup; 1 if every layer has a window."""
        if not self.seconds[0]:
            return 1.0
        return self.seconds[1] / self.seconds[0]


def as_megatron(call: AttentionCall, hardware: Hardware) -> AttentionCall:
    """An open call as TransformerEngine's p2p would run it: K and V circulate through all ranks,
    whatever their nodes; documents of packed samples are sharded individually.

    For its error against measurements see `benchmarks/validate_plan.py`.
    """
    layout = Layout.DOCUMENTS if call.mask.documents else call.layout
    ring = replace(
        call, intra="ring", inter="flat", circulate=Circulate.KV, pulled=False, resends=False,
        layout=layout,
    )  # fmt: skip
    return resolved(on_cudnn(ring, hardware))


def megatron_bytes(shape: AttentionShape, packed: bool = False) -> int:
    """Memory of TransformerEngine's p2p in backward, besides inputs and outputs.

    Counts were fitted: those of one causal sequence to rows of 32/32, 32/8, 8/2, 8/1, 64/8 and 64/4
    heads of 64 to 256 dimensions on 2 and 4 ranks (1 % at most off), of packed documents to rows of
    64/8 and 32/8 heads on 2. The causal count is cuDNN's workspace, q once or twice, and k and v
    five times. What holds these was not looked up in TransformerEngine.
    """
    rows = shape.batch * shape.tokens
    queries = rows * shape.heads_q * shape.dim_qk * shape.itemsize
    width = (shape.dim_qk + shape.dim_v) * shape.itemsize
    keys, statistics = rows * shape.heads_kv * width, rows * shape.heads_q * shape.stat_bytes
    if packed:
        return 7 * queries + 5 * keys + 4 * statistics
    copies = 1 if 1 < shape.heads_kv < shape.heads_q else 2
    own = cudnn_workspace(shape, shape.tokens, shape.tokens)
    return own + copies * queries + 5 * keys + statistics


def modes_of(call: AttentionCall, hardware: Hardware) -> dict[str, AttentionCall]:
    """An open call in each mode of TransformerEngine that its KV heads permit, by name.

    Not `all_gather`: of 394 measured problems it was the fastest in none.
    """
    nodes, ranks = call.topology.inter_size, call.topology.intra_size
    calls, heads_kv = {"p2p": call}, call.shape.heads_kv
    if min(nodes, ranks) > 1 and heads_kv % ranks == 0:
        calls["a2a+p2p"] = _traded(call, pretend_nodes(ranks, 1))
    if heads_kv % (nodes * ranks) == 0:
        calls["a2a"] = _traded(call, pretend_nodes(nodes * ranks, nodes))
    return {name: as_megatron(one, hardware) for name, one in calls.items()}


def _traded(call: AttentionCall, traders: Topology) -> AttentionCall:
    """A call after some ranks, those of a node first, traded their rows for heads."""
    shape, size = call.shape, traders.cp_size
    heads = {"heads_q": shape.heads_q // size, "heads_kv": shape.heads_kv // size}
    rest = call.topology.cp_size // size
    return replace(
        call, shape=replace(shape, tokens=shape.tokens * size, **heads), traders=traders,
        topology=pretend_nodes(rest, rest), neighbours=call.neighbours * traders.intra_size,
    )  # fmt: skip


def gain(job: Job, strategy: Strategy) -> Gain:
    """What a step gains from burst attention, if a strategy kept nothing."""
    plain = replace(strategy, keep="none", offload=False, offload_inputs=False, placed=(), whole=0)
    packing = job.packing and Packing(Layout.DOCUMENTS, job.packing.sample)
    own = replace(job, packing=packing)
    modes = modes_of(open_call(own, plain), job.hardware)
    times = {name: _attention_seconds(own, plain, call) for name, call in modes.items()}
    mode = min(times, key=times.__getitem__)
    ours = _attention_seconds(job, plain, attention_call(job, plain))
    return Gain(mode, (ours, times[mode]))


def _attention_seconds(job: Job, strategy: Strategy, call: AttentionCall) -> float:
    """Seconds of attention per step with such calls and a strategy's recomputation."""
    sample = job.packing and job.packing.sharded(strategy.cp)
    forward, backward = (
        pass_time(call, job.hardware, direction, sample).seconds for direction in Direction
    )
    times = busiest_layers(job.model, strategy) * job.model.full_layers / job.model.layers
    times *= job.batch // strategy.dp
    return times * ((1 + recomputed(job, strategy)) * forward + backward)
