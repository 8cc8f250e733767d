"""`megatron-burst bench`: burst beside what is installed here, on one attention problem."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from megatron_burst.attention import burst_attention
from megatron_burst.cli.speeds import Attention
from megatron_burst.cli.te import MODES, TransformerEngine
from megatron_burst.cli.timing import (
    Memory,
    attempt,
    clean_up,
    disagreement,
    interleave,
    sample_of,
)
from megatron_burst.cli.world import World
from megatron_burst.comm.state import symmetric_bytes
from megatron_burst.errors import BurstError
from megatron_burst.plan.units import in_units, nearest_multiples

BURST, KERNEL = "burst", "kernel alone"
_WARM_UP = 2
_WIDTH = 160  # where no terminal says


@dataclass(frozen=True, slots=True)
class Problem:
    """Causal attention over all ranks, one sequence.

    Attributes:
        seq: tokens of the whole sequence.
        heads: query and KV heads of all ranks together.
        dim: width of a head.
    """

    seq: int
    heads: tuple[int, int]
    dim: int

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

    def draw(self, world: World) -> tuple[Tensor, ...]:
        """This rank's q, k, v, which take gradients, and dout: [s_local, 1, h, d]."""
        torch.manual_seed(world.rank)
        options, rows = {"dtype": _dtype(world), "device": world.device}, self.seq // world.size
        q, k, v, dout = (
            torch.randn(rows, 1, heads, self.dim, **options)
            for heads in (self.heads[0], self.heads[1], self.heads[1], self.heads[0])
        )
        return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


@dataclass(slots=True)
class Contender:
    """One implementation, tried out.

    Attributes:
        forward: a forward pass as in inference.
        both: a forward and a backward pass; returns its results.
        failure: why it did not run; None if it did.
        gib: the worst rank's memory above inputs and results; None on CPU.
        ms: of the slowest rank, by repetition: forward, and both.
    """

    forward: Callable[[], object] = lambda: None
    both: Callable[[], tuple[Tensor, ...]] = tuple
    failure: str | None = None
    gib: float | None = None
    ms: tuple[list[float], list[float]] = ((), ())


def measure(problem: Problem, world: World, reps: int) -> dict[str, Contender]:
    """Burst, each mode of TransformerEngine, and burst's kernel alone; all ranks together.

    Args:
        problem: the same on all ranks.
        world: all ranks.
        reps: repetitions, in turns.

    Returns:
        by name, the same on all ranks.

    Raises:
        BurstError: if the problem cannot be sharded.
    """
    problem.check(world.size)
    tensors = problem.draw(world)
    burst = partial(burst_attention, group=world.group, causal=True, qkv_format="sbhd")
    found = {BURST: _attention(burst, tensors)}
    engines = {mode: TransformerEngine(mode, world) for mode in MODES}
    for mode, engine in engines.items():
        failure = engine.refusal(problem.heads[1])
        failure = failure or attempt(
            lambda engine=engine: engine.prepare(problem.heads, (problem.dim,) * 2, True), world
        )
        found[f"te {mode}"] = Contender(failure=failure) if failure else _attention(engine, tensors)
    found[KERNEL] = _kernel(problem, world)
    truth: tuple[Tensor, ...] = ()
    for name, one in found.items():
        world.progress.now(f"{name}: trying it out")
        sample = _try_out(one, name, world, truth)
        truth = truth or sample
    able = {name: one for name, one in found.items() if not one.failure}
    counts = dict.fromkeys(able, reps)
    forward = interleave({n: one.forward for n, one in able.items()}, counts, world, _never)
    both = interleave({n: one.both for n, one in able.items()}, counts, world, _never)
    for name, one in able.items():
        one.ms = forward[name], both[name]
    world.progress.end()
    return found


def _never() -> bool:
    return False


def _dtype(world: World) -> torch.dtype:
    return torch.bfloat16 if world.device.type == "cuda" else torch.float32


def _attention(attend: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Contender:
    """An implementation that is one differentiable call on the ranks' shards."""
    *leaves, dout = tensors

    def forward() -> None:
        with torch.no_grad():
            attend(*leaves)

    def both() -> tuple[Tensor, ...]:
        out = attend(*leaves)
        grads = torch.autograd.grad(out, leaves, dout.view(out.shape))
        return out.detach(), *grads

    return Contender(forward, both)


def _kernel(problem: Problem, world: World) -> Contender:
    """Whole heads on each rank, no communication: the bound for all who shard the sequence."""
    heads = problem.heads[0] // world.size, max(1, problem.heads[1] // world.size)
    if problem.heads[0] % world.size or heads[0] % heads[1]:
        each = f"{problem.heads[0]}/{problem.heads[1]} heads over {world.size} ranks"
        return Contender(failure=f"each rank computes whole heads; got {each}")
    call = Attention.drawn(world, problem.seq, heads, problem.dim, _dtype(world))
    return Contender(call.forward, lambda: call.backward()())


def _try_out(
    one: Contender, name: str, world: World, truth: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Run it twice, the second time for its memory; a wrong answer is a failure."""
    results: list[Tensor] = []
    memory = Memory(world)

    def run() -> None:
        results[:] = []
        results[:] = one.both()

    for _ in range(_WARM_UP):
        memory.restart()
        one.failure = one.failure or attempt(run, world)
    sample = sample_of(results)
    if not one.failure and truth and name != KERNEL:
        one.failure = disagreement(sample, truth, world)
    if not one.failure:
        uncounted = symmetric_bytes(world.group) if name == BURST else 0
        one.gib = memory.peak_gib(sum(x.nbytes for x in results), uncounted)
    results[:] = []
    clean_up(world)
    return sample


def show(problem: Problem, found: dict[str, Contender], ranks: int) -> None:
    """Print the table."""
    width = None if Console().is_terminal else _WIDTH
    Console(width=width, markup=False).print(table(problem, found, ranks))


def table(problem: Problem, found: dict[str, Contender], ranks: int) -> Table:
    """One line an implementation, beside burst."""
    sizes = f"{in_units(problem.seq)} tokens, heads {problem.heads[0]}/{problem.heads[1]}"
    shown = Table(title=f"causal attention, {sizes} x {problem.dim}, {ranks} ranks")
    for column in ("", "forward ms", "forward + backward ms (min-max)", "TFLOP/s per GPU",
                   "burst is", "GiB", "not measured"):  # fmt: skip
        shown.add_column(column, justify="left" if column in ("", "not measured") else "right")
    burst = found[BURST].ms[1]
    for name, one in found.items():
        if one.failure:
            shown.add_row(name, *[""] * 5, one.failure)
            continue
        forward, both = one.ms
        ms = median(both)
        beside = f"{ms / median(burst):.2f} x as fast" if burst and name != BURST else ""
        shown.add_row(
            name, f"{median(forward):.4g}", f"{ms:.4g} ({min(both):.4g}-{max(both):.4g})",
            f"{problem.flops / ranks / ms / 1e9:.3g}", beside,
            "" if one.gib is None else f"{one.gib:.2f}", "",
        )  # fmt: skip
    return shown
