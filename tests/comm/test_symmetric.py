"""When symmetric buffers grow; their memory is pretended."""

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_burst.comm import symmetric
from megatron_burst.comm.groups import communicator_of
from megatron_burst.config import BurstConfig
from megatron_burst.plan.schedule import Cargo
from tests.ranks import run_ranks


class Stream:
    cuda_stream = 0


class Handle:
    """Of memory that nobody else can read."""

    def __init__(self, buffer):
        self.buffer = buffer

    def get_buffer(self, position, shape, dtype):
        return self.buffer

    def barrier(self, timeout_ms):
        pass


def pretend(empty):
    """Have symmetric memory on CPU; a rank that meets the others waits for them."""

    def rendezvous(buffer, group_name):
        dist.barrier(distributed_c10d._resolve_process_group(group_name))
        return Handle(buffer)

    torch.cuda.current_stream = lambda device: Stream()
    torch.cuda.current_device = lambda: 0
    torch.cuda.synchronize = lambda device: None
    torch.cuda.Stream = lambda device, priority: None
    symmetric.symmetric_memory.empty = empty
    symmetric.symmetric_memory.rendezvous = rendezvous


def room(num_bytes, dtype, device):
    return torch.empty(num_bytes, dtype=dtype)


def sizes_of_slots(rank):
    """Slots grow on the second host only: in zigzag its shares are smaller than the first one's."""
    pretend(room)
    carrier = communicator_of(dist.group.WORLD, BurstConfig(hosts=2, timeout_s=20))
    host, found = rank // 2, []
    for num_bytes in ((2048, 1536)[host], 2048, 4096):
        slots = carrier._pool.slots(Cargo.GRAD, 4, num_bytes, torch.device("cpu"))
        found.append(slots.slot_bytes)
    carrier.board.share("the end", "test")
    return found


def test_slots_grow_where_they_must_and_nobody_waits_for_other_hosts():
    found = run_ranks(sizes_of_slots, 4)
    assert found == [[2048, 2048, 4096]] * 2 + [[1536, 2048, 4096]] * 2
