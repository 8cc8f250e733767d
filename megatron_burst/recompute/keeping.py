"""How calls are kept: in a checkpoint's frame, how much of the outputs, and where.

Kept results live in the checkpoint's own frame, which is referenced by whatever can rerun its
function: when the graph drops that, the frame is freed too. So nothing goes stale, however many
micro-batches are in flight and however a step ends.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from contextvars import Token
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from megatron_burst.comm.detector import PassAnnouncer
from megatron_burst.engine.passes import FRAMES
from megatron_burst.errors import BurstError

WHO = "burst keep"
Tensors = tuple[Tensor, ...]


class Frame:
    """One call of a checkpoint: entered for the first pass and for each recomputation.

    Results are put in the first pass and taken in recomputation by index: the same function runs,
    so its n-th call is the same. Each is taken once; a further recomputation (backward with
    retain_graph) computes again.
    """

    def __init__(self, stops_early: bool = False) -> None:
        # whether torch ends a recomputation once it has all tensors that backward needs
        self.stops_early = stops_early
        self._results: dict[int, Any] = {}
        self._has_run = False
        self._tokens: list[Token] = []

    def __enter__(self) -> "Frame":
        run = RunningFrame(self, recomputes=self._has_run)
        self._has_run = True
        self._tokens.append(FRAMES.set((*running(), run)))
        return self

    def __exit__(self, *_) -> None:
        if running()[-1].recomputes:
            self._results.clear()  # also if it failed or stopped early
        FRAMES.reset(self._tokens.pop())

    def bind(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, entering this frame whenever it is called."""

        @functools.wraps(function, updated=())
        def run(*args, **options):
            with self:
                outs = function(*args, **options)
                for notify in running()[-1].at_end:
                    notify(outs)
                return outs

        run.frame = self
        return run


def framed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function bound to a frame: its own if it has one, else a new one."""
    has_own = isinstance(getattr(function, "frame", None), Frame)
    return function if has_own else Frame().bind(function)


@dataclass(slots=True)
class RunningFrame:
    """A frame while its function runs; counts calls that may be kept."""

    frame: Frame
    recomputes: bool  # whether this is not the first pass
    place: int = -1
    rounds: bool = False  # whether an attention call so far was recomputed, so rounded otherwise
    # called with the results of a recomputation, once it is complete
    at_end: list[Callable[[Any], None]] = field(default_factory=list)

    def put(self, result: Any) -> None:
        """Keep something of this call for recomputation."""
        self.frame._results[self.place] = result

    def kept_bytes(self) -> int:
        """Bytes of what the first pass kept and recomputation has not taken yet."""
        return sum(getattr(result, "num_bytes", 0) for result in self.frame._results.values())

    @property
    def keeps_next(self) -> bool:
        """Whether the first pass kept something of the next call."""
        return self.place + 1 in self.frame._results

    def take(self) -> Any:
        """What the first pass kept of this call, once; None if nothing."""
        return self.frame._results.pop(self.place, None)


def running() -> tuple[RunningFrame, ...]:
    """The frames whose functions run in this thread right now, outermost first."""
    return FRAMES.get() or ()


@contextmanager
def without_frames():
    """Context that hides running frames from the function being recorded."""
    token = FRAMES.set(None)
    try:
        yield
    finally:
        FRAMES.reset(token)


class Watch:
    """Detects in-place writes to tensors since it was made, through any view, of which it holds
    version counters only. Autograd checks neither kept results nor what checkpoints save."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._seen = [(_counter(x), x._version, tuple(x.shape)) for x in tensors]

    def check(self) -> None:
        """Refuse a write."""
        shapes = [f"{shape}" for x, version, shape in self._seen if x._version != version]
        if shapes:
            raise BurstError(f"{WHO}: attention's kept results and offloaded inputs must not be "
                             "modified in place before backward, because recomputation needs their "
                             f"original values; got a write to shape {', '.join(shapes)}; write "
                             "out = out + x instead of out += x, or pass --burst-keep "
                             "none")  # fmt: skip


def _counter(x: Tensor) -> Tensor:
    """A tensor that shares x's version counter, without its data."""
    counter = x.detach()
    if type(counter) is Tensor:  # subclasses manage their own data; setting it keeps the counter
        counter.data = x.new_empty(0)
    return counter


class Parcel(Protocol):
    """Kept tensors, wherever they are."""

    def get(self) -> Tensors:
        """The tensors, on the device; refuses those that were written in place since."""
        ...


class Resident:
    """Kept tensors that stay where they are."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors, self._watch = tensors, Watch(tensors)

    def get(self) -> Tensors:
        self._watch.check()
        return self.tensors


@dataclass(frozen=True, slots=True)
class Keeping:
    """How calls are kept."""

    # what of the outputs is kept: `later.KeepTail`, `ending.Nothing`; None: all of them
    policy: Any = None
    pack: Callable[[Tensors], Parcel] = Resident  # stores kept tensors until recomputation
    debug: bool = False  # whether its inputs are compared with the first pass's, bit by bit
    # of the call: tell other ranks of errors
    announcer: PassAnnouncer = field(default_factory=PassAnnouncer)
    parameters: Tensors = ()  # that the function reads: they live on, so they are not kept
