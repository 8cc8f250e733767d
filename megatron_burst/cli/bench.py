"""`megatron-burst bench ...`: options in, calls out. Heavy imports wait until a command runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option

from megatron_burst.cli.cases import (
    PRESETS,
    Grid,
    head_counts,
    head_dims,
    one_head_count,
    problems,
)
from megatron_burst.cli.impls import impls_of
from megatron_burst.cli.options import Budget, Device, Dtype, Hosts, Out
from megatron_burst.cli.sentence import in_one_sentence
from megatron_burst.errors import BurstError
from megatron_burst.plan.units import whole_numbers

if TYPE_CHECKING:
    from megatron_burst.cli.bench_attention import Plan
    from megatron_burst.cli.world import World

_ATTENTION, _RECOMPUTE, _LOSS = "bench attention", "bench recompute", "bench loss"
app = typer.Typer(no_args_is_help=True, help="Measure beside the peers; show what was measured.")
Csvs = Annotated[list[Path], Argument(help="CSV files that bench attention wrote")]


@app.command()
def attention(
    seq: Annotated[str, Option(help="tokens of the whole sequence, e.g. 64K,128K,1M")] = "",
    heads: Annotated[str, Option(help="query heads / key heads, e.g. 32/32,32/8")] = "",
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
    hosts: Hosts = None,
    device: Device = None,
) -> None:
    """Attention over all ranks, beside its peers; alone or under torchrun."""
    with in_one_sentence():
        grid = _grid(seq, heads, batch, mask)
        plan = _plan(preset, grid, tuple(impl or ()), reps=reps, budget_s=budget_s, out=out)
        _run(plan, head_dims(head_dim), dtype, device, hosts)


def _grid(seq: str, heads: str, batch: str, mask: str) -> Grid:
    """The lists that were given."""
    masks = tuple(mask.split(",")) if mask else ()
    if not set(masks) <= {"causal", "full"}:
        raise BurstError(
            f"{_ATTENTION}: --mask must list causal or full, because these are measured; got "
            f"{mask!r}; write for example causal,full"
        )
    return Grid(
        seqs=whole_numbers(seq, "--seq", _ATTENTION) if seq else (),
        heads=head_counts(heads, _ATTENTION) if heads else (),
        batches=whole_numbers(batch, "--batch", _ATTENTION) if batch else (),
        masks=masks,
    )


def _plan(preset: str, grid: Grid, impls: tuple[str, ...], **limits) -> "Plan":
    """Problems and implementations of a preset or of lists."""
    from megatron_burst.cli.bench_attention import Plan

    cases, usual = problems(preset, grid)
    return Plan(cases, impls_of(impls or usual), **limits)


def _run(plan: "Plan", dims: tuple[int, int], dtype, device, hosts) -> None:
    """Measure, then show what was measured."""
    from dataclasses import replace

    from rich.console import Console

    from megatron_burst.cli.bench_attention import measure
    from megatron_burst.cli.tables import reasons, terminal_table
    from megatron_burst.cli.world import started

    width = None if Console().is_terminal else 200
    console = Console(width=width, markup=False, highlight=False)
    with started(_ATTENTION, device, hosts) as world:
        dtype = dtype or _usual_dtype(world)
        sizes = {"head_dim_qk": dims[0], "head_dim_v": dims[1], "dtype": dtype}
        plan = replace(plan, cases=tuple(replace(case, **sizes) for case in plan.cases))
        rows = measure(plan, world)
        if world.rank == 0 and rows:
            console.print(terminal_table(rows), *reasons(rows), sep="\n")
            console.print(f"rows were appended to {plan.out}")


def _usual_dtype(world: "World") -> str:
    return "bfloat16" if world.device.type == "cuda" else "float32"


@app.command()
def recompute(
    seq: Annotated[str, Option(help="tokens of the whole sequence, e.g. 64K,256K,1M")] = "64K",
    heads: Annotated[str, Option(help="query heads / key heads")] = "32/8",
    head_dim: Annotated[int, Option(min=1, help="width of a head")] = 128,
    layers: Annotated[int, Option(min=1, help="layers of the stack")] = 4,
    hidden: Annotated[int, Option(min=1, help="model width")] = 4096,
    ffn: Annotated[int, Option(min=1, help="width of the gated MLP")] = 14336,
    batch: Annotated[int, Option(min=1, help="sequences")] = 1,
    mode: Annotated[
        list[str] | None, Option(help="repeatable, e.g. burst:all, megatron:full; default: all")
    ] = None,
    dtype: Dtype = None,
    out: Out = Path("recompute.csv"),
    reps: Annotated[int, Option(min=1)] = 5,
    budget_s: Budget = None,
    hosts: Hosts = None,
    device: Device = None,
) -> None:
    """Time and memory of a stack of Megatron's layers by how it recomputes and what it keeps."""
    from megatron_burst.cli.bench_recompute import Plan, measure
    from megatron_burst.cli.modes import modes_of
    from megatron_burst.cli.recompute_table import draw_if_possible, trade_table
    from megatron_burst.cli.world import started
    from megatron_burst.mcore.widths import Widths

    with in_one_sentence():
        sizes = layers, hidden, ffn, *one_head_count(heads, _RECOMPUTE), head_dim
        lengths, modes = whole_numbers(seq, "--seq", _RECOMPUTE), modes_of(mode or ())
        with started(_RECOMPUTE, device, hosts) as world:
            modes = modes_of(mode or (), world.size)
            dtype = dtype or _usual_dtype(world)
            problems = [Widths(*sizes, tokens, batch, dtype) for tokens in lengths]
            plan = Plan(problems, modes, reps=reps, budget_s=budget_s, out=out)
            rows = measure(plan, world)
            if world.rank == 0 and rows:
                typer.echo(trade_table(rows))
                for path in draw_if_possible(rows, out.with_suffix("")):
                    typer.echo(path)


