"""Time of a training step: attention simulated, the rest counted, pipeline bubbles included."""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_burst.recompute.later_plan import recomputed_share
from megatron_burst.schedule.spec import AttentionShape, Direction
from megatron_burst.schedule.topology import Link
from megatron_burst.tools.job.memory import Memory
from megatron_burst.tools.job.strategy import (
    Job,
    Strategy,
    attention_call,
    busiest_layers,
    ranks_per_node,
)
from megatron_burst.tools.job.transfers import (
    all_to_all_seconds,
    boundary_seconds,
    sharded_seconds,
    update_seconds,
)
from megatron_burst.tools.simulate.call import AttentionCall, pass_time
from megatron_burst.tools.simulate.kernels import Timer

# Parts of a step, as named in tables and errors.
ATTENTION, MATMUL, ELEMENTWISE = "attention kernels", "matrix products", "element-wise kernels"
INTRA, INTER = "waiting for NVLink", "waiting for the network"
TENSOR, EXPERT = "tensor-parallel transfers", "expert-parallel transfers"
HOST, HEAD, BUBBLE = "waiting for host copies", "LM head and loss", "pipeline bubble"
LINEAR = "linear attention"
AGAIN, UPDATE = "computing again, the rest", "gradients and optimizer"
ATTENTION_AGAIN = "computing again, attention kernels"


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step."""

    seconds: float  # of a step
    # what they are made of, on the slowest pipeline stage; they add up
    parts: tuple[tuple[str, float], ...]
    tokens_per_gpu: float  # tokens a second and GPU
    mfu: float  # model FLOPs (`Model.flops_per_token`) over the peak

    @property
    def tokens(self) -> str:
        """Tokens a second and GPU, as people write them."""
        return f"{self.tokens_per_gpu:.4g}"


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
        parts[UPDATE] = update_seconds(job, strategy, memory, backward)
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
) -> tuple[tuple[tuple[str, float], ...], float]:
    """Seconds of an average layer by part, and of its backward."""
    layer = _Layer(job, strategy, call)
    return tuple(layer.parts().items()), layer.backward


def stage_parts(
    job: Job, strategy: Strategy, call: AttentionCall | None = None
) -> tuple[dict[str, float], float]:
    """Seconds of a micro-batch by part on the pipeline stage that computes most, without transfers
    between stages; and of its layers' backward. `call`: the attention call, if not burst's."""
    # a layer is the same in every stage and for every micro-batch
    layer_parts, layer_backward = _layer(job, replace(strategy, pp=1, dp=1), call)
    layers = busiest_layers(job.model, strategy)
    one: dict[str, float] = defaultdict(float)
    for part, seconds in layer_parts:
        one[part] = seconds * layers
    one[HEAD] = _head_seconds(job, strategy) * (1 + job.model.predicted)
    one[MATMUL] += _joined_seconds(job, strategy)
    return one, layer_backward * layers


def layer_seconds(job: Job, strategy: Strategy, call: AttentionCall | None = None) -> float:
    """Time of an average layer, forward, recomputation and backward, for one sequence; `call`: the
    attention call, if not burst's."""
    return sum(_Layer(job, strategy, call).parts().values())


