"""The list of backends, and the choice among them: the fastest that supports the problem."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from megatron_burst.errors import BurstError
from megatron_burst.kernels.interface import Backend, Problem, multiprocessors
from megatron_burst.logs import Decision
from megatron_burst.schedule.mask import SLICES
from megatron_burst.schedule.spec import Kernel


@lru_cache(maxsize=1)
def backends() -> dict[str, Backend]:
    """All backends by name, fastest first."""
    from megatron_burst.kernels.fa4 import FlashAttention4
    from megatron_burst.kernels.reference import Reference
    from megatron_burst.kernels.torch_cpu import TorchCpu
    from megatron_burst.kernels.torch_gpu import Cudnn, Flash
    from megatron_burst.kernels.triton import Triton

    kinds: tuple[type[Backend], ...] = FlashAttention4, Cudnn, Flash, Triton, TorchCpu, Reference
    return {kind.capability.name: kind() for kind in kinds}


def attend_and_raise(backend: Backend, largest: Tensor | None) -> Callable[..., Any]:
    """`backend.forward`, which raises `largest` [h], if there is one, to each head's largest score,
    without sinks."""
    if largest is None:
        return backend.forward
    if backend.finds_largest(largest.device):
        return partial(backend.forward, largest=largest)
    from megatron_burst.kernels.reference import with_scores

    return partial(with_scores, backend, largest)


def kernel_of(backend: Backend, device: torch.device) -> Kernel:
    """The properties of a backend on a device that programs depend on."""
    supports = backend.capability
    flags = supports.rectangular_causal, supports.takes_delta, supports.wide_grads
    return Kernel(*flags, device.type, multiprocessors(device))


def choose_backend(problem: Problem, requested: str) -> tuple[Backend, Decision]:
    """The first of the requested backends that supports the problem, with the reason.

    `requested`: a name, several joined by commas, or "auto": all of them, the fastest first. Where
    head dimensions are above those of all GPU kernels, "auto" does not take plain torch, which is
    many times slower.

    Raises:
        BurstError: if a name is unknown, or if no requested backend supports the problem.
    """
    names = _names(problem, requested)
    chosen = _first_supported(problem, names)
    if chosen is None:
        raise _no_backend_error(problem, requested, names)
    if requested != "auto":
        among = f" among {', '.join(names)}: {chosen.reason}" if len(names) > 1 else ""
        chosen = replace(chosen, reason=f"asked for{among}")
    return backends()[chosen.value], chosen


@lru_cache
def in_one_call(problem: Problem) -> Backend | None:
    """The fastest kernel that takes delta, and any parts of a score matrix in one call; None if
    there is none. Plain torch on a GPU does not count: it is slower than many calls."""
    names = []
    for name, backend in backends().items():
        supports = backend.capability
        is_plain_torch = problem.device == "cuda" and not supports.devices
        if SLICES in supports.masks and supports.takes_delta and not is_plain_torch:
            names.append(name)
    chosen = _first_supported(problem, names)
    return chosen and backends()[chosen.value]


def pick(problem: Problem, requested: str) -> str:
    """The name of the backend that `choose_backend` returns; "" if it would raise."""
    return chosen.value if (chosen := _first_supported(problem, _names(problem, requested))) else ""


def _names(problem: Problem, requested: str) -> list[str]:
    """The requested names; of "auto" all but slow ones."""
    if requested != "auto":
        return requested.split(",")
    on_gpu = (b.capability for b in backends().values() if "cuda" in b.capability.devices)
    largest = max(capability.max_dim_of(problem.arch) for capability in on_gpu)
    slow = problem.device == "cuda" and max(problem.dim_qk, problem.dim_v) > largest
    return [name for name in backends() if not (slow and name == "reference")]


_UNKNOWN = "no such backend exists"


def _refusal(name: str, problem: Problem) -> str | None:
    if (backend := backends().get(name)) is None:
        return _UNKNOWN
    return backend.capability.refusal(problem) or backend.missing()


def _first_supported(problem: Problem, names: Sequence[str]) -> Decision | None:
    """The first that supports the problem; looking at later ones might import a lot."""
    refusals: dict[str, str] = {}
    for name in names:
        reason = _refusal(name, problem)
        if reason is None:
            skipped = f"; {describe_refusals(refusals)}" if refusals else ""
            return Decision(name, backends()[name].capability.speed + skipped)
        refusals[name] = reason
    return None


def describe_refusals(refusals: Mapping[str, str]) -> str:
    """Why backends cannot be used, by reason: "not fa4, cudnn: it runs on cuda only"."""
    names: dict[str, list[str]] = {}
    for name, reason in refusals.items():
        names.setdefault(reason, []).append(name)
    return "; ".join(f"not {', '.join(same)}: {reason}" for reason, same in names.items())


def _no_backend_error(problem: Problem, requested: str, names: Sequence[str]) -> BurstError:
    """The error if none of the requested backends, `names`, supports the problem."""
    refusals = {name: _refusal(name, problem) for name in backends()}
    usable = [name for name, reason in refusals.items() if reason is None]
    dtype = str(problem.dtype).removeprefix("torch.")
    got = f"{dtype} on {problem.device} with head dimensions {problem.dim_qk}/{problem.dim_v}"
    got += "".join(f" and {need}" for need in sorted(problem.needs, reverse=True))
    reasons = {name: refusals.get(name, _UNKNOWN) for name in names}
    because = "".join(reasons.values()) if len(reasons) == 1 else describe_refusals(reasons)
    instead = "choose another dtype"
    if usable:
        auto = "" if requested == "auto" else ", or auto"
        instead = f"choose among {', '.join(usable)}{auto} (--burst-backend, --attention-backend)"
    uninstalled = [b.missing() for b in backends().values() if not b.capability.refusal(problem)]
    if any(uninstalled):
        instead += f"; {next(filter(None, uninstalled))}"
    return BurstError(
        f"burst attention: the backend {requested} must be able to compute the call, because "
        f"nothing is converted silently; got {got}, and {because}; {instead}"
    )
