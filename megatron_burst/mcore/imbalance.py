"""Seconds of a step that ranks lose to slower ones, in Megatron's log, with `--burst-log`.

A rank's part of a step ends with its last backward pass. Then gradients are summed over all ranks
of its pipeline stage, so all wait there for the slowest.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isnan, nan
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

TIMER = "burst-imbalance-time"


class Part:
    """This rank's part of a step: from the step's beginning to the end of its last backward pass.

    On GPUs these are events on the current stream, read once the step is over.
    """

    _begin: Any = None
    _end: Any = None

    @contextmanager
    def of_step(self, config: Any) -> Iterator[None]:
        """Time the step that runs in this context.

        `config`: the model's, which has the function that Megatron's schedules call after the last
        backward pass, before gradients are waited for.
        """
        finalize = config.finalize_model_grads_func

        def at_end(*args: Any, **options: Any) -> Any:
            self._end = _now()
            return finalize(*args, **options)

        self._begin, self._end = _now(), None
        config.finalize_model_grads_func = finalize and at_end
        try:
            yield
        finally:
            config.finalize_model_grads_func = finalize

    def seconds(self) -> float:
        """Seconds of the last timed step's part; NaN if it had no end. Can be read once, when the
        GPU has finished the step."""
        begin, end = self._begin, self._end
        self._begin = self._end = None
        if begin is None or end is None:
            return nan
        on_gpu = isinstance(begin, torch.cuda.Event)
        return begin.elapsed_time(end) / 1e3 if on_gpu else end - begin


PART = Part()  # of this process


def _now() -> Any:
    if not torch.cuda.is_available():
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def of_all(seconds: float, group: dist.ProcessGroup) -> list[float]:
    """The seconds of all ranks of a group, which call this together."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    local = torch.tensor([seconds], dtype=torch.float64, device=device)
    gathered = local.new_empty(group.size())
    dist.all_gather_into_tensor(gathered, local, group=group)
    return gathered.tolist()


def lost(seconds: Sequence[float]) -> float:
    """Seconds that a rank waits for the slowest, on average; NaN if a rank has not measured."""
    return max(seconds) - sum(seconds) / len(seconds) if not any(map(isnan, seconds)) else nan


def line_of(seconds: Sequence[float], ranks: Sequence[int]) -> str:
    """What a step lost, by seconds of each rank's part, and on which ranks (global numbers)."""
    first, *_, last = sorted(range(len(ranks)), key=seconds.__getitem__)
    mean, longest = lost(seconds), seconds[last]
    return (f"imbalance: in this step ranks waited {mean:.3f} s on average ({mean / longest:.1%} "
            f"of {longest:.3f} s) for rank {ranks[last]}, and rank {ranks[first]} waited "
            f"{longest - seconds[first]:.3f} s")  # fmt: skip
