"""Thousands of calls and groups, and what a process holds meanwhile: memory, threads, descriptors.

python -m tests.faults.soak --calls 20000 --groups 1000 --out docs/soak.csv
python -m tests.faults.soak --backend nccl --calls 600 --again 5000 --groups 100 --out FILE

The second command runs on GPUs, which ranks share where there are fewer. Every call is checked
against full attention, or that it is refused in the words declared.
"""

import argparse
import csv
import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from random import Random
from time import monotonic
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_burst.attention import burst_attention
from tests.faults.table import MODES, WORLD
from tests.mask_cases import Cell, assert_as_declared, cells, outcome
from tests.options import burst_config
from tests.ranks import run_ranks

_NOTES = 100  # lines of a rank
_FEW = 30  # kinds of calls that all caches have room for
_MIB = 2**20
type Kind = tuple[Cell, int, int, torch.dtype, float]  # rows of a unit, head dimension, most error


class Held(NamedTuple):
    """What a process holds.

    Attributes:
        rss_mib: memory, without what the C library keeps free for later.
        free_mib: what it kept free until then.
        blocks: live blocks of Python's allocator, about one for each object.
        gpu_mib: of the GPU, by all processes that share it; 0 without one.
    """

    rss_mib: float
    free_mib: float
    blocks: int
    threads: int
    descriptors: int
    gpu_mib: float


FIELDS = "of", "number", "rank", *Held._fields


def held() -> Held:
    """What this process holds now."""
    gc.collect()
    before = _resident_mib()
    ctypes.CDLL(None).malloc_trim(0)
    after, used = _resident_mib(), 0.0
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        free, every = torch.cuda.mem_get_info()
        used = (every - free) / _MIB
    counts = (len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd"))
    return Held(after, before - after, sys.getallocatedblocks(), *counts, used)


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / _MIB


def device() -> torch.device:
    """Where this rank's calls run."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def kinds(random: Random) -> Iterator[Kind]:
    """Random masks, layouts, modes, kernels, lengths and dtypes, without an end."""
    units, dims = (1, 2, 4), (4, 8)
    errors = [(torch.float64, 1e-12), (torch.float32, 1e-5)]
    if device().type == "cuda":
        units, dims, errors = (4, 8, 16), (64, 128), [(torch.bfloat16, 2e-2)]
    some = cells(_kernels(), (1, 2))
    while True:
        shape = random.choice(some), random.choice(units), random.choice(dims)
        yield *shape, *random.choice(errors)


def _kernels() -> list[str]:
    """Those that run here."""
    if device().type == "cpu":
        return ["torch-cpu", "reference"]
    from tests.gpu.test_gather import kernels

    return kernels()


def calls() -> Callable[[], None]:
    """Calls of every kind, in random order."""
    return _calls(kinds(Random(0)))


def again() -> Callable[[], None]:
    """Calls of a few kinds in turn, so that nothing is new after the first of each."""
    return _calls(cycle(islice(kinds(Random(0)), _FEW)))


def _calls(some: Iterator[Kind]) -> Callable[[], None]:
    def once() -> None:
        cell, unit, dim, dtype, most = next(some)
        got = outcome(cell, unit, dim, torch.empty(0, dtype=dtype, device=device()))
        assert_as_declared(cell, got, dist.get_world_size(), most, unit)

    return once


def groups() -> Callable[[], None]:
    """Groups that are made, used and destroyed."""
    random, dtype = Random(0), torch.bfloat16 if device().type == "cuda" else torch.float32
    made = {"dtype": dtype, "device": device(), "requires_grad": True}

    def once() -> None:
        group, config = dist.new_group(), burst_config(**MODES[random.choice([*MODES])])
        q, k, v = (torch.randn(1, 8, heads, 64, **made) for heads in (8, 4, 4))
        burst_attention(q, k, v, group=group, config=config).sum().backward()
        dist.destroy_process_group(group)

    return once


WHAT = {"calls": calls, "again": again, "groups": groups}


def repeat(rank: int, of: str, count: int, limit_s: float, out: str) -> None:
    """Do so many of these, or fewer if time runs out, and append to the CSV what is held."""
    once, end, every = WHAT[of](), monotonic() + limit_s, max(1, count // _NOTES)
    for number in range(1, count + 1):
        once()
        if number % every and number not in (1, count):
            continue
        line = ",".join(f"{x:.1f}" if isinstance(x, float) else f"{x}" for x in held())
        with open(out, "a") as file:  # one write a line, so ranks may share the file
            file.write(f"{of},{number},{rank},{line}\n")
        over = torch.tensor(float(monotonic() > end), device=device())
        dist.all_reduce(over)  # all ranks stop at the same
        if over.item():
            return


def soak(
    counts: dict[str, int], out: Path, minutes: float = 600, backend: str = "gloo"
) -> list[dict[str, str]]:  # fmt: skip
    """The lines of all ranks, which are in `out` too; random calls take half of the time."""
    out.write_text(",".join(FIELDS) + "\n")
    for of, part in (("calls", 3), ("again", 2), ("groups", 1)):
        given = of, counts[of], minutes * 10 * part, str(out)
        run_ranks(repeat, WORLD, *given, timeout_s=36000, backend=backend, fresh=True)
    with out.open(newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--again", type=int, default=5_000, help="calls of a few kinds")
    parser.add_argument("--groups", type=int, default=1_000)
    parser.add_argument("--minutes", type=float, default=600, help="of all of it, at most")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    import tests.conftest  # noqa: F401 - threads and scheduling, as tests have them

    counts = {of: getattr(args, of) for of in WHAT}
    soak(counts, args.out, args.minutes, args.backend)


if __name__ == "__main__":
    main()
