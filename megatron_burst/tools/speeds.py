"""How fast ranks compute and move data: all of them at once, each call timed on each rank."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from megatron_burst.call import attention_shape
from megatron_burst.comm.grid import nodes_of
from megatron_burst.kernels.backends import choose_backend
from megatron_burst.kernels.interface import Backend, Problem, QuerySide, arch_of
from megatron_burst.kernels.visible import CAUSAL
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.topology import Link, Topology
from megatron_burst.tools.world import World, attempt, timed_ms

Run = Callable[[], object]
_WARM_UP = 2


def times_ms(run: Run, world: World, reps: int = 5) -> list[float]:
    """Milliseconds of each repetition on this rank, after some to warm up."""
    return [timed_ms(run, world) for _ in range(_WARM_UP + reps)][_WARM_UP:]


def rank_ms(run: Run, world: World, reps: int = 5) -> list[float]:
    """Median milliseconds of each rank, in rank order; the same on all ranks."""
    return world.gather(median(times_ms(run, world, reps)))


def problem_of(
    q: Tensor, k: Tensor, v: Tensor, deterministic: bool = False, mask: Mask = Mask.FULL
) -> Problem:
    """The problem of attention over these tensors, [.., .., heads, dim] each."""
    grouped, arch = q.shape[2] != k.shape[2], arch_of(q.device)
    return Problem(
        q.device.type, q.dtype, q.shape[3], v.shape[3], grouped, deterministic, arch, mask.needs,
        huge=attention_shape([x.shape for x in (q, k, v)], q.dtype).exceeds_int32,
    )  # fmt: skip


def rings(topology: Topology) -> dict[Link, list[tuple[int, ...]]]:
    """Rings inside each node, and between nodes through equal places; none for one rank.

    Where nodes are uneven, ranks beyond the smallest node's are in no ring between nodes.
    """
    rows = nodes_of(topology)
    columns = list(zip(*rows, strict=False)) if len(rows) > 1 else []
    return {Link.INTRA: [row for row in rows if len(row) > 1], Link.INTER: columns}


class Mover:
    """Moves bytes between ranks; all of them make it together."""

    def __init__(self, world: World, topology: Topology) -> None:
        self.world, self.rings = world, rings(topology)
        self.node_group: dist.ProcessGroup | None = None  # None where a rank is alone on its node
        for row in self.rings[Link.INTRA]:
            group = world.group if len(row) == world.size else dist.new_group(sorted(row))
            self.node_group = group if world.rank in row else self.node_group

    def shift(self, link: Link, num_bytes: int) -> Run:
        """Each rank sends to the next of its ring; ranks in no ring do nothing."""
        rank, group = self.world.rank, self.world.group
        ring = next((ring for ring in self.rings[link] if rank in ring), None)
        if ring is None:
            return lambda: None
        send, recv = bytes_on(self.world, num_bytes), bytes_on(self.world, num_bytes)
        place = ring.index(rank)
        to, source = ring[(place + 1) % len(ring)], ring[place - 1]
        return partial(shift_once, send, recv, to, source, group)

    def puller(self, most_bytes: int) -> Callable[[int], Run] | None:
        """Makes reads of up to `most_bytes` of the next rank's memory; None if GPUs cannot."""
        made: list[Window] = []

        def make() -> None:
            if self.node_group is not None:
                made.append(Window(self.world, self.node_group, most_bytes))

        if self.world.device.type != "cuda" or attempt(make, self.world):
            return None
        return made[0].read if made else lambda num_bytes: lambda: None


class Window:
    """Symmetric memory of this rank and of the next one of its node."""

    def __init__(self, world: World, group: dist.ProcessGroup, num_bytes: int) -> None:
        self.own = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=world.device)
        self.handle = symmetric_memory.rendezvous(self.own, group.group_name)
        after = (group.rank() + 1) % group.size()
        self.theirs = self.handle.get_buffer(after, (num_bytes,), torch.uint8)
        self.target = bytes_on(world, num_bytes)

    def read(self, num_bytes: int) -> Run:
        """Copies `num_bytes` from the next rank."""
        return partial(self.target[:num_bytes].copy_, self.theirs[:num_bytes])


def bytes_on(world: World, num_bytes: int) -> Tensor:
    """A byte tensor on this rank's device."""
    return torch.ones(num_bytes, dtype=torch.uint8, device=world.device)


def host_copies(world: World, num_bytes: int) -> tuple[Run, Run]:
    """Copies from pinned memory to the device, and back."""
    pin, device = world.device.type == "cuda", bytes_on(world, num_bytes)
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pin)
    ends = (device, pinned), (pinned, device)
    return tuple(partial(to.copy_, source, non_blocking=True) for to, source in ends)


def shift_once(send: Tensor, recv: Tensor, to: int, source: int, group: dist.ProcessGroup) -> None:
    """Send to one global rank while another's bytes come."""
    sending = dist.P2POp(dist.isend, send, to, group)
    for work in dist.batch_isend_irecv([sending, dist.P2POp(dist.irecv, recv, source, group)]):
        work.wait()


def matmul(world: World, width: int, dtype: torch.dtype) -> tuple[Run, float]:
    """A square product, and its FLOPs."""
    a, b = (torch.randn(width, width, device=world.device).to(dtype) for _ in range(2))
    return lambda: a @ b, 2.0 * width**3


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention of one rank's own rows; tensors are [1, seq, heads, head_dim]."""

    backend: Backend
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @classmethod
    def drawn(
        cls, world: World, seq: int, heads: tuple[int, int], dim: int, dtype: torch.dtype
    ) -> "Attention":
        """Random tensors of query and KV heads, and the backend that burst chooses for them."""
        q, k, v, dout = (
            torch.randn(1, seq, count, dim, device=world.device, dtype=dtype)
            for count in (heads[0], heads[1], heads[1], heads[0])
        )
        return cls(choose_backend(problem_of(q, k, v), "auto")[0], q, k, v, dout)

    @property
    def forward_flops(self) -> float:
        """Two products over the pairs that the mask leaves."""
        _, seq, heads, dim = self.q.shape
        return 2.0 * seq * seq * heads * dim

    def forward(self) -> tuple[Tensor, Tensor]:
        """(out, lse)."""
        return self.backend.forward(self.q, self.k, self.v, self.q.shape[3] ** -0.5, CAUSAL)

    def backward(self) -> Run:
        """The backward pass, with its forward pass done."""
        out, lse = self.forward()
        side = QuerySide(q=self.q, dout=self.dout, lse=lse, delta=None, out=out)
        return lambda: self.backend.backward(side, self.k, self.v, self.q.shape[3] ** -0.5, CAUSAL)
