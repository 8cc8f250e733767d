"""Layers whose mixer is no softmax attention: gated delta nets and Mamba-2, beside layers that have
it.

Sources: gdn_layer_flops and mamba_layer_flops in megatron/training/training.py, Megatron-Core 0.19;
the kernels of flash-linear-attention and mamba_ssm. None of these figures is measured.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import SimpleNamespace

from megatron_burst.mcore.refusals import refuses

_DELTA_CHUNK, _MAMBA_CHUNK = 64, 128  # tokens between two states that the kernels write


@dataclass(frozen=True, slots=True)
class _Linear(ABC):
    """Such layers: of each head a state, which all tokens before have written."""

    layers: tuple[bool, ...]  # of each layer of the model, whether it is one

    @property
    def count(self) -> int:
        """Such layers."""
        return sum(self.layers)

    @property
    @abstractmethod
    def projected(self) -> int:
        """Width of the first product."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Width of the mixer's output, which the last product takes."""

    def params(self, hidden: int) -> int:
        """Matrix weights of a layer, without its feed-forward."""
        return hidden * (self.projected + self.width)

    def sent_bytes(self, ranks: int) -> int:
        """What a token sends in a pass with so many context-parallel ranks: all-to-alls trade rows
        for heads before the convolution, and back after the output."""
        return 2 * (self.projected + self.width)

    def is_countable(self, tp: int, cp: int, tokens: int) -> bool:
        """Whether kernels can count what a rank projects of a sample."""
        return True


@dataclass(frozen=True, slots=True)
class DeltaNet(_Linear):
    """Gated delta nets (Qwen3-Next, Qwen3.5)."""

    heads_k: int  # heads of queries and of keys
    heads_v: int  # heads of values, and states
    dim_k: int  # head dimension of queries and keys
    dim_v: int  # head dimension of values
    conv: int  # tokens that the convolution sees

    @property
    def projected(self) -> int:
        """Queries, keys, values, their gate, and two rates a head."""
        return self.convolved + self.heads_v * (self.dim_v + 2)

    @property
    def convolved(self) -> int:
        """Queries, keys and values."""
        return 2 * self.heads_k * self.dim_k + self.width

    @property
    def width(self) -> int:
        return self.heads_v * self.dim_v

    @property
    def flops(self) -> int:
        return 2 * (self.conv * self.convolved + 4 * self.heads_v * self.dim_v**2)

    @property
    def saved_bytes(self) -> int:
        """The products, the convolved, queries and keys normalized for each state, the chunk's
        triangular matrix, the output before and after its norm, all bf16; and two float32 rates a
        head."""
        of_heads = 2 * self.dim_k + _DELTA_CHUNK + 2 * self.dim_v
        return 2 * (self.projected + self.convolved + self.heads_v * of_heads) + 8 * self.heads_v

    @property
    def state_bytes(self) -> float:
        return 2 * self.heads_v * self.dim_k * self.dim_v / _DELTA_CHUNK  # bf16

    def misfit(self, tp: int, cp: int, tokens: int) -> str:
        """TransformerConfig asserts it."""
        if self.heads_k % (tp * cp):
            return f"TP x CP does not divide the {self.heads_k} heads of K in linear attention"
        return ""


@dataclass(frozen=True, slots=True)
class Mamba(_Linear):
    """Mamba-2 (Nemotron-H, Granite-4)."""

    heads: int  # heads, each with a state
    dim: int  # head dimension
    groups: int  # of heads that share B and C
    state: int  # size of the state, which is that of B and C
    conv: int  # tokens that the convolution sees

    @property
    def projected(self) -> int:
        """x, its gate z, B, C, and a step size a head."""
        return self.convolved + self.width + self.heads

    @property
    def convolved(self) -> int:
        """x, B and C."""
        return self.width + 2 * self.groups * self.state

    @property
    def width(self) -> int:
        return self.heads * self.dim

    @property
    def flops(self) -> int:
        """The scan as Megatron counts it, and the convolution."""
        return 7 * self.width * self.state + 2 * self.conv * self.convolved

    @property
    def saved_bytes(self) -> int:
        """mamba_split_conv1d_scan_combined: the products, the scan's output, and the norm's with
        a float32 number a group; backward convolves again."""
        return 2 * (self.projected + 2 * self.width) + 4 * self.groups

    @property
    def state_bytes(self) -> float:
        return 4 * self.width * self.state / _MAMBA_CHUNK  # float32

    def sent_bytes(self, ranks: int) -> int:
        """B and C of a group go to every rank that has heads of it."""
        more = max(0, ranks - self.groups) * 2 * self.state
        return 2 * (self.projected + self.width + more)

    def misfit(self, tp: int, cp: int, tokens: int) -> str:
        """MambaMixer and MambaContextParallel assert it; burst refuses the last."""
        if self.heads % (tp * cp):
            return f"TP x CP does not divide the {self.heads} Mamba heads"
        if self.groups % tp:
            return f"TP {tp} does not divide the {self.groups} groups of Mamba heads"
        groups = self.groups // tp
        if max(groups, cp) % min(groups, cp):
            return f"CP {cp} does not fit the {groups} groups of Mamba heads of a TP rank"
        if not self.is_countable(tp, cp, tokens):
            return f"TP x CP {tp * cp} is too small for Mamba's kernels, which count in 32 bits"
        return ""

    def is_countable(self, tp: int, cp: int, tokens: int) -> bool:
        """As burst finds it of mamba_ssm's kernels."""
        options = SimpleNamespace(
            seq_length=tokens, micro_batch_size=1, context_parallel_size=cp,
            tensor_model_parallel_size=tp, hybrid_layer_pattern="M", mamba_num_heads=self.heads,
            mamba_head_dim=self.dim, mamba_num_groups=self.groups, mamba_state_dim=self.state,
        )  # fmt: skip
        return not refuses("run", "mamba_state_dim", options)


# besides what `_Linear` says: `convolved`, the width of what the convolution sees; of a token the
# `flops` of its forward without those of matrix weights, `saved_bytes` for backward without the
# layer's input and its norm, and `state_bytes` while a layer is in backward, a state a chunk;
# `misfit`, why Megatron or burst refuses such sizes for samples of so many tokens, or ""
Linear = DeltaNet | Mamba
