"""Masks on one GPU: sinks beside the same call without, slices and trees beside a causal sequence.

python benchmarks/masks.py OUT.csv --seq 64K --heads 32/8
TINY=1 python benchmarks/masks.py OUT.csv     small sizes, to see that it runs; on a CPU too

Each mask and what it stands beside are one call of `burst_attention` on one rank, in turns. The
ratio is of speeds on the (query, key) pairs that the mask leaves: at 1 a mask costs what its pairs
cost.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from random import Random
from statistics import median
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its own folder alone

from benchmarks.facts import gpu_state, versions
from benchmarks.one_rank import tensors_of, timed_ms
from benchmarks.ratios import Ratio
from benchmarks.rows import Sheet, append, check_appendable
from megatron_burst import slices
from megatron_burst.attention import burst_attention
from megatron_burst.config import BurstConfig
from megatron_burst.tools.terminal import in_one_sentence
from megatron_burst.tools.units import whole_number

_WHO, _TURNS = "benchmarks/masks.py", 7
_TINY = 512, (2, 1), 8, 2  # tokens, heads, their dimension, turns


@dataclass(frozen=True, kw_only=True)
class MaskRow:
    """One measurement; fields are columns.

    Attributes:
        beside: the mask that it took turns with.
        pass_: "fwd", or "bwd" alone.
        pairs: (query, key) pairs of the mask.
        ms: median over repetitions, with minimum and maximum.
        tflops: on the pairs: two products in forward, five in backward.
        ratio: of tflops to those of `beside`, median over turns.
        each: ms of every repetition, in their order; `each_beside` those of the other mask.
    """

    date: str
    versions: str
    gpu: str
    seq: int
    heads_q: int
    heads_kv: int
    dim: int
    dtype: str
    backend: str
    mask: str
    beside: str
    pass_: str
    pairs: int
    ms: float
    ms_min: float
    ms_max: float
    tflops: float
    ratio: float
    reps: int
    each: str
    each_beside: str


MASKS_CSV = Sheet(_WHO, MaskRow)


@dataclass(frozen=True)
class Case:
    """A mask: the call's arguments, and slices that count its pairs."""

    options: dict[str, Any]
    slices: torch.Tensor
    beside: str = "causal"

    @property
    def pairs(self) -> int:
        """(query, key) pairs, slice by slice."""
        found = 0
        for q_start, q_stop, k_start, k_stop, kind in self.slices.tolist():
            rows, keys = q_stop - q_start, k_stop - k_start
            assert kind == slices.FULL or rows <= keys
            edges = (kind & slices.CAUSAL > 0) + (kind & slices.INVERSE > 0)
            found += rows * keys - edges * rows * (rows - 1) // 2
        return found


