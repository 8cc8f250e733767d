"""Peak memory of a training step on the fullest GPU, part by part."""

from dataclasses import dataclass, fields

from megatron_burst.plan.buffers import buffer_bytes
from megatron_burst.plan.hardware import GIB
from megatron_burst.plan.keep import in_flight
from megatron_burst.plan.strategy import Job, Strategy, attention_call, stage_layers

_LOSS_BYTES = 1 << 30  # of the fused loss, whatever the number of tokens (docs/loss.md)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the first pipeline stage's GPU, which holds most micro-batches; host is a host's.

    Attributes:
        weights: bf16.
        gradients: float32.
        optimizer: float32 weights and two moments, dealt out over data and context parallel ranks.
        saved: activations that wait for backward, all layers and micro-batches.
        kept: attention's results for replays.
        layer: of one layer in backward: what recomputation brings back, and gradients.
        attention: hop buffers, slots, sums of one attention call; at another time than the
            feed-forward's share of `layer`, so whichever is more counts there.
        head: logits, or the fused loss's tiles, and the gradient of its input; with PP what the
            last stage has of it beyond the micro-batches that it need not hold.
        host: pinned memory of all GPUs of a host.
    """

    weights: float
    gradients: float
    optimizer: float
    saved: float
    kept: float
    layer: float
    attention: float
    head: float
    host: float

    @property
    def peak(self) -> float:
        """Of a GPU: the head's turn and a layer's backward are not at the same time."""
        static = self.weights + self.gradients + self.optimizer
        return static + self.saved + self.kept + max(self.layer + self.attention, self.head)

    def in_gib(self) -> dict[str, float]:
        """All parts and the peak."""
        parts = {f.name: getattr(self, f.name) / GIB for f in fields(self)}
        return {**parts, "peak": self.peak / GIB}


def memory_of(job: Job, strategy: Strategy) -> Memory:
    """Memory of a step; `misfit` must have found nothing."""
    weights, gradients, optimizer = _static(job, strategy)
    model, layers = job.model, stage_layers(job.model, strategy)
    tokens = job.seq // strategy.cp / strategy.tp  # with sequence parallelism
    flights = min(in_flight(strategy.pp, 0), job.batch // strategy.dp)
    waiting = layers * flights
    a_layer = _LayerBytes(job, strategy)
    inputs = 2 * model.hidden * tokens
    out = model.heads_q * (2 * model.dim_v + 4) * tokens
    kept = {"none": 0.0, "half": out / 2, "all": out}[strategy.keep]
    on_host = 0.0
    saved = a_layer.saved[strategy.recompute] * waiting
    all_kept = kept * waiting if strategy.recompute == "full" else 0.0
    if strategy.offload:  # two layers' worth is on its way
        on_host, all_kept = on_host + all_kept, min(all_kept, 2 * kept)
    if strategy.offload_inputs:
        on_host, saved = on_host + saved, min(saved, 2 * inputs)
    head = _head(job, strategy)
    if strategy.pp > 1:  # the head is on the last stage, where fewer micro-batches wait
        head = max(0.0, head - (saved + all_kept) * (1 - 1 / flights))
    return Memory(
        weights, gradients, optimizer, saved, all_kept,
        layer=a_layer.working, attention=buffer_bytes(attention_call(job, strategy)),
        head=head,
        host=on_host * job.on_host,
    )  # fmt: skip


def _static(job: Job, strategy: Strategy) -> tuple[float, float, float]:
    """Weights, gradients, optimizer.

    Source: 6 + 12 / ranks bytes a weight of Megatron's distributed optimizer
    (megatron/training/theoretical_memory_usage.py); its ranks are those of DP x CP.
    """
    model, layers = job.model, stage_layers(job.model, strategy)
    moe = min(layers, model.moe_layers)
    dense = layers * model.attention_params + (layers - moe) * model.dense_params
    dense += moe * model.shared_params
    dense += model.embedding_params * (2 if strategy.pp == 1 and not model.tied else 1)
    dense /= strategy.tp
    experts = moe * model.expert_params / strategy.ep
    ranks = strategy.dp * strategy.cp
    expert_ranks = max(1, job.gpus // (strategy.pp * strategy.ep))
    optimizer = 12 * (dense / ranks + experts / expert_ranks)
    if strategy.shard_weights:  # bf16 gradients; two layers' weights gathered, one's gradient whole
        one = (model.attention_params + model.dense_params) / strategy.tp
        return 2 * dense / ranks + 4 * one, 2 * dense / ranks + 2 * one, optimizer
    return 2 * (dense + experts), 4 * (dense + experts), optimizer


class _LayerBytes:
    """Activations of one layer for one sequence.

    Attributes:
        saved: what waits for backward, by recomputation.
        working: what backward of the layer needs beside that and the attention call's buffers.
    """

    def __init__(self, job: Job, strategy: Strategy) -> None:
        model = job.model
        tokens = job.seq // strategy.cp / strategy.tp
        hidden = 2 * model.hidden * tokens
        heads_kv = max(model.heads_kv, strategy.tp)  # key heads are repeated on surplus TP ranks
        qkv = model.heads_q * model.dim_qk + heads_kv * (model.dim_qk + model.dim_v)
        qkv *= 2 * tokens
        out = model.heads_q * (2 * model.dim_v + 4) * tokens
        width = model.ffn
        routed = 0.0
        if model.experts:
            width = model.experts.shared_ffn
            routed = model.experts.active * (model.hidden + 3 * model.experts.ffn) * 2 * tokens
            dense = 2 * 3 * model.ffn * tokens
            routed = max(routed, dense - 6 * width * tokens)  # the first layers may be dense
        gated = 3 if model.gated else 2
        mlp = 2 * gated * width * tokens + routed + hidden
        call = attention_call(job, strategy)
        attention = 2 * hidden + qkv + out  # input, its norm, q, k, v, out and lse
        attention += call.left_bytes
        self.saved = {
            "none": attention + hidden + mlp,
            "selective": attention + 2 * hidden,
            "full": hidden,
        }
        # gradients of the feed-forward are as large as what it saved
        in_mlp = {"none": mlp, "selective": 2 * mlp, "full": attention + 2 * mlp}
        grads = qkv + 2 * hidden  # dq, dk, dv, dout and that of the layer's output
        in_attention = {"none": grads, "selective": grads, "full": attention + grads}
        buffers = buffer_bytes(call)
        here = max(in_mlp[strategy.recompute] - buffers, in_attention[strategy.recompute])
        self.working = here


def _head(job: Job, strategy: Strategy) -> float:
    """The head and its loss on the last stage (which holds fewer micro-batches if PP > 1)."""
    tokens = job.seq // strategy.cp
    hidden = 2 * 2 * job.model.hidden * tokens / strategy.tp  # input of the head and its gradient
    if strategy.fused_loss:
        return hidden + _LOSS_BYTES
    # bf16 logits, their float32 softmax, the bf16 gradient
    return hidden + tokens * job.model.vocab / strategy.tp * (2 + 4 + 2)
