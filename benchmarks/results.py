"""What a measured call takes and returns: device memory, a sample of its results, their errors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_burst.tools.world import World

_SAMPLED_ROWS = 64
_TOLERANCE = 0.05  # of a relative error; two bf16 kernels differ by less than 0.01


def repetitions(ms: Sequence[float]) -> str:
    """How often something was timed and what each took, "3 repetitions: 1.5 1.4 1.6", for a row's
    note: runs that took turns can then be compared repetition by repetition."""
    return f"{len(ms)} repetitions: {' '.join(f'{each:.6g}' for each in ms)}"


@dataclass(slots=True)
class Memory:
    """Device memory of a call above what was allocated before."""

    world: World
    before: int = 0  # bytes that were allocated

    def __post_init__(self) -> None:
        if self.world.device.type == "cuda":
            self.before = torch.cuda.memory_allocated(self.world.device)

    def restart(self) -> None:
        """Forget the peak so far."""
        if self.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.world.device)

    def peak_gib(self, outputs: int, uncounted: int = 0) -> float | None:
        """The worst rank's peak in GiB above what was allocated before; None on CPU. Excludes bytes
        of `outputs`, includes those that torch's caching allocator does not see (`uncounted`)."""
        if self.world.device.type != "cuda":
            return None
        extra = (
            torch.cuda.max_memory_allocated(self.world.device) - self.before - outputs + uncounted
        )
        return max(self.world.gather(extra)) / 2**30


def sample_of(results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """A few rows of each, [rows, b * h * d] in float32."""
    flat = [x.reshape(x.shape[0], -1) for x in results]
    return tuple(x[:: max(1, len(x) // _SAMPLED_ROWS)].float() for x in flat)


def errors_of(sample: Sequence[Tensor], truth: Sequence[Tensor], world: World) -> dict[str, float]:
    """Relative errors of (out, dq, dk, dv), of the worst rank, by name."""
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(sample, truth, strict=True)]
    worst = [max(errors) for errors in zip(*world.gather(errors), strict=True)]
    return dict(zip(("out", "dq", "dk", "dv"), worst, strict=True))


def disagreement(errors: Mapping[str, float]) -> str | None:
    """Why results differ from the others', or None: a fast wrong answer does not count."""
    if max(errors.values()) <= _TOLERANCE:  # False for NaN
        return None
    words = (f"{name} is off by {error:.2g}" for name, error in errors.items())
    return f"its results are wrong: {', '.join(words)}"
