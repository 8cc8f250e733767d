"""Context parallelism of other libraries as peers: torch's own, DeepSpeed's Ulysses, yunchang.

None of them is imported unless it is measured. Ulysses has no kernel of its own, and yunchang's
flash-attn 2 has no wheel for recent torch: both run one of burst's kernels, which the note names.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.cases import Case
from benchmarks.impls import Impl
from benchmarks.peers import Autograd, Shard, kernel_for, sample_of, seen
from megatron_burst.kernels.interface import Backend, QuerySide
from megatron_burst.kernels.visible import CAUSAL, FULL, Visible
from megatron_burst.masks.sample import indices_of
from megatron_burst.schedule.layout import Layout, positions
from megatron_burst.schedule.mask import Mask
from megatron_burst.tools.world import World


def missing(module: str, name: str) -> str | None:
    """Why a library cannot be measured, or None."""
    return None if find_spec(module) else f"{name} is not installed; pip install {module}"


class Library(Autograd):
    """Another library's attention over the ranks' shards."""

    # how many consecutive ranks exchange heads. Together they have the rows that zigzag gives to
    # one rank in a ring of such groups. The harness draws rows of degree 1: `prepare` and `sample`
    # move them, which is not timed
    degree = 1

    def prepare(self, shard: Shard) -> None:
        tensors = (shard.q, shard.k, shard.v, shard.dout)
        q, k, v, dout = (self._moved(x.detach(), 1, self.degree) for x in tensors)
        super().prepare(Shard(shard.case, *(x.requires_grad_() for x in (q, k, v)), dout))

    def sample(self, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return sample_of([self._moved(x.detach(), self.degree, 1) for x in results])

    def _moved(self, x: Tensor, source: int, target: int) -> Tensor:
        """The rows of degree `target`, of a tensor [s_local, ...] with those of `source`."""
        if source == target:
            return x
        size, whole = self.world.size, x.new_empty(self.world.size * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(whole, x.contiguous(), group=self.world.group)
        parts = [places(len(whole), source, rank, size) for rank in range(size)]
        own = places(len(whole), target, self.world.rank, size)
        return whole[torch.cat(parts).argsort()[own].to(x.device)]


def places(tokens: int, degree: int, rank: int, size: int) -> Tensor:
    """Positions of a rank's rows: see `Library`. Source: yunchang's zigzag_extract_local."""
    ring = size // degree
    ranges = positions(Layout.ZIGZAG, rank // degree, ring, tokens // ring)
    return indices_of(ranges).chunk(degree)[rank % degree]


def over_ranks(module: torch.nn.Module, kind: str, mesh: DeviceMesh) -> torch.nn.Module:
    """An attention module with sequences sharded in axis 2 by torch: "SDPA", or "FLEX"."""
    from torch.distributed.tensor.experimental import _attention as cp
    from torch.distributed.tensor.parallel import parallelize_module

    style = cp._ContextParallel(2, cp._ContextParallel.AttentionType[kind])
    return parallelize_module(module, mesh, style)


class TorchContextParallel(Library):
    """torch's; `impl.mode` is its rotate method and the backend of its SDPA."""

    def __init__(self, impl: Impl, world: World) -> None:
        super().__init__(impl, world)
        self.method, _, kernel = impl.mode.partition("+")
        self.kernel = getattr(torch.nn.attention.SDPBackend, f"{kernel.upper()}_ATTENTION")

    def refusal(self, case: Case) -> str | None:
        on_gpu = self.world.device.type == "cuda"
        return None if on_gpu else "torch's context parallelism runs on CUDA only"

    @cached_property
    def attention(self) -> torch.nn.Module:
        """SDPA as a module, as in torchtitan. What is switched on is for DTensors alone."""
        from torch.distributed.tensor.experimental import _attention as cp

        cp._enable_context_parallel_dispatcher()
        mesh = DeviceMesh.from_group(self.world.group, self.world.device.type)
        return over_ranks(_Sdpa(), "SDPA", mesh)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.distributed.tensor.experimental import _attention as cp

        causal = self.shard.case.mask == "causal"
        cp.set_rotate_method(self.method)  # of the process, also for the backward that follows
        cp._cp_options.enable_load_balance = causal
        with torch.nn.attention.sdpa_kernel(self.kernel):
            out = self.attention(*(x.permute(1, 2, 0, 3) for x in (q, k, v)), causal)
        return out.permute(2, 0, 1, 3)


