"""Attention over a process group, beside its peers.

torchrun --nproc-per-node 4 -m benchmarks.attention --preset quick --out quick.csv
python -m benchmarks.attention --help
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, get_args

from rich.console import Console
from typer import Option

from benchmarks.cases import PRESETS, Case, Grid, Pass, grid_of, head_dims, problems
from benchmarks.facts import gpu_state, link_speed, versions
from benchmarks.impls import Impl, impls_of
from benchmarks.peers import Burst, Ceiling, OneGpu, Peer, Shard, draw_shard
from benchmarks.rows import Row
from benchmarks.sweep import (
    Budget,
    Dtype,
    Out,
    check_out,
    clock,
    interleave,
    new_app,
    save,
    sweep,
    usual_dtype,
)
from benchmarks.tables import reasons, terminal_table
from benchmarks.te_peer import TransformerEngine
from benchmarks.trial import Trial, try_out
from megatron_burst.cli.terminal import Device, Nodes, in_one_sentence
from megatron_burst.cli.world import World, attempt, clean_up, started

_WHO = "benchmarks.attention"
_PEERS = {"burst": Burst, "te": TransformerEngine, "ceiling": Ceiling, "one_gpu": OneGpu}
_WARM_UP = 2
_SLOW_S = 0.5
_PASSES = tuple(reversed(get_args(Pass)))  # the more telling one first: time may run out
app = new_app()


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run measures.

    Attributes:
        cases: problems, in order.
        impls: what each is measured with.
        reps: repetitions; None: 10, or 3 of what takes over 0.5 s.
        budget_s: seconds after which no problem and no repetition is started; None: no end.
        out: CSV that rank 0 appends to; None: nowhere.
    """

    cases: Sequence[Case]
    impls: Sequence[Impl]
    reps: int | None = None
    budget_s: float | None = None
    out: Path | None = None


def measure(plan: Plan, world: World, say: Callable[[str], None] | None = None) -> list[Row]:
    """Run a plan on all ranks together.

    Args:
        plan: the same on all ranks.
        world: all ranks.
        say: see `sweep`.

    Returns:
        the rows, on every rank.

    Raises:
        BurstError: if a problem cannot be dealt out, or `plan.out` has other columns.
    """
    for case in plan.cases:
        case.check(world.size)
    check_out(plan.out, world)
    bench = _Bench(plan, world, clock(plan.budget_s))
    peers = [_PEERS[impl.name](impl, world) for impl in plan.impls]
    return sweep(plan.cases, lambda case: bench.run(case, peers), world, bench.out_of_time, say)


@dataclass(slots=True)
class _Bench:
    """What stays the same from problem to problem."""

    plan: Plan
    world: World
    out_of_time: Callable[[], bool]
    link: str = ""
    trials: dict[str, Trial] = field(default_factory=dict)

    def run(self, case: Case, peers: Sequence[Peer]) -> list[Row]:
        """All rows of one problem; on disk when this returns."""
        shard = draw_shard(case, self.world)
        self.trials, truth = {}, None
        for peer in peers:
            self.world.progress.now(f"{peer.impl}: trying it out")
            trial = try_out(peer, shard, self.world, truth)
            if peer.comparable and trial.status == "ok":
                truth = truth or trial.sample
            self.trials[str(peer.impl)] = trial
        self.link = link_speed(self.world)  # sockets' speed drifts from problem to problem
        rows = []
        together = [peer for peer in peers if not peer.alone]
        for group in (together, *([peer] for peer in peers if peer.alone)):
            rows += self._run_group(group, shard)
        return rows

    def _run_group(self, peers: Sequence[Peer], shard: Shard) -> list[Row]:
        """Time implementations in turns, then let them go."""
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
            save(self.plan.out, self.world, made)
            rows += made
        for peer in peers:
            peer.release()
        clean_up(self.world)
        return rows

    def _able(self, peers: Sequence[Peer]) -> list[Peer]:
        return [peer for peer in peers if self.trials[str(peer.impl)].status == "ok"]

    def _warm_up(self, peer: Peer, shard: Shard) -> None:
        peer.prepare(shard)
        slow = self.trials[str(peer.impl)].seconds > _SLOW_S
        for _ in range(0 if slow else _WARM_UP):  # it was tried out just now
            peer.run_forward()
            peer.run_forward_backward()

    def _times(self, peers: Sequence[Peer], pass_: Pass) -> dict[str, list[float]]:
        def reps(peer: Peer) -> int:
            slow = self.trials[str(peer.impl)].seconds > _SLOW_S
            return self.plan.reps or (3 if slow else 10)

        runs = {
            str(p.impl): p.run_forward if pass_ == "fwd" else p.run_forward_backward for p in peers
        }
        counts = {str(peer.impl): reps(peer) for peer in peers}
        return interleave(runs, counts, self.world, self.out_of_time)

    def _row(self, case: Case, peer: Peer, pass_: Pass, times: dict, gpu: str) -> Row:
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
                "note": "; ".join(filter(None, (peer.note, f"{len(ms)} repetitions"))),
            }
        return Row(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=versions(),
            gpu=gpu,
            nodes=self.world.nodes,
            ranks=self.world.size,
            link=self.link,
            **asdict(case),
            impl=peer.impl.name,
            mode=peer.impl.mode,
            pass_=pass_,
            **measured,
        )