@app.command()
def loss(
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
        Option(
            help="repeatable, e.g. burst:auto, megatron:fused, liger; default: all that can run"
        ),
    ] = None,
    dtype: Dtype = None,
    out: Out = Path("loss.csv"),
    reps: Annotated[int, Option(min=1)] = 5,
    budget_s: Budget = None,
    device: Device = None,
) -> None:
    """LM head and loss, forward and backward; all ranks share the vocabulary (TP)."""
    from megatron_burst.cli.bench_loss import LOSS_CSV, LossPlan, measure
    from megatron_burst.cli.loss_heads import cases_of, listed_cases
    from megatron_burst.cli.loss_peers import peers_of, usual_peers
    from megatron_burst.cli.loss_table import draw_if_possible, loss_table
    from megatron_burst.cli.sweep import check_out
    from megatron_burst.cli.world import started

    with in_one_sentence(), started(_LOSS, device) as world:
        dtype = dtype or _usual_dtype(world)
        cases = listed_cases(case or (), dtype) or cases_of(preset, tokens, hidden, vocab, dtype)
        check_out(out, world, LOSS_CSV)
        peers = peers_of(impl) if impl else usual_peers(world)
        plan = LossPlan(cases, peers, reps=reps, budget_s=budget_s, out=out)
        rows = measure(plan, world)
        if world.rank == 0 and rows:
            typer.echo(loss_table(rows))
            for path in draw_if_possible(rows, out.with_suffix("")):
                typer.echo(path)


@app.command()
def recompute_show(
    csvs: Annotated[list[Path], Argument(help="CSV files of bench recompute")],
) -> None:
    """Print what bench recompute measured as a Markdown table; draw it beside the first CSV."""
    from megatron_burst.cli.recompute_table import draw_if_possible, trade_table
    from megatron_burst.cli.results import RECOMPUTE_CSV, read

    with in_one_sentence():
        rows = read(csvs, RECOMPUTE_CSV)
        typer.echo(trade_table(rows))
        for path in draw_if_possible(rows, csvs[0].with_suffix("")):
            typer.echo(path)


@app.command()
def loss_show(csvs: Annotated[list[Path], Argument(help="CSV files of bench loss")]) -> None:
    """Print what bench loss measured as a Markdown table; draw it beside the first CSV."""
    from megatron_burst.cli.bench_loss import LOSS_CSV
    from megatron_burst.cli.loss_table import draw_if_possible, loss_table
    from megatron_burst.cli.results import read

    with in_one_sentence():
        rows = read(csvs, LOSS_CSV)
        typer.echo(loss_table(rows))
        for path in draw_if_possible(rows, csvs[0].with_suffix("")):
            typer.echo(path)


@app.command()
def table(
    csvs: Csvs,
    pass_: Annotated[Literal["fwd", "fwd_bwd"], Option("--pass", help="which pass")] = "fwd_bwd",
) -> None:
    """Print a Markdown table: burst beside TransformerEngine's best mode and the ceiling."""
    from megatron_burst.cli.results import read
    from megatron_burst.cli.tables import markdown_table

    with in_one_sentence():
        rows = read(csvs)
        typer.echo(markdown_table(rows, pass_))


@app.command()
def plot(csvs: Csvs) -> None:
    """Draw TFLOP/s and memory over the sequence length, as PNG beside the first CSV."""
    from megatron_burst.cli.results import read

    with in_one_sentence():
        rows = read(csvs)
        try:
            from megatron_burst.cli.plots import draw
        except ModuleNotFoundError as error:
            raise BurstError(
                "bench plot: Matplotlib must be installed, because it draws the pictures; got "
                f"{error}; pip install matplotlib"
            ) from None
        for path in draw(rows, csvs[0].with_suffix("")):
            typer.echo(path)
