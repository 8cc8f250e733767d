"""Faults of ranks on GPUs: who is named, though no CPU waits for a GPU.

Guards against hangs, ranks that name another than the faulty one, hops that are over and are said
to hang, and memory that is held for passes that are over. Ranks share a GPU where there are few.
"""

import gc
import math
import os
import signal
import subprocess
import time
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_burst.attention import burst_attention
from megatron_burst.comm.group import check_in_step, state_of
from megatron_burst.desync.hops import awaited_hop
from megatron_burst.errors import BurstError
from megatron_burst.schedule.spec import Direction
from megatron_burst.tools.doctor.explain import explained
from tests.attention.failing import failing
from tests.faults.acts import NoMemoryError, dies, no_memory, raises
from tests.faults.table import MARGIN_S
from tests.gpu import needs_gpus
from tests.gpu.test_failed_passes import WAYS as EVERY
from tests.options import burst_config
from tests.ranks import Crew, _variables, run_ranks
from tests.sampling import whole

pytestmark = [pytest.mark.gpu, needs_gpus()]
ODD, TIMEOUT_S = 1, 5.0
WAYS = {name: way for name, way in EVERY.items() if name != "two nodes, rings"}


def stops(step, op, binder, run):
    """For longer than the others wait; then this process ends."""
    child = f"sleep {TIMEOUT_S + 10}; kill -KILL {os.getpid()}"
    subprocess.Popen(["sh", "-c", child])
    os.kill(os.getpid(), signal.SIGSTOP)


def spins(step, op, binder, run):
    """The GPU computes for longer than the time-out; the CPU goes on."""
    torch.cuda._sleep(int((TIMEOUT_S + 4) * 2e9))
    return step.run(run)


ACTS = {"killed": dies, "stopped": stops, "spins": spins, "raises": raises, "no memory": no_memory}


def suffer(rank, way, fault, direction, place, folder):
    """What a rank is told of a fault of another within a while, and after how many seconds. Nothing
    here waits for a GPU: transfers may hang."""
    os.environ["MEGATRON_BURST_FAULTS"] = folder
    generator = torch.Generator("cuda").manual_seed(rank)
    make = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    q, k, v = (torch.randn(1, 1024, heads, 64, **make).requires_grad_() for heads in (8, 4, 4))
    group, config = dist.new_group(), burst_config(**WAYS[way])
    attend = partial(burst_attention, group=group, config=config, layer=7)
    for _ in range(2):
        torch.autograd.grad(attend(q, k, v).sum(), (q, k, v))
    torch.cuda.synchronize()
    dist.barrier()
    distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S), group)
    log, begun, told = state_of(group).log, time.monotonic(), ""
    broken = failing(Direction(direction), place, act=ACTS[fault])
    try:
        with broken if rank == ODD else nullcontext():
            torch.autograd.grad(attend(q, k, v).sum(), (q, k, v))
        check_in_step(group)
        while time.monotonic() < begun + TIMEOUT_S + MARGIN_S:  # a thread looks at hops
            log.poll()
            time.sleep(0.1)
    except (BurstError, NoMemoryError, RuntimeError) as error:
        told = str(error)
    return told, time.monotonic() - begun


CASES = [
    (way, fault, direction, place)
    for way in WAYS
    for fault in ACTS
    for direction in ("forward", "backward")
    for place in ("first", "last")
    if fault != "spins" or place == "first"  # after the last nobody waits
]
SOME = {("send", "killed", "backward", "first"), ("pull", "spins", "forward", "first"),
        ("ring", "raises", "backward", "last"), ("a2a", "stopped", "forward", "first")}  # fmt: skip


@pytest.mark.parametrize(
    "way, fault, direction, place",
    [*sorted(SOME), *whole(*[case for case in CASES if case not in SOME])],
)
def test_the_other_ranks_name_the_faulty_one_in_time(way, fault, direction, place, tmp_path):
    world = 4 if way == "two nodes" else 2
    crew = Crew("nccl", _variables(world, "nccl", 2 if way == "two nodes" else 1, {}))
    try:
        arguments = (way, fault, direction, place, str(tmp_path))
        gone = ODD if fault in ("killed", "stopped") else -1
        found = crew.run(suffer, arguments, 240, mortal=gone)
    finally:
        crew.end()  # transfers hang
    for rank, result in enumerate(found):
        if result is None or rank == ODD:
            continue
        told, took = result
        assert f"cp ranks [{ODD}]" in told or f"on cp rank {ODD}, while" in told, (rank, told)
        assert took <= TIMEOUT_S + MARGIN_S + 2, (rank, took)
    assert explained(tmp_path).startswith(f"rank {ODD} on node"), explained(tmp_path)


def held(rank, way):
    """Bytes on the GPU after many calls, of the same and of growing length, beside those after a
    few; whether the log then awaits a hop; and how many passes it remembers."""
    config, found = burst_config(timeout_s=60, **WAYS[way]), []
    for count in (4, 60, 60):
        for _ in range(count):
            tensors = [torch.randn(1, 1024, heads, 64, device="cuda", dtype=torch.bfloat16)
                       for heads in (8, 4, 4)]  # fmt: skip
            q, k, v = (x.requires_grad_() for x in tensors)
            out = burst_attention(q, k, v, config=config)
            torch.autograd.grad(out.sum(), (q, k, v))
        del q, k, v, tensors, out
        torch.cuda.synchronize()
        gc.collect()
        found.append(torch.cuda.memory_allocated())
    log = state_of(dist.group.WORLD).log
    return found, awaited_hop(log), len(log.runs)


@pytest.mark.parametrize("way", ["pull", "two nodes", *whole("ring", "send", "a2a")])
def test_passes_that_are_over_hold_no_memory_and_await_nothing(way):
    world = 4 if way == "two nodes" else 2
    for (few, many, more), hop, runs in run_ranks(held, world, way, backend="nccl", fresh=True):
        assert many == few == more and hop is None and runs == 1


def of_nan(rank, way):
    """As on CPUs: what is said of a NaN in the keys of a rank; nothing without the guard."""
    found = []
    for guard in (False, True):
        config = burst_config(timeout_s=60, nan_guard=guard, **WAYS[way])
        q, k, v = (torch.ones(1, 512, heads, 64, device="cuda", dtype=torch.bfloat16)
                   for heads in (8, 4, 4))  # fmt: skip
        if rank == ODD:
            k[0, 3] = torch.nan
        try:
            out = burst_attention(q, k, v, causal=False, config=config, layer=3)
            found.append(math.isnan(out.sum().item()))
        except (BurstError, RuntimeError) as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("way", ["ring", "pull"])
def test_a_nan_is_named(way):
    for plain, said in run_ranks(of_nan, 2, way, backend="nccl", fresh=True):
        assert plain is True and "got NaN in out of" in said
