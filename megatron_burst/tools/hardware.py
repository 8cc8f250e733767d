"""Speeds and sizes of a cluster's GPUs, links and nodes, as data; and what calibrate measures.

Speeds are measured rather than from data sheets, where measurements exist; every figure of a preset
names its source (`sources`).
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import log
from typing import Annotated, Any, Literal

from megatron_burst.files import Count, Limits, LongText, Positive

MIB, GIB = 1 << 20, 1 << 30
Share = Annotated[float, Limits(high=1)]


@dataclass(frozen=True, slots=True)
class Curve:
    """A measured quantity: linear in log x between its points, flat beyond them."""

    points: tuple[tuple[float, float], ...]  # (x, y), x positive and ascending

    @classmethod
    def of_data(cls, value: Any) -> "Curve":
        """From a number, or [x, y] of each point; a ValueError says what it must be."""
        pairs = [[1, value]] if isinstance(value, int | float) else value
        good = isinstance(pairs, list) and pairs and all(
            isinstance(p, list) and len(p) == 2
            and all(type(n) in (int, float) and 0 < n < 1e15 for n in p)
            for p in pairs
        )  # fmt: skip
        xs = [p[0] for p in pairs] if good else []
        if not good or xs != sorted(set(xs)):
            raise ValueError("be a number or a list of positive [x, y] with ascending x")
        return cls(tuple((float(x), float(y)) for x, y in pairs))

    def at(self, x: float) -> float:
        """The value at x."""
        last = len(self.points) - 1
        place = bisect_left(self.points, (x,))
        if place == 0 or place > last:
            return self.points[min(place, last)][1]
        (x0, y0), (x1, y1) = self.points[place - 1 : place + 1]
        return y0 + (y1 - y0) * log(x / x0) / log(x1 / x0)

    def times(self, factor: float) -> "Curve":
        """The same curve, all values multiplied."""
        return Curve(tuple((x, factor * y) for x, y in self.points))


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """How long messages take over a link."""

    latency_us: float  # of an empty message
    gbs: Curve  # GB/s in one direction, by message size in MiB

    def seconds(self, num_bytes: float, share: float = 1.0) -> float:
        """Time of a message that gets a share of the link."""
        if num_bytes <= 0:
            return 0.0
        return self.latency_us * 1e-6 + num_bytes / (self.gbs.at(num_bytes / MIB) * 1e9 * share)


@dataclass(frozen=True, slots=True)
class KernelSpeed:
    """How fast an attention kernel is on a whole GPU.

    Speeds are TFLOP/s, by the TFLOP computed without a pause: after some 10 ms the GPU reaches its
    power limit and lowers its clock.
    """

    backend: str  # its name in `--burst-backend`
    head_dim: Count
    forward: Curve
    backward: Curve
    # speed of a tile in which nothing is masked over that of a causal one
    unmasked_forward: Positive = 1.0
    unmasked_backward: Positive = 1.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU."""

    memory_gib: Positive  # that a process sees
    reserved_gib: float  # of it for the CUDA context, NCCL, libraries and fragmentation
    multiprocessors: Count  # that a kernel's blocks run on
    peak_tflops: Positive  # dense bf16; what MFU is relative to
    matmul_tflops: Positive  # dense bf16 in the GEMMs of a transformer's layers, sustained
    memory_gbs: Positive  # GB/s that element-wise kernels reach
    launch_us: float  # between two dependent kernels
    nccl_share: Share  # of the multiprocessors, during an NCCL transfer
    host_gbs: Positive  # GB/s to pinned host memory while all GPUs of the node copy
    capability: Count = 9  # major compute capability, which decides what kernels there are

    @property
    def usable_bytes(self) -> float:
        """Memory for tensors."""
        return (self.memory_gib - self.reserved_gib) * GIB


@dataclass(frozen=True, slots=True)
class Node:
    """One NVLink domain: a server, or a rack that is one domain."""

    gpus: Count
    nics: Count  # shared evenly by GPUs that send at the same time
    memory_gib: Positive


@dataclass(frozen=True, slots=True)
class Links:
    """The links of a GPU."""

    intra: LinkSpeed  # NVLink, by NCCL
    pull: LinkSpeed  # NVLink, by copy engine through symmetric memory
    inter: LinkSpeed  # one network card, by NCCL


@dataclass(frozen=True)
class Hardware:
    """A kind of cluster; looked up often, so its hash is cached."""

    name: str  # of the preset, or of the machine that was measured
    gpu: Gpu
    node: Node
    links: Links
    kernels: Annotated[tuple[KernelSpeed, ...], Limits(1)]  # of attention, `auto`'s first one
    # where figures come from, by dotted name, e.g. "gpu.memory_gib"
    sources: Mapping[str, LongText] = field(default_factory=dict)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.gpu, self.node, self.links, self.kernels))

    def kernel(self, head_dim: float, backend: str = "auto") -> KernelSpeed:
        """The kernel for a head dimension, or for the nearest one that is known.

        Where another backend than the first is not known at a dimension as the first is, it is
        taken to lose or gain there as much as the first does.

        Raises:
            KeyError: if there is no such backend.
        """
        requested = backend.split(",")
        names = [k.backend for k in self.kernels if backend == "auto" or k.backend in requested]
        if not names:
            raise KeyError(backend)
        kernel = self._nearest(names[0], head_dim)
        first = self.kernels[0].backend
        here, there = (self._nearest(first, dim) for dim in (head_dim, kernel.head_dim))
        if here.head_dim == there.head_dim or there.head_dim != kernel.head_dim:
            return kernel
        forward = here.forward.points[-1][1] / there.forward.points[-1][1]
        backward = here.backward.points[-1][1] / there.backward.points[-1][1]
        return replace(
            kernel, head_dim=here.head_dim, forward=kernel.forward.times(forward),
            backward=kernel.backward.times(backward),
        )  # fmt: skip

    def _nearest(self, backend: str, head_dim: float) -> KernelSpeed:
        known = [kernel for kernel in self.kernels if kernel.backend == backend]
        return min(known, key=lambda kernel: abs(log(kernel.head_dim / head_dim)))

    def inter_share(self, senders: int) -> float:
        """Share of a network card that each sender gets, with this many senders on a node."""
        return min(1.0, self.node.nics / max(senders, 1))


@dataclass(frozen=True, slots=True)
class KernelRow:
    """How fast a rank computes causal attention; the slowest rank's median."""

    backend: str
    direction: Literal["forward", "backward"]  # backward without the forward that it needs
    head_dim: Count
    seq: Count  # tokens, all on one rank
    tflops: Positive  # masked pairs do not count: 2 products forward, 5 backward


@dataclass(frozen=True, slots=True)
class LinkRow:
    """How fast ranks move data, all of them at once; the slowest rank's median.

    "intra" and "inter" are ring shifts inside and between nodes; "copy_engine": ranks of a node
    read the next one's symmetric memory; "host": pinned copies, the slower of both directions.
    """

    kind: Literal["intra", "inter", "copy_engine", "host"]
    message_bytes: Count  # that a rank sends in the call
    gb_per_s: Positive  # message_bytes over the time of the call, start included
    latency_us: float  # of the same call with a tiny message


@dataclass(frozen=True, slots=True)
class Calibration:
    """A machine as it was measured."""

    name: str  # what the user calls it
    gpu: str  # the GPU's own name
    memory_gib: Positive  # of a GPU
    matmul_tflops: Positive  # of a large dense product; bf16 on GPUs, fp32 on CPU
    kernels: tuple[KernelRow, ...] = ()
    links: tuple[LinkRow, ...] = ()
