"""Runs implementations of one problem in turns: tries, warms up, times and records them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, get_args

from benchmarks.cases import Case, Pass
from benchmarks.facts import gpu_state, link_speed, versions
from benchmarks.peers import Peer
from benchmarks.results import repetitions
from benchmarks.rows import ATTENTION_CSV, Sheet
from benchmarks.sweep import interleave, save
from benchmarks.trial import Trial, try_out
from megatron_burst.tools.world import World, attempt, clean_up

_WARM_UP = 2
_SLOW_S = 0.5
_PASSES = tuple(reversed(get_args(Pass)))  # the more telling one first: time may run out


@dataclass(slots=True)
class Bench:
    """What stays the same from problem to problem.

    Attributes:
        world: all ranks.
        draw: makes this rank's tensors of a problem.
        out_of_time: asked on rank 0 before each repetition but the first.
        reps: repetitions; None: 10, or 3 of what takes over 0.5 s.
        out: CSV that rank 0 appends to; None: nowhere.
        sheet: the kind of CSV.
        link: measured before each problem.
        trials: by implementation, of the problem.
    """

    world: World
    draw: Callable[[Any, World], Any]
    out_of_time: Callable[[], bool]
    reps: int | None = None
    out: Path | None = None
    sheet: Sheet = ATTENTION_CSV
    link: str = ""
    trials: dict[str, Trial] = field(default_factory=dict)

    def run(self, case: Case, peers: Sequence[Peer]) -> list:
        """All rows of one problem; on disk when this returns."""
        shard = self.draw(case, self.world)
        self.trials, truth = {}, None
        for peer in peers:
            self.world.progress.now(f"{peer.impl}: trying it out")
            trial = try_out(peer, shard, self.world, truth)
            if peer.comparable and trial.status == "ok":
                truth = truth or trial.sample
            self.trials[str(peer.impl)] = trial
            self._tell(trial, peer)
        self.link = link_speed(self.world)  # sockets' speed drifts from problem to problem
        rows = []
        together = [peer for peer in peers if not peer.alone]
        for group in (together, *([peer] for peer in peers if peer.alone)):
            rows += self._run_group(group, shard)
        return rows

    def _tell(self, trial: Trial, peer: Peer) -> None:
        """Report how much its results differ from the first one's, before any time."""
        if trial.errors and self.world.rank == 0:
            words = (f"{name} {error:.2g}" for name, error in trial.errors.items())
            self.world.progress.say(f"{peer.impl}: differs by {', '.join(words)}")

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
            gpu = gpu_state(self.world.device)
            made = [self._row(shard.case, peer, pass_, times, gpu) for peer in peers]
            save(self.out, self.world, made, self.sheet)
            rows += made
        for peer in peers:
            peer.release()
        clean_up(self.world)
        return rows

    def _able(self, peers: Sequence[Peer]) -> list[Peer]:
        return [peer for peer in peers if self.trials[str(peer.impl)].status == "ok"]

    def _warm_up(self, peer: Peer, shard: Any) -> None:
        peer.prepare(shard)
        slow = self.trials[str(peer.impl)].seconds > _SLOW_S
        for _ in range(0 if slow else _WARM_UP):  # it was tried out just now
            peer.run_forward()
            peer.run_forward_backward()

    def _times(self, peers: Sequence[Peer], pass_: Pass) -> dict[str, list[float]]:
        def reps(peer: Peer) -> int:
            slow = self.trials[str(peer.impl)].seconds > _SLOW_S
            return self.reps or (3 if slow else 10)

        runs = {
            str(p.impl): p.run_forward if pass_ == "fwd" else p.run_forward_backward for p in peers
        }
        counts = {str(peer.impl): reps(peer) for peer in peers}
        return interleave(runs, counts, self.world, self.out_of_time)

    def _row(self, case: Case, peer: Peer, pass_: Pass, times: dict, gpu: str) -> Any:
        trial, ms = self.trials[str(peer.impl)], times.get(str(peer.impl))
        measured = {"status": trial.status, "note": trial.reason}
        if ms:
            middle = median(ms)
            measured = {
                "ms": middle,
                "ms_min": min(ms),
                "ms_max": max(ms),
                "tflops_per_gpu": case.flops(pass_) / peer.gpus / middle / 1e9,
                "peak_gib": trial.peak_gib if pass_ == "fwd_bwd" else None,
                "note": "; ".join(filter(None, (peer.note, repetitions(ms)))),
            }
        return self.sheet.kind(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=versions(),
            gpu=gpu,
            nodes=self.world.nodes,
            ranks=self.world.size,
            link=self.link,
            **case.columns(),
            impl=peer.impl.name,
            mode=peer.impl.mode,
            pass_=pass_,
            **measured,
        )
