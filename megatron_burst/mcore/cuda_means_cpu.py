"""A mode of torch in which CUDA devices are the CPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class CudaMeansCpu(TorchFunctionMode):
    """Answers every torch call that names a CUDA device or pinned memory with the CPU's."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # core/optimizer/optimizer.py:1009, :1028 and clip_grads.py:174 compare with the names
            # of CUDA types.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        kwargs = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*map(_on_cpu, args), **kwargs)


def _on_cpu(value: object) -> object:
    """Replace a CUDA device, by name or as torch.device, by the CPU."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and value.startswith("cuda") else value
