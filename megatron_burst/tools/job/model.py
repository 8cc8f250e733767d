"""The properties of a transformer that its training time and memory depend on."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_burst.errors import require
from megatron_burst.tools.job.layers import Experts, Latent, Windows
from megatron_burst.tools.job.linear import Linear

_WIDEST = 256  # head dimension of kernels on GPUs


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder; every layer has causal attention, softmax or linear."""

    name: str  # of the preset or the file
    layers: int  # number of them
    hidden: int  # width
    heads_q: int  # query heads
    heads_kv: int  # KV heads; divides heads_q
    dim_qk: int  # head dimension of queries and keys
    dim_v: int  # head dimension of values
    ffn: int  # width of the dense feed-forward
    vocab: int  # classes
    gated: bool = True  # whether the feed-forward has a gate (SwiGLU), a third matrix
    tied: bool = False  # whether embedding and head share a weight
    experts: Experts | None = None  # of MoE models
    latent: Latent | None = None  # of latent attention, whose heads are expanded for training
    windows: Windows | None = None  # of models with layers of sliding-window attention
    linear: Linear | None = None  # of models with layers of linear attention
    # of models whose layers are either a mixer or a feed-forward: a letter a layer, those of
    # Megatron's --hybrid-layer-pattern (M Mamba, G gated delta net, * and + attention,
    # - feed-forward, E experts)
    pattern: str = ""
    # whether it is a HybridModel without `pattern`: each of its layers is two letters, such as *-
    hybrid: bool = False
    gated_attention: bool = False  # whether a gate as wide as the queries multiplies the output
    sinks: bool = False  # whether the softmax has a learned sink for each head
    biases: bool = False  # whether linear layers have biases
    # layers of multi-token prediction, each like the last layer, and a pass of the head more
    predicted: int = 0
    # Megatron's flags without a field here, with their values; norms of q and k take memory
    beside: tuple[tuple[str, int | float | str | bool | tuple[int, ...]], ...] = ()
    # entries of its config that no flag here says: its flags would be those of another model
    unknown: tuple[str, ...] = ()
    towers: tuple[str, ...] = ()  # entries of its config that are parts beside it, not counted

    def __post_init__(self) -> None:
        names = ("layers", "hidden", "heads_q", "heads_kv", "dim_qk", "dim_v", "ffn", "vocab")
        wrong = [name for name in names if getattr(self, name) < 1]
        if not wrong and self.heads_q % self.heads_kv:
            wrong = ["heads_q", "heads_kv"]
        got = ", ".join(f"{name} {getattr(self, name)}" for name in wrong)
        require("model", [(not wrong, "all sizes must be positive and KV heads must divide query "
                           "heads, because each KV head serves equally many query heads", got,
                           f"correct {self.name}")])  # fmt: skip
        widest = max(self.dim_qk, self.dim_v)
        require("plan", [(widest <= _WIDEST, f"heads must have at most {_WIDEST} dimensions, "
                          "because on GPUs only plain PyTorch computes wider heads, and it is too "
                          "slow to plan", f"heads of {widest}",
                          f"plan another model than {self.name}")])  # fmt: skip

    @property
    def base_name(self) -> str:
        """The name without the folders of its file; a config.json with the last of them."""
        path = Path(self.name)
        if not path.suffix:
            return self.name
        return f"{path.parent.name}/{path.name}".lstrip("/") if path.stem == "config" else path.name

    @property
    def norms_heads(self) -> bool:
        """Whether each head of q and k has a norm; of latent attention low ranks have."""
        return dict(self.beside).get("--qk-layernorm") is True and not self.latent

    def attention_products(self) -> Iterator[tuple[str, int, int]]:
        """Names, inputs and outputs of attention's products."""
        heads, hidden = self.heads_q, self.hidden
        yield "linear_proj", heads * self.dim_v, hidden
        if not self.latent:
            keys = self.heads_kv * (self.dim_qk + self.dim_v)
            queries = heads * self.dim_qk * (2 if self.gated_attention else 1)
            yield "linear_qkv", hidden, queries + keys
            return
        low, rope = self.latent, self.latent.rope_dim
        if low.q_rank:
            yield "linear_q_down_proj", hidden, low.q_rank
            yield "linear_q_up_proj", low.q_rank, heads * self.dim_qk
        else:
            yield "linear_q_proj", hidden, heads * self.dim_qk
        yield "linear_kv_down_proj", hidden, low.kv_rank + rope
        yield "linear_kv_up_proj", low.kv_rank, heads * (self.dim_qk - rope + self.dim_v)

    @property
    def attention_params(self) -> int:
        """Weights of a layer's softmax attention."""
        return sum(inner * width for _, inner, width in self.attention_products())

    @property
    def mixer_params(self) -> float:
        """Weights of an average layer's mixer: attention, softmax or linear."""
        linear = self.linear.count * self.linear.params(self.hidden) if self.linear else 0
        return (linear + self.softmax_layers * self.attention_params) / self.layers

    def _mlp(self, ffn: int, width: int = 0) -> int:
        return (3 if self.gated else 2) * (width or self.hidden) * ffn

    @property
    def expert_width(self) -> int:
        """Width of what routed experts take and give."""
        return (self.experts.latent if self.experts else 0) or self.hidden

    @property
    def dense_params(self) -> int:
        """Weights of a dense layer's feed-forward."""
        return self._mlp(self.ffn)

    @property
    def expert_params(self) -> int:
        """Weights of all routed experts of a layer."""
        if not self.experts:
            return 0
        return self.experts.count * self._mlp(self.experts.ffn, self.expert_width)

    @property
    def shared_params(self) -> int:
        """Weights of an MoE layer's shared expert, router and products around routed experts."""
        if not self.experts:
            return 0
        beside = self.experts.count + 2 * self.experts.latent
        return self._mlp(self.experts.shared_ffn) + self.hidden * beside

    @property
    def active_params(self) -> int:
        """Weights of an MoE layer's feed-forward that are active for one token."""
        if not self.experts:
            return 0
        each = self._mlp(self.experts.ffn, self.expert_width)
        return self.shared_params + self.experts.active * each

    @property
    def active_feed_params(self) -> float:
        """Weights of an average layer's feed-forward that are active for one token."""
        dense = self.dense_layers * self.dense_params
        return (dense + self.moe_layers * self.active_params) / self.layers

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        if self.pattern:
            return self.pattern.count("E")
        return self.layers - self.experts.dense_layers if self.experts else 0

    @property
    def dense_layers(self) -> int:
        """Layers with a dense feed-forward."""
        return self.pattern.count("-") if self.pattern else self.layers - self.moe_layers

    @property
    def halves(self) -> int:
        """Mixers and feed-forwards of a layer, each with its norm and residual."""
        return 1 if self.pattern else 2

    @property
    def megatron_layers(self) -> int:
        """Layers as Megatron counts them."""
        return self.layers * (2 if self.hybrid else 1)

    @property
    def predicted_layers(self) -> int:
        """Layers of multi-token prediction, each a mixer and a feed-forward."""
        return self.predicted * 2 // self.halves

    def stage_feeds(self, layers: int) -> tuple[float, float]:
        """Dense feed-forwards and those with experts, each of the stage that has most of them."""
        if self.pattern:
            share = layers / self.layers
            return self.dense_layers * share, self.moe_layers * share
        moe = min(layers, self.moe_layers)
        return layers - moe, moe

    @property
    def predicted_params(self) -> tuple[int, int]:
        """Weights of a layer of multi-token prediction, which first joins the state with the next
        token's embedding: dense ones, routed experts."""
        dense = self.attention_params + 2 * self.hidden * self.hidden
        if not self.moe_layers:
            return dense + self.dense_params, 0
        return dense + self.shared_params, self.expert_params

    @property
    def embedding_params(self) -> int:
        """Weights of the embedding; of the head too."""
        return self.vocab * self.hidden

    @property
    def params(self) -> int:
        """All matrix weights."""
        dense = self.dense_layers * self.dense_params
        moe = self.moe_layers * (self.expert_params + self.shared_params)
        ends = self.embedding_params * (1 if self.tied else 2)
        predicted = self.predicted * sum(self.predicted_params)
        return round(self.layers * self.mixer_params) + dense + moe + ends + predicted

    @property
    def matmul_params(self) -> int:
        """Weights that multiply a token: its experts and the head, not the embedding; those of
        prediction layers too, with their passes of the head."""
        idle = self.expert_params + self.shared_params - self.active_params
        each = sum(self.predicted_params) - idle + self.embedding_params
        ends = self.embedding_params + self.predicted * each
        return round(self.layers * (self.mixer_params + self.active_feed_params)) + ends

    @property
    def full_layers(self) -> int:
        """Layers whose queries see all earlier keys."""
        return self.softmax_layers - (self.windows.count if self.windows else 0)

    @property
    def softmax_layers(self) -> int:
        """Layers with softmax attention, windowed ones included."""
        if self.pattern:
            return sum(map(self.pattern.count, "*+"))
        return self.layers - (self.linear.count if self.linear else 0)

    @property
    def softmax_share(self) -> float:
        return self.softmax_layers / self.layers

    @property
    def result_bytes(self) -> int:
        """Attention's output in bf16 and its log-sum-exp, of a token in a layer."""
        return self.heads_q * (2 * self.dim_v + 4)

    def flops_per_token(self, seq: int, share: float = 1.0) -> float:
        """Model FLOPs of training a token: 6 N + 6 L H d S, with (d_qk + d_v) / 2 for d.

        Backward counts twice forward; attention's causal half only; no recomputation. In layers
        with windows, S is twice the keys that a query sees. `share`: of a causal sequence's pairs
        that packed documents have.
        """
        width = 3 * self.heads_q * (self.dim_qk + self.dim_v)
        attention: float = width * (self.full_layers + self.predicted) * seq * share
        if self.windows:
            attention += width * self.windows.count * 2 * self.windows.keys(seq, share)
        linear = 3 * self.linear.count * self.linear.flops if self.linear else 0
        return 6 * self.matmul_params + attention + linear