def cases(seq: int, heads: int, device: torch.device, dtype: torch.dtype) -> dict[str, Case]:
    """By name."""
    sink = torch.linspace(-2, 2, heads, device=device).to(dtype).requires_grad_()
    causal, part = slices.prefix_lm(0, seq), seq // 128
    window, first = {"window": (127, 0)}, slices.prefix_lm(0, 127)
    seen = torch.cat((first, torch.tensor([[127, seq, 0, seq, slices.BOTH]])))
    alive = torch.rand(part, part, generator=torch.Generator().manual_seed(0)) < 0.25
    alive = (alive | torch.eye(part).bool()).tril()
    found = {
        "causal": Case({}, causal, ""),
        "causal with sinks": Case({"sink": sink}, causal),
        "window 128": Case(window, seen, ""),
        "window 128 with sinks": Case(window | {"sink": sink}, seen, "window 128"),
    }
    unit = seq // 64  # at 64K: prompts of 8K, answers of 1K
    lengths = [8 * unit, *[unit] * 16] * 2 + [8 * unit, *[unit] * 8]
    parents = [-1, *[0] * 16, -1, *[17] * 16, -1, *[34] * 8]
    drawn = {
        "16 frames": slices.block_causal([seq // 16] * 16),
        "prefix": slices.prefix_lm(seq // 2, seq),
        "a quarter of blocks of 128": slices.blocks(alive, 128, seq, causal=True),
        "16 answers as slices": slices.tree(lengths, parents),
        "random tree as slices": slices.tree(*(of_any := random_tree(seq, depth=6))),
    }
    found |= {name: Case({"causal": False, "slices": x}, x) for name, x in drawn.items()}
    trees = {"16 answers": (lengths, parents), "random tree": of_any}
    for name, of in trees.items():
        starts = torch.tensor([0, *accumulate(of[0])], dtype=torch.int32)
        found[name] = Case({"cu_seqlens": starts, "prefix_tree": of[1]}, slices.tree(*of))
    return found


def random_tree(seq: int, depth: int) -> tuple[list[int], list[int]]:
    """Lengths and parents, depth first, of about 64 segments of random length."""
    random, parents, path = Random(0), [-1], [0]
    while len(parents) < 64:
        path = path[: random.randint(1, min(len(path), depth - 1))]
        parents.append(path[-1])
        path.append(len(parents) - 1)
    cuts = sorted(random.sample(range(1, seq), len(parents) - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, seq], strict=True)], parents


def runs_of(case: Case, tensors: list[torch.Tensor], config: BurstConfig) -> dict[str, Callable]:
    """By pass."""
    *inputs, dout = tensors
    leaves = [x.requires_grad_() for x in inputs]
    out = burst_attention(*leaves, config=config, **case.options)
    wanted = [*leaves, *(x for name, x in case.options.items() if name == "sink")]

    def forward() -> None:
        with torch.no_grad():
            burst_attention(*leaves, config=config, **case.options)

    return {
        "fwd": forward,
        "bwd": lambda: torch.autograd.grad(out, wanted, dout, retain_graph=True),
    }


def in_ms(times: list[float]) -> str:
    """Times in one cell."""
    return " ".join(f"{ms:.4f}" for ms in times)


def main(
    out: Annotated[Path, typer.Argument(help="the CSV; rows are appended")],
    seq: Annotated[str, typer.Option(help="tokens, a multiple of 2048")] = "64K",
    heads: Annotated[str, typer.Option(help="query heads / KV heads")] = "32/8",
    dim: Annotated[int, typer.Option(help="of a head")] = 128,
    only: Annotated[str, typer.Option(help="words that a mask's name must have one of")] = "",
    backend: Annotated[str, typer.Option(help="the kernel")] = "auto",
    tiny: Annotated[
        bool, typer.Option("--tiny", envvar="TINY", help="small sizes, to try this out")
    ] = False,
) -> None:
    """Measure forward and backward of each mask, in turns with what it stands beside."""
    with in_one_sentence():
        check_appendable(out, MASKS_CSV, "OUT")
        tokens = whole_number(seq, "--seq", _WHO)
    (heads_q, heads_kv), turns = map(int, heads.split("/")), _TURNS
    if tiny:
        tokens, (heads_q, heads_kv), dim, turns = _TINY
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tensors, config = tensors_of(tokens, (heads_q, heads_kv), dim, device, dtype), BurstConfig(
        backend=backend)  # fmt: skip
    every = cases(tokens, heads_q, device, dtype)
    for name, case in every.items():
        if not case.beside or not any(word in name for word in only.split(",")):
            continue
        other = every[case.beside]
        both = [runs_of(one, tensors, config) for one in (case, other)]
        for pass_, products in (("fwd", 4), ("bwd", 10)):
            times: list[list[float]] = [[], []]
            for turn in range(turns + 2):
                for which in (0, 1)[:: -1 if turn % 2 else 1]:
                    times[which].append(timed_ms(both[which][pass_], device))
            kept = [some[2:] for some in times]  # the first two compile, warm up
            flops = [products * one.pairs * heads_q * dim for one in (case, other)]
            ratio = Ratio.paired(*kept).value * flops[0] / flops[1]
            row = MaskRow(
                date=datetime.now(UTC).isoformat(timespec="seconds"), versions=versions(),
                gpu=gpu_state(device), seq=tokens, heads_q=heads_q, heads_kv=heads_kv, dim=dim,
                dtype=str(dtype).removeprefix("torch."), backend=backend, mask=name,
                beside=case.beside, pass_=pass_, pairs=case.pairs, ms=median(kept[0]),
                ms_min=min(kept[0]), ms_max=max(kept[0]),
                tflops=flops[0] / median(kept[0]) / 1e9, ratio=ratio, reps=len(kept[0]),
                each=in_ms(kept[0]), each_beside=in_ms(kept[1]),
            )  # fmt: skip
            append(out, [row], MASKS_CSV)
            print(f"{name}, {pass_}: {row.ms:.2f} ms, {ratio:.3f} of {case.beside}", flush=True)


if __name__ == "__main__":
    typer.run(main)
