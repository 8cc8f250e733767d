"""Attention for packed samples and windows: burst, its peers, the kernel alone."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmarks.impls import Impl
from benchmarks.library_peers import Ulysses, over_ranks
from benchmarks.packed_cases import PackedCase
from benchmarks.peers import Autograd, Burst, Ceiling, Shard, tensors_of
from benchmarks.te import TransformerEngine
from megatron_burst.kernels.interface import QuerySide
from megatron_burst.kernels.masks.parts import Parts
from megatron_burst.kernels.visible import Segments, Visible
from megatron_burst.masks.sample import indices_of
from megatron_burst.masks.slice_calls import Calls
from megatron_burst.masks.slice_parts import Bands
from megatron_burst.masks.tree import slices_of_tree
from megatron_burst.schedule.layout import Layout, positions, positions_in_documents
from megatron_burst.schedule.mask import Mask
from megatron_burst.tools.world import World

_SAMPLED = 128  # positions whose results are compared
_BLOCK = 128  # rows that FlexAttention's masks, and so a rank's share, are made of


@dataclass(frozen=True, slots=True)
class PackedShard(Shard):
    """This rank's part in one layout; a batch of one: [s_local, 1, h, d]."""

    places: Tensor  # positions of the rows in the sample, int64 on the CPU
    cu_seqlens: Tensor  # where documents begin and the last one ends, int32 on the device
    longest: int  # tokens of the longest document


