"""The interface of a backend: what it supports (`Capability`), and attention of one tile."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_burst.kernels.visible import Visible
from megatron_burst.schedule.mask import DOCUMENTS, SLICES, WINDOWS
from megatron_burst.schedule.spec import USUAL_MULTIPROCESSORS

SOFTCAP = "soft cap of the scores"  # of kernels, in words


@dataclass(frozen=True, slots=True)
class Problem:
    """The properties of a call that decide whether a backend supports it."""

    device: str  # torch device type
    dtype: torch.dtype
    dim_qk: int
    dim_v: int
    grouped: bool = False  # fewer KV heads than query heads
    deterministic: bool = False  # gradients must be bitwise reproducible
    arch: int = 0  # major number of the GPU's compute capability
    needs: frozenset[str] = frozenset()  # `Mask.needs`, and SOFTCAP
    invariant: bool = False  # bits must not depend on the number of heads
    huge: bool = False  # `AttentionShape.exceeds_int32`


@lru_cache
def arch_of(device: torch.device) -> int:
    """Major number of a GPU's compute capability; 0 on the CPU."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; on the CPU those of a typical GPU."""
    if device.type != "cuda":
        return USUAL_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True, slots=True)
class Capability:
    """What a backend supports, as data; an empty set means any."""

    name: str  # what the user calls it
    devices: frozenset[str]  # torch device types
    dtypes: frozenset[torch.dtype]
    max_dim: int  # largest head dimension; 0 means any
    dim_multiple: int  # head dimensions must be a multiple of this
    takes_delta: bool  # whether backward takes delta; else it takes the output, or its surrogate
    speed: str  # for the printed reason
    equal_dims: bool = False  # whether queries and values need the same head dimension
    equal_dims_if_grouped: bool = False  # the same, for grouped heads only
    # whether a causal tile may have more keys than queries (diagonal aligned bottom right); any
    # kernel with segments supports it inside them
    rectangular_causal: bool = False
    # besides full and causal: windows (`Visible.left`, `.right`), packed documents
    # (`Visible.segments`), slices (`Visible.parts`), which else are composed of the other two
    masks: frozenset[str] = frozenset()
    # by major compute capability, the largest head dimension with which it takes slices in one
    # call, without deterministic gradients; fast if most blocks of scores are full or empty
    block_sparse_on: Mapping[int, int] = field(default_factory=dict)
    wide_grads: bool = False  # whether gradients have the accumulation dtype, not the input's
    sinks: bool = False  # whether forward takes attention sinks; else they are merged afterwards
    softcap: bool = False  # whether both passes take a soft cap of the scores
    deterministic: bool = True  # whether it can compute bitwise reproducible gradients
    splits: bool = False  # whether few heads may make it split the keys of a row
    archs: frozenset[int] = frozenset()  # major compute capabilities, as keys below
    min_dim: int = 1  # smallest head dimension
    max_dim_on: Mapping[int, int] = field(default_factory=dict)  # where max_dim differs
    wide_pairs: frozenset[tuple[int, int]] = frozenset()  # (QK, V) head dimensions beyond max_dim
    # (QK, V) head dimensions with wrong gradients
    wrong_pairs_on: Mapping[int, frozenset[tuple[int, int]]] = field(default_factory=dict)
    in_32_bits: bool = False  # whether offsets are of 32 bits

    def refusal(self, problem: Problem) -> str | None:
        """Why the backend does not support the problem, or None if it does."""
        if self.devices and problem.device not in self.devices:
            return f"it runs on {'/'.join(sorted(self.devices))} only"
        if problem.dtype not in self.dtypes:
            return f"it has no {str(problem.dtype).removeprefix('torch.')}"
        if self.archs and problem.arch not in self.archs:
            return f"it runs on GPUs of compute capability {sorted(self.archs)}, not {problem.arch}"
        if problem.deterministic and not self.deterministic:
            return "its gradients are not deterministic"
        if problem.invariant and self.splits:
            return "it may split a row's keys if heads are few, so that bits depend on their number"
        supported = self.masks | self.composed | ({SOFTCAP} if self.softcap else set())
        if lacks := sorted(problem.needs - supported, reverse=True):
            return f"it has no {lacks[0]}"
        if problem.huge and self.in_32_bits:
            return "its offsets have 32 bits, and a rank's padded output has over 2^31 elements"
        equal_dims = self.equal_dims or (self.equal_dims_if_grouped and problem.grouped)
        if equal_dims and problem.dim_qk != problem.dim_v:
            return "it needs equal head dimensions of queries and values"
        dims, largest = (problem.dim_qk, problem.dim_v), self.max_dim_of(problem.arch)
        for dim in dims:
            if largest and dim > largest and dims not in self.wide_pairs:
                return f"its largest head dimension is {largest}"
            if dim < self.min_dim:
                return f"its smallest head dimension is {self.min_dim}"
            if dim % self.dim_multiple:
                return f"it needs head dimensions that are multiples of {self.dim_multiple}"
        if dims in self.wrong_pairs_on.get(problem.arch, ()):
            return f"its gradients are wrong for head dimensions {dims[0]}/{dims[1]} on such GPUs"
        return None

    @property
    def composed(self) -> frozenset[str]:
        """Masks that several calls compute: slices, by bands and segments."""
        return frozenset({SLICES} if {WINDOWS, DOCUMENTS} <= self.masks else ())

    def takes_blocks(self, problem: Problem) -> bool:
        """Whether it takes slices by blocks, for a problem that it supports."""
        dims, largest = (problem.dim_qk, problem.dim_v), self.block_sparse_on.get(problem.arch, 0)
        free = not problem.deterministic and SOFTCAP not in problem.needs
        return dims[0] == dims[1] <= largest and free

    def max_dim_of(self, arch: int) -> int:
        """The largest head dimension on GPUs of a major compute capability; 0: any."""
        return self.max_dim_on.get(arch, self.max_dim)


