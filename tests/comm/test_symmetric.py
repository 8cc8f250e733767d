"""When symmetric buffers grow; their memory is simulated."""

import gc
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from megatron_burst.comm import symmetric
from megatron_burst.comm.communicator import communicator_of
from megatron_burst.comm.transport import Placement
from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from megatron_burst.logs import Decision
from megatron_burst.schedule.spec import Cargo
from tests.ranks import run_ranks
from tests.said import hearing


class Handle:
    """Handle of memory that nobody else can read."""

    def __init__(self, buffer):
        self.buffer = buffer

    def get_buffer(self, position, shape, dtype):
        return self.buffer

    def barrier(self, timeout_ms):
        pass


def pretend(empty):
    """Simulate symmetric memory on the CPU; a rendezvous waits for the other ranks."""

    def rendezvous(buffer, group_name):
        group = c10d._resolve_process_group(group_name)
        rank, store = group.rank(), group.get_group_store()
        store.set(f"met/0/{rank}", b"")
        store.wait([f"met/0/{each}" for each in range(group.size())])
        return Handle(buffer)

    torch.cuda.current_device = lambda: 0
    torch.cuda.synchronize = lambda device: None
    symmetric.symmetric_memory.empty = empty
    symmetric.symmetric_memory.rendezvous = rendezvous


def room(num_bytes, dtype, device):
    return torch.empty(num_bytes, dtype=dtype)


def sizes_of_slots(rank):
    """Slots grow on the second node only: in zigzag its shares are smaller than the first one's."""
    pretend(room)
    carrier = communicator_of(dist.group.WORLD, BurstConfig(nodes=2, timeout_s=20))
    node, found = rank // 2, []
    for num_bytes in ((2048, 1536)[node], 2048, 4096):
        slots = carrier.pool.slots(Cargo.GRAD, 4, num_bytes, Placement(torch.device("cpu")))
        found.append(slots.slot_bytes)
    carrier.consensus.all_gather("the end", "test")
    return found


def test_slots_grow_where_they_must_and_nobody_waits_for_other_nodes():
    found = run_ranks(sizes_of_slots, 4)
    assert found == [[2048, 2048, 4096]] * 2 + [[1536, 2048, 4096]] * 2


def without_room(rank, asked):
    """A second allocation fails on rank 1; by rank, the outcome and how long it took."""
    asked_for = []

    def room_once(num_bytes, dtype, device):
        asked_for.append(num_bytes)
        if rank == 1 and num_bytes > 4096:
            raise RuntimeError("out of memory\nat some line")
        return room(num_bytes, dtype, device)

    pretend(room_once)
    carrier = communicator_of(dist.group.WORLD, BurstConfig(nodes=2, timeout_s=30))
    carrier.transfer, carrier._requested = Decision("pull"), asked
    where, begin = Placement(torch.device("cpu")), time.monotonic()
    carrier.slots(Cargo.READ, 2, 1024, where)
    try:
        with hearing() as lines:
            slots = carrier.slots(Cargo.GRAD, 2, 8192, where)
    except BurstError as error:
        return str(error), carrier.transfer.value, time.monotonic() - begin
    return type(slots).__name__, str(carrier.transfer), time.monotonic() - begin, len(lines)


def test_a_rank_without_room_is_told_to_all_of_its_node_before_they_meet():
    (one, *_), (other, *_), *far = run_ranks(without_room, 4, "pull")
    assert (
        one == other
        and "cp rank 1: out of memory;" in one
        and "--burst-tune force.transfer=send" in one
    )
    assert [found[:2] for found in far] == [("PulledSlots", "pull")] * 2


def test_ranks_that_chose_to_pull_by_themselves_send_where_one_has_no_room():
    (one, *near), (other, *_), *far = run_ranks(without_room, 4, "auto")
    assert one == other == "SentSlots" and near[0].startswith("send (")
    assert "cp rank 1: out of memory)" in near[0] and near[1] < 20 and near[2] == 1
    assert [found[:2] for found in far] == [("PulledSlots", "pull")] * 2


