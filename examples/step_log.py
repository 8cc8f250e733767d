"""Log each training step in full precision, as JSON lines."""

import functools
import inspect
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch
from megatron.training import get_args, training


class StepLog:
    """Writes one JSON object per step: iteration, lm loss, grad norm, seconds, tokens per second,
    and on GPUs the peak memory so far.

    Megatron prints three digits of the gradient norm and has no per-step callback, but it calls
    train_step and then training_log once per step; both are rebound. Values are taken by the names
    of training_log's parameters, because their order changes between releases. The last rank
    writes, as it has the loss; the file is overwritten.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._started = 0.0
        self._signature = inspect.signature(training.training_log)
        training.train_step = self._before(training.train_step, self._start)
        training.training_log = self._before(training.training_log, self._write)

    @staticmethod
    def _before(function: Callable[..., Any], hook: Callable[..., None]) -> Callable[..., Any]:
        @functools.wraps(function)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            hook(*args, **kwargs)
            return function(*args, **kwargs)

        return hooked

    def _start(self, *args: Any, **kwargs: Any) -> None:
        self._started = time.perf_counter()

    def _write(self, *args: Any, **kwargs: Any) -> None:
        if torch.distributed.get_rank() != torch.distributed.get_world_size() - 1:
            return
        logged = self._signature.bind(*args, **kwargs).arguments
        losses = {name: float(loss) for name, loss in logged["loss_dict"].items()}  # waits for GPU
        seconds = time.perf_counter() - self._started
        tokens = get_args().global_batch_size * get_args().seq_length
        step = {
            "iteration": logged["iteration"],
            **losses,
            "grad norm": logged["grad_norm"],
            "seconds": seconds,
            "tokens/s": tokens / seconds,
        }
        if torch.cuda.is_available():
            step["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w", buffering=1)
        self._file.write(json.dumps(step) + "\n")
