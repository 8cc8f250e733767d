"""What the first training step, without keeping, leaves of a GPU's memory, how long its layers
take, and what they hold for backward: what can be kept from then on."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from logging import WARNING
from math import inf
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer

from megatron_burst.environment import available_host_bytes
from megatron_burst.logs import log_message
from megatron_burst.recompute.auto.budget import MOST_USED, growth
from megatron_burst.recompute.auto.graph import graph_bytes, storages
from megatron_burst.recompute.keeping import WHO, RunningFrame

_COPIED = 1 << 26  # bytes, to measure the bandwidth
_MISCOUNTED = 1.1  # times what was counted, from which on the log says so


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
    """Watches one step of any torch optimizer.

    It begins when this is made, before a forward; torch's peaks of memory count from then on.

    Attributes:
        is_over: whether an optimizer has made it.
        held_share: most bytes that a layer's graph holds for backward, beside its input and its
            results, by bytes of its input; 0: not measured.
        kinds: of layers that this was measured of.
        tokens: of its longest micro-batch.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.is_over, self.held_share, self.tokens = device, False, 0.0, 0
        self.kinds: set[Hashable] = set()
        if self._on_gpu:  # what came before may have taken more than the step does
            torch.cuda.reset_peak_memory_stats(device)
        self._began = self._peak = self.allocated()
        self._has_warned = False
        self._before_turn: int | None = None  # the peak until the first recomputation
        self._spans: list[tuple[_Span, list[_Span]]] = []  # layers, and calls in each
        self._turn: tuple[_Span, _Span] | None = None
        self._hooks = [
            optimizer.register_optimizer_step_pre_hook(self._before_optimizer),
            optimizer.register_optimizer_step_post_hook(self._after_optimizer),
        ]

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def allocated(self) -> int:
        """Bytes of all tensors on the GPU; 0 without one."""
        if not self._on_gpu:
            return 0
        # memory_allocated takes ten times as long, for which every whole layer would wait
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        return stats["allocated_bytes"]["all"]["current"] if stats else 0

    def _before_optimizer(self, *_: Any) -> None:
        if self._on_gpu and not self.is_over:
            self._peak = max(self._peak, torch.cuda.max_memory_allocated(self._device))

    def _after_optimizer(self, *_: Any) -> None:
        self.is_over = True  # hooks cannot be removed while torch calls them

    @contextmanager
    def timing(self, tokens: int, modules: Iterable[torch.nn.Module] = ()) -> Iterator[None]:
        """Context of a layer's forward, whose time counts until the step is over. `tokens`: of the
        micro-batch; `modules`: those that recomputation does without anyway, see `rest_s`."""
        if not self.is_over:
            self.tokens = max(self.tokens, tokens)
        if not self._on_gpu or self.is_over:
            yield
            return
        calls: list[_Span] = []
        with ExitStack() as hooks:
            for module in modules:
                begins = module.register_forward_pre_hook(lambda *_: calls.append(_Span()))
                ends = module.register_forward_hook(lambda *_: calls[-1].end())
                hooks.callback(begins.remove)
                hooks.callback(ends.remove)
            span = _Span()
            yield
        span.end()
        self._spans.append((span, calls))

    def forward_s(self) -> float:
        """Seconds of a layer's forward, the median; 0: not measured. Waits for the GPU."""
        return self._median(lambda layer, calls: layer.seconds)

    def rest_s(self) -> float:
        """The same without modules that recomputation does without anyway."""
        return self._median(lambda layer, calls: layer.seconds - sum(x.seconds for x in calls))

    def _median(self, seconds: Callable[[_Span, list[_Span]], float]) -> float:
        if not self._spans:
            return 0.0
        torch.cuda.synchronize(self._device)
        return median(seconds(*spans) for spans in self._spans)

    def turn(self, run: RunningFrame) -> None:
        """Say that a layer's recomputation begins: the first one is the last layer's."""
        if self._spans and self._turn is None and not self.is_over:
            self._turn = self._spans[-1][0], _Span()
            most = torch.cuda.max_memory_allocated(self._device)
            self._before_turn = most - run.kept_bytes()  # as if this layer kept nothing

    def free_bytes(self) -> float:
        """What a layer's recomputation and backward took beyond all that came before, of which the
        loss may take more; infinite: not measured."""
        return inf if self._before_turn is None else float(self._peak - self._before_turn)

    def turn_s(self) -> float:
        """Seconds between the last layer's forward and its recomputation; 0: not measured."""
        if self._turn is None:
            return 0.0
        torch.cuda.synchronize(self._device)
        return self._turn[0].until(self._turn[1])

    def weigh(self, forward: Callable[[], Any], x: Tensor, run: RunningFrame, kind: Hashable,
              living: Callable[[], Iterable[Tensor]] = tuple) -> Any:  # fmt: skip
        """A layer's results in recomputation; until the step is over, measures `held_share`.

        By what the graph saves, and on a GPU also by how much more is allocated, whichever is more:
        the graph does not show what nodes in C++ save, and growth not what took the place of
        something else, such as tensors that Megatron's token dispatchers hold between calls. Not
        where torch itself looks at what the graph saves.

        `x`: the layer's input; `kind`: of the layer: those of one kind hold as much; `living`:
        tensors that the graph may save and that live on anyway, such as parameters.
        """
        if self.is_over or run.frame.stops_early:
            return forward()
        if self._on_gpu:  # this thread's first product would allocate its workspace
            torch.cuda.current_blas_handle()
        before = self.allocated() - run.kept_bytes()  # kept for this call, so part of it
        outs = forward()
        grown = self.allocated() - run.kept_bytes() - before - sum(storages(outs).values())
        most = max(grown, graph_bytes(outs, (x, *living())))
        self.held_share = max(self.held_share, most / x.nbytes)
        self.kinds.add(kind)
        return outs

    @contextmanager
    def expecting(self, num_bytes: int) -> Iterator[None]:
        """Context of a call that should hold so many bytes for backward, as measured; says once if
        a GPU has to hold more. 0: unknown."""
        before = self.allocated() if num_bytes and not self._has_warned else 0
        yield
        grown = self.allocated() - before if before else 0
        if grown > _MISCOUNTED * num_bytes:
            self._has_warned = True
            log_message(
                f"{WHO}: all results of a layer take {grown / 2**30:.2f} GiB in a micro-batch, but "
                f"{num_bytes / 2**30:.2f} in the first step, perhaps because this GPU's experts "
                "get more tokens, so memory may not suffice; pass --burst-keep-budget-gib to keep "
                "less",
                WARNING,
            )

    @property
    def taken_bytes(self) -> int:
        """What the step took above what it began with."""
        return self._peak - self._began

    def release_cache(self) -> None:
        """Give what PyTorch cached back to the GPU: free blocks of this step's sizes would lie
        between those of later steps, which keep more."""
        if self._on_gpu:
            torch.cuda.empty_cache()

    def left_bytes(self, tokens: int) -> int:
        """What a further step leaves of the memory: it begins with the optimizer's states, and
        takes as much as the first one, or more if this rank's micro-batches were shorter than
        `tokens`. Without a GPU, half of what is available."""
        for hook in self._hooks:
            hook.remove()
        if not self._on_gpu:
            return available_host_bytes() // 2
        taken = self.allocated() + self.taken_bytes
        most = max(taken, torch.cuda.max_memory_allocated(self._device))
        most += int((growth(tokens, self.tokens) - 1) * self.taken_bytes)
        free, total = torch.cuda.mem_get_info(self._device)
        of_others = total - free - torch.cuda.memory_reserved(self._device)
        return max(0, int(MOST_USED * total) - of_others - most)


def host_gbs(device: torch.device) -> float | None:
    """GB/s of a copy between a GPU and pinned host memory, the best of some, in the slower
    direction; None: no GPU. Other GPUs of the node slow it down only while they copy too."""
    if device.type != "cuda":
        return None
    on_device = torch.empty(_COPIED, dtype=torch.uint8, device=device)
    on_host = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=True)
    seconds = max(_copy_s(on_host, on_device), _copy_s(on_device, on_host))
    return _COPIED / seconds / 1e9


def _copy_s(target: torch.Tensor, source: torch.Tensor) -> float:
    """Seconds of the fastest of some copies: other work of the node may disturb one."""
    copies = []
    for _ in range(5):
        copies.append(_Span())
        target.copy_(source, non_blocking=True)
        copies[-1].end()
    torch.cuda.synchronize()
    return min(copy.seconds for copy in copies)
