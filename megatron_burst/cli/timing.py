"""Time, memory and agreement of calls that all ranks make together."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.cli.world import World
from megatron_burst.errors import BurstError

_HEAD_START_CYCLES = 20_000_000  # about 10 ms
_SAMPLED_ROWS = 64
_TOLERANCE = 0.05  # of a relative error; two bf16 kernels differ by less than 0.01


def timed_ms(run: Callable[[], object], world: World) -> float:
    """Milliseconds that one call takes on this rank; all ranks start together.

    On GPUs the CPU runs ahead, as it does in training, so what it does before a kernel counts only
    where the GPU has to wait for it: the GPU spins, then waits for the others, then starts.
    """
    world.barrier()
    if world.device.type == "cpu":
        start = perf_counter()
        run()
        return (perf_counter() - start) * 1e3
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_HEAD_START_CYCLES)
    dist.all_reduce(torch.zeros(1, device=world.device), group=world.group)
    first.record()
    run()
    last.record()
    world.synchronize()
    return first.elapsed_time(last)


def attempt(action: Callable[[], object], world: World) -> str | None:
    """Why an action failed, in one line, or None; the same on all ranks.

    Raises:
        BurstError: if it failed on some ranks only: the others may wait for them forever.
    """
    try:
        action()
        failure = None
    except Exception as error:  # whatever a peer raises becomes a row with its reason
        kind = "" if isinstance(error, BurstError) else f"{type(error).__name__}: "
        failure = (kind + " ".join(str(error).split()))[:400]
    failures = world.gather(failure)
    failed = [rank for rank, reason in enumerate(failures) if reason is not None]
    if failed and len(failed) < world.size:
        raise BurstError(
            "bench: an implementation must run or fail on all ranks, because the others "
            f"wait in its collectives; got a failure on ranks {failed} of {world.size} only: "
            f"{failures[failed[0]]}; leave that implementation or size out"
        )
    if not failed:
        world.synchronize()
    return failures[0]


@dataclass(slots=True)
class Memory:
    """Device memory of a call above what was there when this was made."""

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
        """The worst rank's peak in GiB above what was there; None on CPU.

        Args:
            outputs: bytes of results, which do not count.
            uncounted: bytes past torch's caching allocator, which do.
        """
        if self.world.device.type != "cuda":
            return None
        extra = (
            torch.cuda.max_memory_allocated(self.world.device) - self.before - outputs + uncounted
        )
        return max(self.world.gather(extra)) / 2**30


def clean_up(world: World) -> None:
    """Collect what failed calls left in cycles, and give unused memory back."""
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()


def sample_of(results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """A few rows of each, [rows, b * h * d] in float32."""
    flat = [x.reshape(x.shape[0], -1) for x in results]
    return tuple(x[:: max(1, len(x) // _SAMPLED_ROWS)].float() for x in flat)


def disagreement(sample: Sequence[Tensor], truth: Sequence[Tensor], world: World) -> str | None:
    """Why results are not those of the others, or None: a fast wrong answer is no peer."""
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(sample, truth, strict=True)]
    worst = [max(errors) for errors in zip(*world.gather(errors), strict=True)]
    if max(worst) <= _TOLERANCE:  # NaN is not
        return None
    named = zip(("out", "dq", "dk", "dv"), worst, strict=True)
    return "its results are wrong: " + ", ".join(f"{name} is off by {e:.2g}" for name, e in named)
