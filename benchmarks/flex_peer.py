"""torch's context parallelism of FlexAttention as a peer, for documents and windows."""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmarks.impls import Impl
from benchmarks.library_peers import mesh_of, over_ranks
from benchmarks.packed_cases import PackedCase
from benchmarks.packed_peers import NO_TREES, Packed, Sample
from megatron_burst.tools.world import World

_BLOCK = 128  # rows that a mask of blocks, and so a rank's share, is made of


class Flex(Packed):
    """Gathers all keys; ranks have blocks of rows, assigned by work (torch's PTRR)."""

    def __init__(self, impl: Impl, world: World) -> None:
        super().__init__(impl, world)
        # positions of a rank's rows, and what they see: compiled once for each problem
        self.assigned: dict[PackedCase, tuple[Tensor, BlockMask]] = {}
        self.mask: BlockMask | None = None

    def refusal(self, case: PackedCase) -> str | None:
        if self.world.device.type != "cuda":
            return "FlexAttention has no backward on CPUs"
        if case.seq % (_BLOCK * self.world.size):
            return f"FlexAttention's ranks need whole blocks of {_BLOCK} rows; got {case.seq}"
        return NO_TREES if case.parents else None

    def prepare(self, sample: Sample) -> None:
        case = sample.case
        if case not in self.assigned:
            self.assigned[case] = self._assign(case)
        places, self.mask = self.assigned[case]
        self.shard = sample.rows(places)

    def _assign(self, case: PackedCase) -> tuple[Tensor, BlockMask]:
        from torch.distributed.tensor.experimental import _attention as cp

        torch._dynamo.config.recompile_limit = 64  # instead of 8: each problem is compiled for
        rank, size, device = self.world.rank, self.world.size, self.world.device
        compiled = torch.compile(create_block_mask, dynamic=False)
        whole = compiled(_seen(case, device), 1, 1, case.seq, case.seq, device=device)
        balancer = cp._PTRRLoadBalancer(whole, size)
        (mask,) = cp._context_parallel_shard(self.mesh, [whole], [2], balancer)
        return balancer._generate_indices()[0].chunk(size)[rank].cpu(), mask

    @cached_property
    def mesh(self) -> torch.distributed.device_mesh.DeviceMesh:
        return mesh_of(self.world)

    @cached_property
    def attention(self) -> torch.nn.Module:
        """Compiled as torchtitan does."""
        kernel = torch.compile(flex_attention, mode="max-autotune-no-cudagraphs", dynamic=False)
        return over_ranks(_Attention(kernel), "FLEX", self.mesh)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = self.attention(*(x.permute(1, 2, 0, 3) for x in (q, k, v)), self.mask)
        return out.permute(2, 0, 1, 3)

    def release(self) -> None:
        super().release()
        self.mask = None


class _Attention(torch.nn.Module):
    def __init__(self, kernel: Callable) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
        return self.kernel(q, k, v, block_mask=mask, enable_gqa=True)


def _seen(case: PackedCase, device: torch.device) -> Callable[..., Tensor]:
    """Which keys a query sees, by positions, as FlexAttention asks."""
    if not case.documents:
        return lambda batch, head, query, key: (key <= query) & (query - key <= case.window)
    lengths = torch.tensor(case.lengths, device=device)
    document = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
    return lambda batch, head, query, key: (key <= query) & (document[key] == document[query])
