"""Sizes of the layers that recomputation is measured on; known before Megatron is loaded."""

from dataclasses import dataclass

from megatron_burst.plan.units import in_units


@dataclass(frozen=True, slots=True)
class Widths:
    """Sizes of the layers.

    Attributes:
        layers: how many.
        hidden: model width.
        ffn: width of the gated MLP.
        heads_q, heads_kv: query and key heads.
        head_dim: of each.
        seq: tokens of the whole sequence.
        batch: sequences.
        dtype: of weights and activations, as torch names it.
    """

    layers: int
    hidden: int
    ffn: int
    heads_q: int
    heads_kv: int
    head_dim: int
    seq: int
    batch: int
    dtype: str

    def __str__(self) -> str:
        return (
            f"{self.layers} layer{'s' * (self.layers > 1)} of {in_units(self.seq)} tokens, batch "
            f"{self.batch}, hidden {self.hidden}, ffn {self.ffn}, heads {self.heads_q}/"
            f"{self.heads_kv} x {self.head_dim}, {self.dtype}"
        )

    @property
    def flops(self) -> float:
        """Model FLOPs of a forward and a backward pass: causal, nothing computed twice counted."""
        projections = self.hidden * self.head_dim * (2 * self.heads_q + 2 * self.heads_kv)
        weights = self.layers * (projections + 3 * self.hidden * self.ffn)
        attention = self.layers * self.heads_q * self.head_dim * self.seq
        return 6.0 * (weights + attention) * self.seq * self.batch

    @property
    def attention_flops(self) -> float:
        """FLOPs of attention's forward pass in all layers: causal."""
        return 2.0 * self.layers * self.heads_q * self.head_dim * self.seq**2 * self.batch
