"""Prediction for Megatron's own context parallelism: TransformerEngine's p2p, one ring of K and V
over all ranks with cuDNN's kernels."""

from dataclasses import dataclass, replace

from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.spec import AttentionShape, Circulate, Direction
from megatron_burst.tools.hardware import Hardware
from megatron_burst.tools.job.layer_time import recomputed
from megatron_burst.tools.job.memory import memory_of
from megatron_burst.tools.job.step import step_time
from megatron_burst.tools.job.strategy import (
    Job,
    Strategy,
    attention_call,
    busiest_layers,
    open_call,
)
from megatron_burst.tools.simulate.buffers import cudnn_workspace
from megatron_burst.tools.simulate.call import (
    AttentionCall,
    buffer_bytes,
    on_cudnn,
    pass_time,
    resolved,
)
from megatron_burst.tools.simulate.sample import Packing


@dataclass(frozen=True, slots=True)
class Gain:
    """A training step on a GPU with burst's attention, and with Megatron's own, which keeps
    nothing. Attention is that of layers without windows, recomputation included."""

    seconds: tuple[float, float]  # attention of burst, of Megatron's own, computed again alike
    kept: float  # attention of burst with what its strategy keeps
    # besides inputs and outputs, at the peak of backward, including what is kept
    num_bytes: tuple[float, float]
    step: float  # seconds of Megatron's own

    @property
    def ratio(self) -> float:
        """Burst's speedup if both recompute attention in the same way; 1 if every layer has a
        window."""
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


def gain(job: Job, strategy: Strategy) -> Gain:
    """What a step gains from burst attention, and from what a strategy keeps."""
    plain = replace(strategy, keep="none", offload=False, offload_inputs=False, placed=(), whole=0)
    packing = job.packing and Packing(Layout.DOCUMENTS, job.packing.sample)
    own = replace(job, packing=packing)
    theirs = as_megatron(open_call(own, plain), job.hardware)
    memory = memory_of(job, strategy)
    ours = attention_call(job, strategy)
    return Gain(
        (
            _attention_seconds(job, plain, attention_call(job, plain)),
            _attention_seconds(own, plain, theirs),
        ),
        _attention_seconds(job, strategy, ours),
        (
            buffer_bytes(ours) + memory.kept,
            megatron_bytes(theirs.shape, packed=job.packing is not None),
        ),
        step_time(own, plain, memory_of(own, plain), theirs).seconds,
    )


def _attention_seconds(job: Job, strategy: Strategy, call: AttentionCall) -> float:
    """Seconds of attention per step with such calls and a strategy's recomputation."""
    sample = job.packing and job.packing.sharded(strategy.cp)
    forward, backward = (
        pass_time(call, job.hardware, direction, sample).seconds for direction in Direction
    )
    times = busiest_layers(job.model, strategy) * job.model.full_layers / job.model.layers
    times *= job.batch // strategy.dp
    return times * ((1 + recomputed(job, strategy)) * forward + backward)
