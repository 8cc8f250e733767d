"""Process groups destroyed and made again on one store: nothing of the first survives.

Guards against a second group that reads the first one's answers, and caches that hold on to groups,
communicators or buffers.
"""

import gc
import os
import time
from datetime import timedelta
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed import distributed_c10d

from megatron_burst.attention import burst_attention
from megatron_burst.comm import group as state
from megatron_burst.comm.communicator import communicator_of
from megatron_burst.comm.group import state_of
from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from megatron_burst.loss.linear import linear_cross_entropy
from megatron_burst.schedule.layout import Layout
from megatron_burst.shards import shard
from tests.attention.test_processes import inputs, run, truth_of, worst
from tests.options import burst_config
from tests.oracle import rows_of
from tests.ranks import run_ranks

WORLD = 4
# Where torch names a group by how many this rank has made, ranks that have made different numbers
# wait for each other for ever, without burst too.
GROUPS_OF_ONE_RANK = Version(torch.__version__) < Version("2.15")
RUNS = (  # of one group after another: options of the calls
    {"nodes": 2},
    {"nodes": 4, "circulate": "q"},
    {"intra": "gather", "heads_per_round": 1},
)


def lasting_store(rank, kind, folder):
    """A store that outlives process groups, and what no group may find in it: addresses."""
    if kind == "file":
        return dist.FileStore(os.path.join(folder, "lasting"), WORLD)
    first = dist.group.WORLD.get_group_store()
    options = {"is_master": rank == 0, "timeout": timedelta(seconds=30)}
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, WORLD, wait_for_workers=False, **options)
        first.set("port", str(store.port))
        return store
    return dist.TCPStore("127.0.0.1", int(first.get("port")), WORLD, **options)


def forget_addresses(store, rank, number):
    """gloo itself finds its old addresses in a store and fails; ours must stay in place."""

    def meet(place):
        store.add(f"{place} {number}", 1)
        while store.add(f"{place} {number}", 0) < WORLD:
            time.sleep(0.01)

    meet("destroyed")
    if rank == 0:
        for key in store.list_keys():
            if "cpu//" in key:
                store.delete_key(key)
    meet("forgotten")


def several_groups(rank, kind, folder):
    """By group: the largest error; whether everything it owned is gone after it is destroyed."""
    store, found = lasting_store(rank, kind, folder), []
    dist.barrier()
    dist.destroy_process_group()
    for number, options in enumerate(RUNS):
        forget_addresses(store, rank, number)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=30)
        )
        time.sleep(0.3 * ((rank + number) % 3))  # the first to come must not take old answers
        tensors = inputs(WORLD, 6, (4, 2), (8, 5), torch.float64)
        rows = rows_of(Layout.ZIGZAG, rank, WORLD, 6)
        config = burst_config(**options)
        got = run(tensors, rows, config=config)
        error = worst(got, truth_of(tensors, True, 8**-0.5), rows)
        made = communicator_of(dist.group.WORLD, config)
        buffers = [ref(x) for memory in made._memory._buffers.values() for x in memory.flats]
        things = [ref(dist.group.WORLD), ref(made), *map(ref, made.groups.values()), *buffers]
        topology = str(made.topology)
        del made
        if number + 1 < len(RUNS):  # the last one is destroyed by the test runner
            dist.barrier()
            dist.destroy_process_group()
            things = [thing() for thing in things if thing() is not None]
        found.append((error, topology, len(things), len(state._STATES)))
    return found


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_each_group_agrees_anew_and_leaves_nothing(kind, tmp_path):
    expected = ["2 nodes x 2 ranks", "4 nodes x 1 rank", "1 node x 4 ranks"]
    for found in run_ranks(several_groups, WORLD, kind, str(tmp_path)):
        for (error, topology, *_), words in zip(found, expected, strict=True):
            assert error <= 1e-12 and words in topology, (topology, words)
        assert [left for _, _, left, _ in found[:-1]] == [0, 0]
        assert [states for *_, states in found[:-1]] == [0, 0]


def held_by_the_user(rank):
    """If somebody holds on to what a destroyed group owned, it goes when the next group is used."""
    old = dist.new_group([0, 1])
    made = ref(communicator_of(old, BurstConfig()))
    before = made() is not None
    dist.destroy_process_group(old)
    refused, x = [], torch.ones(1, 4, 2, 8)
    for call in (
        lambda: burst_attention(x, x, x, group=old), lambda: shard(x, group=old),
        lambda: linear_cross_entropy(x[0, 0], x[0, 0], torch.zeros(2).long(), tp_group=old),
    ):  # fmt: skip
        with pytest.raises(BurstError, match="the group must exist.*that was destroyed"):
            refused.append(call())
    communicator_of(dist.group.WORLD, BurstConfig())
    return before, made() is None, old in state._STATES, refused


def test_a_destroyed_group_that_is_still_held_keeps_no_buffers_and_is_refused():
    assert run_ranks(held_by_the_user, 2) == [(True, True, False, [])] * 2


def held_by_process():
    """Threads, descriptors and process groups of this process."""
    groups = len(distributed_c10d._world.pg_map)
    return [len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd")] + [groups]


def many_groups(rank):
    """What the process holds after each of several groups was made, used and destroyed."""
    found = []
    for number in range(5):
        group = dist.new_group([0, 1])
        if GROUPS_OF_ONE_RANK and rank == number % 2:  # other groups of its own
            dist.new_group([rank], use_local_synchronization=True)
        q, k, v = (torch.randn(1, 4, 2, 8) for _ in range(3))
        burst_attention(q, k, v, group=group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        found.append(held_by_process())
    return found


def test_groups_that_are_made_and_destroyed_leave_nothing_behind():
    """Sub-groups of the latest one exist until another is used."""
    for first, *_, last in run_ranks(many_groups, 2):
        own = 2 * GROUPS_OF_ONE_RANK  # groups of a single rank, which the test itself left
        assert last[2] - first[2] == own
        # A thread of gloo may be about to end.
        assert last[0] - first[0] <= 3 * own + 1 and last[1] - first[1] <= 5 * own


def fewer_ranks(rank):
    """Sub-groups of three ranks' group that exist while a group of two of them is used, and then
    while one of all three is."""

    def used(ranks):
        group = dist.new_group(ranks)
        if rank in ranks:
            burst_attention(*(torch.randn(1, 4, 2, 8) for _ in range(3)), group=group)
            return group, state_of(group).consensus.name
        return group, None

    first, name = used([0, 1, 2])
    dist.destroy_process_group(first)
    found = []
    for ranks in ([0, 1], [0, 1, 2]):
        used(ranks)
        names = distributed_c10d._world.pg_names.values()
        found.append(any(one.startswith(f"{name}/") for one in names))
    return found


def test_sub_groups_are_destroyed_by_all_their_ranks_together():
    """NCCL waits for all of them."""
    assert run_ranks(fewer_ranks, 3) == [[True, False]] * 3
