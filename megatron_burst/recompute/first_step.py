"""What the first training step, without keeping, leaves of a GPU's memory, how long its layers
take, and what they hold for backward: what can be kept from then on."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import optimizer

from megatron_burst.environment import available_host_bytes
from megatron_burst.recompute.budget import MOST_USED
from megatron_burst.recompute.graph import graph_bytes
from megatron_burst.recompute.keeping import RunningFrame

_COPIED = 1 << 26  # bytes, to measure the bandwidth


class _Span:
    """Time on the GPU, from now on until `end`."""

    def __init__(self) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._events[0].record()

    def end(self) -> None:
        """What comes later is not in it."""
        self._events[1].record()

    def until(self, later: "_Span") -> float:
        """Seconds between its end and the begin of a later one."""
        return self._events[1].elapsed_time(later._events[0]) / 1e3

    @property
    def seconds(self) -> float:
        """From its begin to its end."""
        return self._events[0].elapsed_time(self._events[1]) / 1e3


class FirstStep:
    """Watches one step of any torch optimizer. It begins when this is made, before a forward.

    Args:
        device: of the model.

    Attributes:
        is_over: whether an optimizer has made it.
        held_share: most bytes that a layer's graph holds for backward, beside its input, by bytes
            of that; 0: not measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.is_over, self.held_share = device, False, 0.0
        self._began = self._peak = self._allocated()
        self._spans: list[tuple[_Span, list[_Span]]] = []  # layers, and calls in each
        self._turn: tuple[_Span, _Span] | None = None
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
    def timing(self, others: Iterable[Module] = ()) -> Iterator[None]:
        """Context of a layer's forward, whose time counts until the step is over.

        Args:
            others: modules that recomputation does without anyway; see `rest_s`.
        """
        if not self._on_gpu or self.is_over:
            yield
            return
        within: list[_Span] = []
        hooks = [
            hook
            for module in others
            for hook in (
                module.register_forward_pre_hook(lambda *_: within.append(_Span())),
                module.register_forward_hook(lambda *_: within[-1].end()),
            )
        ]
        span = _Span()
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        span.end()
        self._spans.append((span, within))

    def forward_s(self) -> float | None:
        """Seconds of a layer's forward, the median; None: not measured. Waits for the GPU."""
        return self._median(lambda layer, _: layer.seconds)

    def rest_s(self) -> float | None:
        """The same without modules that recomputation does without anyway."""
        return self._median(
            lambda layer, within: layer.seconds - sum(each.seconds for each in within)
        )

    def _median(self, seconds: Callable[[_Span, list[_Span]], float]) -> float | None:
        if not self._spans:
            return None
        torch.cuda.synchronize(self._device)
        return median(seconds(*each) for each in self._spans)

    def turn(self) -> None:
        """Say that a layer's recomputation begins: the first one is the last layer's."""
        if self._spans and self._turn is None and not self.is_over:
            self._turn = self._spans[-1][0], _Span()

    def turn_s(self) -> float:
        """Seconds between the last layer's forward and its recomputation; 0: not measured."""
        if self._turn is None:
            return 0.0
        torch.cuda.synchronize(self._device)
        return self._turn[0].until(self._turn[1])

    def weigh(self, forward: Callable[[], Any], x: Tensor, run: RunningFrame) -> Any:
        """A layer's results in recomputation; until the step is over, measures `held_share`.

        On a GPU by its allocated memory, to which what was kept for this call belongs already;
        elsewhere by what the graph saves. Not where torch itself looks at what the graph saves.

        Args:
            forward: the layer's.
            x: its input.
            run: the checkpoint that is recomputed.
        """
        if self.is_over or run.frame.stops_early:
            return forward()
        before = self._allocated() - run.kept_bytes()
        outs = forward()
        grown = self._allocated() - run.kept_bytes() - before
        num_bytes = grown if self._on_gpu else graph_bytes(outs, x)
        self.held_share = max(self.held_share, num_bytes / x.nbytes)
        return outs

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
