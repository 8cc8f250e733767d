"""Passes that fail on GPUs, as for want of memory, calls on other streams than before, and groups
whose ranks have met in others.

Guards against transfers of a failed pass that meet those of a later one or write to memory that
was freed, ranks that wait for a failed one, and buffers that depend on a rank's stream. Functions
take a device, so they also run on a CPU.
"""

import gc
import time
from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_burst.attention import burst_attention
from megatron_burst.comm.communicator import communicator_of
from megatron_burst.comm.group import check_in_step, release_buffers
from megatron_burst.errors import DisagreementError
from megatron_burst.schedule.spec import Direction
from tests.attention.failing import NoMemoryError, failing
from tests.gpu import needs_gpus
from tests.loss import test_failed_loss as of_loss
from tests.options import burst_config
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(),
]
WAYS = {
    "ring": {"intra": "ring", "nodes": 1},
    "send": {"intra": "gather", "transfer": "send", "nodes": 1, "heads_per_round": 2},
    "pull": {"intra": "gather", "transfer": "pull", "nodes": 1, "heads_per_round": 2},
    "a2a": {"intra": "a2a", "nodes": 1},
    "two nodes": {"intra": "gather", "nodes": 2, "heads_per_round": 2},
    "two nodes, rings": {"intra": "ring", "nodes": 2, "circulate": "q"},
}


def config_of(way):
    return burst_config(deterministic=True, timeout_s=60, **WAYS[way])


def shard(device, tokens=512):
    """This rank's q, k, v and dout; the same in each call."""
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    sizes = (8, 64), (4, 64), (4, 64), (8, 64)
    make = {"generator": generator, "device": device, "dtype": torch.bfloat16}
    return [torch.randn(1, tokens, *size, **make) for size in sizes]


def run(tensors, config, group=None):
    """(out, dq, dk, dv)."""
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    out = burst_attention(q, k, v, config=config, group=group)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3])]


def same(got, expected):
    return all(map(torch.equal, got, expected))


def retried(rank, world, way, device):
    """Whether the call after each failure on all ranks, in different operations, is the same to the
    bit; and whether memory that was freed after a failure stays as it is."""
    tensors, config, found, clean = shard(device), config_of(way), [], True
    expected = run(tensors, config)
    for direction, places in product(Direction, (["memory"], ["results", "middle", "last"])):
        for turn in range(2):
            at = places[(rank + turn) % len(places)]
            with failing(direction, at), pytest.raises(NoMemoryError):
                run(tensors, config)
        if way != "pull":  # symmetric memory takes long to allocate
            release_buffers(dist.group.WORLD)
            zeros = [torch.zeros(1 << 20, device=device) for _ in range(8)]
            dist.barrier()
            clean = clean and not any(x.any() for x in zeros)
        found.append(same(run(tensors, config), expected))
    check_in_step(dist.group.WORLD)
    return found, clean


CASES = [(1, "ring"), *((2, way) for way in WAYS), (4, "pull"), (4, "a2a"), (4, "two nodes")]


@pytest.mark.parametrize("world, way", CASES)
def test_a_call_that_failed_on_all_ranks_can_be_made_again(world, way):
    found = run_ranks(retried, world, world, way, "cuda", backend="nccl")
    assert found == [([True] * 4, True)] * world


def alone(rank, way, direction, device):
    """What a rank is told if rank 1 fails alone. After a backward, which no pass follows that would
    wait for rank 1: whether a new group computes the same."""
    tensors, config, group = shard(device), config_of(way), dist.new_group()
    expected, told = run(tensors, config, group), ""
    try:
        with failing(direction, "middle") if rank == 1 else nullcontext():
            run(tensors, config, group)
        check_in_step(group)
    except (NoMemoryError, DisagreementError) as error:
        told = str(error)
    if direction is Direction.FORWARD:
        return told, True
    dist.barrier()
    return told, same(run(tensors, config, dist.new_group()), expected)