@dataclass(slots=True)
class Sample:
    """This rank's parts of one sample, the same sample in each layout."""

    case: PackedCase  # the problem
    world: World  # all ranks
    parts: dict[str, PackedShard] = field(default_factory=dict)  # by layout, made when asked for

    def shard(self, layout: str) -> PackedShard:
        """The part of a layout; "" is the one in which documents, or the sequence, are usual."""
        layout = layout or self.case.layout
        if layout not in self.parts:
            self.parts[layout] = self._cut(Layout(layout))
        return self.parts[layout]

    def _cut(self, layout: Layout) -> PackedShard:
        case, world = self.case, self.world
        if layout is Layout.DOCUMENTS:
            ranges = positions_in_documents(case.edges, world.rank, world.size)
        else:
            ranges = positions(layout, world.rank, world.size, case.seq // world.size)
        return self.rows(indices_of(ranges))

    def rows(self, places: Tensor) -> PackedShard:
        """Rows at these positions, of tensors that all ranks draw alike."""
        case, world = self.case, self.world
        device = world.device
        tensors = tensors_of(case, case.seq, case.seed, device, places.to(device))
        cu_seqlens = torch.tensor(case.edges, dtype=torch.int32, device=device)
        return PackedShard(case, *tensors, places, cu_seqlens, max(case.lengths))


class Packed(Autograd):
    """Attention over the ranks' shards of a sample."""

    layout = ""  # in which it takes them; "" is the usual one
    has_trees = False
    shard: PackedShard | None = None

    def refusal(self, case: PackedCase) -> str | None:
        is_refused = case.parents and not self.has_trees
        return "it has no prefix trees" if is_refused else super().refusal(case)

    def prepare(self, sample: Sample) -> None:
        self.shard = sample.shard(self.layout)

    def sample(self, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Rows of the same positions in every layout, of all ranks."""
        places, seq = self.shard.places, self.shard.case.seq
        step = max(1, seq // _SAMPLED)
        chosen = (places % step == step - 1).nonzero().flatten()
        rows = [x.detach().reshape(len(places), -1)[chosen.to(x.device)].cpu() for x in results]
        everyone = self.world.gather((places[chosen], rows))
        order = torch.cat([where for where, _ in everyone]).argsort()
        results_of_ranks = zip(*(rows for _, rows in everyone), strict=True)
        return tuple(torch.cat(shards)[order].float() for shards in results_of_ranks)


class PackedBurst(Packed, Burst):
    """burst_attention with one configuration in one layout, which `impl.mode` has behind an @."""

    has_trees = True

    def __init__(self, impl: Impl, world: World) -> None:
        super().__init__(impl, world)
        self.layout = impl.mode.partition("@")[2]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shard, case = self.shard, self.shard.case
        documents = {}
        if case.documents:
            documents = {"cu_seqlens": shard.cu_seqlens, "max_seqlen": shard.longest}
            documents["prefix_tree"] = case.parents
        q, k, v = (x.squeeze(1) for x in (q, k, v))
        window = None if case.window is None else (case.window, 0)
        layout = self.layout or case.layout.value
        return self.call(q, k, v, window=window, layout=layout, qkv_format="thd", **documents)


class PackedTransformerEngine(Packed, TransformerEngine):
    """TransformerEngine's: THD for documents, SBHD for windows, as Megatron calls it."""

    def prepare(self, sample: Sample) -> None:
        Packed.prepare(self, sample)
        self.set_up(sample.case, True)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.shard.case.documents:
            return super().attend(q, k, v, window_size=(self.shard.case.window, 0))
        starts, longest = self.shard.cu_seqlens, self.shard.longest
        names = ("q", "kv", "q_padded", "kv_padded")
        return super().attend(
            *(x.squeeze(1) for x in (q, k, v)), qkv_format="thd", attn_mask_type="padding_causal",
            max_seqlen_q=longest, max_seqlen_kv=longest,
            **{f"cu_seqlens_{name}": starts for name in names},
        )  # fmt: skip


def packed_seen(case: PackedCase, device: torch.device) -> tuple[Mask, Visible]:
    """The mask that a kernel must support on a whole sample, and what it is told."""
    segments = None
    if case.documents:
        edges = torch.tensor(case.edges, dtype=torch.int32).to(device)
        segments = Segments(edges, edges, max(case.lengths), max(case.lengths))
    return Mask(case.window, 0, bool(case.documents)), Visible(case.window, 0, segments)


class PackedCeiling(Ceiling):
    """The kernel alone, on the whole sample and 1/P of the heads; trees take several calls."""

    calls: Calls | None = None

    def seen(self, case: PackedCase) -> tuple[Mask, Visible]:
        return packed_seen(case, self.world.device)

    def prepare(self, sample: Sample) -> None:
        super().prepare(sample.shard(""))
        case = sample.case
        if case.parents:
            slices = slices_of_tree(case.edges, case.parents).numpy()
            every = (range(case.seq),)
            parts = Parts(Bands(slices).parts(every, every))
            self.calls = Calls(parts, self.world.device, together=True)

    def run_forward(self) -> tuple[Tensor, Tensor]:
        qkv = self.tensors[:3]
        if self.calls:
            return self.calls.forward(self.backend, *qkv, self.scale)
        return self.backend.forward(*qkv, self.scale, self.visible)

    def run_forward_backward(self) -> tuple[Tensor, ...]:
        (out, lse), (q, k, v, dout) = self.run_forward(), self.tensors
        side = QuerySide(q=q, dout=dout, lse=lse, delta=None, out=out.to(q.dtype))
        if self.calls:
            return out, *self.calls.backward(self.backend, side, k, v, self.scale)
        return out, *self.backend.backward(side, k, v, self.scale, self.visible)


class PackedUlysses(Packed, Ulysses):
    """DeepSpeed's: whole samples of some heads, so that documents concern the kernel alone."""

    layout = Layout.CONTIGUOUS.value

    def seen(self, case: PackedCase) -> tuple[Mask, Visible]:
        return packed_seen(case, self.world.device)

    def prepare(self, sample: Sample) -> None:
        Packed.prepare(self, sample)
        self.choose()


class Flex(Packed):
    """torch's for FlexAttention: gathers all keys; ranks get blocks of rows by work (its PTRR)."""

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
        return super().refusal(case)

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
    def mesh(self) -> DeviceMesh:
        return DeviceMesh.from_group(self.world.group, self.world.device.type)

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
