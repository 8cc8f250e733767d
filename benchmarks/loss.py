"""The LM head and loss, compared with peers.

torchrun --nproc-per-node 4 -m benchmarks.loss --tokens 32K,128K --hidden 8192 --vocab 256K
python -m benchmarks.loss --help
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.distributed as dist
import typer
from typer import Option

from benchmarks import loss_heads as heads
from benchmarks import runner
from benchmarks.bench import Memory
from benchmarks.facts import stamp
from benchmarks.loss_table import draw_loss, loss_table
from benchmarks.sheets import COUNTED_CSV, LOSS_CSV, LossRow
from benchmarks.tables import repetitions, spread
from megatron_burst.tools.speeds import matmul
from megatron_burst.tools.terminal import Device
from megatron_burst.tools.world import World, attempt, clean_up, started, timed_ms

_WHO = "benchmarks.loss"
_REPS, _CHECKED_TOKENS = 5, 1024
_TOLERANCE = 0.05
_MATMUL = {"cuda": 8192, "cpu": 512}  # side of the square product that the rate is measured with
app = runner.App()


def measure(
    plan: runner.Plan, world: World, say: Callable[[str], None] | None = None
) -> list[LossRow]:
    """Run a plan on all ranks together, which share the vocabulary; returns the rows, on each.
    BurstError if `plan.out` has other columns."""
    sheet = plan.kind or LOSS_CSV
    runner.check_out(plan.out, world, sheet)
    out_of_time, rate = runner.clock(plan.budget_s), matmul_tflops(world, plan.cases[0].dtype)

    def rows_of(case: heads.LossCase) -> list[LossRow]:
        made = _Head(case, plan, world, rate, out_of_time).rows()
        return runner.save(plan.out, world, made, sheet)

    return runner.sweep(plan.cases, rows_of, world, out_of_time, say)


def matmul_tflops(world: World, dtype: str) -> float:
    """What this machine's matmul reaches, TFLOP/s of the slowest rank; the best of five."""
    side = _MATMUL[world.device.type]
    product, flops = matmul(world, side, getattr(torch, dtype))
    best = min(timed_ms(product, world) for _ in range(5))
    return flops / max(world.gather(best)) / 1e9


@dataclass(slots=True)
class _Trial:
    """Results of an implementation alone: errors of loss, dX, dW; peak memory; why it failed."""

    errors: tuple[float | None, ...] = (None, None, None)
    peak_gib: float | None = None
    failure: str | None = None


