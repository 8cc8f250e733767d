"""The compared implementations: burst, and kernels without communication.

Each is prepared for a problem, run, and releases what it holds.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.before import TODAY, earlier
from benchmarks.cases import Case
from benchmarks.impls import Impl
from megatron_burst.kernels.backends import choose_backend
from megatron_burst.kernels.interface import Backend, QuerySide
from megatron_burst.kernels.visible import CAUSAL, FULL, Visible
from megatron_burst.schedule.mask import Mask
from megatron_burst.tools.speeds import problem_of
from megatron_burst.tools.world import World

_SAMPLED_ROWS = 64


def sample_of(results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """A few rows of each, [rows, b * h * d] in float32."""
    flat = [x.reshape(x.shape[0], -1) for x in results]
    return tuple(x[:: max(1, len(x) // _SAMPLED_ROWS)].float() for x in flat)


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's part of a problem, in the views that Megatron's self-attention makes."""

    case: Case  # the problem
    q: Tensor  # [s_local, b, h, d_qk]; a copy where heads are grouped, else a view like k
    k: Tensor  # [s_local, b, h_kv, d_qk]; a view of the fused projection's output, strided in heads
    v: Tensor  # [s_local, b, h_kv, d_v]; the same
    dout: Tensor  # [s_local, b, h, d_v]


def tensors_of(
    case: Case, rows: int, seed: int, device: torch.device, places: Tensor | slice = slice(None)
) -> list[Tensor]:
    """Random q, k, v, the output of a fused projection, taken apart, and dout: of so many rows
    those at these places. Source: Megatron-Core 0.19.0, get_query_key_value_tensors."""
    generator = torch.Generator(device).manual_seed(seed)
    options = {"generator": generator, "device": device, "dtype": getattr(torch, case.dtype)}
    group = case.heads_q // case.heads_kv * case.head_dim_qk
    widths = (group, case.head_dim_qk, case.head_dim_v)
    mixed = torch.randn(rows, case.batch, case.heads_kv, sum(widths), **options)[places]
    q, k, v = mixed.split(widths, dim=-1)
    q = q.reshape(len(q), case.batch, case.heads_q, case.head_dim_qk)
    dout = torch.randn(rows, case.batch, case.heads_q, case.head_dim_v, **options)[places]
    return [*(x.detach().requires_grad_() for x in (q, k, v)), dout]


