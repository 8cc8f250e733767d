"""What an implementation does when tried alone, before it is timed beside others."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from torch import Tensor

from megatron_burst.cli.peers import Peer, Shard
from megatron_burst.cli.timing import Memory, attempt, clean_up
from megatron_burst.cli.world import World

_SAMPLED_ROWS = 64
_TOLERANCE = 0.05  # of a relative error; two bf16 kernels differ by less than 0.01


@dataclass(slots=True)
class Trial:
    """How an implementation did when tried alone.

    Attributes:
        status: "ok", "failed" or "skipped".
        reason: why it is not ok.
        peak_gib: see `Memory`.
        seconds: of one forward and backward pass, on the slowest rank.
        sample: some rows of this rank's (out, dq, dk, dv).
    """

    status: str = "ok"
    reason: str = ""
    peak_gib: float | None = None
    seconds: float = 0.0
    sample: tuple[Tensor, ...] = ()


def try_out(
    peer: Peer, shard: Shard, world: World, truth: tuple[Tensor, ...] | None = None
) -> Trial:
    """One implementation alone: can it run, does it agree, how much memory, about how long.

    The first pass makes what lasts (compiled kernels, communicators, buffers), the second counts.

    Args:
        peer: the implementation.
        shard: this rank's tensors.
        world: all ranks.
        truth: sample of another one's results, with which it must agree if it is comparable.
    """
    for ask, status in ((peer.refusal, "failed"), (peer.skip, "skipped")):
        reason = next(filter(None, world.gather(ask(shard.case))), None)
        if reason:
            return Trial(status, reason)
    results = []

    def run() -> None:
        results[:] = []
        results[:] = peer.run_forward_backward()

    failure = attempt(partial(peer.prepare, shard), world)
    memory = Memory(world)
    failure = failure or attempt(run, world)
    sample = _sample(results)
    outputs = sum(x.nbytes for x in results)
    results[:] = []
    memory.restart()
    start = perf_counter()
    failure = failure or attempt(run, world)
    seconds = max(world.gather(perf_counter() - start))
    peak_gib = None if failure else memory.peak_gib(outputs, peer.uncounted_bytes())
    results[:] = []
    if not failure and peer.comparable and truth:
        failure = _disagreement(sample, truth, world)
    peer.release()
    clean_up(world)
    return Trial("failed", failure) if failure else Trial("ok", "", peak_gib, seconds, sample)


def _sample(results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """A few rows of each, [rows, b * h * d] in float32."""
    flat = [x.reshape(x.shape[0], -1) for x in results]
    return tuple(x[:: max(1, len(x) // _SAMPLED_ROWS)].float() for x in flat)


def _disagreement(sample: Sequence[Tensor], truth: Sequence[Tensor], world: World) -> str | None:
    """Why results are not those of the others, or None: a fast wrong answer is no peer."""
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(sample, truth, strict=True)]
    worst = [max(errors) for errors in zip(*world.gather(errors), strict=True)]
    if max(worst) <= _TOLERANCE:  # NaN is not
        return None
    named = zip(("out", "dq", "dk", "dv"), worst, strict=True)
    return "its results are wrong: " + ", ".join(f"{name} is off by {e:.2g}" for name, e in named)