@app.command()
def main(
    seq: Annotated[str, Option(help="tokens of the whole sequence, e.g. 64K,128K,1M")] = "",
    heads: Annotated[str, Option(help="query heads / KV heads, e.g. 32/32,32/8")] = "",
    batch: Annotated[str, Option(help="sequences, e.g. 1,2")] = "",
    mask: Annotated[str, Option(help="causal, full, or both: causal,full")] = "",
    head_dim: Annotated[str, Option(help="width of a head, or 192/128 for q, k / v")] = "128",
    dtype: Dtype = None,
    impl: Annotated[
        list[str] | None,
        Option(
            help="repeatable: burst[:auto|gather|ring|FIELD=VALUE,...], te[:MODE], "
            "ceiling[:BACKEND], one-gpu[:BACKEND]; default: burst:auto, te, ceiling"
        ),
    ] = None,
    preset: Annotated[
        str, Option(help=f"{', '.join(PRESETS)}; lists given beside it narrow it down")
    ] = "",
    out: Out = Path("attention.csv"),
    reps: Annotated[
        int | None, Option(min=1, help="default: 10, or 3 of what takes over 0.5 s")
    ] = None,
    budget_s: Budget = None,
    nodes: Nodes = None,
    device: Device = None,
) -> None:
    """Attention over all ranks, beside its peers; alone or under torchrun."""
    with in_one_sentence():
        grid = grid_of(seq, heads, batch, mask)
        plan = _plan(preset, grid, tuple(impl or ()), reps=reps, budget_s=budget_s, out=out)
        _run(plan, head_dims(head_dim), dtype, device, nodes)


def _plan(preset: str, grid: Grid, impls: tuple[str, ...], **limits) -> Plan:
    """Problems and implementations of a preset or of lists."""
    cases, usual = problems(preset, grid)
    return Plan(cases, impls_of(impls or usual), **limits)


def _run(plan: Plan, dims: tuple[int, int], dtype, device, nodes) -> None:
    """Measure, then show what was measured."""
    width = None if Console().is_terminal else 200
    console = Console(width=width, markup=False, highlight=False)
    with started(_WHO, device, nodes) as world:
        dtype = dtype or usual_dtype(world)
        sizes = {"head_dim_qk": dims[0], "head_dim_v": dims[1], "dtype": dtype}
        plan = replace(plan, cases=tuple(replace(case, **sizes) for case in plan.cases))
        rows = measure(plan, world)
        if world.rank == 0 and rows:
            console.print(terminal_table(rows), *reasons(rows), sep="\n")
            console.print(f"rows were appended to {plan.out}")


if __name__ == "__main__":
    app()
