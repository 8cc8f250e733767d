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

from benchmarks.bench import Bench
from benchmarks.cases import PRESETS, Case, Grid, grid_of, head_dims, problems
from benchmarks.impls import Impl, impls_of
from benchmarks.library_peers import TorchContextParallel, Ulysses, Yunchang
from benchmarks.peers import Burst, Ceiling, OneGpu, Peer, draw_shard
from benchmarks.rows import ATTENTION_CSV, Sheet
from benchmarks.sweep import (
    Budget,
    Dtype,
    Out,
    check_out,
    clock,
    new_app,
    sweep,
    usual_dtype,
)
from benchmarks.tables import reasons, terminal_table
from benchmarks.te_peer import TransformerEngine
from megatron_burst.tools.terminal import Device, Nodes, in_one_sentence
from megatron_burst.tools.world import World, started

_WHO = "benchmarks.attention"
app = new_app()


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of problems: attention of sequences, or of packed samples.

    Attributes:
        peers: by name, what implementations are called with.
        draw: makes a rank's tensors of a problem.
        sheet: the kind of CSV.
    """

    peers: Mapping[str, Callable[[Impl, World], Peer]]
    draw: Callable[[Any, World], Any]
    sheet: Sheet


ATTENTION = Kind(
    {
        "burst": Burst,
        "before": Burst,
        "te": TransformerEngine,
        "torch": TorchContextParallel,
        "ulysses": Ulysses,
        "yunchang": Yunchang,
        "ceiling": Ceiling,
        "one_gpu": OneGpu,
    },
    draw_shard,
    ATTENTION_CSV,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run measures.

    Attributes:
        cases: problems, in order.
        impls: what each is measured with; the same for all, or per problem.
        reps: repetitions; None: 10, or 3 of what takes over 0.5 s.
        budget_s: seconds after which no problem and no repetition is started; None: no end.
        out: CSV that rank 0 appends to; None: nowhere.
        kind: of the problems.
    """

    cases: Sequence[Case]
    impls: Sequence[Impl] | Mapping[Case, Sequence[Impl]]
    reps: int | None = None
    budget_s: float | None = None
    out: Path | None = None
    kind: Kind = ATTENTION

    def of(self, case: Case) -> Sequence[Impl]:
        """The implementations that a problem is measured with."""
        return self.impls[case] if isinstance(self.impls, Mapping) else self.impls


def measure(plan: Plan, world: World, say: Callable[[str], None] | None = None) -> list[Any]:
    """Run a plan on all ranks together.

    Args:
        plan: the same on all ranks.
        world: all ranks.
        say: see `sweep`.

    Returns:
        the rows, on every rank.

    Raises:
        BurstError: if a problem cannot be sharded, or `plan.out` has other columns.
    """
    kind = plan.kind
    for case in plan.cases:
        case.check(world.size)
    check_out(plan.out, world, kind.sheet)
    bench = Bench(world, kind.draw, clock(plan.budget_s), plan.reps, plan.out, kind.sheet)
    every = dict.fromkeys(impl for case in plan.cases for impl in plan.of(case))
    peers = {impl: kind.peers[impl.name](impl, world) for impl in every}

    def rows_of(case: Case) -> list[Any]:
        return bench.run(case, [peers[impl] for impl in plan.of(case)])

    return sweep(plan.cases, rows_of, world, bench.out_of_time, say)


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
            help="repeatable: burst[:auto|gather|ring|a2a|FIELD=VALUE,...], te[:MODE], "
            "torch[:MODE], ulysses[:BACKEND], yunchang[:MODE], ceiling[:BACKEND], "
            "one-gpu[:BACKEND], before; default: burst:auto, te, ceiling"
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
    """Attention over all ranks, compared with its peers; alone or under torchrun."""
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
