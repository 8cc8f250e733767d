"""Attention over a process group, compared with its peers.

torchrun --nproc-per-node 4 -m benchmarks.attention --preset quick --out quick.csv
python -m benchmarks.attention --help
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from typer import Option

from benchmarks import runner
from benchmarks.bench import Bench
from benchmarks.cases import PRESETS, Case, grid_of, head_dims, problems
from benchmarks.compared import reasons, terminal_table
from benchmarks.impls import IMPLS, Impl, impls_of
from benchmarks.library_peers import TorchContextParallel, Ulysses, Yunchang
from benchmarks.peers import Burst, Ceiling, OneGpu, Peer, draw_shard
from benchmarks.runner import App, Budget, Dtype, Out, Plan, Words, usual_dtype
from benchmarks.sheets import ATTENTION_CSV, Sheet
from benchmarks.te import TransformerEngine
from megatron_burst.tools.terminal import Device, Nodes
from megatron_burst.tools.world import World, started

_WHO = "benchmarks.attention"
app = App()
FewReps = Annotated[int | None, Option(min=1, help="default: 10, or 3 of what takes over 0.5 s")]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of problems: attention of sequences, or of packed samples."""

    peers: Mapping[str, Callable[[Impl, World], Peer]]  # what makes each, by name
    draw: Callable[[Any, World], Any]  # makes a rank's tensors of a problem
    sheet: Sheet  # the kind of CSV


ATTENTION = Kind(
    {
        "burst": Burst, "before": Burst, "te": TransformerEngine, "torch": TorchContextParallel,
        "ulysses": Ulysses, "yunchang": Yunchang, "ceiling": Ceiling, "one_gpu": OneGpu,
    },
    draw_shard, ATTENTION_CSV,
)  # fmt: skip


def measure(plan: Plan, world: World, say: Callable[[str], None] | None = None) -> list[Any]:
    """Run a plan on all ranks together; the rows. BurstError if it cannot be run, or written."""
    plan = replace(plan, kind=plan.kind or ATTENTION)
    for case in plan.cases:
        case.check(world.size)
    runner.check_out(plan.out, world, plan.kind.sheet)
    bench = Bench(plan, world, runner.clock(plan.budget_s))
    every = dict.fromkeys(impl for case in plan.cases for impl in plan.of(case))
    peers = {impl: plan.kind.peers[impl.name](impl, world) for impl in every}

    def rows_of(case: Case) -> list[Any]:
        return bench.run(case, [peers[impl] for impl in plan.of(case)])

    return runner.sweep(plan.cases, rows_of, world, bench.out_of_time, say)


def show(plan: Plan, tables: Sequence[Sequence[Any]], rows: Sequence[Any]) -> None:
    """Print what was measured: a table for each of these lists of rows."""
    width = None if Console().is_terminal else 200
    console = Console(width=width, markup=False, highlight=False)
    console.print(*map(terminal_table, filter(None, tables)), *reasons(rows), sep="\n")
    console.print(f"rows were appended to {plan.out}")


@app.command()
def main(
    seq: Annotated[str, Option(help="tokens of the whole sequence, e.g. 64K,128K,1M")] = "",
    heads: Annotated[str, Option(help="query heads / KV heads, e.g. 32/32,32/8")] = "",
    batch: Annotated[str, Option(help="sequences, e.g. 1,2")] = "",
    mask: Annotated[str, Option(help="causal, full, or both: causal,full")] = "",
    head_dim: Annotated[str, Option(help="width of a head, or 192/128 for q, k / v")] = "128",
    dtype: Dtype = None,
    impl: Annotated[Words, Option(help=f"default: burst:auto, te, ceiling; {IMPLS}")] = None,
    preset: Annotated[str, Option(help=f"{', '.join(PRESETS)}; lists narrow it down")] = "",
    out: Out = Path("attention.csv"),
    reps: FewReps = None,
    budget_s: Budget = None,
    nodes: Nodes = None,
    device: Device = None,
) -> None:
    """Attention over all ranks, compared with its peers; alone or under torchrun."""
    cases, usual = problems(preset, grid_of(seq, heads, batch, mask))
    impls, (dim_qk, dim_v) = impls_of(tuple(impl or usual)), head_dims(head_dim)
    with started(_WHO, device, nodes) as world:
        sizes = {"head_dim_qk": dim_qk, "head_dim_v": dim_v, "dtype": dtype or usual_dtype(world)}
        plan = Plan([replace(case, **sizes) for case in cases], impls, reps, budget_s, out)
        rows = measure(plan, world)
        if world.rank == 0 and rows:
            show(plan, [rows], rows)


if __name__ == "__main__":
    app()
