"""Peak memory of a training step on the fullest GPU, part by part."""

from dataclasses import dataclass, fields, replace
from functools import lru_cache

from megatron_burst.recompute.budget import in_flight
from megatron_burst.tools.hardware import GIB
from megatron_burst.tools.job.model import Model
from megatron_burst.tools.job.strategy import (
    Job,
    Strategy,
    attention_call,
    busiest_layers,
    stage_layers,
)
from megatron_burst.tools.simulate.call import buffer_bytes, left_bytes

_LOSS_BYTES = 1 << 30  # of the fused loss, independent of tokens (docs/loss.md)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on a GPU of the first pipeline stage, which holds most micro-batches; `node`: per
    node."""

    weights: float  # bf16
    gradients: float  # float32
    # float32 weights and two moments, sharded over data- and context-parallel ranks
    optimizer: float
    saved: float  # activations that wait for backward, all layers and micro-batches
    kept: float  # attention's results, kept for layers whose backward is to come
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
    weights, gradients, optimizer = _static(job, strategy)
    model, layers = job.model, stage_layers(job.model, strategy)
    flights = min(in_flight(strategy.pp, 0), job.batch // strategy.dp)
    last = busiest_layers(model, strategy)
    waiting = layers * flights if strategy.pp > 1 else last
    # other sizes and offloading do not change what a layer needs
    alike = replace(strategy, pp=1, dp=1, ep=1, offload=False, offload_inputs=False)
    a_layer = _layer_bytes(job, alike)
    tokens = job.seq // strategy.cp / strategy.tp
    saved = a_layer.saved * waiting
    kept = strategy.kept * model.result_bytes * tokens
    all_kept = kept * (waiting - 1)  # the layer being recomputed counts them among its own
    on_node = 0.0
    if strategy.offload:  # the next layer's are being copied back
        on_node, all_kept = on_node + kept * waiting, min(all_kept, kept)
    if strategy.offload_inputs:
        on_node, saved = on_node + saved, min(saved, 2 * 2 * model.hidden * tokens)
    head = _head(job, strategy) + kept  # all layers wait then
    head += _joined(job, strategy)
    if strategy.pp > 1:  # the head is on the last stage, where fewer micro-batches wait
        head += (last - layers) * (a_layer.saved + kept)
        head = max(0.0, head - (saved + all_kept) * (1 - 1 / flights))
    return Memory(
        weights, gradients, optimizer, saved, all_kept,
        layer=a_layer.working, head=head, attention=a_layer.buffers,
        node=on_node * job.on_node,
    )  # fmt: skip


def _static(job: Job, strategy: Strategy) -> tuple[float, float, float]:
    """Weights, gradients, optimizer.

    Source: 6 + 12 / ranks bytes per weight of Megatron's distributed optimizer
    (megatron/training/theoretical_memory_usage.py); its ranks are those of DP x CP.
    """
    dense, experts = params_of_rank(job, strategy)
    expert_ranks = max(1, job.gpus // (strategy.pp * strategy.ep))
    sharded = dense / (strategy.dp * strategy.cp) + experts / expert_ranks
    optimizer = 12 * sharded
    if strategy.fsdp != "none":  # bf16 gradients; two layers gathered, one's gradient whole
        one = layer_params(job, strategy)
        return 2 * sharded + 4 * one, 2 * sharded + 2 * one, optimizer
    return 2 * (dense + experts), 4 * (dense + experts), optimizer


def params_of_rank(job: Job, strategy: Strategy) -> tuple[float, float]:
    """Weights of the largest stage on a rank if only TP and EP shard them: dense ones, experts."""
    model, layers = job.model, stage_layers(job.model, strategy)
    both = 1 if model.tied else 2  # embedding and head; prediction layers need both
    if strategy.pp == 1:
        stages = [(layers, model.predicted, both)]
    else:
        end = model.layers - layers * (strategy.pp - 1)
        stages = [(layers, 0, 1), (end, model.predicted, both if model.predicted else 1)]
    of_stages = (_stage_params(model, *stage) for stage in stages)
    sharded = [(dense / strategy.tp, experts / strategy.ep) for dense, experts in of_stages]
    return max(sharded, key=sum)


def _stage_params(model: Model, layers: int, predicted: int, ends: int) -> tuple[int, int]:
    """Weights of a stage: dense ones, with so many matrices of the vocabulary, and experts."""
    moe = min(layers, model.moe_layers)
    dense = layers * model.attention_params + (layers - moe) * model.dense_params
    dense += moe * model.shared_params + ends * model.embedding_params
    more, experts = model.predicted_params
    return dense + predicted * more, moe * model.expert_params + predicted * experts


def layer_params(job: Job, strategy: Strategy) -> float:
    """Weights of the largest layer on a rank, as FSDP gathers it."""
    model = job.model
    dense = model.dense_params / strategy.tp if model.moe_layers < model.layers else 0.0
    experts = model.shared_params / strategy.tp + model.expert_params / strategy.ep
    return model.attention_params / strategy.tp + max(dense, experts)


@dataclass(frozen=True, slots=True)
class _LayerBytes:
    """Activations of one layer for one sequence.

    Weight gradients add nothing to the peak: the largest exists after the activation's saved
    tensors are freed, which are larger once a rank has two thirds as many tokens as the hidden
    size.
    """

    saved: float  # what waits for backward, the layer's input included
    working: float  # what backward of the layer needs in addition, at its peak
    buffers: float  # of its attention call


@lru_cache(maxsize=1024)
def _layer_bytes(job: Job, strategy: Strategy) -> _LayerBytes:
    model, how = job.model, strategy.recompute
    tokens = job.seq // strategy.cp / strategy.tp  # sequence-parallel, or of 1/TP of the heads
    hidden = 2 * model.hidden * tokens
    call = attention_call(job, strategy)
    out = 2 * model.heads_q * model.dim_v * tokens
    qkv = _qkv_bytes(model, strategy, tokens)
    feed = _feed_forward(model, strategy.tp, tokens)
    # input, its norm, q, k, v, out, lse
    attention = 2 * hidden + qkv + out + 4 * model.heads_q * tokens
    attention += _beside_values(model, strategy, tokens) + left_bytes(call)
    if strategy.core_attn:
        attention -= 4 * model.heads_q * tokens + left_bytes(call)
    after = hidden + feed.saved  # the sum with the residual, then the feed-forward's
    norm = hidden if model.experts else 0.0  # else it is computed in the first product
    saved = {"none": attention + after, "selective": attention + hidden + norm, "full": hidden}
    # recomputation restores the rest, and its output is held during backward
    again = 0.0 if how == "none" else saved["none"] - saved[how] + hidden
    gone = after + (hidden if how == "selective" else 0.0)  # when backward reaches attention
    buffers = buffer_bytes(call)
    attending = hidden + out + qkv + buffers  # gradients: of the layer, out, q, k, v
    working = again + max(feed.working, attending - gone)
    return _LayerBytes(saved[how], working, buffers)


@dataclass(frozen=True, slots=True)
class _FeedForward:
    """Bytes of a feed-forward for one sequence."""

    # its input after the norm, the first products' outputs, and the activation's output
    saved: float
    # what backward needs in addition at its peak, including the gradient of the layer's output
    working: float


def _feed_forward(model: Model, tp: int, tokens: float) -> _FeedForward:
    """A layer's feed-forward; with experts, the kind of layer that needs most."""
    dense = _dense(model, model.ffn, tp, tokens)
    if not model.experts:
        return dense
    experts, hidden = model.experts, 2 * model.hidden * tokens
    shared = _dense(model, experts.shared_ffn, tp, tokens)
    came, width = experts.active * hidden, 2 * experts.active * experts.ffn * tokens
    first = _first(model, width)
    # gradients of the experts' outputs exist together with that of the activation's output
    working = hidden + max(first, came + width)
    if experts.shared_ffn:
        working = max(working, shared.working)
    routed = _FeedForward(shared.saved + came + first + width, working)
    kinds = [routed, dense] if experts.dense_layers else [routed]
    return max(kinds, key=lambda one: one.saved + one.working)


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