class QuerySide(NamedTuple):
    """The query side of backward; has delta, or the output for kernels that do not take delta."""

    q: Tensor  # [b, n, h, dqk]
    dout: Tensor  # [b, n, h, dv]
    lse: Tensor  # [b, h, n] over all keys of the sequence, natural logarithm
    delta: Tensor | None  # [b, h, n], rowsum(dO * O)
    out: Tensor | None  # [b, n, h, dv], the output or a surrogate with the same delta

    def rows(self, rows: slice) -> "QuerySide":
        """These rows of all tensors."""
        delta = None if self.delta is None else self.delta[:, :, rows]
        out = None if self.out is None else self.out[:, rows]
        return QuerySide(self.q[:, rows], self.dout[:, rows], self.lse[:, :, rows], delta, out)


class Backend(Protocol):
    """Attention of one tile. Tensors are [b, n, h, d] in any strides with a dense last axis.

    `visible` is a mask that the capability has. A causal tile is square; with `rectangular_causal`
    it may have more keys than queries, and the last query sees every key. A row that sees no key
    has out 0, lse -inf and no gradients. Query head i uses KV head i // (h / h_kv). Results are
    written to `into`, if it is passed, and returned. With `Capability.sinks` forward takes `sink`
    [h]: one more score for each query, without a value; rows without a key then have that lse.
    With `Capability.softcap` both passes take `softcap`, a positive number: scores s are
    softcap * tanh(s / softcap). Where `finds_largest` forward takes `largest` [h], float32 or lse's
    dtype, and raises it to the largest score of each head, without sinks.
    """

    capability: Capability

    def missing(self) -> str | None:
        """What must be installed to use it, or None if nothing is missing."""
        return None

    def finds_largest(self, device: torch.device) -> bool:
        """Whether forward takes `largest` on a device; else another kernel computes it."""
        return False

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Visible,
        into: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(out [b, n, h, dv], lse [b, h, n]); lse is natural, -inf for rows without a key."""
        ...

    def backward(
        self, side: QuerySide, k: Tensor, v: Tensor, scale: float, visible: Visible,
        into: tuple[Tensor, Tensor, Tensor] | None = None, deterministic: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """(dq, dk, dv) of this tile, from lse and delta over the whole sequence."""
        ...


def copy_results(
    results: tuple[Tensor, ...], into: tuple[Tensor, ...] | None
) -> tuple[Tensor, ...]:
    """Results of a kernel that cannot write to given tensors, copied into `into` if given."""
    if into is None:
        return results
    for target, result in zip(into, results, strict=True):
        target.copy_(result)
    return into
