"""Tries an implementation alone, before it is timed along with others."""

from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

from torch import Tensor

from benchmarks.peers import Peer, Shard
from benchmarks.results import Memory, disagreement, errors_of
from megatron_burst.tools.world import World, attempt, clean_up


@dataclass(slots=True)
class Trial:
    """Results of trying an implementation alone.

    Attributes:
        status: "ok", "failed" or "skipped".
        reason: why it is not ok.
        peak_gib: see `Memory`.
        seconds: of one forward and backward pass, on the slowest rank.
        sample: some rows of (out, dq, dk, dv).
        errors: relative to another implementation's results, by name.
    """

    status: str = "ok"
    reason: str = ""
    peak_gib: float | None = None
    seconds: float = 0.0
    sample: tuple[Tensor, ...] = ()
    errors: dict[str, float] = field(default_factory=dict)


def try_out(
    peer: Peer, shard: Shard, world: World, truth: tuple[Tensor, ...] | None = None
) -> Trial:
    """Run one implementation alone: does it run and agree, its memory, roughly its time.

    The first pass creates what stays (kernels, communicators, buffers); the second counts.

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
    sample = () if failure else peer.sample(results)
    outputs = sum(x.nbytes for x in results)
    results[:] = []
    memory.restart()
    start = perf_counter()
    failure = failure or attempt(run, world)
    seconds = max(world.gather(perf_counter() - start))
    peak_gib = None if failure else memory.peak_gib(outputs, peer.uncounted_bytes())
    results[:] = []
    errors = {}
    if not failure and peer.comparable and truth:
        errors = errors_of(sample, truth, world)
        failure = disagreement(errors)
    peer.release()
    clean_up(world)
    if failure:
        return Trial("failed", failure, errors=errors)
    return Trial("ok", "", peak_gib, seconds, sample, errors)
