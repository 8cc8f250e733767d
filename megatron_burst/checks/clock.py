"""Times a pass and its waits, for logs: loaded by the first pass that is timed."""

from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

import torch

from megatron_burst.comm.transport import Handle, OneQueue, Queues
from megatron_burst.engine.run import BoundProgram, Run, Step


class Clock:
    """Times runs of an executor, one at a time: in total, and where the call's stream waits.

    On GPUs these are events on the stream, read once the GPU has passed them, without
    synchronizing.
    """

    def __init__(self, executor: BoundProgram) -> None:
        self._events: list[torch.cuda.Event] = []
        self._used, self._on_gpu = 0, False
        self._stream: torch.cuda.Stream | None = None
        self._whole: list[Any] = []
        self._waits: list[tuple[Any, Any]] = []
        # steps that wait for slots that other ranks may still read
        self.steps = tuple(self._opening(step) if step.opens and step.queue is None else step
                           for step in executor.compiler.steps)  # fmt: skip

    def begin(self, queues: OneQueue | Queues) -> None:
        """Start timing a run, on the stream of the call."""
        self._clear()
        self._stream = queues.stream
        self._on_gpu = queues.placement.device.type == "cuda"
        self._whole.append(self._now())

    def end(self) -> None:
        """All of the run has been queued on the call's stream."""
        self._whole.append(self._now())

    def handles(self, count: int) -> list[Any]:
        """A list for the run's handles; waits on them are timed."""
        return _Watched(self, count)

    def seconds(self) -> dict[str, float]:
        """Seconds of the run: "" in total, "exposed"; empty if the run, or its work on the GPU, is
        not finished. Can be read once."""
        if len(self._whole) < 2 or (self._on_gpu and not self._whole[1].query()):
            return {}
        exposed = sum(self._between(*wait) for wait in self._waits)
        seconds = {"": self._between(*self._whole), "exposed": exposed}
        self._clear()
        return seconds

    def wait(self, what: Handle, stream: torch.cuda.Stream | None) -> None:
        """Wait for an operation as the run would; timed where its kernels wait."""
        if stream != self._stream:
            what.wait(stream)
            return
        began = self._now()
        what.wait(stream)
        self._waits.append((began, self._now()))

    def _clear(self) -> None:
        self._used = 0
        self._whole.clear()
        self._waits.clear()

    def _opening(self, step: Step) -> Step:
        def run(of: Run) -> Any:
            began = self._now()
            for use, number in step.opens:
                of.slots[use].open(number, of.queues.stream)
            self._waits.append((began, self._now()))
            return step.run(of)

        return replace(step, run=run, opens=[])

    def _now(self) -> Any:
        """Now, on the current stream if there is one."""
        if not self._on_gpu:
            return perf_counter()
        if self._used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        event = self._events[self._used]
        self._used += 1
        event.record()
        return event

    def _between(self, began: Any, ended: Any) -> float:
        return began.elapsed_time(ended) / 1e3 if self._on_gpu else ended - began


class _Watched(list):
    """Handles of a run by operation; the clock times waits on them."""

    def __init__(self, clock: Clock, count: int) -> None:
        super().__init__([None] * count)
        self._clock = clock

    def __setitem__(self, index, what) -> None:
        super().__setitem__(index, _Waited(self._clock, what))


class _Waited(NamedTuple):
    clock: Clock
    what: Handle

    def wait(self, stream: torch.cuda.Stream | None) -> None:
        self.clock.wait(self.what, stream)
