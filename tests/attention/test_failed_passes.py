"""Passes that fail, as in a kernel without memory: what the next call computes, and what ranks say.

Guards against transfers of a failed pass that meet those of a later one, buffers that are freed
while another rank still writes to them, and ranks that go on with what a failed one sent.
"""

import gc
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from random import Random
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megatron_burst.attention import burst_attention
from megatron_burst.comm.group import check_in_step
from megatron_burst.errors import BurstError
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.spec import Direction
from megatron_burst.schedule.topology import pretend_nodes
from tests.attention.engine import Passes, Way
from tests.attention.engine import problem as simulated_problem
from tests.attention.engine import truth as simulated_truth
from tests.attention.failing import PLACES, NoMemoryError, fail, failing
from tests.attention.simulated import run_simulated
from tests.attention.test_processes import inputs, run, truth_of, worst
from tests.options import burst_config
from tests.oracle import rows_of
from tests.ranks import run_ranks
from tests.sampling import whole

WORLD = 4
RINGS = [{"intra": "ring", "circulate": c, "nodes": n} for n in (1, 2) for c in ("kv", "q")]
OTHERS = [
    {"intra": "gather"},
    {"intra": "a2a"},
    *({"intra": "gather", "circulate": c, "nodes": 2} for c in ("kv", "q")),
    {"inter": "a2a", "nodes": 2},
]
HEADS = (8, 4)


def config_of(way, timeout_s=60.0):
    rounds = {"heads_per_round": 1} if way.get("intra", "ring") != "ring" else {}
    return burst_config(timeout_s=timeout_s, **rounds, **way)


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


@pytest.mark.parametrize("ways", [RINGS, OTHERS[:2], OTHERS[2:]], ids=["rings", "one", "two"])
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
            except (NoMemoryError, BurstError) as error:
                said.append(str(error))
    return said, seen, worst(run(tensors, rows, config=config), truth, rows)


@pytest.mark.parametrize("place", ["memory", "middle"])
@pytest.mark.parametrize("direction", Direction)
def test_if_one_rank_fails_alone_the_others_say_so_and_get_no_wrong_number(direction, place):
    began = time.monotonic()
    for rank, (said, seen, error) in enumerate(run_ranks(alone, WORLD, direction, place)):
        assert len(said) == 2 and seen == [] and error <= 1e-12, (rank, said, seen, error)
        for sentence in said if rank != 1 else ():
            assert "got NoMemoryError: no memory left on cp rank 1, while" in sentence
    assert time.monotonic() - began < 60  # their time-out


def trained(rank, odd):
    """A weight after three steps, of which the second runs out of memory in its last backward on
    rank `odd` alone and is repeated on all ranks; and how often the optimizer wrote it."""
    tensors, _, rows = problem(rank)
    q, k, v = (x[:, rows].detach() for x in tensors[:3])
    weight = torch.ones((), dtype=q.dtype, requires_grad=True)
    optimizer, written = torch.optim.SGD([weight], lr=1e-3), 0
    for step in range(3):
        for attempt in range(2):
            fails = (rank, step, attempt) == (odd, 1, 0)
            optimizer.zero_grad()
            out = burst_attention(q * weight, k * weight, v, config=config_of({}))
            try:
                with failing(Direction.BACKWARD, "last") if fails else nullcontext():
                    out.square().sum().backward()
            except (NoMemoryError, BurstError):
                continue
            optimizer.step()
            written += 1
            break
    return weight.item(), written


def test_all_ranks_hear_of_a_failure_in_the_last_backward_before_they_write_weights():
    """So that a step that is repeated on all of them is the same step on all of them."""
    assert run_ranks(trained, WORLD, 1) == run_ranks(trained, WORLD, None)


SLICES = torch.tensor([[0, 16, 0, 16, 0]])
BEFORE = {  # what runs before a pass is announced, and arguments of a call that runs it
    "megatron_burst.masks.slices.Slices": {"slices": SLICES, "causal": False},
    "megatron_burst.masks.documents.Documents": {"cu_seqlens": torch.tensor([0, 9, 16])},
    "megatron_burst.attention._readable": {},
    "megatron_burst.attention._choose": {"window": (3, 0)},
}


