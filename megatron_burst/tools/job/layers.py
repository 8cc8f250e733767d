"""What some layers of a model have: experts, low ranks, windows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_burst.tools.job.entries import positive


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture-of-experts layers."""

    count: int  # routed experts
    active: int  # experts per token
    ffn: int  # width of one
    shared_ffn: int = 0  # width of the shared expert
    dense_layers: int = 0  # layers without experts, at the front
    # width of what routed experts take and give, between two products that all of them share
    # (LatentMoE of Nemotron-3-Super); 0: the hidden size
    latent: int = 0


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: low ranks of queries and of keys and values."""

    q_rank: int  # of queries
    kv_rank: int  # of keys and values
    rope_dim: int  # part of `dim_qk` with rotary embedding


@dataclass(frozen=True, slots=True)
class Windows:
    """Layers whose queries see only the nearest keys (sliding-window attention)."""

    size: int  # keys that a query sees, its own included
    layers: tuple[bool, ...]  # of each layer of the model, whether it has a window

    @classmethod
    def of(cls, size: Any, layers: Sequence[object], name: str) -> "Windows | None":
        """Of a size, a positive whole number, and which layers have it, as the file `name` says;
        None if none has."""
        keys = positive(size, "sliding_window", name)
        return cls(keys, tuple(map(bool, layers))) if any(layers) else None

    @property
    def count(self) -> int:
        """Layers with a window."""
        return sum(self.layers)

    def keys(self, seq: int, share: float = 1.0) -> float:
        """Keys that a query sees on average, including queries at the start; `share`: of a causal
        sequence's pairs that packed documents have."""
        size = min(self.size, seq)
        return min(size - size * size / (2 * seq), share * seq / 2)
