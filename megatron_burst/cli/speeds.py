"""How fast ranks compute and move data; all of them together, each call timed on each rank."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from megatron_burst.cli.timing import attempt, timed_ms
from megatron_burst.cli.world import World
from megatron_burst.kernels.backends import Backend, QuerySide, choose_backend, problem_of
from megatron_burst.kernels.visible import CAUSAL
from megatron_burst.schedule.topology import Link, Topology

Run = Callable[[], object]
_WARM_UP = 2


def rank_ms(run: Run, world: World, reps: int = 5) -> list[float]:
    """Median milliseconds of each rank, in rank order; the same on all ranks."""
    mine = [timed_ms(run, world) for _ in range(_WARM_UP + reps)][_WARM_UP:]
    return world.gather(median(mine))


def rings(topology: Topology) -> dict[Link, list[tuple[int, ...]]]:
    """Rings inside each node, and between nodes through equal places; none of one rank.

    Where nodes are uneven, ranks beyond the smallest node's are in no ring between nodes.
    """
    ring = [rank for row in topology.grid for rank in row]
    nodes = dict.fromkeys(topology.node_of[rank] for rank in ring)
    rows = [tuple(rank for rank in ring if topology.node_of[rank] == node) for node in nodes]
    columns = list(zip(*rows, strict=False)) if len(rows) > 1 else []
    return {Link.INTRA: [row for row in rows if len(row) > 1], Link.INTER: columns}


@dataclass(frozen=True, slots=True)
class Mover:
    """Moves bytes between ranks."""

    world: World
    topology: Topology
    node_group: dist.ProcessGroup | None  # of this rank's node; None where it is alone

    @classmethod
    def of(cls, world: World, topology: Topology) -> "Mover":
        """All ranks make it together."""
        mine = None
        for row in rings(topology)[Link.INTRA]:
            group = world.group if len(row) == world.size else dist.new_group(sorted(row))
            mine = group if world.rank in row else mine
        return cls(world, topology, mine)

    def shift(self, link: Link, num_bytes: int) -> Run:
        """Each rank sends to the next of its ring; those in none do nothing."""
        world = self.world
        ring = next((ring for ring in rings(self.topology)[link] if world.rank in ring), None)
        if ring is None:
            return lambda: None
        send, recv = self._bytes(num_bytes), self._bytes(num_bytes)
        place = ring.index(world.rank)
        to, source = ring[(place + 1) % len(ring)], ring[place - 1]
        return partial(shift_once, send, recv, to, source, world.group)

    def all_to_all(self, num_bytes: int) -> Run:
        """Each rank sends an equal part to each of its node."""
        if self.node_group is None:
            return lambda: None
        size = self.node_group.size()
        send, recv = (self._bytes(max(1, num_bytes // size) * size) for _ in range(2))
        return lambda: dist.all_to_all_single(recv, send, group=self.node_group)

    def all_gather(self, num_bytes: int) -> Run:
        """Each rank receives an equal part of each of its node, its own among them."""
        if self.node_group is None:
            return lambda: None
        part = self._bytes(max(1, num_bytes // self.node_group.size()))
        whole = self._bytes(part.numel() * self.node_group.size())
        return lambda: dist.all_gather_into_tensor(whole, part, group=self.node_group)

    def puller(self, most_bytes: int) -> Callable[[int], Run] | None:
        """Makes runs in which each rank reads the next one's symmetric memory, up to so many bytes;
        None where GPUs cannot."""
        made: list[tuple] = []

        def make() -> None:
            if self.node_group is None:
                return
            own = symmetric_memory.empty(most_bytes, dtype=torch.uint8, device=self.world.device)
            handle = symmetric_memory.rendezvous(own, self.node_group.group_name)
            after = (self.node_group.rank() + 1) % self.node_group.size()
            theirs = handle.get_buffer(after, (most_bytes,), torch.uint8)
            made.append((theirs, self._bytes(most_bytes), own, handle))  # these last as long

        def read(num_bytes: int) -> Run:
            return lambda: [
                target[:num_bytes].copy_(theirs[:num_bytes]) for theirs, target, *_ in made
            ]

        able = self.world.device.type == "cuda" and not attempt(make, self.world)
        return read if able else None

    def host_copies(self, num_bytes: int) -> tuple[Run, Run]:
        """To the device from pinned memory, and back."""
        pin, device = self.world.device.type == "cuda", self._bytes(num_bytes)
        pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pin)
        ends = (device, pinned), (pinned, device)
        return tuple(partial(to.copy_, source, non_blocking=True) for to, source in ends)

    def _bytes(self, num_bytes: int) -> Tensor:
        return torch.ones(num_bytes, dtype=torch.uint8, device=self.world.device)


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