def before_a_pass(rank):
    """By place: what each rank is told when rank 1 fails there alone, in the first of three calls
    that look the same, and whether the other two are the same."""
    tensors, _, rows = problem(rank)
    q, k, v = (x[:1, rows] for x in tensors[:3])
    config, found = config_of({}), {}
    burst_attention(q, k, v, config=config)
    for place, options in BEFORE.items():
        attend = partial(burst_attention, q, k, v, config=config, **options)
        with patch(place, fail) if rank == 1 else nullcontext():
            try:
                attend()
                told = ""
            except (NoMemoryError, BurstError) as error:
                told = str(error)
        out = attend()
        found[place] = told, torch.equal(out, attend())
    return found


def test_a_rank_that_fails_before_its_pass_skips_none_without_a_word():
    began = time.monotonic()
    for rank, found in enumerate(run_ranks(before_a_pass, WORLD)):
        for place, (told, same) in found.items():
            assert same and ("on cp rank 1, while" in told or rank == 1), (rank, place, told)
    assert time.monotonic() - began < 60  # their time-out


HALVES = Layout.ZIGZAG, Layout.CONTIGUOUS  # ranks recompute, and also keep, rows of others


def halved(rank, layout, ranks):
    """What a rank is told if some fail while they recompute an early half; the gradients' error
    in the step after each."""
    tensors, truth, _ = problem(rank)
    rows, config = rows_of(layout, rank, WORLD, 4), config_of({"keep": "half"})

    def step(broken):
        q, k, v = (x[:, rows].detach().requires_grad_() for x in tensors[:3])
        attend = partial(burst_attention, config=config, layout=layout.value)
        out = checkpoint(lambda *qkv: attend(*qkv), q, k, v, use_reentrant=False)
        with broken:
            grads = torch.autograd.grad(out, (q, k, v), tensors[3][:, rows])
        check_in_step(dist.group.WORLD)
        return worst([out.detach(), *grads], truth, rows)

    said, errors = [], [step(nullcontext()) for _ in range(2)]
    for place in ("memory", "middle", "last"):
        try:
            step(failing(Direction.FORWARD, place) if rank in ranks else nullcontext())
        except (NoMemoryError, BurstError) as error:
            said.append(str(error))
        errors.append(step(nullcontext()))
    return said, errors


@pytest.mark.parametrize("ranks", [range(WORLD), [1]], ids=["all", "one"])
@pytest.mark.parametrize("layout", HALVES)
def test_a_recomputation_of_an_early_half_that_failed_can_be_made_again(layout, ranks):
    began = time.monotonic()
    for rank, (said, errors) in enumerate(run_ranks(halved, WORLD, layout, ranks)):
        assert len(said) == 3 and max(errors) <= 1e-12, (rank, said, errors)
        for sentence in said if rank not in ranks else ():
            assert "got NoMemoryError: no memory left on cp rank 1, while" in sentence
    assert time.monotonic() - began < 60  # their time-out


# several slots on two nodes with --all only: refilled as on one node, less often than a single one
@pytest.mark.parametrize(
    "nodes, pulls",
    [*product((1, 2), (False, "one slot")), (1, True), *whole((2, True))],
)
@pytest.mark.parametrize("mode", ["ring", "gather", "a2a"])
def test_so_it_can_in_slots_that_others_read_after_some_failures_of_any_ranks(mode, nodes, pulls):
    """On simulated ranks, whose memory is NaN until it is written."""
    if pulls and mode == "ring":
        pytest.skip("rings have no slots")
    topology, way = pretend_nodes(WORLD, nodes), Way(mode, pulls=pulls)
    tensors = simulated_problem(WORLD, 4, HEADS, (4, 4), 3)
    truth = simulated_truth(*tensors, way.mask, way.scale)

    def one(rank, carrier):
        rows, draw, errors = rows_of(way.layout, rank, WORLD, 4), Random(rank), []
        shard = [x[:, rows] for x in tensors]
        passes = Passes(way, topology, shard, carrier)
        for direction in (0, 1) * 3:
            binder = passes.executors[direction].compiler
            steps = list(binder.steps)
            at = draw.choice([at for at, step in enumerate(steps) if not step.is_transfer])
            steps[at] = replace(steps[at], run=fail)
            fails = rank == 1 or draw.random() < 0.5
            broken = patch.object(binder, "steps", tuple(steps)) if fails else nullcontext()
            with broken, pytest.raises(NoMemoryError) if fails else nullcontext():
                passes.both(*shard) if direction else passes.forward(*shard[:3])
            errors.append(worst(passes.both(*shard), truth, rows))
        return errors

    for errors in run_simulated(one, WORLD, pulls=pulls)[0]:
        assert max(errors) <= 1e-12