@pytest.mark.parametrize(
    "way, direction", [("send", Direction.BACKWARD), ("pull", Direction.FORWARD)]
)
def test_if_one_rank_fails_alone_the_others_are_told(way, direction):
    # fresh: a transfer of the next pass may wait until the processes end
    found = run_ranks(alone, 2, way, direction, "cuda", backend="nccl", fresh=True)
    assert "got NoMemoryError: no memory left on cp rank 1, while" in found[0][0]
    assert found[1][0].startswith("no memory left") and all(again for _, again in found)


def on_streams(rank, way, device):
    """Whether calls on streams of their own, by rank and call, some of them longer, compute the
    same as on the usual stream."""
    config, found = config_of(way), []
    streams = [torch.cuda.Stream() for _ in range(2)] if device == "cuda" else []
    for number, tokens in enumerate((256, 256, 512, 512, 1024, 256)):
        tensors = shard(device, tokens)
        stream = streams[(number + rank) % 2] if streams and (number + rank) % 3 else None
        with torch.cuda.stream(stream) if stream else nullcontext():
            if stream:
                stream.wait_stream(torch.cuda.default_stream())
            got = run(tensors, config)
        if stream:
            torch.cuda.current_stream().wait_stream(stream)
        found.append((got, tensors))
    return [same(got, run(tensors, config)) for got, tensors in found]


@pytest.mark.parametrize("way", ["send", "pull"])
def test_ranks_may_call_on_different_streams(way):
    assert run_ranks(on_streams, 2, way, "cuda", backend="nccl") == [[True] * 6] * 2


def met_unequally(rank, device):
    """Seconds, and how a group's ranks reach each other, if some have met more often before, in
    other groups."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    config, begin = config_of("pull"), time.monotonic()
    for tokens in (512, 2048) if rank < 2 else (512,):
        run(shard(device, tokens), config, pairs[rank // 2])
    run(shard(device), config)
    return time.monotonic() - begin, communicator_of(dist.group.WORLD, config).transfer.value


def test_ranks_that_met_in_other_groups_still_pull():
    for seconds, transfer in run_ranks(met_unequally, 4, "cuda", backend="nccl"):
        assert transfer == "pull" and seconds < 150  # torch would wait for 180 s


def groups(rank, device):
    """Process groups, and bytes on the GPU, after each of some groups was used and destroyed."""
    tensors, found = shard(device), []
    for _ in range(4):
        group = dist.new_group()
        run(tensors, config_of("send"), group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        found.append((len(distributed_c10d._world.pg_map), least_held(device)))
    return found


def least_held(device):
    """Bytes on the GPU once the thread that looks at a group's passes has let go of it: it may hold
    them for a moment."""
    held = []
    for _ in range(15):
        held.append(torch.cuda.memory_allocated() if device == "cuda" else 0)
        time.sleep(0.1)
    return min(held)


def test_groups_that_are_destroyed_leave_nothing_behind():
    for _, *later in run_ranks(groups, 2, "cuda", backend="nccl"):
        assert len(set(later)) == 1, later


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_loss_that_failed_can_be_computed_again(is_alone):
    """A rank that did not fail gets NaN: nothing on a GPU waits for another rank's word. Or it gets
    the right loss, where the other fails after the last collective. A backward with collectives
    would wait for the failed rank."""
    modes = ("forward",) if is_alone else ("forward", "recompute")
    results = run_ranks(of_loss.retried, 2, is_alone, "cuda", modes, backend="nccl")
    for rank, found in enumerate(results):
        for case, kind, words, error in found:
            assert error < 1e-12, (rank, case, error)
            if not (is_alone and rank == 0):
                assert kind is NoMemoryError, (rank, case, words)
            elif case.startswith("losses"):
                assert float(words) < 1e-12, (case, words)
            else:
                assert words == "nan", (case, words)