class _Sdpa(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


@dataclass(frozen=True, slots=True)
class LocalKernel:
    """One of burst's kernels, for libraries that take any; tensors are [b, n, h, d]."""

    backend: Backend
    visible: Visible
    scale: float

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The output, differentiable."""
        return _Attend.apply(q, k, v, self)

    def forward(self, q, k, v, dropout_p, softmax_scale, causal, **_):
        """(out, lse) of a tile, called as yunchang calls flash-attn 2."""
        return self.backend.forward(q, k, v, softmax_scale, CAUSAL if causal else FULL)

    def backward(
        self, dout, q, k, v, out, lse, dq, dk, dv, dropout_p, softmax_scale, causal, *_, **__
    ):
        """Writes a tile's dq, dk, dv; called as yunchang calls flash-attn 2."""
        side = QuerySide(q, dout, lse.contiguous(), None, out)
        visible = CAUSAL if causal else FULL
        self.backend.backward(side, k, v, softmax_scale, visible, (dq, dk, dv))


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, kernel):
        out, lse = kernel.backend.forward(q, k, v, kernel.scale, kernel.visible)
        ctx.kernel = kernel
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        kernel, side = ctx.kernel, QuerySide(q, dout, lse, None, out)
        grads = kernel.backend.backward(side, k, v, kernel.scale, kernel.visible)
        return *(grad.to(q.dtype) for grad in grads), None


class AnyKernel(Library):
    """A library that runs one of burst's kernels on its tensors."""

    asked = "auto"
    kernel: LocalKernel | None = None

    def seen(self, case: Case) -> tuple[Mask, Visible]:
        """What the kernel must support, and what it is told."""
        return seen(case)

    def prepare(self, shard: Shard) -> None:
        super().prepare(shard)
        self.choose()

    def choose(self) -> None:
        """Find the kernel for the tensors that the peer has."""
        case = self.shard.case
        mask, visible = self.seen(case)
        backend, self.note = kernel_for(self.shard, self.asked, mask)
        self.kernel = LocalKernel(backend, visible, case.head_dim_qk**-0.5)


class Ulysses(AnyKernel):
    """DeepSpeed's DistributedAttention; `impl.mode` is the backend's name, or "auto"."""

    def __init__(self, impl: Impl, world: World) -> None:
        super().__init__(impl, world)
        self.degree, self.asked = world.size, impl.mode

    def refusal(self, case: Case) -> str | None:
        return missing("deepspeed", "DeepSpeed")

    @cached_property
    def attention(self) -> torch.nn.Module:
        import deepspeed.comm
        from deepspeed.sequence.layer import DistributedAttention

        deepspeed.comm.init_distributed(dist.get_backend(self.world.group), False, verbose=False)
        return DistributedAttention(self._local, self.world.group, scatter_idx=2, gather_idx=0)

    def _local(self, *tensors: Tensor) -> Tensor:
        return self.kernel.attend(*(x.transpose(0, 1) for x in tensors)).transpose(0, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention(q, k, v, 1)  # sequences of a batch are axis 1


class Yunchang(AnyKernel):
    """yunchang's attention; `impl.mode` says which ranks exchange heads (none in "ring", pairs in
    "usp", all in "ulysses"), and the backend that stands in for flash-attn 2, or "auto"."""

    def __init__(self, impl: Impl, world: World) -> None:
        super().__init__(impl, world)
        self.way, _, self.asked = impl.mode.partition("+")
        self.degree = {"ring": 1, "usp": 2, "ulysses": world.size}[self.way]

    def refusal(self, case: Case) -> str | None:
        size, in_rings = self.world.size, self.way != "ulysses"
        if lack := missing("yunchang", "yunchang"):
            return lack
        if in_rings and case.mask != "causal":
            return "yunchang's zigzag ring is for causal masks"
        if in_rings and case.dtype == "float32":
            return "yunchang's ring sums gradients in the kernel's buffers if they are float32"
        if self.way == "usp" and (size % 2 or size < 4):
            return f"usp needs an even number of ranks, 4 or more; got {size}"
        if case.heads_kv % self.degree:
            return f"yunchang shards KV heads over {self.degree} ranks; got {case.heads_kv}"
        return None

    @cached_property
    def attention(self) -> torch.nn.Module:
        import yunchang
        from yunchang.ring import zigzag_ring_flash_attn
        from yunchang.ulysses import attn_layer

        for module in (zigzag_ring_flash_attn, attn_layer):
            module.select_flash_attn_impl = _kernel_of
        if self.way == "ulysses":  # LongContextAttention would send gradients to itself
            return yunchang.UlyssesAttention(self.world.group, attn_type=self)
        rank, size = self.world.rank, self.world.size
        yunchang.set_seq_parallel_pg(self.degree, size // self.degree, rank, size)
        return yunchang.LongContextAttention(ring_impl_type="zigzag", attn_type=self)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tensors = (x.transpose(0, 1) for x in (q, k, v))
        causal = self.shard.case.mask == "causal"
        return self.attention(*tensors, causal=causal).transpose(0, 1)


def _kernel_of(peer: Yunchang, stage: str) -> Callable:
    """In place of yunchang's choice by `attn_type`, which is the peer here."""
    if stage == "fwd-bwd":  # asked for once, while kernels follow the problem
        return lambda q, k, v, **_: peer.kernel.attend(q, k, v)
    return peer.kernel.forward if stage == "fwd-only" else peer.kernel.backward
