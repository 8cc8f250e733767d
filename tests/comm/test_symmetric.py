"""When symmetric buffers grow; their memory is pretended."""

import torch
import torch.distributed as dist

from megatron_burst.comm import symmetric
from megatron_burst.comm.groups import communicator_of
from megatron_burst.comm.slots import PulledSlots
from megatron_burst.config import BurstConfig
from megatron_burst.plan.schedule import Cargo
from tests.ranks import run_ranks


class Stream:
    cuda_stream = 0


def sizes_of_slots(rank):
    """Slots grow on the second host only: in zigzag its shares are smaller than the first one's."""
    torch.cuda.current_stream = lambda device: Stream()
    torch.cuda.synchronize = lambda device: None

    def make(pool, count, num_bytes, device):
        buffers = [{pool._cp_rank: torch.empty(num_bytes, dtype=torch.uint8)} for _ in range(count)]
        return PulledSlots(buffers, [lambda: None] * count, pool._cp_rank, None)

    symmetric.SymmetricPool._make = make
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
