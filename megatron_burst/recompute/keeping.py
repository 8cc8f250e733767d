"""How calls are kept: how much of the outputs, and where they wait."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from megatron_burst.errors import BurstError

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


class Watch:
    """Tells whether tensors have been written in place since it was made, by any of their views.

    Autograd's own check sees neither what is kept nor what a checkpoint that is not reentrant
    saves. It holds the counters of writes alone, not the tensors' memory.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._counters = [_counter(x) for x in tensors]
        self._versions = [x._version for x in self._counters]
        self._shapes = [tuple(x.shape) for x in tensors]

    def check(self) -> None:
        """Refuse a write.

        Raises:
            BurstError: naming the shapes of what was written.
        """
        pairs = zip(self._counters, self._versions, strict=True)
        written = [counter._version != version for counter, version in pairs]
        if any(written):
            shapes = [shape for shape, each in zip(self._shapes, written, strict=True) if each]
            raise BurstError(
                f"{WHO}: attention's results and inputs that wait on the host must not be written "
                "in place before their backward, because a replay takes them as they were; got a "
                f"write to shape {', '.join(map(str, shapes))}; write elsewhere, as in "
                "out = out + x for out += x, or keep none"
            )


def _counter(x: Tensor) -> Tensor:
    """A tensor without data that counts the writes to x: one whose data are set keeps sharing the
    counter of what it was detached from."""
    counter = x.detach()
    if type(counter) is Tensor:  # what others hold is their own affair
        counter.data = x.new_empty(0)
    return counter


class Parcel(Protocol):
    """Kept tensors, wherever they are."""

    def get(self) -> Tensors:
        """The tensors, on the device of the replay.

        Raises:
            BurstError: if they were written in place after they were put away.
        """
        ...


@dataclass(slots=True)
class Resident:
    """Kept tensors that stay where they are."""

    tensors: Tensors
    _watch: Watch = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._watch = Watch(self.tensors)

    def get(self) -> Tensors:
        """The tensors themselves."""
        self._watch.check()
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
