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


def calls(rank: int, count: int, seed: int) -> list[tuple]:
    """Random masks, layouts, modes, kernels, lengths and dtypes; rows of the CSV."""
    random, some, found = Random(seed), cells(KERNELS, (1, 2)), []
    for number in range(count):
        cell, unit, dim = random.choice(some), random.choice((2, 4, 6)), random.choice((4, 8))
        dtype, most = random.choice([(torch.float64, 1e-12), (torch.float32, 1e-5)])
        got = outcome(cell, unit, dim, torch.empty(0, dtype=dtype))
        assert_as_declared(cell, got, WORLD, most, unit)
        if number % max(1, count // _NOTES) == 0 or number == count - 1:
            found.append(("calls", number, rank, *held()))
    return found


def groups(rank: int, count: int, seed: int) -> list[tuple]:
    """Groups that are made, used and destroyed."""
    random, found = Random(seed), []
    for number in range(count):
        group, config = dist.new_group(), BurstConfig(**MODES[random.choice([*MODES])])
        q, k, v = (torch.randn(1, 8, heads, 4, requires_grad=True) for heads in (8, 4, 4))
        burst_attention(q, k, v, group=group, config=config).sum().backward()
        dist.destroy_process_group(group)
        del group
        if number % max(1, count // _NOTES) == 0 or number == count - 1:
            found.append(("groups", number, rank, *held()))
    return found


def soaked(num_calls: int, num_groups: int) -> list[dict]:
    """Rows of all ranks."""
    every = [*run_ranks(calls, WORLD, num_calls, 0, timeout_s=36000),
             *run_ranks(groups, WORLD, num_groups, 0, timeout_s=36000)]  # fmt: skip
    return [dict(zip(FIELDS, row, strict=True)) for of_rank in every for row in of_rank]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--groups", type=int, default=1_000)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = soaked(args.calls, args.groups)
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(row | {"rss_mib": round(row["rss_mib"], 1)} for row in rows)


if __name__ == "__main__":
    main()
