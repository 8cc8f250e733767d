"""`megatron-burst plan --cu-seqlens`: one packed sample's attention, in words and as a picture."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from megatron_burst.errors import BurstError
from megatron_burst.resolve import how_it_runs
from megatron_burst.schedule.layout import Layout
from megatron_burst.tools.hardware import Hardware
from megatron_burst.tools.job.model import Model
from megatron_burst.tools.job.search import Fixed
from megatron_burst.tools.job.strategy import Job, Strategy, least_multiple, misfit, open_call
from megatron_burst.tools.packed import Way, way_of
from megatron_burst.tools.packed_picture import save_sample_picture
from megatron_burst.tools.picture import base_name
from megatron_burst.tools.plan_table import say
from megatron_burst.tools.simulate.sample import Sample
from megatron_burst.tools.terminal import new_console, writing

_SHOWN = 16  # ranks of which each is told
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Asked:
    """A sample and where it is to run.

    Attributes:
        path: of its boundaries or lengths.
        model: whose attention.
        gpus, on_node: of the job, and of a node.
        fixed: sizes that are given; without CP all GPUs that TP leaves.
        hardware: the cluster's.
        picture: file to draw, or None.
    """

    path: Path
    model: Model
    gpus: int
    on_node: int
    fixed: Fixed
    hardware: Hardware
    picture: Path | None


def plan_sample(asked: Asked) -> None:
    """Print, and draw, what a sample's attention takes.

    Raises:
        BurstError: if the file has no documents, or the sizes fit no job.
    """
    numbers = numbers_in(asked.path)
    sample = Sample.of(numbers)
    ways = _ways(asked, sample)
    found = {name: way for name, way in ways.items() if isinstance(way, Way)}
    if not found:
        raise BurstError(next(str(way) for way in ways.values()).removeprefix("burst attention: "))
    read = "boundaries" if sample.edges == tuple(numbers) else "lengths"
    longest, lengths = max(sample.lengths), sample.lengths
    title = (
        f"{base_name(asked.model.name)}, {asked.hardware.name}: a packed sample of "
        f"{sample.tokens:,} tokens in {len(lengths)} documents, the longest {longest:,}"
    )
    console = new_console()
    say(console, f"{title} ({asked.path.name} has {read})")
    say(console, f"its work is {sample.share:.1%} of one causal sequence's; one layer's attention:")
    console.print(_table(found))
    for name, way in ways.items():
        if isinstance(way, Way) and way.why.reason != "asked for":
            say(console, f'"{name}" runs as {way.why.value}, because {way.why.reason}')
        elif not isinstance(way, Way):
            say(console, f'"{name}": {way}', "refused: ", "yellow")
    if asked.picture:
        with writing("plan", "--picture", asked.picture):
            save_sample_picture(found, title, asked.picture)


def _ways(asked: Asked, sample: Sample) -> dict[str, Way | BurstError]:
    """Both layouts as burst runs them; where an all-to-all runs, also with rows that stay."""
    sizes = dict(asked.fixed)
    tp = sizes.get("tp", 1)
    cp = sizes.get("cp", max(1, asked.gpus // tp))
    strategy = Strategy(tp=tp, cp=cp, dp=max(1, asked.gpus // (tp * cp)))
    seq = -(-sample.tokens // least_multiple(strategy)) * least_multiple(strategy)
    job = Job(asked.model, seq, asked.gpus, asked.on_node, strategy.dp, asked.hardware)
    if why := misfit(job, strategy):
        raise BurstError(
            "plan: --gpus, --tp and --cp must fit the model and each other, because ranks share "
            f"heads and tokens evenly; got sizes of which {why}; choose others"
        )
    call = open_call(job, strategy)
    stays = replace(call, intra="gather", inter="ring")
    every = {
        "THD (--sft): each document zigzag": (call, Layout.DOCUMENTS),
        "documents at any token": (call, Layout.ZIGZAG),
        "any token, rows stay": (stays, Layout.ZIGZAG),
    }
    found = {name: _way(*how, sample, asked.hardware) for name, how in every.items()}
    other = found["documents at any token"]
    if isinstance(other, Way) and other.call.intra != "a2a":
        del found["any token, rows stay"]
    return found


def _way(call, layout: Layout, sample: Sample, hardware: Hardware) -> Way | BurstError:
    try:
        return way_of(call, sample, hardware, layout)
    except BurstError as error:
        return error


def _table(ways: Mapping[str, Way]) -> Table:
    table = Table()
    table.add_column("")
    for name in ways:
        table.add_column(name, justify="right")
    every = list(ways.values())
    rows = {
        "runs as": [how_it_runs(way.call) for way in every],
        "tokens of padding": [f"{way.padding:,}" for way in every],
        "work, slowest / mean": [f"{way.imbalance:.2f}" for way in every],
        "forward, ms": [f"{1e3 * way.seconds[0]:.3g}" for way in every],
        "backward, ms": [f"{1e3 * way.seconds[1]:.3g}" for way in every],
        "of that exposed, ms": [f"{1e3 * way.exposed:.3g}" for way in every],
        "TFLOP/s per GPU": [f"{way.tflops:.0f}" for way in every],
    }
    for rank in range(min(_SHOWN, len(every[0].work))):
        rows[f"rank {rank}: work / mean, MiB sent"] = [
            f"{way.work[rank] * len(way.work) / sum(way.work):.2f}, {way.sent[rank] / _MIB:,.0f}"
            for way in every
        ]
    for name, cells in rows.items():
        table.add_row(name, *cells)
    if (more := len(every[0].work) - _SHOWN) > 0:
        table.caption = f"{more} more ranks"
    return table


def numbers_in(path: Path) -> list[int]:
    """The whole numbers in a file: text with commas or blanks between them, .npy or .pt.

    Raises:
        BurstError: if it cannot be read, or has something else.
    """
    if not path.is_file():
        raise BurstError(
            "plan: --cu-seqlens must name a file, because documents are read from it; got no file "
            f"{path}; check the path"
        )
    try:
        if path.suffix == ".npy":
            from numpy import load

            found = load(path, allow_pickle=False).ravel().tolist()
        elif path.suffix == ".pt":
            import torch

            found = torch.as_tensor(torch.load(path, weights_only=True)).flatten().tolist()
        else:
            found = path.read_text(encoding="utf-8").replace(",", " ").split()
        numbers = [int(number) for number in found]
        if not all(float(number) == float(one) for number, one in zip(found, numbers, strict=True)):
            raise ValueError("a fraction")
    except Exception as error:  # what files and their readers raise has no common type
        raise BurstError(
            "plan: --cu-seqlens must name a file of whole numbers (text, .csv, .npy or .pt), "
            f"because they are document boundaries or lengths; got {path}: "
            f"{str(error).splitlines()[0] if str(error) else error!r}; write for example 0, "
            "4096, 6144"
        ) from None
    return numbers
