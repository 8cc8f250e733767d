"""How fast the ranks' links are at this moment."""

from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.cli.timing import timed_ms
from megatron_burst.cli.world import World

_NUM_BYTES = {"cuda": 256 << 20, "cpu": 1 << 20}
_REPS = 5


def link_speed(world: World) -> str:
    """Ring shift and all-to-all in GB/s a rank; "" for one rank.

    On several hosts it is what leaves a rank for other hosts, otherwise what leaves a rank.
    """
    if world.size == 1:
        return ""
    send = torch.ones(_NUM_BYTES[world.device.type], dtype=torch.uint8, device=world.device)
    send = send[: send.numel() // world.size * world.size]
    recv = torch.empty_like(send)
    across = world.hosts > 1 and world.size % world.hosts == 0
    distance = world.size // world.hosts if across else 1
    staying = distance / world.size  # the share of an all-to-all that does not leave

    to, source = ((world.rank + sign * distance) % world.size for sign in (1, -1))
    shift = partial(shift_once, send, recv, to, source, world.group)

    def exchange() -> None:
        dist.all_to_all_single(recv, send, group=world.group)

    ring = _gbs(shift, send.numel(), world)
    all_to_all = _gbs(exchange, send.numel() * (1 - staying), world)
    where = f"between {world.hosts} hosts" if across else "on one host"
    if across and world.machines == 1:
        where += " of one machine"
    return f"ring {ring:.3g}, all-to-all {all_to_all:.3g} GB/s {where}"


def shift_once(send: Tensor, recv: Tensor, to: int, source: int, group: dist.ProcessGroup) -> None:
    """Send to one global rank while another's bytes come."""
    operations = [
        dist.P2POp(dist.isend, send, to, group), dist.P2POp(dist.irecv, recv, source, group),
    ]  # fmt: skip
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _gbs(run, num_bytes: float, world: World) -> float:
    """GB/s of the slowest rank, median over repetitions after two to warm up."""
    mine = [timed_ms(run, world) for _ in range(2 + _REPS)][2:]
    slowest = [max(times) for times in zip(*world.gather(mine), strict=True)]
    return num_bytes / (median(slowest) * 1e6)
