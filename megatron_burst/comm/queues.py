"""Where work is queued: on a GPU's streams; without one everything happens where it is called."""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch


class Queues(Protocol):
    """Queues of one device; each runs what it was given in order, beside the others."""

    def on(self, name: Hashable):
        """Within it, work goes to the queue of that name."""

    def mark(self) -> object:
        """What the current queue has been given so far."""

    def wait(self, mark: object) -> None:
        """Let the current queue wait until that is done."""


class OneQueue:
    """Of a CPU, or where nothing is to overlap: what was queued before is done before."""

    @contextmanager
    def on(self, name: Hashable) -> Iterator[None]:
        yield

    def mark(self) -> None:
        pass

    def wait(self, mark: object) -> None:
        pass


class Streams:
    """Of a GPU: the current stream, and others by name, the same ones in every call."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[Hashable, torch.cuda.Stream] = {}

    def on(self, name: Hashable) -> torch.cuda.StreamContext:
        if name not in self._streams:
            self._streams[name] = torch.cuda.Stream(self._device, priority=-1)
        return torch.cuda.stream(self._streams[name])

    def mark(self) -> torch.cuda.Event:
        return torch.cuda.current_stream(self._device).record_event()

    def wait(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)
