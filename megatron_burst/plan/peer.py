"""Megatron's own context parallelism, as the planner predicts it: TransformerEngine's p2p, one ring
of K and V over all ranks with cuDNN's kernels."""

from dataclasses import dataclass, replace

from megatron_burst.plan.attention import AttentionCall
from megatron_burst.plan.attention_cost import buffer_bytes, pass_time
from megatron_burst.plan.hardware import Hardware
from megatron_burst.plan.sample import Packing
from megatron_burst.plan.step import recomputed
from megatron_burst.plan.strategy import Job, Strategy, attention_call, stage_layers
from megatron_burst.schedule.call import AttentionShape, Direction
from megatron_burst.schedule.layout import Layout


@dataclass(frozen=True, slots=True)
class Gain:
    """Attention of a training step on a GPU, burst's and Megatron's own: of layers without windows,
    recomputation included."""

    seconds: tuple[float, float]  # of burst, of Megatron's own
    num_bytes: tuple[int, int]  # beside inputs and outputs, at the fullest moment of backward

    @property
    def ratio(self) -> float:
        """How many times as fast burst is."""
        return self.seconds[1] / self.seconds[0]


def as_megatron(call: AttentionCall, hardware: Hardware) -> AttentionCall:
    """The call as TransformerEngine's p2p would run it: every shard of K and V passes all ranks,
    whatever node they are on; each document of packed samples is sharded for itself.

    How far that is from what was measured: `benchmarks/validate_plan.py`.
    """
    known = {kernel.backend for kernel in hardware.kernels}
    backend = "cudnn" if "cudnn" in known else "auto"
    layout = Layout.DOCUMENTS if call.mask.documents else call.layout
    return replace(
        call, intra="ring", inter="flat", circulate="kv", transfer="send", again=False,
        backend=backend, layout=layout,
    )  # fmt: skip


def megatron_bytes(shape: AttentionShape, packed: bool = False) -> int:
    """Memory of TransformerEngine's p2p beside inputs and outputs, in backward.

    Counts were fitted: those of one causal sequence to rows of 32/32, 32/8, 8/2 and 8/1 heads on 2
    and 4 ranks (0.3 % at most off), of packed documents to rows of 64/8 and 32/8 heads on 2. What
    lies there at the fullest moment was not looked up in TransformerEngine.
    """
    rows = shape.batch * shape.tokens
    queries = rows * shape.heads_q * shape.dim_qk * shape.itemsize
    keys = rows * shape.heads_kv * (shape.dim_qk + shape.dim_v) * shape.itemsize
    statistics = rows * shape.heads_q * shape.stat_bytes
    causal = max(7 * queries + keys, 4 * queries + 5 * keys)
    return (7 * queries + 5 * keys if packed else causal) + 4 * statistics


def gain(job: Job, strategy: Strategy) -> Gain:
    """What burst attention gains in a step, under Megatron's own recomputation there."""
    ours = attention_call(job, strategy)
    packing = job.packing and Packing(Layout.DOCUMENTS, job.packing.sample)
    theirs = as_megatron(attention_call(replace(job, packing=packing), strategy), job.hardware)
    # without burst nothing is kept
    again = recomputed(job, strategy), float(strategy.recompute == "full" or strategy.core_attn)
    seconds = []
    for call, packed, share in ((ours, job.packing, again[0]), (theirs, packing, again[1])):
        sample = packed and packed.sharded(strategy.cp)
        forward, backward = (
            pass_time(call, job.hardware, direction, sample).seconds for direction in Direction
        )
        seconds.append((1 + share) * forward + backward)
    model = job.model
    times = stage_layers(model, strategy) * model.full_layers / model.layers
    times *= job.batch // strategy.dp
    return Gain(
        (times * seconds[0], times * seconds[1]),
        (buffer_bytes(ours), megatron_bytes(theirs.shape, packed=job.packing is not None)),
    )
