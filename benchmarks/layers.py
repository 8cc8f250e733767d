"""What `benchmarks.recompute` measures: sizes of layers, ways to recompute; without Megatron."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.impls import pick
from megatron_burst.errors import require
from megatron_burst.tools.units import in_units


@dataclass(frozen=True, slots=True)
class Widths:
    """Sizes of the layers."""

    layers: int  # how many
    hidden: int  # model width
    ffn: int  # width of the gated MLP
    heads_q: int  # query heads
    heads_kv: int
    head_dim: int  # of each
    seq: int  # tokens of the whole sequence
    batch: int  # sequences
    dtype: str  # of weights and activations, as torch names it

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
    """One way to recompute."""

    impl: str  # whose attention: "burst" or "megatron"
    name: str  # of the mode
    recompute: str = "full"  # "full", "selective" or "off"
    keep: str = "none"  # burst's keeping
    half_of_layers: bool = False  # whether only half of the layers keep
    offload: bool = False  # whether it is offloaded
    least_ranks: int = 1  # of a context-parallel group that it needs

    def __str__(self) -> str:
        return f"{self.impl}:{self.name}"


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
    return f"{impl}:{mode}" in MODES or (mode == ATTENTION and impl in ("burst", "megatron"))


def modes_of(names: Sequence[str], ranks: int | None = None) -> tuple[Mode, ...]:
    """The modes of a list of names; none named means all that so many ranks can run, if told."""
    modes = pick(
        names, MODES, "benchmarks.recompute: --mode must name one that there is, because it stands "
        "for a way to recompute",
    )  # fmt: skip
    apart = [mode for mode in modes if ranks is not None and mode.least_ranks > ranks]
    require("benchmarks.recompute", [(
        not names, f"--mode {mode} must have {mode.least_ranks} ranks, because these share what is "
        "kept", f"{ranks}", "start more with torchrun, or leave it out",
    ) for mode in apart])  # fmt: skip
    return tuple(mode for mode in modes if mode not in apart)
