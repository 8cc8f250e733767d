"""Peak memory of a training step on the fullest GPU, part by part."""

from dataclasses import dataclass, fields, replace
from functools import lru_cache

from megatron_burst.recompute.auto.budget import in_flight
from megatron_burst.tools.hardware import GIB
from megatron_burst.tools.job.kept import items_of
from megatron_burst.tools.job.layer_time import late_bytes
from megatron_burst.tools.job.model import Model
from megatron_burst.tools.job.strategy import (
    Job,
    Strategy,
    again_layers,
    attention_call,
    busiest_layers,
    stage_layers,
)
from megatron_burst.tools.job.weights import static_bytes
from megatron_burst.tools.simulate.call import buffer_bytes, left_bytes

_LOSS_BYTES = 1 << 30  # of the fused loss, independent of tokens (docs/loss.md)


NAMES = {  # parts of `Memory`, in the order of a plan's table
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "saved": "saved activations",
    "kept": "kept for recomputation",
    "layer": "a layer in backward",
    "head": "LM head and loss",
}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on a GPU of the first pipeline stage, which holds most micro-batches."""

    weights: float  # bf16
    gradients: float  # float32
    optimizer: float  # float32 weights and two moments, sharded over DP x CP ranks
    saved: float  # activations that wait for backward, all layers and micro-batches
    kept: float  # results and modules' outputs, kept for layers whose backward is to come
    # of the layer in backward, at its peak: recomputed activations, gradients, attention's buffers
    # if the peak is in attention
    layer: float
    # logits, or the fused loss's tiles, and the gradient of its input; with PP what the last
    # stage has of it beyond the micro-batches that it need not hold
    head: float
    attention: float  # hop buffers, slots, sums of one attention call; not added to the total
    node: float  # pinned memory of all GPUs of a node

    @property
    def peak(self) -> float:
        """Peak of a GPU: the head and a layer's backward are not at the same time."""
        static = self.weights + self.gradients + self.optimizer
        return static + self.saved + self.kept + max(self.layer, self.head)

    def in_gib(self) -> dict[str, float]:
        """All parts and the peak."""
        parts = {f.name: getattr(self, f.name) / GIB for f in fields(self)}
        return {**parts, "peak": self.peak / GIB}