@dataclass(slots=True)
class _Head:
    """All implementations on one head."""

    case: heads.LossCase
    plan: runner.Plan
    world: World
    rate: float
    out_of_time: Callable[[], bool]
    trials: dict[str, _Trial] = field(default_factory=dict)
    warm: set[str] = field(default_factory=set)

    def rows(self) -> list[LossRow]:
        """Measure, then free everything."""
        world = self.world
        x = heads.draw(self.case, world.rank, world.device, world.group)
        small = x.first(_CHECKED_TOKENS)
        truth = heads.truth_of(small)
        for peer in self.plan.impls:
            world.progress.now(f"{peer.name}: trying it out")
            self.trials[peer.name] = self._try_out(peer, x, small, truth)
        able = [peer for peer in self.plan.impls if not self.trials[peer.name].failure]
        runs, reps = {peer.name: partial(peer.run, x) for peer in able}, self.plan.reps or _REPS
        times = runner.interleave(runs, reps, world, self.out_of_time, partial(self._ready, x))
        facts = stamp(world.device)
        made = [self._row(peer, times.get(peer.name), facts) for peer in self.plan.impls]
        del x, small, truth, runs
        clean_up(world)
        return made

    def _ready(self, x: heads.HeadTensors, name: str) -> None:
        """Set the stage for one repetition: buffers, and at its first the allocator's memory."""
        (peer,) = (peer for peer in self.plan.impls if peer.name == name)
        self._give_buffer(peer, x)
        if name not in self.warm:
            self.warm.add(name)
            peer.run(x)

    def _give_buffer(self, peer: heads.LossPeer, x: heads.HeadTensors) -> None:
        """Give Megatron's buffer to implementations that add to it; zeroing it is not timed.

        Megatron sets it to zero once a step, whatever the loss is.
        """
        if hasattr(x.weight, "main_grad"):
            if peer.into_main_grad:
                x.weight.main_grad.zero_()
                return
            del x.weight.main_grad, x.weight.grad_added_to_main_grad
        peer.prepare(x)

    def _try_out(
        self, peer: heads.LossPeer, x: heads.HeadTensors, small: heads.HeadTensors, truth
    ) -> _Trial:
        world = self.world
        failure = next(filter(None, world.gather(peer.refusal(world.size))), None)
        errors: list[float] = []

        def check() -> None:
            self._give_buffer(peer, small)
            loss, dhidden, dweight = peer.run(small)
            if peer.gives_parts and world.size > 1:
                dist.all_reduce(dhidden, group=world.group)
            loss = truth[0] if peer.is_policy else loss
            pairs = zip((loss, dhidden, dweight), truth, strict=True)
            errors[:] = [float((a.double() - b).norm() / b.norm()) for a, b in pairs]

        failure = failure or attempt(check, world)
        worst = runner.slowest(world.gather(errors))
        if not failure and not max(worst) <= _TOLERANCE:
            failure = f"its results are wrong: loss, dX, dW are off by {worst}"
        failure = failure or attempt(lambda: self._give_buffer(peer, x), world)
        failure = failure or attempt(partial(peer.run, x), world)  # compiles, grows buffers
        clean_up(world)
        memory = Memory(world)
        memory.restart()
        failure = failure or attempt(partial(peer.run, x), world)
        outputs = x.hidden.nbytes + (0 if peer.into_main_grad else 4 * x.weight.numel())
        peak = None if failure else memory.peak_gib(outputs)
        clean_up(world)
        if peer.is_policy and worst:
            worst[0] = None
        return _Trial(tuple(worst) or (None,) * 3, peak, failure)

    def _row(self, peer: heads.LossPeer, ms: list[float] | None, facts: dict[str, str]) -> LossRow:
        trial, measured = self.trials[peer.name], {}
        if ms:
            measured = spread(ms)
            tflops = self.case.flops(self.world.size) / measured["ms"] / 1e9
            measured["gemm_efficiency"] = tflops / self.rate
            measured["peak_gib"] = None if trial.peak_gib is None else max(trial.peak_gib, 0.0)
        names = ("error_loss", "error_dhidden", "error_dweight")
        kind, case = (self.plan.kind or LOSS_CSV).kind, asdict(self.case)
        if kind is LossRow:
            case.pop("counted")
        return kind(
            **facts, ranks=self.world.size, **case, impl=peer.name,
            matmul_tflops=self.rate, **measured, **dict(zip(names, trial.errors, strict=True)),
            status="ok" if ms else "failed",
            note=trial.failure or (repetitions(ms) if ms else "time was up"),
        )  # fmt: skip


@app.command()
def main(
    tokens: Annotated[str, Option(help="of all ranks together, e.g. 8K,32K,128K")] = "",
    hidden: Annotated[str, Option(help="width of the hidden states, e.g. 4096,8192")] = "",
    vocab: Annotated[str, Option(help="classes of all ranks, e.g. 32K,128K")] = "",
    preset: Annotated[Literal["quick", "full"], Option(help="what is not listed")] = "quick",
    case: Annotated[
        list[str] | None,
        Option(help="repeatable, in place of lists: tokens, width, classes, e.g. 32K,4096,128K"),
    ] = None,
    impl: Annotated[
        list[str] | None,
        Option(help="repeatable, e.g. burst:forward, megatron:fused, liger; default: all that can"),
    ] = None,
    counted: Annotated[
        list[str] | None,
        Option(
            help="repeatable: all, '10 % at random', '10 % in one block'; a CSV with a column more"
        ),
    ] = None,
    dtype: runner.Dtype = None,
    out: runner.Out = Path("loss.csv"),
    reps: runner.Reps = _REPS,
    budget_s: runner.Budget = None,
    device: Device = None,
) -> None:
    """LM head and loss, forward and backward; all ranks share the vocabulary (TP)."""
    with started(_WHO, device) as world:
        dtype = dtype or runner.usual_dtype(world)
        cases = heads.listed_cases(case or (), dtype)
        cases = cases or heads.cases_of(preset, tokens, hidden, vocab, dtype)
        cases = heads.with_counts(cases, counted or ())
        sheet = COUNTED_CSV if counted else LOSS_CSV
        runner.check_out(out, world, sheet)
        peers = heads.peers_of(impl) if impl else heads.usual_peers(world)
        rows = measure(runner.Plan(cases, peers, reps, budget_s, out, sheet), world)
        if world.rank == 0 and rows:
            typer.echo(loss_table(rows))
            for path in draw_loss(rows, out.with_suffix("")):
                typer.echo(path)


if __name__ == "__main__":
    app()
