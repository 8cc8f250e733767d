"""Layers of linear attention (gated delta net), beside layers of softmax attention.

Sources: gdn_layer_flops in megatron/training/training.py, Megatron-Core 0.19; the chunked kernels
of flash-linear-attention. None of these figures is measured.
"""

from dataclasses import dataclass

_CHUNK = 64  # tokens between two states that the kernels write


@dataclass(frozen=True, slots=True)
class Linear:
    """Gated delta net layers: of each head a state, which all tokens before have written."""

    layers: tuple[bool, ...]  # of each layer of the model, whether it is one
    heads_k: int  # heads of queries and of keys
    heads_v: int  # heads of values, and states
    dim_k: int  # head dimension of queries and keys
    dim_v: int  # head dimension of values
    conv: int  # tokens that the convolution sees

    @property
    def count(self) -> int:
        """Such layers."""
        return sum(self.layers)

    @property
    def projected(self) -> int:
        """Width of the first product: queries, keys, values, their gate, and two rates a head."""
        return self.convolved + self.heads_v * (self.dim_v + 2)

    @property
    def convolved(self) -> int:
        """Width of queries, keys and values."""
        return 2 * self.heads_k * self.dim_k + self.heads_v * self.dim_v

    def params(self, hidden: int) -> int:
        """Matrix weights of a layer, without its feed-forward."""
        return hidden * (self.projected + self.heads_v * self.dim_v)

    @property
    def flops(self) -> int:
        """FLOPs of a token in forward, besides those of matrix weights."""
        return 2 * (self.conv * self.convolved + 4 * self.heads_v * self.dim_v**2)

    @property
    def saved_bytes(self) -> int:
        """What a token saves for backward, besides the layer's input and its norm: the products,
        the convolved, queries and keys normalized for each state, the chunk's triangular matrix,
        the output before and after its norm, all bf16; and two float32 rates a head."""
        of_heads = 2 * self.dim_k + _CHUNK + 2 * self.dim_v
        return 2 * (self.projected + self.convolved + self.heads_v * of_heads) + 8 * self.heads_v

    @property
    def state_bytes(self) -> float:
        """States in bf16, of a token: one a chunk."""
        return 2 * self.heads_v * self.dim_k * self.dim_v / _CHUNK

    @property
    def traffic(self) -> float:
        """Bytes that a token's forward writes and reads again."""
        return 2 * (self.saved_bytes + self.state_bytes)

    @property
    def sent_bytes(self) -> int:
        """What a token sends in a pass with context parallelism: all-to-alls trade rows for heads
        before the convolution, and back after the output."""
        return 2 * (self.projected + self.heads_v * self.dim_v)
