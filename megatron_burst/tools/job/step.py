"""Time of a training step: attention simulated, the rest counted, pipeline bubbles included; and
coefficients of a micro-batch's seconds, fitted to simulated ones."""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_burst.balance.costs import Costs, Measured, fit
from megatron_burst.schedule.layout import Layout
from megatron_burst.tools.job.layer_time import (
    BUBBLE,
    HEAD,
    HOST,
    MATMUL,
    UPDATE,
    Layer,
    head_seconds,
    host_seconds,
)
from megatron_burst.tools.job.memory import Memory
from megatron_burst.tools.job.strategy import Job, Strategy, busiest_layers, least_multiple
from megatron_burst.tools.job.transfers import boundary_seconds, sharded_seconds, update_seconds
from megatron_burst.tools.simulate.call import AttentionCall
from megatron_burst.tools.simulate.kernels import Timer
from megatron_burst.tools.simulate.sample import Packing, Sample

_DOCUMENTS = 1, 4, 16, 64  # of a micro-batch, all of one length
_PARTS = 1, 4  # of the job's tokens: whole micro-batches and small ones
_LEAST = 4  # times the shortest document that every rank has a part of


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step."""

    seconds: float  # of a step
    parts: tuple[tuple[str, float], ...]  # that add up to it, on the slowest pipeline stage
    tokens_per_gpu: float  # tokens a second and GPU
    mfu: float  # model FLOPs (`Model.flops_per_token`) over the peak

    @property
    def tokens(self) -> str:
        """Tokens a second and GPU, as people write them."""
        number = self.tokens_per_gpu
        return f"{number:.4g}" if number < 1000 else f"{number:,.0f}"


def step_time(
    job: Job, strategy: Strategy, memory: Memory, call: AttentionCall | None = None
) -> StepTime:
    """Time of a step that needs this memory; `misfit` must have found nothing. `call`: the
    attention call, if not burst's."""
    micro_batches = job.batch // strategy.dp
    one, backward = stage_parts(job, strategy, call)
    if strategy.pp > 1:
        one[BUBBLE] = 2 * boundary_seconds(job, strategy)
    stage = sum(one.values())
    parts = defaultdict(float, {part: each * micro_batches for part, each in one.items()})
    parts[BUBBLE] += stage * (strategy.pp - 1)
    if strategy.fsdp == "none":
        sent = memory.weights + memory.gradients
        parts[UPDATE] = update_seconds(job, strategy, sent, backward)
    else:
        parts[UPDATE] = sharded_seconds(job, strategy, stage) * micro_batches
    parts[UPDATE] += Timer(job.hardware).memory(2.5 * memory.optimizer)
    seconds = sum(parts.values())
    tokens = job.batch * job.seq / seconds / job.gpus
    peak = job.hardware.gpu.peak_tflops * 1e12
    mfu = tokens * job.model.flops_per_token(job.seq, job.share) / peak
    return StepTime(seconds, tuple(sorted(parts.items(), key=lambda p: -p[1])), tokens, mfu)


@lru_cache(maxsize=8192)
def _layer(
    job: Job, strategy: Strategy, call: AttentionCall | None
) -> tuple[tuple[tuple[str, float], ...], float, float]:
    """Seconds of an average layer by part, of its backward, and of its forward."""
    layer = Layer(job, strategy, call)
    return tuple(layer.parts().items()), layer.backward, layer.forward


def stage_parts(
    job: Job, strategy: Strategy, call: AttentionCall | None = None
) -> tuple[dict[str, float], float]:
    """Seconds of a micro-batch by part on the pipeline stage that computes most, without transfers
    between stages; and of its layers' backward. `call`: the attention call, if not burst's."""
    # a layer is the same for every micro-batch, and in every stage but for what it keeps
    alike = replace(strategy, dp=1, pp=strategy.pp if strategy.recompute == "full" else 1)
    layer_parts, layer_backward, forward = _layer(job, alike, call)
    layers = busiest_layers(job.model, strategy)
    one: dict[str, float] = defaultdict(float)
    for part, seconds in layer_parts:
        one[part] = seconds * layers
    one[HEAD] = head_seconds(job, strategy) * (1 + job.model.predicted)
    one[MATMUL] += _joined_seconds(job, strategy)
    head = one[HEAD] if strategy.pp == 1 else 0.0
    of_layer = forward, sum(seconds for _, seconds in layer_parts)
    one[HOST] = host_seconds(job, strategy, of_layer, layers, head)
    return one, layer_backward * layers


def _joined_seconds(job: Job, strategy: Strategy) -> float:
    """Products that join states with embeddings before layers of multi-token prediction."""
    passes = 3 + (strategy.recompute == "full")
    flops = 2 * passes * job.model.predicted * 2 * job.model.hidden**2
    return Timer(job.hardware).matmul(flops * (job.seq // strategy.cp) / strategy.tp)


def micro_batch_seconds(job: Job, strategy: Strategy, lengths: tuple[int, ...]) -> float:
    """Seconds of a micro-batch of documents sharded individually (THD), on the slowest stage."""
    sample = Sample.of(lengths).padded(least_multiple(strategy))
    packed = replace(job, seq=sample.tokens, packing=Packing(Layout.DOCUMENTS, sample))
    parts, _ = stage_parts(packed, strategy)
    return sum(parts.values())


def costs_of(job: Job, strategy: Strategy) -> Costs | None:
    """Coefficients for a strategy and for sub-groups of its context-parallel ranks; None if
    sequences are too short to tell them apart.

    A rank has as many tokens at every size, up to the job's sequence over the strategy's CP.
    """
    if job.seq < _LEAST * least_multiple(strategy):
        return None
    measured = []
    sizes = [1 << n for n in range(strategy.cp.bit_length()) if strategy.cp % (1 << n) == 0]
    for size in sorted({*sizes, strategy.cp}):
        narrow = replace(strategy, cp=size)
        step = least_multiple(narrow)
        for part in _PARTS:
            for count in _DOCUMENTS:
                length = max(step, job.seq * size // strategy.cp // part // count // step * step)
                seconds = micro_batch_seconds(job, narrow, (length,) * count)
                area = count * length * (length + 1) // 2
                measured.append(Measured(count * length, area, size, seconds))
    return fit(measured)
