"""Sends and receives under way."""

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist


class Transfer:
    """What was sent and received together.

    Args:
        works: of each send and receive.
        timeout_s: for each; None on GPUs, where a wait with one would block the CPU.
        explain: makes an error of what torch raises.
    """

    def __init__(
        self,
        works: Sequence[dist.Work],
        timeout_s: float | None,
        explain: Callable[[Exception], Exception],
    ) -> None:
        self._works, self._timeout_s, self._explain = works, timeout_s, explain

    def wait(self) -> None:
        """Let the current stream (on CPU: this thread) wait until all have happened."""
        works = self._works
        try:
            if self._timeout_s is None:
                for work in works:
                    work.wait()
                return
            self._works = ()  # gloo waits for ever for what was waited for before
            for work in works:
                work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise self._explain(error) from error
