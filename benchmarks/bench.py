"""Runs implementations of one problem in turns: tries, warms up, times and records them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, get_args

import torch
from torch import Tensor

from benchmarks.cases import Case, Pass
from benchmarks.facts import link_speed, stamp
from benchmarks.peers import Peer, Shard
from benchmarks.runner import Plan, interleave, save
from benchmarks.tables import repetitions, spread
from megatron_burst.tools.world import World, attempt, clean_up

_WARM_UP = 2
_SLOW_S = 0.5
_PASSES = tuple(reversed(get_args(Pass)))  # the more telling one first: time may run out
_TOLERANCE = 0.05  # of a relative error; two bf16 kernels differ by less than 0.01


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
        peak = torch.cuda.max_memory_allocated(self.world.device)
        return max(self.world.gather(peak - self.before - outputs + uncounted)) / 2**30


@dataclass(slots=True)
class Trial:
    """Results of trying an implementation alone."""

    status: str = "ok"  # "ok", "failed" or "skipped"
    reason: str = ""  # why it is not ok
    peak_gib: float | None = None  # see `Memory`
    seconds: float = 0.0  # of one forward and backward pass, on the slowest rank
    sample: tuple[Tensor, ...] = ()  # some rows of (out, dq, dk, dv)
    errors: dict[str, float] = field(default_factory=dict)  # beside another's results, by name

    @property
    def is_slow(self) -> bool:
        """Whether it needs no more warming up, and few repetitions."""
        return self.seconds > _SLOW_S


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


def try_out(peer: Peer, shard: Shard, world: World, truth: Sequence[Tensor] = ()) -> Trial:
    """Run one implementation alone: does it run and agree, its memory, roughly its time.

    The first pass creates what stays (kernels, communicators, buffers); the second counts. `truth`
    is a sample of another one's results, with which it must agree if it is comparable."""
    for ask, status in ((peer.refusal, "failed"), (peer.skip, "skipped")):
        if reason := next(filter(None, world.gather(ask(shard.case))), None):
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


@dataclass(slots=True)
class Bench:
    """A run's plan, all ranks, and what is asked on rank 0, before repetitions, if time is up."""

    plan: Plan
    world: World
    out_of_time: Callable[[], bool]
    link: str = ""  # measured before each problem
    trials: dict[str, Trial] = field(default_factory=dict)  # by implementation, of the problem

    def run(self, case: Case, peers: Sequence[Peer]) -> list:
        """All rows of one problem; on disk when this returns."""
        shard = self.plan.kind.draw(case, self.world)
        self.trials, truth = {}, ()
        for peer in peers:
            self.world.progress.now(f"{peer.impl}: trying it out")
            trial = try_out(peer, shard, self.world, truth)
            if peer.comparable and trial.status == "ok":
                truth = truth or trial.sample
            self.trials[str(peer.impl)] = trial
            if trial.errors and self.world.rank == 0:
                words = (f"{name} {error:.2g}" for name, error in trial.errors.items())
                self.world.progress.say(f"{peer.impl}: differs by {', '.join(words)}")
        self.link = link_speed(self.world)  # sockets' speed drifts from problem to problem
        together = [peer for peer in peers if not peer.alone]
        groups = together, *([peer] for peer in peers if peer.alone)
        return [row for group in groups for row in self._run_group(group, shard)]

    def _run_group(self, peers: Sequence[Peer], shard: Any) -> list:
        """Time implementations in turns, then release them."""
        for peer in self._able(peers):
            failure = attempt(partial(self._warm_up, peer, shard), self.world)
            if failure:
                self.trials[str(peer.impl)] = Trial("failed", failure)
                peer.release()
                clean_up(self.world)
        rows = []
        for pass_ in _PASSES:
            times = self._times(self._able(peers), pass_)
            same = stamp(self.world.device) | shard.case.columns()
            made = [self._row(shard.case, peer, pass_, times, same) for peer in peers]
            rows += save(self.plan.out, self.world, made, self.plan.kind.sheet)
        for peer in peers:
            peer.release()
        clean_up(self.world)
        return rows

    def _able(self, peers: Sequence[Peer]) -> list[Peer]:
        return [peer for peer in peers if self.trials[str(peer.impl)].status == "ok"]

    def _warm_up(self, peer: Peer, shard: Any) -> None:
        peer.prepare(shard)
        # what is slow was tried out just now
        for _ in range(0 if self.trials[str(peer.impl)].is_slow else _WARM_UP):
            peer.run_forward()
            peer.run_forward_backward()

    def _times(self, peers: Sequence[Peer], pass_: Pass) -> dict[str, list[float]]:
        trials = self.trials
        counts = {name: self.plan.reps or (3 if trials[name].is_slow else 10) for name in trials}
        forward = pass_ == "fwd"
        runs = {str(p.impl): p.run_forward if forward else p.run_forward_backward for p in peers}
        return interleave(runs, counts, self.world, self.out_of_time)

    def _row(self, case: Case, peer: Peer, pass_: Pass, times: dict, same: dict) -> Any:
        trial, ms = self.trials[str(peer.impl)], times.get(str(peer.impl))
        measured = {"status": trial.status, "note": trial.reason}
        if ms:
            measured = spread(ms) | {
                "peak_gib": trial.peak_gib if pass_ == "fwd_bwd" else None,
                "note": "; ".join(filter(None, (peer.note, repetitions(ms)))),
            }
            measured["tflops_per_gpu"] = case.flops(pass_) / peer.gpus / measured["ms"] / 1e9
        return self.plan.kind.sheet.kind(
            nodes=self.world.nodes, ranks=self.world.size, link=self.link, **same,
            impl=peer.impl.name, mode=peer.impl.mode, pass_=pass_, **measured,
        )  # fmt: skip
