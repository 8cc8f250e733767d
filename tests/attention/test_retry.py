"""Passes that fail, as in a kernel without memory: what the next call computes, and what ranks say.

Guards against transfers of a failed pass that meet those of a later one, buffers that are freed
while another rank still writes to them, and ranks that go on with what a failed one sent.
"""

import gc
import math
import time
from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.distributed as dist

from megatron_burst.comm.state import check_in_step
from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from megatron_burst.schedule.call import Direction
from megatron_burst.schedule.layout import Layout
from tests.attention.failing import PLACES, NoMemoryError, failing
from tests.attention.test_processes import inputs, run, truth_of, worst
from tests.oracle import rows_of
from tests.ranks import run_ranks

WORLD = 4
RINGS = [{"intra": "ring", "circulate": c, "nodes": n} for n in (1, 2) for c in ("kv", "q")]
OTHERS = [
    *({"intra": i, "circulate": c, "nodes": n}
      for n, c in ((1, "kv"), (2, "kv"), (2, "q")) for i in ("gather", "a2a")),
    {"inter": "a2a", "nodes": 2},
]  # fmt: skip
HEADS = (8, 4)


def config_of(way, timeout_s=20.0):
    rounds = {"heads_per_round": 1} if way.get("intra", "ring") != "ring" else {}
    return BurstConfig.of(timeout_s=timeout_s, **rounds, **way)


def problem(rank):
    tensors = inputs(WORLD, 4, HEADS, (4, 4), torch.float64)
    return tensors, truth_of(tensors, True, 0.5), rows_of(Layout.ZIGZAG, rank, WORLD, 4)


def retried(rank, ways, places):
    """By way, direction and place: the error of a call after it failed on all ranks; whether a rank
    failed elsewhere than the others; how many failed runs are still in memory."""
    tensors, truth, rows = problem(rank)
    found, runs = [], []
    gc.collect()
    gc.disable()  # memory must be freed without it
    for way, direction, place in product(ways, Direction, places):
        at = place if isinstance(place, str) else place[rank]
        with failing(direction, at, runs), pytest.raises(NoMemoryError):
            run(tensors, rows, config=config_of(way))
        error = worst(run(tensors, rows, config=config_of(way)), truth, rows)
        found.append((str((way, direction, place)), error))
    return found, sum(each() is not None for each in runs)


APART = ("results", "first", "middle", "last")  # by rank


@pytest.mark.parametrize("ways", [RINGS, OTHERS[:4], OTHERS[4:]], ids=["rings", "one", "two"])
def test_a_call_that_failed_on_all_ranks_can_be_made_again(ways):
    for found, alive in run_ranks(retried, WORLD, ways, ("memory", "middle", APART)):
        assert alive == 0
        for case, error in found:
            assert error <= 1e-12, (case, error)


def test_so_it_can_wherever_it_failed():
    ways = [{"intra": "gather", "nodes": 2}, {"intra": "a2a", "nodes": 2}]
    for found, _ in run_ranks(retried, WORLD, ways, PLACES):
        assert all(error <= 1e-12 for _, error in found), found


def alone(rank, direction, place):
    """What each rank gets when rank 1 fails alone, twice; then a call's error."""
    tensors, truth, rows = problem(rank)
    said, seen, config = [], [], config_of({"intra": "gather", "nodes": 2})
    for _ in range(2):
        with failing(direction, place) if rank == 1 else nullcontext():
            try:
                seen.append(worst(run(tensors, rows, config=config), truth, rows))
                check_in_step(dist.group.WORLD)
            except (NoMemoryError, BurstError) as error:
                said.append(str(error))
    return said, seen, worst(run(tensors, rows, config=config), truth, rows)


@pytest.mark.parametrize("place", ["memory", "middle"])
@pytest.mark.parametrize("direction", Direction)
def test_if_one_rank_fails_alone_the_others_say_so_and_get_no_wrong_number(direction, place):
    began = time.monotonic()
    for rank, (said, seen, error) in enumerate(run_ranks(alone, WORLD, direction, place)):
        assert len(said) == 2 and error <= 1e-12, (rank, said, error)
        assert all(math.isnan(wrong) or wrong <= 1e-12 for wrong in seen), seen
        for sentence in said if rank != 1 else ():
            assert "got NoMemoryError: no memory left on cp rank 1, while" in sentence
    assert time.monotonic() - began < 20  # their time-out
