"""The interface of a backend, the list of backends, and the choice among them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_burst.errors import BurstError
from megatron_burst.kernels.visible import Visible
from megatron_burst.say import Choice
from megatron_burst.schedule.mask import DOCUMENTS, SLICES, WINDOWS
from megatron_burst.schedule.spec import USUAL_MULTIPROCESSORS, Kernel


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
    needs: frozenset[str] = frozenset()  # of the mask: `Mask.needs`
    invariant: bool = False  # bits must not depend on the number of heads
    huge: bool = False  # `AttentionShape.is_huge`


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
    dtypes: frozenset[torch.dtype]  # of inputs
    max_dim: int  # largest head dimension; 0 means any
    dim_multiple: int  # head dimensions must be a multiple of this
    takes_delta: bool  # whether backward takes delta instead of an output, or of its stand-in
    speed: str  # for the printed reason
    equal_dims: bool = False  # whether queries and values need the same head dimension
    equal_dims_if_grouped: bool = False  # the same, for grouped heads only
    # whether a causal tile may have more keys than queries (diagonal aligned bottom right); any
    # kernel with segments supports it inside them
    rectangular_causal: bool = False
    # besides full and causal: windows, any band of keys (`Visible.left`, `.right`); packed
    # documents, segments with a band each (`Visible.segments`); slices, parts of the score
    # matrix (`Visible.parts`), which else are composed of the other two
    masks: frozenset[str] = frozenset()
    # by major compute capability, the largest head dimension up to which it takes any parts in one
    # call, with gradients that are not deterministic; fast if most blocks of the score matrix are
    # seen whole or not at all
    block_sparse_on: Mapping[int, int] = field(default_factory=dict)
    wide_grads: bool = False  # whether gradients have the accumulation dtype, not the input's
    sinks: bool = False  # whether forward takes attention sinks; else they join in another pass
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
        if lacks := sorted(problem.needs - self.masks - self.composed, reverse=True):
            return f"it has no {lacks[0]}"
        if problem.huge and self.in_32_bits:
            return "its offsets are of 32 bits, and a rank's output, padded, has over 2^31 elements"
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
        """Masks that several calls make: slices, of bands and segments."""
        return frozenset({SLICES} if {WINDOWS, DOCUMENTS} <= self.masks else ())

    def takes_blocks(self, problem: Problem) -> bool:
        """Whether it takes parts by blocks, for a problem that it supports."""
        dims, largest = (problem.dim_qk, problem.dim_v), self.block_sparse_on.get(problem.arch, 0)
        return dims[0] == dims[1] <= largest and not problem.deterministic

    def max_dim_of(self, arch: int) -> int:
        """The largest head dimension on GPUs of a major compute capability; 0: any."""
        return self.max_dim_on.get(arch, self.max_dim)


class QuerySide(NamedTuple):
    """The query side of backward: delta or the output; of both, kernels that take delta use it."""

    q: Tensor  # [b, n, h, dqk]
    dout: Tensor  # [b, n, h, dv]
    lse: Tensor  # [b, h, n] over all keys of the sequence, natural logarithm
    delta: Tensor | None  # [b, h, n], rowsum(dO * O)
    out: Tensor | None  # [b, n, h, dv], the output or a stand-in with the same delta

    def rows(self, rows: slice) -> "QuerySide":
        """The side restricted to some rows."""
        delta = None if self.delta is None else self.delta[:, :, rows]
        out = None if self.out is None else self.out[:, rows]
        return QuerySide(self.q[:, rows], self.dout[:, rows], self.lse[:, :, rows], delta, out)


class Backend(Protocol):
    """Attention of one tile. Tensors are [b, n, h, d] in any strides with a dense last axis.

    `visible` says which keys a query sees; bands and segments only if the capability has them. A
    causal tile is square, or with `rectangular_causal` may have more keys than queries: then the
    last query sees every key. A row that sees no key has out 0, lse -inf and no gradients. Grouped
    heads are native: query head i uses KV head i // (h / h_kv). Tensors given as `into` are written
    to and returned. A backend whose capability has sinks takes `sink` [h] in forward: one more
    score for each query, without a value; then rows without a key have that lse.
    """

    capability: Capability

    def missing(self) -> str | None:
        """What must be installed to use it, or None if nothing is missing."""
        ...

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
        """(dq, dk, dv) of this tile, given statistics over the whole sequence."""
        ...


def deliver(results: tuple[Tensor, ...], into: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
    """Results of a kernel that cannot write to given tensors, copied into `into` if given."""
    if into is None:
        return results
    for target, result in zip(into, results, strict=True):
        target.copy_(result)
    return into


@lru_cache(maxsize=1)
def backends() -> dict[str, Backend]:
    """All backends by name, fastest first."""
    from megatron_burst.kernels.fa4 import FlashAttention4
    from megatron_burst.kernels.flash_attn import FlashAttention2, FlashAttention3
    from megatron_burst.kernels.reference import Reference
    from megatron_burst.kernels.torch_cpu import TorchCpu
    from megatron_burst.kernels.torch_gpu import Cudnn, Flash
    from megatron_burst.kernels.triton import Triton

    every: tuple[type[Backend], ...] = (
        FlashAttention4, FlashAttention3, Cudnn, FlashAttention2, Flash, Triton, TorchCpu, Reference
    )  # fmt: skip
    return {kind.capability.name: kind() for kind in every}


def kernel_of(backend: Backend, device: torch.device) -> Kernel:
    """What programs depend on of a backend on a device."""
    can = backend.capability
    supports = can.rectangular_causal, can.takes_delta, can.wide_grads
    return Kernel(*supports, device.type, multiprocessors(device))


def choose_backend(problem: Problem, asked: str) -> tuple[Backend, Choice]:
    """The first backend that supports the problem, with the reason.

    With head dimensions above those of all GPU kernels only plain torch is left, which is many
    times slower; "auto" does not take it, so it must be asked for by name.

    Args:
        problem: what it must support.
        asked: a name, several joined by commas, or "auto": all of them, the fastest first.

    Raises:
        BurstError: if a name is unknown, or none of those asked for supports the problem.
    """
    chosen = _first(problem, names := _names(problem, asked))
    if chosen and asked != "auto":
        among = f" among {', '.join(names)}: {chosen.reason}" if len(names) > 1 else ""
        chosen = replace(chosen, reason=f"asked for{among}")
    if chosen is None:
        raise _nothing_can(problem, asked, names)
    return backends()[chosen.value], chosen


@lru_cache
def in_one_call(problem: Problem) -> Backend | None:
    """The fastest kernel that takes any parts of a score matrix, and delta; None if there is none:
    plain torch on a GPU is slower than many calls."""
    able = [
        name for name, backend in backends().items()
        if SLICES in (can := backend.capability).masks and can.takes_delta
        and (can.devices or problem.device != "cuda")
    ]  # fmt: skip
    chosen = _first(problem, able)
    return chosen and backends()[chosen.value]


def pick(problem: Problem, asked: str) -> str:
    """The name of the backend that `choose_backend` returns; "" if it would raise."""
    return chosen.value if (chosen := _first(problem, _names(problem, asked))) else ""


def _names(problem: Problem, asked: str) -> list[str]:
    """Those asked for; for "auto" all but slow ones."""
    if asked != "auto":
        return asked.split(",")
    able = (b.capability for b in backends().values() if "cuda" in b.capability.devices)
    largest = max(can.max_dim_of(problem.arch) for can in able)
    slow = problem.device == "cuda" and max(problem.dim_qk, problem.dim_v) > largest
    return [name for name in backends() if not (slow and name == "reference")]


_UNKNOWN = "no such backend exists"


def _refusal(name: str, problem: Problem) -> str | None:
    if (backend := backends().get(name)) is None:
        return _UNKNOWN
    return backend.capability.refusal(problem) or backend.missing()


def _first(problem: Problem, names: Sequence[str]) -> Choice | None:
    """The first that supports the problem; later ones are not asked, as that may import a lot."""
    refusals = {}
    for name in names:
        if (why := _refusal(name, problem)) is None:
            skipped = f"; {in_words(refusals)}" if refusals else ""
            return Choice(name, backends()[name].capability.speed + skipped)
        refusals[name] = why
    return None


def in_words(refusals: Mapping[str, str]) -> str:
    """Why backends cannot be used, each reason once: "not fa4, fa3: it runs on cuda only"."""
    names = {why: [n for n in refusals if refusals[n] == why] for why in refusals.values()}
    return "; ".join(f"not {', '.join(them)}: {why}" for why, them in names.items())


def _nothing_can(problem: Problem, asked: str, names: Sequence[str]) -> BurstError:
    """The error if the backend asked for, or none of `names`, supports the problem."""
    refusals = {name: _refusal(name, problem) for name in backends()}
    able = [name for name, why in refusals.items() if why is None]
    what = str(problem.dtype).removeprefix("torch.")
    got = f"{what} on {problem.device} with head dimensions {problem.dim_qk}/{problem.dim_v}"
    got += "".join(f" and {need}" for need in sorted(problem.needs, reverse=True))
    why = {name: refusals.get(name, _UNKNOWN) for name in names}
    because = "".join(why.values()) if len(why) == 1 else in_words(why)
    instead = "choose another dtype"
    if able:
        auto = "" if asked == "auto" else ", or auto"
        instead = f"choose among {', '.join(able)}{auto} (--burst-backend, --attention-backend)"
    uninstalled = [b.missing() for b in backends().values() if not b.capability.refusal(problem)]
    if any(uninstalled):
        instead += f"; {next(filter(None, uninstalled))}"
    return BurstError(
        f"burst attention: the backend {asked} must be able to compute the call, because nothing "
        f"is converted silently; got {got}, and {because}; {instead}"
    )
