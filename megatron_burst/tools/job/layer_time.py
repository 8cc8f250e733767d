"""Time of a layer's parts, of its attention, and of what it copies to the host."""

from collections import defaultdict

from megatron_burst.recompute.auto.budget import LAYERS_BEHIND
from megatron_burst.recompute.later_plan import recomputed_share
from megatron_burst.schedule.spec import AttentionShape, Direction
from megatron_burst.schedule.topology import Link
from megatron_burst.tools.job.kept import host_bytes, saved_by
from megatron_burst.tools.job.strategy import Job, Strategy, attention_call, ranks_per_node
from megatron_burst.tools.job.transfers import all_to_all_seconds
from megatron_burst.tools.simulate.call import AttentionCall, pass_time
from megatron_burst.tools.simulate.kernels import Timer

# Parts of a step, as named in tables and errors.
ATTENTION, MATMUL, ELEMENTWISE = "attention kernels", "matrix products", "element-wise kernels"
INTRA, INTER = "waiting for NVLink", "waiting for the network"
TENSOR, EXPERT = "tensor-parallel transfers", "expert-parallel transfers"
HOST, HEAD, BUBBLE = "waiting for host copies", "LM head and loss", "pipeline bubble"
LINEAR = "linear attention"
AGAIN, UPDATE = "recomputation beside attention", "gradients and optimizer"
ATTENTION_AGAIN = "recomputation of attention"


class Layer:
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
        attention = {d: self._full * self._passes[d].seconds + self._windows[d] for d in Direction}
        self.attention = attention[Direction.FORWARD]  # seconds of its forward
        self.backward = 2 * self._matmul(model.mixer_params + self._mlp) + 2 * self._linear()
        self.backward += attention[Direction.BACKWARD]

    @property
    def forward(self) -> float:
        """Seconds of its forward."""
        seconds = self._matmul(self._job.model.mixer_params + self._mlp) + self._linear()
        seconds += self.attention
        return seconds + self._elementwise() + self._tensor_seconds() + self._expert_seconds()

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
        saved, is_full = saved_by(self._job, self._strategy), self._strategy.recompute == "full"
        share = self._mlp / params if self._strategy.recompute == "selective" else saved.again
        parts[AGAIN] += share * self._matmul(params) - self._timer.matmul(saved.flops)
        parts[AGAIN] += share * self._linear() * is_full
        parts[AGAIN] += share * self._elementwise() - saved.norms * self._norm()
        parts[TENSOR] += (share - saved.transfers / 4) * self._tensor_seconds()
        parts[EXPERT] += self._expert_seconds() * (share if is_full else bool(share))
        return parts

    def _norm(self) -> float:
        """Forward of a norm of the hidden states, of those in `_elementwise`."""
        num_bytes = 4 * self._job.model.hidden * self._tokens / self._strategy.tp
        return num_bytes / (self._job.hardware.gpu.memory_gbs * 1e9)

    def _elementwise(self) -> float:
        """Forward: norms, residuals, rotary embedding, activation; read and written once each."""
        model = self._job.model
        width = model.heads_q * model.dim_qk + model.heads_kv * (model.dim_qk + model.dim_v)
        ffn = model.ffn
        if model.experts:
            ffn = model.experts.shared_ffn + model.experts.active * (
                model.experts.ffn + model.expert_width
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
        traffic = 2 * (linear.saved_bytes + linear.state_bytes)  # written and read again
        seconds += self._timer.memory(traffic * tokens)
        sent = linear.sent_bytes(strategy.cp) * tokens * (1 - 1 / strategy.cp)
        nodes = strategy.cp / ranks_per_node(self._job, strategy)
        seconds += all_to_all_seconds(self._job, sent, nodes)
        return seconds * linear.count / self._job.model.layers

    def _tensor_seconds(self) -> float:
        """One pass: the mixer and the feed-forward each gather and scatter the hidden states."""
        tp = self._strategy.tp
        moved = 2 * self._job.model.hidden * self._tokens * (tp - 1) / tp
        return 2 * self._job.model.halves * self._job.hardware.links.intra.seconds(moved)

    def _expert_seconds(self) -> float:
        """One pass: tokens to their experts and back, all exposed."""
        model, strategy = self._job.model, self._strategy
        if not model.experts or strategy.ep == 1:
            return 0.0
        moved = model.experts.active * 2 * model.expert_width * self._tokens / strategy.tp
        moved *= 1 - 1 / strategy.ep
        seconds = all_to_all_seconds(self._job, moved, strategy.ep / self._job.on_node)
        return 2 * seconds * model.moe_layers / model.layers


def layer_seconds(job: Job, strategy: Strategy, call: AttentionCall | None = None) -> float:
    """Time of an average layer in all passes of a sequence; `call`: attention, if not burst's."""
    layer, layers = Layer(job, strategy, call), job.model.layers
    seconds = sum(layer.parts().values())
    return seconds + host_seconds(job, strategy, (layer.forward, seconds), layers) / layers


def recomputed(job: Job, strategy: Strategy) -> float:
    """Share of attention's forward that backward recomputes."""
    if strategy.recompute != "full":
        return float(strategy.core_attn)
    saved = saved_by(job, strategy)
    share = saved.again - saved.attention
    if saved.half:
        share -= saved.half * (1 - recomputed_share(attention_call(job, strategy)))
    return share


def host_seconds(
    job: Job, strategy: Strategy, seconds: tuple[float, float], layers: int, head: float = 0.0
) -> float:
    """Exposed time of offloading and copying back in a micro-batch.

    All copies are made in order. Those to the host hide behind the layers' forward, which waits if
    they are too many layers behind, then the head and the last layer's backward; a layer's copy
    back, which starts with the backward of the one behind it, hides behind that. `seconds`: of an
    average layer's forward, and of all of it; `head`: of the stage's head and loss.
    """
    moved, count = host_bytes(job, strategy)
    if not count:
        return 0.0
    forward, backward = seconds[0], seconds[1] - seconds[0]
    there = moved / (job.hardware.gpu.host_gbs * 1e9)
    back = there / count
    waits, late = _behind(there, back, (layers - 1) * forward)
    late = max(0.0, late - head)
    return waits + max(0.0, late + back - backward) + (count - 1) * max(0.0, back - backward)


def _behind(there: float, back: float, hides: float) -> tuple[float, float]:
    """How long the layers' forward, which hides so many seconds, waits for copies to the host; and
    how many seconds of these are left at its end. They take `there` in all, `back` for a layer."""
    late, most = max(0.0, there - hides), LAYERS_BEHIND * back
    return max(0.0, late - most), min(late, most)


def late_bytes(job: Job, strategy: Strategy, layers: int) -> tuple[float, float]:
    """Bytes that still wait for their copy to the host when the head begins, and when it ends."""
    moved, count = host_bytes(job, strategy)
    if not count:
        return 0.0, 0.0
    rate = job.hardware.gpu.host_gbs * 1e9
    there, hides = moved / rate, (layers - 1) * Layer(job, strategy).forward
    _, late = _behind(there, there / count, hides)
    head = head_seconds(job, strategy) if strategy.pp == 1 else 0.0
    return rate * late, rate * max(0.0, late - head)


def head_seconds(job: Job, strategy: Strategy) -> float:
    """Head and its backward: four products. The fused loss computes logits again; for Megatron's
    own, passes over all logits take about as long (docs/benchmarks/loss.md)."""
    flops = 2 * 4 * job.model.embedding_params * (job.seq // strategy.cp) / strategy.tp
    return Timer(job.hardware).matmul(flops)
