"""Causal attention in packed samples, and with sliding windows, beside its peers.

torchrun --nproc-per-node 2 -m benchmarks.packed --preset one-node --out packed.csv
python -m benchmarks.packed --help
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Option

from benchmarks.bench import Bench
from benchmarks.cases import head_counts
from benchmarks.documents import KINDS, SEED
from benchmarks.impls import Impl, impls_of
from benchmarks.packed_cases import PRESETS, PackedGrid, Problem, packed_problems
from benchmarks.packed_peers import PEERS, Sample
from benchmarks.rows import PACKED_CSV, PackedRow
from benchmarks.sweep import Budget, Dtype, Out, check_out, clock, new_app, sweep, usual_dtype
from benchmarks.tables import reasons, terminal_table
from megatron_burst.cli.terminal import Device, Nodes, in_one_sentence
from megatron_burst.cli.world import World, started
from megatron_burst.errors import BurstError
from megatron_burst.schedule.layout import Layout
from megatron_burst.units import whole_numbers

_WHO = "benchmarks.packed"
_LAYOUTS = ("", Layout.ZIGZAG, Layout.CONTIGUOUS, Layout.DOCUMENTS)
app = new_app()


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run measures.

    Attributes:
        problems: in order, each with its implementations.
        reps: repetitions; None: 10, or 3 of what takes over 0.5 s.
        budget_s: seconds after which no problem and no repetition is started; None: no end.
        out: CSV that rank 0 appends to; None: nowhere.
    """

    problems: Sequence[Problem]
    reps: int | None = None
    budget_s: float | None = None
    out: Path | None = None


def measure(plan: Plan, world: World, say: Callable[[str], None] | None = None) -> list[PackedRow]:
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
    every = [impl for problem in plan.problems for impl in packed_impls(problem.impls)]
    for problem in plan.problems:
        problem.case.check(world.size)
    check_out(plan.out, world, PACKED_CSV)
    peers = {str(impl): PEERS[impl.name](impl, world) for impl in every}
    bench = Bench(world, Sample, clock(plan.budget_s), plan.reps, plan.out, PACKED_CSV)

    def rows_of(problem: Problem) -> list[PackedRow]:
        return bench.run(problem.case, [peers[str(i)] for i in packed_impls(problem.impls)])

    return sweep(plan.problems, rows_of, world, bench.out_of_time, say)


def packed_impls(texts: Sequence[str]) -> tuple[Impl, ...]:
    """All that `--impl` names; burst's layout stays behind an @ of the mode."""
    found = []
    for text in texts:
        plain, at, layout = text.partition("@")
        impls = impls_of((plain,))
        burst = impls[0].name == "burst"
        if impls[0].name not in PEERS or layout not in _LAYOUTS or (at and not burst):
            raise BurstError(
                f"{_WHO}: --impl must name an implementation, because each is called in its own "
                f"way; got {text!r}; choose among burst[:MODE][@LAYOUT] with a layout of "
                f"{', '.join(_LAYOUTS[1:])}, te[:MODE], ceiling[:BACKEND]"
            )
        found += [replace(impl, mode=f"{impl.mode}{at}{layout}") for impl in impls]
    return tuple({str(impl): impl for impl in found}.values())


@app.command()
def main(
    seq: Annotated[str, Option(help="tokens of the whole sample, e.g. 32K,128K")] = "",
    heads: Annotated[str, Option(help="query heads / KV heads, e.g. 64/8,32/8")] = "",
    documents: Annotated[str, Option(help=f"how long documents are: {KINDS}; a list")] = "",
    window: Annotated[str, Option(help="keys before its own that a query sees, e.g. 4K")] = "",
    head_dim: Annotated[int, Option(min=1, help="width of a head")] = 128,
    seed: Annotated[int, Option(help="of drawn lengths")] = SEED,
    dtype: Dtype = None,
    impl: Annotated[
        list[str] | None,
        Option(help="repeatable: burst:MODE or burst:MODE@LAYOUT, te:MODE, ceiling"),
    ] = None,
    preset: Annotated[
        str, Option(help=f"{', '.join(PRESETS)}; lists given beside it narrow it down")
    ] = "",
    out: Out = Path("packed.csv"),
    reps: Annotated[
        int | None, Option(min=1, help="default: 10, or 3 of what takes over 0.5 s")
    ] = None,
    budget_s: Budget = None,
    nodes: Nodes = None,
    device: Device = None,
) -> None:
    """Packed samples and windows over all ranks, beside its peers; alone or under torchrun."""
    with in_one_sentence():
        problems = packed_problems(preset, _grid(seq, heads, documents, window), impl or ())
        sizes = {"head_dim_qk": head_dim, "head_dim_v": head_dim, "seed": seed, "dtype": dtype}
        plan = Plan(problems, reps, budget_s, out)
        with started(_WHO, device, nodes) as world:
            _run(plan, sizes, world)


def _grid(seq: str, heads: str, documents: str, window: str) -> PackedGrid:
    """The lists that were given as options."""
    return PackedGrid(
        seqs=whole_numbers(seq, "--seq", _WHO) if seq else (),
        heads=head_counts(heads, _WHO) if heads else (),
        documents=tuple(documents.split(",")) if documents else (),
        windows=whole_numbers(window, "--window", _WHO) if window else (),
    )


def _run(plan: Plan, sizes: dict, world: World) -> None:
    """Measure, then show what was measured."""
    sizes |= {"dtype": sizes["dtype"] or usual_dtype(world), "multiple": max(4, 2 * world.size)}
    problems = [Problem(replace(each.case, **sizes), each.impls) for each in plan.problems]
    rows = measure(replace(plan, problems=problems), world)
    if world.rank == 0 and rows:
        width = None if Console().is_terminal else 200
        console = Console(width=width, markup=False, highlight=False)
        of_windows = [row for row in rows if row.mask.startswith("window")]
        of_documents = [row for row in rows if row not in of_windows]
        tables = [terminal_table(some) for some in (of_documents, of_windows) if some]
        console.print(*tables, *reasons(rows), sep="\n")
        console.print(f"rows were appended to {plan.out}")


if __name__ == "__main__":
    app()