def memory_of(job: Job, strategy: Strategy) -> Memory:
    """Memory of a step; `misfit` must have found nothing."""
    weights, gradients, optimizer = static_bytes(job, strategy)
    model, layers = job.model, stage_layers(job.model, strategy)
    flights = min(in_flight(strategy.pp, 0), job.batch // strategy.dp)
    last = busiest_layers(model, strategy)
    every = last if strategy.pp == 1 else layers
    a_layer = _layer_bytes(job, _alike(strategy))
    tokens = job.seq // strategy.cp / strategy.tp
    items = items_of(job, strategy)
    kept = sum(item.num_bytes * item.placed.at_peak(flights) for item in items)
    resident = sum(item.num_bytes * item.placed.device for item in items)  # of a micro-batch
    saved, working, of_rest = _layers(job, strategy, every)
    saved *= flights
    if of_rest:  # which run backward while all that others keep waits
        working = max(working, of_rest + resident * flights - kept)
    on_node = sum(item.num_bytes * item.placed.host for item in items) * flights
    if strategy.offload_inputs:
        on_node, saved = on_node + saved, min(saved, 2 * 2 * model.hidden * tokens)
    # all layers wait when the head's backward begins, and nothing is fetched yet
    head = _head(job, strategy) + resident * flights - kept + _joined(job, strategy)
    late = late_bytes(job, strategy, every)
    head, working = head + late[0], working + late[1]
    if strategy.pp > 1:  # the head is on the last stage, where fewer micro-batches wait
        head += (last - layers) * (a_layer.saved + resident / layers)
        head = max(0.0, head - (saved + kept) * (1 - 1 / flights))
    return Memory(
        weights, gradients, optimizer, saved, kept,
        layer=working, head=head, attention=a_layer.buffers, node=on_node * job.on_node,
    )  # fmt: skip


def _layers(job: Job, strategy: Strategy, every: int) -> tuple[float, float, float]:
    """What a stage of so many layers saves of a micro-batch, and what backward needs in addition,
    of layers that are recomputed, and of the others; 0: there are none.

    Layers after the recomputed ones ("block", or `whole`) have their backward first, and free what
    they saved.
    """
    alike = _alike(strategy)
    a_layer = _layer_bytes(job, alike)
    rest = every - again_layers(job.model, strategy) if strategy.recompute == "full" else 0
    if rest <= 0:
        return a_layer.saved * every, a_layer.working, 0.0
    whole = _layer_bytes(job, replace(alike, recompute="none", keep="none"))
    working = a_layer.working - rest * whole.saved if rest < every else 0.0
    return a_layer.saved * (every - rest) + whole.saved * rest, working, whole.working


def whole_bytes(job: Job, strategy: Strategy) -> float:
    """Bytes that a layer which is not recomputed holds for backward beside its input, of a
    micro-batch; of layers that differ the largest one."""
    alike = _alike(strategy)
    inputs = _layer_bytes(job, replace(alike, recompute="full")).saved
    return _layer_bytes(job, replace(alike, recompute="none")).most - inputs


def _alike(strategy: Strategy) -> Strategy:
    """A strategy whose layers need as much: other sizes and what is kept change nothing."""
    return replace(
        strategy, pp=1, dp=1, ep=1, offload=False, offload_inputs=False, keep_budget_gib=None,
        again_layers=None, placed=(), whole=0,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _LayerBytes:
    """Activations of one layer for one sequence.

    Weight gradients add nothing to the peak: the largest exists after the activation's saved
    tensors are freed, which are larger once a rank has two thirds as many tokens as the hidden
    size.
    """

    saved: float  # what waits for backward, the layer's input included; on average
    most: float  # the same of the largest layer
    working: float  # what backward of the layer needs in addition, at its peak
    buffers: float  # of its attention call


@lru_cache(maxsize=1024)
def _layer_bytes(job: Job, strategy: Strategy) -> _LayerBytes:
    model = job.model
    tokens = job.seq // strategy.cp / strategy.tp  # sequence-parallel, or of 1/TP of the heads
    hidden = 2 * model.hidden * tokens
    call = attention_call(job, strategy)
    out = 2 * model.heads_q * model.dim_v * tokens
    qkv = _qkv_bytes(model, strategy, tokens)
    qkv += out if model.gated_attention else 0.0
    norms = 2 * (model.heads_q + model.heads_kv) * model.dim_qk * tokens * model.norms_heads
    # input, its norm, q, k, v, out, lse
    attention = 2 * hidden + qkv + out + 4 * model.heads_q * tokens + norms
    attention += _beside_values(model, strategy, tokens) + left_bytes(call)
    if strategy.core_attn:
        attention -= 4 * model.heads_q * tokens + left_bytes(call)
    buffers = buffer_bytes(call)
    mixers = [(model.softmax_layers, _Mixer(attention, out + qkv + buffers))]
    if model.linear:
        own = model.linear.saved_bytes * tokens
        # gradients of all that is saved, and states with theirs
        grads = own + 2 * model.linear.state_bytes * tokens
        mixers.append((model.linear.count, _Mixer(2 * hidden + own, grads)))
    kinds = _kinds(model, mixers, _feed_forwards(model, strategy.tp, tokens))
    costs = [(count, *_saved(job, strategy, mixer, feed)) for count, mixer, feed in kinds if count]
    saved = sum(count * saved for count, saved, _ in costs) / model.layers
    _, each, working = zip(*costs, strict=True)
    return _LayerBytes(saved, max(each), max(working), buffers)


_Kind = tuple[int, "_Mixer", "_FeedForward"]


def _kinds(
    model: Model, mixers: list[tuple[int, "_Mixer"]], feeds: list[tuple[int, "_FeedForward"]]
) -> list[_Kind]:
    """Kinds of layers, with how many there are: a mixer and the feed-forward that needs most; or,
    of models whose layers are one of both, one."""
    if model.pattern:
        alone = [(count, mixer, _FeedForward(0.0, 0.0)) for count, mixer in mixers]
        return alone + [(count, _Mixer(0.0, 0.0), feed) for count, feed in feeds]
    most = max((feed for count, feed in feeds if count), key=lambda one: one.saved + one.working)
    return [(count, mixer, most) for count, mixer in mixers]


def _saved(
    job: Job, strategy: Strategy, mixer: "_Mixer", feed: "_FeedForward"
) -> tuple[float, float]:
    """What a layer saves, and what its backward needs in addition."""
    model, how = job.model, strategy.recompute
    hidden = 2 * model.hidden * (job.seq // strategy.cp / strategy.tp)
    fed = hidden if feed.saved else 0.0
    after = fed + feed.saved  # the sum with the residual, then the feed-forward's
    norm = fed if model.experts else 0.0  # else it is computed in the first product
    saved = {"none": mixer.saved + after, "selective": mixer.saved + fed + norm, "full": hidden}
    # recomputation restores the rest, and its output is held during backward
    missing = saved["none"] - saved[how]
    again = missing + hidden if missing else 0.0
    gone = after + (fed if how == "selective" else 0.0)  # when backward reaches the mixer
    working = again + max(feed.working, hidden + mixer.grads - gone)  # the layer's gradient too
    return saved[how], working


@dataclass(frozen=True, slots=True)
class _Mixer:
    """Bytes of a layer's attention, softmax or linear, for one sequence."""

    saved: float  # the layer's input, its norm, and what the mixer saves
    grads: float  # of all of that, and what else its backward has at its peak


@dataclass(frozen=True, slots=True)
class _FeedForward:
    """Bytes of a feed-forward for one sequence."""

    saved: float  # its input after the norm, outputs of the first products and the activation
    working: float  # what backward needs beside at its peak, the output's gradient included


def _feed_forwards(model: Model, tp: int, tokens: float) -> list[tuple[int, _FeedForward]]:
    """Feed-forwards, with how many layers have one: with experts, dense."""
    dense = (model.dense_layers, _dense(model, model.ffn, tp, tokens))
    if not model.experts:
        return [dense]
    experts, hidden = model.experts, 2 * model.hidden * tokens
    shared = _dense(model, experts.shared_ffn, tp, tokens)
    inner = 2 * model.expert_width * tokens
    came, width = experts.active * inner, 2 * experts.active * experts.ffn * tokens
    first = _first(model, width)
    # gradients of the experts' outputs exist together with that of the activation's output
    working = hidden + max(first, came + width)
    if experts.shared_ffn:
        working = max(working, shared.working)
    around = 2 * inner if experts.latent else 0.0  # of the products around them, in and out
    routed = _FeedForward(shared.saved + came + first + width + around, working)
    return [(model.moe_layers, routed), dense]


def _dense(model: Model, ffn: int, tp: int, tokens: float) -> _FeedForward:
    """A dense feed-forward.

    Backward peaks at the activation: the gradients of its output and input exist, its output is
    freed. Sequence-parallel layers gather the gradient before that; after it they gather the input
    again, held together with its gradient until that is scattered.
    """
    hidden, width = 2 * model.hidden * tokens, 2 * ffn * tokens
    first, whole = _first(model, width), hidden * tp if tp > 1 else 0.0
    turns = first, whole + width, 2 * whole + hidden - width
    return _FeedForward(hidden + first + width, hidden + max(turns))


def _first(model: Model, width: float) -> float:
    """Bytes of the outputs of the products before the activation."""
    return (2 if model.gated else 1) * width


def _qkv_bytes(model: Model, strategy: Strategy, tokens: float) -> float:
    """Bytes of q, k, v; or of their gradients."""
    heads_kv = max(model.heads_kv, strategy.tp)  # KV heads are repeated on surplus TP ranks
    return 2 * tokens * (model.heads_q * model.dim_qk + heads_kv * (model.dim_qk + model.dim_v))


def _beside_values(model: Model, strategy: Strategy, tokens: float) -> float:
    """Bytes of the fused projection that V is a slice of; V of grouped heads is copied."""
    if strategy.cp == 1 or model.latent or model.heads_q != model.heads_kv:
        return 0.0
    return 2 * tokens * 2 * model.heads_q * model.dim_qk


def _head(job: Job, strategy: Strategy) -> float:
    """The head and its loss on the last stage (which holds fewer micro-batches if PP > 1)."""
    tokens = job.seq // strategy.cp
    passes = 1 + job.model.predicted  # all wait for one backward
    # input of the head and its gradient
    hidden = passes * 2 * 2 * job.model.hidden * tokens / strategy.tp
    if strategy.fused_loss:
        return hidden + _LOSS_BYTES
    # bf16 logits, their float32 softmax, the bf16 gradient
    return hidden + passes * tokens * job.model.vocab / strategy.tp * (2 + 4 + 2)


def _joined(job: Job, strategy: Strategy) -> float:
    """What layers of multi-token prediction save beside a layer's: the embedding; unless it is
    recomputed, its norm, the state's, and both joined."""
    tensors = 1 if strategy.recompute == "full" else 5
    tokens = job.seq // strategy.cp / strategy.tp
    return job.model.predicted * tensors * 2 * job.model.hidden * tokens
