"""The list of backends, and the choice among them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch

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

    every: tuple[type[Backend], ...] = (
        FlashAttention4, Cudnn, Flash, Triton, TorchCpu, Reference,
    )  # fmt: skip
    return {kind.capability.name: kind() for kind in every}


def kernel_of(backend: Backend, device: torch.device) -> Kernel:
    """What programs depend on of a backend on a device."""
    can = backend.capability
    supports = can.rectangular_causal, can.takes_delta, can.wide_grads
    return Kernel(*supports, device.type, multiprocessors(device))


def choose_backend(problem: Problem, asked: str) -> tuple[Backend, Decision]:
    """The first backend that supports the problem, with the reason.

    With head dimensions above those of all GPU kernels only plain torch is left, which is many
    times slower; "auto" does not take it, so it must be asked for by name.

    Args:
        problem: what it must support.
        asked: a name, several joined by commas, or "auto": all of them, the fastest first.

    Raises:
        BurstError: if a name is unknown, or none of those asked for supports the problem.
    """
    chosen = _first(problem, names := _names(problem, asked))
    if chosen and asked != "auto":
        among = f" among {', '.join(names)}: {chosen.reason}" if len(names) > 1 else ""
        chosen = replace(chosen, reason=f"asked for{among}")
    if chosen is None:
        raise _nothing_can(problem, asked, names)
    return backends()[chosen.value], chosen


@lru_cache
def in_one_call(problem: Problem) -> Backend | None:
    """The fastest kernel that takes any parts of a score matrix, and delta; None if there is none:
    plain torch on a GPU is slower than many calls."""
    able = [
        name for name, backend in backends().items()
        if SLICES in (can := backend.capability).masks and can.takes_delta
        and (can.devices or problem.device != "cuda")
    ]  # fmt: skip
    chosen = _first(problem, able)
    return chosen and backends()[chosen.value]


def pick(problem: Problem, asked: str) -> str:
    """The name of the backend that `choose_backend` returns; "" if it would raise."""
    return chosen.value if (chosen := _first(problem, _names(problem, asked))) else ""


def _names(problem: Problem, asked: str) -> list[str]:
    """Those asked for; for "auto" all but slow ones."""
    if asked != "auto":
        return asked.split(",")
    able = (b.capability for b in backends().values() if "cuda" in b.capability.devices)
    largest = max(can.max_dim_of(problem.arch) for can in able)
    slow = problem.device == "cuda" and max(problem.dim_qk, problem.dim_v) > largest
    return [name for name in backends() if not (slow and name == "reference")]


_UNKNOWN = "no such backend exists"


def _refusal(name: str, problem: Problem) -> str | None:
    if (backend := backends().get(name)) is None:
        return _UNKNOWN
    return backend.capability.refusal(problem) or backend.missing()


def _first(problem: Problem, names: Sequence[str]) -> Decision | None:
    """The first that supports the problem; later ones are not asked, as that may import a lot."""
    refusals = {}
    for name in names:
        if (why := _refusal(name, problem)) is None:
            skipped = f"; {describe_refusals(refusals)}" if refusals else ""
            return Decision(name, backends()[name].capability.speed + skipped)
        refusals[name] = why
    return None


def describe_refusals(refusals: Mapping[str, str]) -> str:
    """Why backends cannot be used, each reason once: "not fa4, cudnn: it runs on cuda only"."""
    names = {why: [n for n in refusals if refusals[n] == why] for why in refusals.values()}
    return "; ".join(f"not {', '.join(them)}: {why}" for why, them in names.items())


def _nothing_can(problem: Problem, asked: str, names: Sequence[str]) -> BurstError:
    """The error if the backend asked for, or none of `names`, supports the problem."""
    refusals = {name: _refusal(name, problem) for name in backends()}
    able = [name for name, why in refusals.items() if why is None]
    what = str(problem.dtype).removeprefix("torch.")
    got = f"{what} on {problem.device} with head dimensions {problem.dim_qk}/{problem.dim_v}"
    got += "".join(f" and {need}" for need in sorted(problem.needs, reverse=True))
    why = {name: refusals.get(name, _UNKNOWN) for name in names}
    because = "".join(why.values()) if len(why) == 1 else describe_refusals(why)
    instead = "choose another dtype"
    if able:
        auto = "" if asked == "auto" else ", or auto"
        instead = f"choose among {', '.join(able)}{auto} (--burst-backend, --attention-backend)"
    uninstalled = [b.missing() for b in backends().values() if not b.capability.refusal(problem)]
    if any(uninstalled):
        instead += f"; {next(filter(None, uninstalled))}"
    return BurstError(
        f"burst attention: the backend {asked} must be able to compute the call, because nothing "
        f"is converted silently; got {got}, and {because}; {instead}"
    )