def draw_shard(case: Case, world: World) -> Shard:
    """Random tensors of this rank."""
    return Shard(case, *tensors_of(case, case.seq // world.size, world.rank, world.device))


class Peer(ABC):
    """One implementation in one mode, on one rank."""

    alone = False  # it holds so much that nobody else may hold anything meanwhile
    comparable = False  # its results are for this shard and must match other comparable peers'
    note = ""  # what its rows say besides

    def __init__(self, impl: Impl, world: World) -> None:
        self.impl, self.world = impl, world

    @property
    def gpus(self) -> int:
        """The number of devices that share the work."""
        return self.world.size

    def refusal(self, case: Case) -> str | None:
        """Why it cannot run the problem, or None; asked on every rank, one reason is enough."""
        return None

    def skip(self, case: Case) -> str | None:
        """Why it should be skipped, or None; called like `refusal`."""
        return None

    @abstractmethod
    def prepare(self, shard: Shard) -> None:
        """Make what the runs need; all ranks together."""

    @abstractmethod
    def run_forward(self) -> None:
        """The forward pass as in inference."""

    @abstractmethod
    def run_forward_backward(self) -> tuple[Tensor, ...]:
        """Both passes; returns (out, dq, dk, dv), and keeps no reference to them."""

    @abstractmethod
    def release(self) -> None:
        """Free everything in device memory; all ranks together."""

    def uncounted_bytes(self) -> int:
        """Device memory that it holds outside torch's caching allocator."""
        return 0

    def sample(self, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Some rows of each result, the same of all who are comparable, in float32."""
        return sample_of(results)


class Autograd(Peer):
    """Attention over the ranks' shards as one differentiable call."""

    comparable = True
    shard: Shard | None = None

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The output of this rank's rows, [s_local, b, h, d_v] or with the last two joined."""

    def prepare(self, shard: Shard) -> None:
        self.shard = shard

    def run_forward(self) -> None:
        with torch.no_grad():
            self.attend(self.shard.q, self.shard.k, self.shard.v)

    def run_forward_backward(self) -> tuple[Tensor, ...]:
        leaves = (self.shard.q, self.shard.k, self.shard.v)
        out = self.attend(*leaves)
        grads = torch.autograd.grad(out, leaves, self.shard.dout.view(out.shape))
        return out.detach(), *grads

    def release(self) -> None:
        self.shard = None


class Burst(Autograd):
    """burst_attention with one configuration; of an earlier commit if `impl.name` is "before"."""

    def __init__(self, impl: Impl, world: World) -> None:
        super().__init__(impl, world)
        self.package = earlier() if impl.name == "before" else TODAY
        self.note = self.package.note

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        causal = self.shard.case.mask == "causal"
        return self.call(q, k, v, causal=causal, qkv_format="sbhd")

    def call(self, q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        """burst_attention; an earlier commit chooses all itself: it may lack today's options."""
        if self.impl.config is not None:
            options["config"] = self.impl.config
        return self.package.burst_attention(q, k, v, group=self.world.group, **options)

    def release(self) -> None:
        super().release()
        self.package.release_buffers(self.world.group)

    def uncounted_bytes(self) -> int:
        return self.package.symmetric_bytes(self.world.group)


def seen(case: Case) -> tuple[Mask, Visible]:
    """The mask that a kernel must support, and what it is told."""
    return (Mask.CAUSAL, CAUSAL) if case.mask == "causal" else (Mask.FULL, FULL)


def kernel_for(shard: Shard, name: str, mask: Mask) -> tuple[Backend, str]:
    """The backend of this name, or burst's choice for "auto"; and the note of a row that ran it."""
    backend, choice = choose_backend(problem_of(shard.q, shard.k, shard.v, mask=mask), name)
    return backend, f"backend {choice.value}"


class Kernel(Peer):
    """The kernel named by `impl.mode`, or burst's choice for "auto", on whole sequences."""

    backend: Backend
    tensors: tuple[Tensor, ...] = ()  # q, k, v, dout: [b, s, h, d]

    @abstractmethod
    def heads(self, case: Case) -> tuple[int, int]:
        """Query and KV heads that this rank computes; none if no query head."""

    def seen(self, case: Case) -> tuple[Mask, Visible]:
        return seen(case)

    def prepare(self, shard: Shard) -> None:
        case, device = shard.case, self.world.device
        mask, self.visible = self.seen(case)
        self.scale = case.head_dim_qk**-0.5
        heads_q, heads_kv = self.heads(case)
        self.backend, self.note = kernel_for(shard, self.impl.mode, mask)
        sizes = (
            (heads_q, case.head_dim_qk), (heads_kv, case.head_dim_qk), (heads_kv, case.head_dim_v),
            (heads_q, case.head_dim_v),
        )  # fmt: skip
        if heads_q:
            self.tensors = tuple(
                torch.randn(case.batch, case.seq, *size, device=device, dtype=shard.q.dtype)
                for size in sizes
            )

    def run_forward(self) -> None:
        if self.tensors:
            self.backend.forward(*self.tensors[:3], self.scale, self.visible)

    def run_forward_backward(self) -> tuple[Tensor, ...]:
        if not self.tensors:
            return ()
        q, k, v, dout = self.tensors
        out, lse = self.backend.forward(q, k, v, self.scale, self.visible)
        side = QuerySide(q=q, dout=dout, lse=lse, delta=None, out=out)
        return out, *self.backend.backward(side, k, v, self.scale, self.visible)

    def release(self) -> None:
        self.tensors = ()


class Ceiling(Kernel):
    """Each rank computes 1/P of the heads at once: the single-GPU kernel bound."""

    def heads(self, case: Case) -> tuple[int, int]:
        return case.heads_q // self.gpus, max(1, case.heads_kv // self.gpus)

    def refusal(self, case: Case) -> str | None:
        heads_q, heads_kv = self.heads(case)
        if case.heads_q % self.gpus or heads_q % heads_kv:
            return (
                f"the ceiling: {case.heads_q}/{case.heads_kv} heads must be sharded evenly over "
                f"{self.gpus} ranks, because each computes whole heads"
            )
        return None


class OneGpu(Kernel):
    """Rank 0 computes the whole problem; the others wait."""

    alone = True
    gpus = 1

    def heads(self, case: Case) -> tuple[int, int]:
        return (case.heads_q, case.heads_kv) if self.world.rank == 0 else (0, 0)

    def skip(self, case: Case) -> str | None:
        if self.world.rank != 0 or self.world.device.type != "cuda":
            return None
        needed, free = self.num_bytes(case), torch.cuda.mem_get_info(self.world.device)[0]
        words = f"needs about {needed / 2**30:.0f} GiB; {free / 2**30:.0f} GiB are free on one GPU"
        return None if needed <= free else words

    @staticmethod
    def num_bytes(case: Case) -> int:
        """Estimate: inputs, outputs, and sums of dq, dk, dv in float32."""
        queries = case.heads_q * (case.head_dim_qk + case.head_dim_v)
        keys = case.heads_kv * (case.head_dim_qk + case.head_dim_v)
        both_ways = 2 * (queries + keys) * getattr(torch, case.dtype).itemsize
        sums = 4 * (case.heads_q * case.head_dim_qk + keys)
        return case.batch * case.seq * (both_ways + sums)
