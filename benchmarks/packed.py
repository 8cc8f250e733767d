"""Causal attention in packed samples and with sliding windows, compared with its peers.

torchrun --nproc-per-node 2 -m benchmarks.packed --preset one-node --out packed.csv
python -m benchmarks.packed --help
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from benchmarks import packed_peers as packed
from benchmarks.attention import FewReps, Kind, measure, show
from benchmarks.documents import KINDS, SEED, multiple_for
from benchmarks.impls import Impl, impls_of
from benchmarks.packed_cases import PRESETS, Problem, grid_of, packed_problems
from benchmarks.peers import Peer
from benchmarks.runner import App, Budget, Dtype, Out, Plan, Words, usual_dtype
from benchmarks.sheets import PACKED_CSV
from megatron_burst.errors import BurstError
from megatron_burst.schedule.layout import Layout
from megatron_burst.tools.terminal import Device, Nodes
from megatron_burst.tools.world import started

_WHO = "benchmarks.packed"
_LAYOUTS = ("", Layout.ZIGZAG, Layout.CONTIGUOUS, Layout.DOCUMENTS)
_IMPLS = (
    f"burst[:MODE][@LAYOUT] with a layout of {', '.join(_LAYOUTS[1:])}, te[:MODE], "
    "ulysses[:BACKEND], flex, ceiling[:BACKEND], before"
)
app = App()

PEERS: dict[str, type[Peer]] = {
    "burst": packed.PackedBurst, "before": packed.PackedBurst,
    "te": packed.PackedTransformerEngine, "ulysses": packed.PackedUlysses, "flex": packed.Flex,
    "ceiling": packed.PackedCeiling,
}  # fmt: skip
PACKED = Kind(PEERS, packed.Sample, PACKED_CSV)


def plan_of(problems: Sequence[Problem], **limits: Any) -> Plan:
    """What a run measures; `limits` as of `Plan`."""
    impls = {problem.case: packed_impls(problem.impls) for problem in problems}
    return Plan(tuple(impls), impls, kind=PACKED, **limits)


def packed_impls(texts: Sequence[str]) -> tuple[Impl, ...]:
    """All that `--impl` names; burst's layout stays behind an @ of the mode."""
    every = []
    for text in texts:
        plain, at, layout = text.partition("@")
        impls = (Impl("flex", "ptrr"),) if plain == "flex" else impls_of((plain,))
        burst = impls[0].name == "burst"
        if impls[0].name not in PEERS or layout not in _LAYOUTS or (at and not burst):
            raise BurstError(
                f"{_WHO}: --impl must name an implementation, because each is called in its own "
                f"way; got {text!r}; choose among {_IMPLS}"
            )
        every += [replace(impl, mode=f"{impl.mode}{at}{layout}") for impl in impls]
    return tuple({str(impl): impl for impl in every}.values())


@app.command()
def main(
    seq: Annotated[str, Option(help="tokens of the whole sample, e.g. 32K,128K")] = "",
    heads: Annotated[str, Option(help="query heads / KV heads, e.g. 64/8,32/8")] = "",
    documents: Annotated[str, Option(help=f"how long documents are: {KINDS}; a list")] = "",
    window: Annotated[str, Option(help="keys before its own that a query sees, e.g. 4K")] = "",
    head_dim: Annotated[int, Option(min=1, help="head dimension")] = 128,
    seed: Annotated[int, Option(help="of drawn lengths")] = SEED,
    dtype: Dtype = None,
    impl: Annotated[Words, Option(help=f"repeatable: {_IMPLS}")] = None,
    preset: Annotated[str, Option(help=f"{', '.join(PRESETS)}; lists narrow it down")] = "",
    out: Out = Path("packed.csv"),
    reps: FewReps = None,
    budget_s: Budget = None,
    nodes: Nodes = None,
    device: Device = None,
) -> None:
    """Packed samples and windows over all ranks, compared with peers; alone or under torchrun."""
    problems = packed_problems(preset, grid_of(seq, heads, documents, window), impl or ())
    with started(_WHO, device, nodes) as world:
        sizes = {"head_dim_qk": head_dim, "head_dim_v": head_dim, "seed": seed}
        sizes |= {"dtype": dtype or usual_dtype(world), "multiple": multiple_for(world.size)}
        problems = [Problem(replace(each.case, **sizes), each.impls) for each in problems]
        plan = plan_of(problems, reps=reps, budget_s=budget_s, out=out)
        rows = measure(plan, world)
        if world.rank == 0 and rows:
            of_windows = [row for row in rows if row.mask.startswith("window")]
            show(plan, [[row for row in rows if row not in of_windows], of_windows], rows)


if __name__ == "__main__":
    app()