class _Layer:
    """Time of an average layer of a stage, with recomputation, for one micro-batch."""

    def __init__(self, job: Job, strategy: Strategy, call: AttentionCall | None = None) -> None:
        self._job, self._strategy = job, strategy
        self._timer = Timer(job.hardware)
        self._tokens = job.seq // strategy.cp
        call = call or attention_call(job, strategy)
        sample = job.packing and job.packing.sharded(strategy.cp)
        self._passes = {d: pass_time(call, job.hardware, d, sample) for d in Direction}
        model = job.model
        self._full = model.full_layers / model.layers
        self._windows = {d: self._window_seconds(call.shape, d) for d in Direction}
        self._mlp = model.active_feed_params
        self.backward = 2 * self._matmul(model.mixer_params + self._mlp) + 2 * self._linear()
        backward = Direction.BACKWARD
        self.backward += self._full * self._passes[backward].seconds + self._windows[backward]

    def _window_seconds(self, shape: AttentionShape, direction: Direction) -> float:
        """Seconds of windowed kernels, averaged over all layers; few keys come from other ranks."""
        model = self._job.model
        if not model.windows:
            return 0.0
        seconds = self._timer.window(
            model.windows.keys(self._job.seq, self._job.share), shape, direction
        )
        return seconds * model.windows.count / model.layers

    def _matmul(self, params: float) -> float:
        return self._timer.matmul(2 * params * self._tokens / self._strategy.tp)

    def parts(self) -> dict[str, float]:
        """Seconds by part."""
        parts: dict[str, float] = defaultdict(float)
        again = recomputed(self._job, self._strategy)
        for direction, timeline in self._passes.items():
            times = self._full * (1 + (again if direction is Direction.FORWARD else 0))
            waits = 0.0
            for link, name in ((Link.INTRA, INTRA), (Link.INTER, INTER)):
                parts[name] += timeline.exposed(link) * times
                waits += timeline.exposed(link)
            kernels = self._full * (timeline.seconds - waits) + self._windows[direction]
            parts[ATTENTION] += kernels
            if direction is Direction.FORWARD:
                parts[ATTENTION_AGAIN] += again * kernels
        params = self._job.model.mixer_params + self._mlp
        parts[LINEAR] += 3 * self._linear()
        parts[MATMUL] += 3 * self._matmul(params)
        parts[ELEMENTWISE] += 3 * self._elementwise()
        parts[TENSOR] += 2 * self._tensor_seconds()
        parts[EXPERT] += 2 * self._expert_seconds()
        weights = {"none": 0.0, "selective": self._mlp, "full": params}[self._strategy.recompute]
        parts[AGAIN] += self._matmul(weights)
        parts[AGAIN] += self._linear() if self._strategy.recompute == "full" else 0.0
        share = weights / params
        parts[AGAIN] += share * self._elementwise()
        parts[TENSOR] += share * self._tensor_seconds()
        parts[EXPERT] += self._expert_seconds() if share else 0.0
        parts[HOST] += self._host_seconds(sum(parts.values()))
        return parts

    def _elementwise(self) -> float:
        """Forward: norms, residuals, rotary embedding, activation; read and written once each."""
        model = self._job.model
        width = model.heads_q * model.dim_qk + model.heads_kv * (model.dim_qk + model.dim_v)
        ffn = model.ffn
        if model.experts:
            ffn = model.experts.shared_ffn + model.experts.active * (
                model.experts.ffn + model.hidden
            )
        feeds = (model.dense_layers + model.moe_layers) / model.layers
        num_bytes = 10 * model.halves * model.hidden + 8 * width * model.softmax_share
        num_bytes += 6 * ffn * feeds
        return self._timer.memory(num_bytes * self._tokens / self._strategy.tp)

    def _linear(self) -> float:
        """Forward of linear attention between its products, and its all-to-alls, all exposed."""
        linear, strategy = self._job.model.linear, self._strategy
        if not linear:
            return 0.0
        tokens = self._tokens / strategy.tp
        seconds = self._timer.matmul(linear.flops * tokens)
        seconds += self._timer.memory(linear.traffic * tokens)
        sent = linear.sent_bytes(strategy.cp) * tokens * (1 - 1 / strategy.cp)
        nodes = strategy.cp / ranks_per_node(self._job, strategy)
        seconds += all_to_all_seconds(self._job, sent, nodes)
        return seconds * linear.count / self._job.model.layers

    def _tensor_seconds(self) -> float:
        """One pass: a gather and a scatter of the hidden states (sequence parallelism) for the
        mixer, and for the feed-forward."""
        tp = self._strategy.tp
        moved = 2 * self._job.model.hidden * self._tokens * (tp - 1) / tp
        return 2 * self._job.model.halves * self._job.hardware.links.intra.seconds(moved)

    def _expert_seconds(self) -> float:
        """One pass: tokens to their experts and back, all exposed."""
        model, strategy = self._job.model, self._strategy
        if not model.experts or strategy.ep == 1:
            return 0.0
        moved = model.experts.active * 2 * model.hidden * self._tokens / strategy.tp
        moved *= 1 - 1 / strategy.ep
        seconds = all_to_all_seconds(self._job, moved, strategy.ep / self._job.on_node)
        return 2 * seconds * model.moe_layers / model.layers

    def _host_seconds(self, layer_seconds: float) -> float:
        """Exposed time of offloading in forward and copying back in backward."""
        job, strategy = self._job, self._strategy
        moved = strategy.kept * strategy.offload * job.model.result_bytes
        moved *= job.model.softmax_share
        moved += 2 * job.model.hidden * strategy.offload_inputs
        moved *= self._tokens / strategy.tp
        seconds = moved / (job.hardware.gpu.host_gbs * 1e9)
        forward = layer_seconds * 0.25  # backward has at least twice that
        return max(0.0, seconds - forward) + max(0.0, seconds - 3 * forward)


def recomputed(job: Job, strategy: Strategy) -> float:
    """Share of attention's forward that backward recomputes."""
    if strategy.recompute != "full":
        return float(strategy.core_attn)
    if strategy.keep == "half":
        return recomputed_share(attention_call(job, strategy))
    return float(strategy.keep == "none")


def _head_seconds(job: Job, strategy: Strategy) -> float:
    """Head and its backward: four products. The fused loss computes logits again; for Megatron's
    own, passes over all logits take about as long (docs/benchmarks/loss-rows.md)."""
    flops = 2 * 4 * job.model.embedding_params * (job.seq // strategy.cp) / strategy.tp
    return Timer(job.hardware).matmul(flops)


def _joined_seconds(job: Job, strategy: Strategy) -> float:
    """Products that join states with embeddings before layers of multi-token prediction."""
    passes = 3 + (strategy.recompute == "full")
    flops = 2 * passes * job.model.predicted * 2 * job.model.hidden**2
    return Timer(job.hardware).matmul(flops * (job.seq // strategy.cp) / strategy.tp)
