"""The ways to recompute that `bench recompute` measures."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron_burst.cli.sentence import pick
from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError

if TYPE_CHECKING:
    from megatron_burst.mcore.stack import Stack
    from megatron_burst.mcore.widths import Widths


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to recompute.

    Attributes:
        impl: whose attention: "burst" or "megatron".
        name: of the mode.
        recompute: "full", "selective" or "off".
        keep: burst's keeping.
        half_of_layers: whether only half of the layers keep.
        offload: whether it waits on the host.
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

    def apply(self, stack: "Stack", widths: "Widths", options: BurstConfig) -> None:
        """Have the layers recompute this way."""
        burst = replace(options, keep=self.keep, keep_offload=self.offload)
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
    """Whether `bench recompute` writes rows of that name: of a mode, or of attention alone."""
    impls = {known.impl for known in MODES.values()}
    return f"{impl}:{mode}" in MODES or (mode == ATTENTION and impl in impls)


def modes_of(names: Sequence[str], ranks: int | None = None) -> tuple[Mode, ...]:
    """The modes of a list of names; none named means all that so many ranks can run, if told.

    Raises:
        BurstError: if there is no such mode, or it needs more ranks.
    """
    found = pick(
        names, MODES, "bench recompute: --mode must name one that there is, because it stands for "
        "a way to recompute",
    )  # fmt: skip
    apart = [mode for mode in found if ranks is not None and mode.least_ranks > ranks]
    if names and apart:
        raise BurstError(
            f"bench recompute: --mode {apart[0]} must have {apart[0].least_ranks} ranks, because "
            f"these share what is kept; got {ranks}; start more with torchrun, or leave it out"
        )
    return tuple(mode for mode in found if mode not in apart)
