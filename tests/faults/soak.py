"""Thousands of calls and groups, and what a process holds meanwhile: memory, threads, descriptors.

python -m tests.faults.soak --calls 20000 --groups 1000 --out docs/soak.csv

Every call is checked against full attention, or that it is refused in the words declared.
"""

import argparse
import csv
import gc
import os
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist

from megatron_burst.attention import burst_attention
from megatron_burst.config import BurstConfig
from tests.faults.table import MODES, WORLD
from tests.masks import assert_as_declared, cells, outcome
from tests.ranks import run_ranks

KERNELS = "torch-cpu", "reference"
FIELDS = "of", "number", "rank", "rss_mib", "threads", "descriptors"
_NOTES = 100  # lines of a rank
_MIB = os.sysconf("SC_PAGESIZE") / 2**20


def held() -> tuple[float, int, int]:
    """MiB of memory, threads and descriptors of this process."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * _MIB
    return resident, *(len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd"))


def note(out: str, count: int, of: str, number: int, rank: int) -> None:
    """Append a line to the CSV, every so often."""
    if number % max(1, count // _NOTES) == 0 or number == count - 1:
        resident, threads, descriptors = held()
        with open(out, "a") as file:  # one write a line, so ranks may share the file
            file.write(f"{of},{number},{rank},{resident:.1f},{threads},{descriptors}\n")


def calls(rank: int, count: int, out: str) -> None:
    """Random masks, layouts, modes, kernels, lengths and dtypes."""
    random, some = Random(0), cells(KERNELS, (1, 2))
    for number in range(count):
        cell, unit, dim = random.choice(some), random.choice((1, 2, 4)), random.choice((4, 8))
        dtype, most = random.choice([(torch.float64, 1e-12), (torch.float32, 1e-5)])
        got = outcome(cell, unit, dim, torch.empty(0, dtype=dtype))
        assert_as_declared(cell, got, WORLD, most, unit)
        note(out, count, "calls", number, rank)


def groups(rank: int, count: int, out: str) -> None:
    """Groups that are made, used and destroyed."""
    random = Random(0)
    for number in range(count):
        group, config = dist.new_group(), BurstConfig(**MODES[random.choice([*MODES])])
        q, k, v = (torch.randn(1, 8, heads, 4, requires_grad=True) for heads in (8, 4, 4))
        burst_attention(q, k, v, group=group, config=config).sum().backward()
        dist.destroy_process_group(group)
        del group
        note(out, count, "groups", number, rank)


def soak(num_calls: int, num_groups: int, out: Path) -> list[dict[str, str]]:
    """The lines of all ranks, which are in `out` too."""
    out.write_text(",".join(FIELDS) + "\n")
    run_ranks(calls, WORLD, num_calls, str(out), timeout_s=36000)
    run_ranks(groups, WORLD, num_groups, str(out), timeout_s=36000)
    with out.open(newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--groups", type=int, default=1_000)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    soak(args.calls, args.groups, args.out)


if __name__ == "__main__":
    main()
