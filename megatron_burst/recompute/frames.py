"""Pairs the first pass of a checkpointed function with its replay.

What is kept lives in the checkpoint's own frame: whoever runs the function again holds the frame,
and when the graph lets go of the one, the other goes with it. So there is nothing to go stale,
however many micro-batches are in flight and however a step ends.
"""

import functools
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any


class Frame[T]:
    """One call of a checkpoint: entered for the first pass, and again for each replay.

    What is put while it is entered first is found, place by place, when it is entered again: a
    replay runs the same function, so the n-th attention call of both is the same. What a replay has
    taken is gone; a further one (backward with retain_graph) computes anew.
    """

    def __init__(self) -> None:
        self._kept: dict[int, T] = {}
        self._has_run = False
        self._tokens: list[Token] = []

    def __enter__(self) -> "Frame[T]":
        run = Run(self, replays=self._has_run)
        self._has_run = True
        self._tokens.append(_RUNNING.set((*running(), run)))
        return self

    def __exit__(self, *_) -> None:
        if running()[-1].replays:
            self._kept.clear()  # also where the replay failed or stopped early
        _RUNNING.reset(self._tokens.pop())

    def bind(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, entering this frame whenever it is called."""

        @functools.wraps(function, updated=())
        def run(*args, **options):
            with self:
                return function(*args, **options)

        run.frame = self
        return run


def framed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function in a frame: in its own, if it is bound to one, else in a new one."""
    if isinstance(getattr(function, "frame", None), Frame):
        return function
    return Frame().bind(function)


class Run[T]:
    """A frame while its function runs; knows which attention call it has come to.

    Attributes:
        frame: whose run.
        replays: whether this is not the first pass.
    """

    def __init__(self, frame: Frame[T], replays: bool) -> None:
        self.frame, self.replays = frame, replays
        self._place = -1

    def step(self) -> None:
        """Come to the next attention call."""
        self._place += 1

    def put(self, kept: T) -> None:
        """Keep something of this call for the replay."""
        self.frame._kept[self._place] = kept

    def take(self) -> T | None:
        """What the first pass has kept of this call, once; None if nothing."""
        return self.frame._kept.pop(self._place, None)


# Which frames run in this thread, outermost first; like a call stack it is empty when none does.
# None while an attention function is being recorded.
_RUNNING: ContextVar[tuple[Run, ...] | None] = ContextVar("megatron_burst_frames", default=())


def running() -> tuple[Run, ...]:
    """The frames whose functions run in this thread right now, outermost first."""
    return _RUNNING.get() or ()


def recording() -> bool:
    """Whether an attention function is being recorded: of what its graph saves, all but its inputs
    and outputs takes memory until the replay."""
    return _RUNNING.get() is None


class Hidden:
    """While entered, no frame is seen to run: for the attention function that is being recorded."""

    def __enter__(self) -> None:
        self._token = _RUNNING.set(None)

    def __exit__(self, *_) -> None:
        _RUNNING.reset(self._token)
