"""How calls are kept: how much of the outputs, and where they wait."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

WHO = "burst keep"
Tensors = tuple[Tensor, ...]


class Policy(Protocol):
    """How much of the outputs is kept."""

    def trim(self, outs: Tensors) -> Tensors:
        """What is kept of the outputs."""
        ...

    def restore(self, kept: Tensors, inputs: Tensors) -> Tensors:
        """The outputs, from what was kept and from the inputs of the replay."""
        ...


class Whole:
    """Keeps all of the outputs."""

    def trim(self, outs: Tensors) -> Tensors:
        """The outputs as they are."""
        return outs

    def restore(self, kept: Tensors, inputs: Tensors) -> Tensors:
        """What was kept, as it is."""
        return kept


WHOLE = Whole()


class Parcel(Protocol):
    """Kept tensors, wherever they are."""

    def get(self) -> Tensors:
        """The tensors, on the device of the replay."""
        ...


@dataclass(slots=True)
class Resident:
    """Kept tensors that stay where they are."""

    tensors: Tensors

    def get(self) -> Tensors:
        """The tensors themselves."""
        return self.tensors


@dataclass(frozen=True, slots=True)
class Keeping:
    """How calls are kept.

    Attributes:
        policy: how much of the outputs.
        pack: puts kept tensors away until the replay.
        debug: whether a replay's inputs are compared with the first pass's, bit by bit.
    """

    policy: Policy = WHOLE
    pack: Callable[[Tensors], Parcel] = Resident
    debug: bool = False