def smaller_and_elsewhere(rank):
    """Bytes of the slots of a smaller call after one without room on rank 1, from which on rank 1
    runs on streams of its own."""

    def narrow(num_bytes, dtype, device):
        if rank == 1 and num_bytes > 4096:
            raise RuntimeError("out of memory")
        return room(num_bytes, dtype, device)

    pretend(narrow)
    carrier, found = communicator_of(dist.group.WORLD, BurstConfig(timeout_s=20)), []
    for number, num_bytes in enumerate((1024, 8192, 2048, 2048, 2048)):
        where = Placement(torch.device("cpu"), number * rank)
        try:
            found.append(carrier.pool.slots(Cargo.GRAD, 4, num_bytes, where).slot_bytes)
        except BurstError:
            found.append(None)
    return found


def test_a_smaller_call_after_one_without_room_gets_slots_on_whatever_stream():
    assert run_ranks(smaller_and_elsewhere, 2) == [[1024, None, 2048, 2048, 2048]] * 2


def tried(rank, fails):
    """Why ranks cannot pull, where a rank of another node has no symmetric memory."""

    def none_at_all(num_bytes, dtype, device):
        raise RuntimeError("no such driver")

    pretend(none_at_all if fails and rank == 3 else room)
    carrier = communicator_of(dist.group.WORLD, BurstConfig(nodes=2, timeout_s=30))
    begin = time.monotonic()
    return carrier.pool.refusal(carrier.consensus), time.monotonic() - begin < 20


def test_trying_out_fails_on_all_ranks_together():
    assert run_ranks(tried, 4, True) == [("cp rank 3: no such driver", True)] * 4
    assert run_ranks(tried, 4, False) == [(None, True)] * 4


def torchs(counter):
    """A rendezvous as torch's: ranks meet in the store of the process group that is registered
    under the name, by keys that count from the process's own number."""

    def gather(name):
        group = c10d._resolve_process_group(name)
        # as from C++, whose calls reach Python's methods
        store = dist.PrefixStore("torch", group.get_group_store())
        rank, size = group.rank(), group.size()
        keys = [f"CUDASymmetricMemory/{counter[0]}/{each}" for each in range(size)]
        counter[0] += 1
        store.set(keys[rank], f"{rank}".encode())
        for each in range(size):
            if each != rank:
                store.wait([keys[each]])
                assert store.get(keys[each]) == f"{each}".encode()

    def rendezvous(buffer, group_name):
        gather(group_name)
        gather(group_name)  # torch's barrier behind it
        return Handle(buffer)

    symmetric.symmetric_memory.rendezvous = rendezvous


def met_before(rank):
    """Slots of a group whose ranks have met in other groups, some of them more often."""
    pretend(room)
    torchs([10 * rank])
    config = BurstConfig(timeout_s=20)
    where, found = Placement(torch.device("cpu")), []
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    for group in (pairs[rank // 2], dist.group.WORLD, pairs[rank // 2]):
        carrier = communicator_of(group, config)
        for num_bytes in (1024, 4096) if rank < 2 or group.size() > 2 else (1024,):
            slots = carrier.pool.slots(Cargo.GRAD, 2, num_bytes, where)
            found.append(slots.slot_bytes)
    return found


def test_ranks_that_met_in_other_groups_find_each_other():
    """torch numbers meetings in each process; unequal numbers wait until the time-out."""
    found = run_ranks(met_before, 4, timeout_s=60)
    assert found == [[1024, 4096, 1024, *[4096] * 3]] * 2 + [[1024, 1024, 4096, 1024]] * 2


def test_a_pool_that_is_gone_leaves_no_name_behind():
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 2, get_group_store=dist.HashStore)
    pool = symmetric.SymmetricPool(group, [0, 1], 0, consensus=None)
    name = pool._name
    assert c10d._resolve_process_group(name).size() == 2
    del pool
    gc.collect()
    with pytest.raises(RuntimeError, match="Could not resolve"):
        c10d._resolve_process_group(name)
