"""`megatron-burst bench`: burst compared with what is installed here, on one attention problem."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from megatron_burst.attention import burst_attention
from megatron_burst.cli.speeds import Attention
from megatron_burst.cli.te import MODES, TransformerEngine
from megatron_burst.cli.world import (
    Memory,
    World,
    attempt,
    clean_up,
    disagreement,
    errors_of,
    sample_of,
    timed_ms,
)
from megatron_burst.comm.state import symmetric_bytes
from megatron_burst.errors import BurstError
from megatron_burst.units import in_units, nearest_multiples

BURST, KERNEL = "burst", "kernel alone"
_WIDTH = 160  # if there is no terminal
Results = tuple[Tensor, ...]


class Problem(NamedTuple):
    """Causal attention over all ranks, one sequence."""

    seq: int  # tokens of the whole sequence
    heads: tuple[int, ...]  # query and KV heads of all ranks together
    dim: int  # width of a head

    def check(self, ranks: int) -> None:
        """Refuse heads that do not fit, and what cannot be sharded in zigzag over the ranks."""
        if len(self.heads) != 2 or self.heads[0] % self.heads[1]:
            raise BurstError(
                "bench: --heads must be query heads / KV heads, because each KV head serves "
                f"equally many query heads; got {'/'.join(map(str, self.heads))!r}; write for "
                "example 32/8"
            )
        if self.seq % (2 * ranks):
            raise BurstError(
                "bench: --seq must be a multiple of twice the ranks, because zigzag gives each "
                f"rank two chunks; got {self.seq} on {ranks} ranks; choose a "
                f"{nearest_multiples(self.seq, 2 * ranks)}"
            )

    @property
    def flops(self) -> float:
        """Of a forward and a backward pass on all ranks: 7 products over half of the pairs."""
        return 7.0 * self.heads[0] * self.dim * self.seq**2

    def draw(self, world: World) -> Results:
        """This rank's q, k, v, which require gradients, and dout: [s_local, 1, h, d]."""
        torch.manual_seed(world.rank)
        options = {"dtype": _dtype(world), "device": world.device}
        counts = self.heads[0], self.heads[1], self.heads[1], self.heads[0]
        q, k, v, dout = (
            torch.randn(self.seq // world.size, 1, heads, self.dim, **options) for heads in counts
        )
        return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


@dataclass(slots=True)
class Contender:
    """One implementation, and its results."""

    forward: Callable[[], object] = lambda: None  # as in inference
    both: Callable[[], Results] = tuple  # a forward and a backward pass
    failure: str | None = None  # why it did not run; None if it did
    gib: float | None = None  # the worst rank's memory above inputs and results; None on CPU
    ms: tuple[list[float], list[float]] = ((), ())  # of the slowest rank: forward, both


def measure(problem: Problem, world: World, reps: int) -> dict[str, Contender]:
    """Burst, each mode of TransformerEngine, and burst's kernel alone, by name; all ranks together.

    Raises:
        BurstError: if the problem cannot be sharded.
    """
    problem.check(world.size)
    tensors = problem.draw(world)
    burst = partial(burst_attention, group=world.group, causal=True, qkv_format="sbhd")
    found = {BURST: _attention(burst, tensors)}
    found |= {f"te {mode}": _engine(mode, problem, world, tensors) for mode in MODES}
    found[KERNEL] = _kernel(problem, world)
    truth: Results = ()
    for name, one in found.items():
        world.progress.now(f"{name}: trying it out")
        sample = _try_out(one, name, world, truth)
        truth = truth or sample
    able = [one for one in found.values() if not one.failure]
    times = [
        _in_turns([getattr(one, pass_) for one in able], reps, world)
        for pass_ in ("forward", "both")
    ]
    for one, forward, both in zip(able, *times, strict=True):
        one.ms = forward, both
    world.progress.end()
    return found


def _in_turns(runs: list[Callable[[], object]], reps: int, world: World) -> list[list[float]]:
    """Milliseconds of the slowest rank for each repetition of each run.

    Runs take turns, so that clocks and heat are shared; every other turn is in reverse order, so
    that none always follows the same one.
    """
    mine: list[list[float]] = [[] for _ in runs]
    for turn in range(reps):
        world.progress.now(f"repetition {turn + 1} of {reps}")
        for ms, run in list(zip(mine, runs, strict=True))[:: -1 if turn % 2 else 1]:
            ms.append(timed_ms(run, world))
    return [
        [max(times) for times in zip(*ranks, strict=True)]
        for ranks in zip(*world.gather(mine), strict=True)
    ]


def _dtype(world: World) -> torch.dtype:
    return torch.bfloat16 if world.device.type == "cuda" else torch.float32


def _attention(attend: Callable[..., Tensor], tensors: Results) -> Contender:
    """An implementation that is one differentiable call on the ranks' shards."""
    *leaves, dout = tensors

    def both() -> Results:
        out = attend(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, dout.view(out.shape))

    return Contender(torch.no_grad()(partial(attend, *leaves)), both)


def _engine(mode: str, problem: Problem, world: World, tensors: Results) -> Contender:
    engine, dims = TransformerEngine(mode, world), (problem.dim, problem.dim)
    refusals = world.gather(engine.refusal(problem.heads[1]))
    failure = next(filter(None, refusals), None)
    failure = failure or attempt(lambda: engine.prepare(problem.heads, dims, causal=True), world)
    return Contender(failure=failure) if failure else _attention(engine, tensors)


def _kernel(problem: Problem, world: World) -> Contender:
    """Whole heads on each rank, no communication: the bound for all that shard the sequence."""
    heads = problem.heads[0] // world.size, max(1, problem.heads[1] // world.size)
    if problem.heads[0] % world.size or heads[0] % heads[1]:
        each = f"{problem.heads[0]}/{problem.heads[1]} heads over {world.size} ranks"
        return Contender(failure=f"each rank computes whole heads; got {each}")
    call = Attention.drawn(world, problem.seq, heads, problem.dim, _dtype(world))
    return Contender(call.forward, lambda: call.backward()())


def _try_out(one: Contender, name: str, world: World, truth: Results) -> Results:
    """Run it twice, the second time for its memory; a wrong answer is a failure."""
    results: list[Tensor] = []
    memory = Memory(world)

    def run() -> None:
        results[:] = []
        results[:] = one.both()

    for _ in range(2):
        memory.restart()
        one.failure = one.failure or attempt(run, world)
    sample = sample_of(results)
    if not one.failure and truth and name != KERNEL:
        one.failure = disagreement(errors_of(sample, truth, world))
    if not one.failure:
        uncounted = symmetric_bytes(world.group) if name == BURST else 0
        one.gib = memory.peak_gib(sum(x.nbytes for x in results), uncounted)
    results[:] = []
    clean_up(world)
    return sample


def show(problem: Problem, found: dict[str, Contender], ranks: int) -> None:
    """Print the table, and why others are missing."""
    width = None if Console().is_terminal else _WIDTH
    console = Console(width=width, markup=False, highlight=False)
    console.print(table(problem, found, ranks))
    reasons: dict[str, list[str]] = {}
    for name, one in found.items():
        if one.failure:
            reasons.setdefault(one.failure, []).append(name)
    for reason, names in reasons.items():
        console.print(f"not measured: {', '.join(names)}: {reason}", soft_wrap=True)


def table(problem: Problem, found: dict[str, Contender], ranks: int) -> Table:
    """One line per implementation that could run, compared with burst."""
    sizes = f"{in_units(problem.seq)} tokens, heads {problem.heads[0]}/{problem.heads[1]}"
    many = f"{ranks} rank{'s' * (ranks > 1)}"
    shown = Table("", title=f"causal attention, {sizes} x {problem.dim}, {many}")
    for column in (
        "forward ms", "forward + backward ms (min-max)", "TFLOP/s per GPU", "burst is", "GiB"
    ):  # fmt: skip
        shown.add_column(column, justify="right")
    burst = found[BURST].ms[1]
    for name, one in found.items():
        if one.failure:
            continue
        forward, both = one.ms
        ms = median(both)
        beside = f"{ms / median(burst):.2f} x as fast" if burst and name != BURST else ""
        shown.add_row(
            name, f"{median(forward):.4g}", f"{ms:.4g} ({min(both):.4g}-{max(both):.4g})",
            f"{problem.flops / ranks / ms / 1e9:.3g}", beside,
            "" if one.gib is None else f"{one.gib:.2f}",
        )  # fmt: skip
    return shown
