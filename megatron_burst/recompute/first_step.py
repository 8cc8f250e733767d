"""What the first training step, without keeping, leaves of a GPU's memory, and how long its layers
take: what can be kept from then on."""

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch.optim import optimizer

from megatron_burst.environment import available_host_bytes
from megatron_burst.recompute.budget import MOST_USED

_COPIED = 1 << 26  # bytes, to measure the bandwidth


class FirstStep:
    """Watches one step of any torch optimizer. It begins when this is made, before a forward.

    Args:
        device: of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.is_over = device, False
        self._began = self._peak = self._allocated()
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._turn: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._hooks = [
            optimizer.register_optimizer_step_pre_hook(self._before_optimizer),
            optimizer.register_optimizer_step_post_hook(self._after_optimizer),
        ]

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._on_gpu else 0

    def _before_optimizer(self, *_: Any) -> None:
        if self._on_gpu and not self.is_over:
            self._peak = max(self._peak, torch.cuda.max_memory_allocated(self._device))

    def _after_optimizer(self, *_: Any) -> None:
        self.is_over = True  # hooks cannot be removed while torch calls them

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Context of a layer's forward, whose time counts until the step is over."""
        if not self._on_gpu or self.is_over:
            yield
            return
        span = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        span[0].record()
        yield
        span[1].record()
        self._spans.append(span)

    def forward_s(self) -> float | None:
        """Seconds of a layer's forward, the median; None: not measured. Waits for the GPU."""
        if not self._spans:
            return None
        torch.cuda.synchronize(self._device)
        return median(begin.elapsed_time(end) for begin, end in self._spans) / 1e3

    def turn(self) -> None:
        """Say that a layer's recomputation begins: the first one is the last layer's."""
        if self._spans and self._turn is None and not self.is_over:
            self._turn = self._spans[-1][1], torch.cuda.Event(enable_timing=True)
            self._turn[1].record()

    def turn_s(self) -> float:
        """Seconds between the last layer's forward and its recomputation; 0: not measured."""
        if self._turn is None:
            return 0.0
        torch.cuda.synchronize(self._device)
        return self._turn[0].elapsed_time(self._turn[1]) / 1e3

    def left_bytes(self) -> int:
        """What a further step leaves of the memory: it begins with the optimizer's states, and
        takes as much as the first one. Without a GPU, half of what is available."""
        for hook in self._hooks:
            hook.remove()
        if not self._on_gpu:
            return available_host_bytes() // 2
        taken = self._allocated() + self._peak - self._began
        most = max(taken, torch.cuda.max_memory_allocated(self._device))
        free, total = torch.cuda.mem_get_info(self._device)
        others = total - free - torch.cuda.memory_reserved(self._device)
        return max(0, int(MOST_USED * total) - others - most)


def host_gbs(device: torch.device) -> float | None:
    """GB/s of a copy between a GPU and pinned host memory, the best of some, in the slower
    direction; None: no GPU. Other GPUs of the node slow it down only if they copy at the same
    time."""
    if device.type != "cuda":
        return None
    there = torch.empty(_COPIED, dtype=torch.uint8, device=device)
    here = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=True)
    slower = max(_copy_s(*ends) for ends in ((here, there), (there, here)))
    return _COPIED / slower / 1e9


def _copy_s(target: torch.Tensor, source: torch.Tensor) -> float:
    """Seconds of the fastest of some copies: other work of the node may disturb one."""
    found = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return min(found)
