"""Masks on one GPU: sinks beside the same call without, slices and trees beside a causal sequence.

python -m benchmarks.masks OUT.csv --seq 64K --heads 32/8
TINY=1 python -m benchmarks.masks OUT.csv     small sizes, to see that it runs; on a CPU too

Each mask and what it stands beside are calls of one rank, in turns. The ratio is of speeds on the
(query, key) pairs that the mask leaves: at 1 a mask costs what its pairs cost.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Annotated, Any

import torch
from typer import Option

from benchmarks.cases import one_head_count
from benchmarks.facts import stamp
from benchmarks.one_rank import tensors_of
from benchmarks.rows import append, check_appendable
from benchmarks.runner import App, OutFile, best_device, on_one
from benchmarks.sheets import MASKS_CSV, MaskRow
from benchmarks.tables import Ratio, spread
from megatron_burst import slices
from megatron_burst.attention import burst_attention
from megatron_burst.config import BurstConfig
from megatron_burst.tools.units import whole_number

_WHO, _TURNS = "benchmarks.masks", 7
_TINY = 512, (2, 1), 8, 2  # tokens, heads, their dimension, turns
app = App()


@dataclass(frozen=True)
class Case:
    """A mask: the call's arguments, and slices that count its pairs."""

    options: dict[str, Any]
    slices: torch.Tensor
    beside: str = "causal"

    @property
    def pairs(self) -> int:
        """(query, key) pairs, slice by slice."""
        count = 0
        for q_start, q_stop, k_start, k_stop, kind in self.slices.tolist():
            rows, keys = q_stop - q_start, k_stop - k_start
            assert kind == slices.FULL or rows <= keys
            edges = (kind & slices.CAUSAL > 0) + (kind & slices.INVERSE > 0)
            count += rows * keys - edges * rows * (rows - 1) // 2
        return count


def cases(seq: int, heads: int, device: torch.device, dtype: torch.dtype) -> dict[str, Case]:
    """By name."""
    sink = torch.linspace(-2, 2, heads, device=device).to(dtype).requires_grad_()
    causal, part = slices.prefix_lm(0, seq), seq // 128
    window, first = {"window": (127, 0)}, slices.prefix_lm(0, 127)
    seen = torch.cat((first, torch.tensor([[127, seq, 0, seq, slices.BOTH]])))
    alive = torch.rand(part, part, generator=torch.Generator().manual_seed(0)) < 0.25
    alive = (alive | torch.eye(part).bool()).tril()
    by_name = {
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
    by_name |= {name: Case({"causal": False, "slices": x}, x) for name, x in drawn.items()}
    trees = {"16 answers": (lengths, parents), "random tree": of_any}
    for name, of in trees.items():
        starts = torch.tensor([0, *accumulate(of[0])], dtype=torch.int32)
        by_name[name] = Case({"cu_seqlens": starts, "prefix_tree": of[1]}, slices.tree(*of))
    return by_name


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


@app.command()
def main(
    out: OutFile,
    seq: Annotated[str, Option(help="tokens, a multiple of 2048")] = "64K",
    heads: Annotated[str, Option(help="query heads / KV heads")] = "32/8",
    dim: Annotated[int, Option(help="of a head")] = 128,
    only: Annotated[str, Option(help="words that a mask's name must have one of")] = "",
    backend: Annotated[str, Option(help="the kernel")] = "auto",
    tiny: Annotated[bool, Option("--tiny", envvar="TINY", help="small sizes")] = False,
) -> None:
    """Measure forward and backward of each mask, in turns with what it stands beside."""
    check_appendable(out, MASKS_CSV, "OUT")
    tokens, counts, turns = whole_number(seq, "--seq", _WHO), one_head_count(heads, _WHO), _TURNS
    if tiny:
        tokens, counts, dim, turns = _TINY
    device, dtype = best_device()
    tensors, config = tensors_of(tokens, counts, dim, device, dtype), BurstConfig(backend=backend)
    every = cases(tokens, counts[0], device, dtype)
    for name, case in every.items():
        if not case.beside or not any(word in name for word in only.split(",")):
            continue
        other = every[case.beside]
        passes = [runs_of(one, tensors, config) for one in (case, other)]
        for pass_, products in (("fwd", 4), ("bwd", 10)):
            runs = {"own": passes[0][pass_], "other": passes[1][pass_]}
            own, others = on_one(runs, turns, device).values()
            flops = [products * one.pairs * counts[0] * dim for one in (case, other)]
            ratio, measured = Ratio.paired(own, others).value * flops[0] / flops[1], spread(own)
            row = MaskRow(
                **stamp(device), seq=tokens, heads_q=counts[0], heads_kv=counts[1], dim=dim,
                dtype=str(dtype).removeprefix("torch."), backend=backend, mask=name,
                beside=case.beside, pass_=pass_, pairs=case.pairs, **measured,
                tflops=flops[0] / measured["ms"] / 1e9, ratio=ratio, reps=len(own),
                each=in_ms(own), each_beside=in_ms(others),
            )  # fmt: skip
            append(out, [row], MASKS_CSV)
            print(f"{name}, {pass_}: {row.ms:.2f} ms, {ratio:.3f} of {case.beside}", flush=True)


def in_ms(times: list[float]) -> str:
    """Times in one cell."""
    return " ".join(f"{ms:.4f}" for ms in times)


if __name__ == "__main__":
    app()
