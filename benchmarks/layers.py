"""What `benchmarks.recompute` measures: sizes of layers, ways to recompute; without Megatron."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchmarks.impls import pick
from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from megatron_burst.tools.units import in_units

if TYPE_CHECKING:
    from benchmarks.stack import Stack


@dataclass(frozen=True, slots=True)
class Widths:
    """Sizes of the layers.

    Attributes:
        layers: how many.
        hidden: model width.
        ffn: width of the gated MLP.
        heads_q, heads_kv: query and KV heads.
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
        """Model FLOPs of a forward and a backward pass: causal, recomputation not counted."""
        projections = self.hidden * self.head_dim * (2 * self.heads_q + 2 * self.heads_kv)
        weights = self.layers * (projections + 3 * self.hidden * self.ffn)
        attention = self.layers * self.heads_q * self.head_dim * self.seq
        return 6.0 * (weights + attention) * self.seq * self.batch

    @property
    def attention_flops(self) -> float:
        """FLOPs of attention's forward pass in all layers: causal."""
        return 2.0 * self.layers * self.heads_q * self.head_dim * self.seq**2 * self.batch


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to recompute.

    Attributes:
        impl: whose attention: "burst" or "megatron".
        name: of the mode.
        recompute: "full", "selective" or "off".
        keep: burst's keeping.
        half_of_layers: whether only half of the layers keep.
        offload: whether it is offloaded.
        least_ranks: of a context-parallel group that it needs.
    """

    impl: str
    name: str
    recompute: str = "full"
    keep: str = "none"
    half_of_layers: bool = False
    offload: bool = False
    least_ranks: int = 1

    def __str__(self) -> str:
        return f"{self.impl}:{self.name}"

    def apply(self, stack: "Stack", widths: Widths, options: BurstConfig) -> None:
        """Set the layers to recompute this way."""
        offload = "results" if self.offload else "none"
        burst = replace(options, keep=self.keep, keep_offload=offload)
        layers = max(1, widths.layers // 2) if self.half_of_layers else None
        stack.set(self.recompute, burst, layers)


ATTENTION = "attention"  # in the column of modes: attention's forward alone, in all layers
MODES = {
    str(mode): mode
    for mode in (
        Mode("burst", "none"),
        Mode("burst", "half", keep="half", least_ranks=2),  # halves are passed between ranks
        Mode("burst", "all", keep="all"),
        Mode("burst", "all-half-layers", keep="all", half_of_layers=True),
        Mode("burst", "all-offload", keep="all", offload=True),
        Mode("burst", "selective", "selective"),
        Mode("burst", "off", "off"),
        Mode("megatron", "full"),
        Mode("megatron", "full-keep", keep="all"),
        Mode("megatron", "selective", "selective"),
        Mode("megatron", "off", "off"),
    )
}


def writes(impl: str, mode: str) -> bool:
    """Whether `benchmarks.recompute` writes rows of that name: of a mode, or of attention alone."""
    impls = {known.impl for known in MODES.values()}
    return f"{impl}:{mode}" in MODES or (mode == ATTENTION and impl in impls)


def modes_of(names: Sequence[str], ranks: int | None = None) -> tuple[Mode, ...]:
    """The modes of a list of names; none named means all that so many ranks can run, if told.

    Raises:
        BurstError: if there is no such mode, or it needs more ranks.
    """
    found = pick(
        names, MODES, "benchmarks.recompute: --mode must name one that there is, because it stands "
        "for a way to recompute",
    )  # fmt: skip
    apart = [mode for mode in found if ranks is not None and mode.least_ranks > ranks]
    if names and apart:
        raise BurstError(
            f"benchmarks.recompute: --mode {apart[0]} must have {apart[0].least_ranks} ranks, "
            f"because these share what is kept; got {ranks}; start more with torchrun, or leave "
            "it out"
        )
    return tuple(mode for mode in found if mode not in apart)
