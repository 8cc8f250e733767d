"""Keeping on GPUs over NCCL: bitwise results, device memory and host memory.

Guards against copies read before they complete, offloaded results that stay on the device, and
recomputation of the early half that differs.
"""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from numpy.linalg import norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from megatron_burst import BurstConfig, burst_attention
from megatron_burst.mcore import patches
from megatron_burst.recompute.auto.budget import LAYERS_BEHIND
from megatron_burst.recompute.keep import call_kept
from megatron_burst.recompute.keeping import Keeping
from megatron_burst.recompute.offload import HostMemory, host_memory
from tests.gpu import SEVERAL, needs_gpus
from tests.ranks import run_ranks

LAYERS, TOKENS, HEADS, DIM = 4, 4096, (8, 2), 64
HOST_GIB = 1.0
SIZES = [HEADS[0] * DIM, HEADS[1] * DIM, HEADS[1] * DIM]  # of q, k and v
MODES = {
    "none": BurstConfig(deterministic=True),
    "all": BurstConfig(deterministic=True, keep="all"),
    "offload": BurstConfig(
        deterministic=True, keep="all", keep_offload="results", keep_host_gib=HOST_GIB
    ),
    "half": BurstConfig(deterministic=True, keep="half"),
    # recomputing fewer rows can need more buffers, which the group then has: "none" follows
    "half, two nodes": BurstConfig(deterministic=True, keep="half", nodes=2),
    "none, two nodes": BurstConfig(deterministic=True, nodes=2),
    "half, one node": BurstConfig(deterministic=True, keep="half", nodes=1),
    "none, one node": BurstConfig(deterministic=True, nodes=1),  # if ranks share a GPU too
}


class Live(TorchDispatchMode):
    """Counts the bytes of live device tensors made while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: list[weakref.ref] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        tensors = (x for x in tree_leaves(out) if isinstance(x, torch.Tensor))
        self._storages += [weakref.ref(x.untyped_storage()) for x in tensors if x.is_cpu]
        return out

    def bytes(self) -> int:
        gc.collect()
        alive = {id(x): x.nbytes() for ref in self._storages if (x := ref()) is not None}
        return sum(alive.values()) - host_memory(torch.device("cpu"), HOST_GIB).taken_bytes


def allocated_bytes() -> int:
    """What tensors on the GPU ask for; the allocator may give a tensor up to 1 MiB more, by what it
    has free."""
    torch.cuda.empty_cache()  # it counts what another stream has read until it looks again
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def layer(x, weight, config):
    q, k, v = (y.unflatten(-1, (-1, DIM)) for y in (x @ weight).split(SIZES, dim=-1))
    return x + burst_attention(q, k, v, config=config).flatten(2)


def steps(rank: int, weights: list, tokens: int, config: BurstConfig, live: Live | None) -> tuple:
    """Gradients of three steps, and bytes between forward and backward of the last one."""
    grads = []
    for step in range(3):
        draw = torch.Generator().manual_seed(100 * rank + step)
        x = (
            torch.randn(1, tokens, SIZES[0], generator=draw)
            .bfloat16()
            .to(weights[0])
            .requires_grad_()
        )
        y = x
        for weight in weights:
            y = checkpoint(layer, y, weight, config, use_reentrant=True)
        if live is None:
            torch.cuda.synchronize()
        between = allocated_bytes() if live is None else live.bytes()
        y.float().square().mean().backward()
        grads.append(x.grad.double().cpu().numpy().copy())  # outside torch's memory
        del x, y
    return grads, between


def run(rank: int, device: str, dtype: torch.dtype, tokens: int) -> dict:
    """By mode: whether gradients of three steps equal those of "none" bitwise, their largest
    relative error in norm, and bytes between forward and backward.

    The reference is the same in the next larger dtype, without keeping.
    """
    patches.apply("checkpoints")
    by_mode, plain = {}, []
    generator, shape = torch.Generator().manual_seed(rank), (SIZES[0], sum(SIZES))
    weights = [
        (torch.randn(shape, generator=generator) / SIZES[0] ** 0.5).to(device, dtype)
        for _ in range(LAYERS)
    ]
    larger = {torch.bfloat16: torch.float32, torch.float32: torch.float64}[dtype]
    with nullcontext() if device == "cuda" else Live() as live:
        truth, _ = steps(rank, [x.to(larger) for x in weights], tokens, MODES["none"], live)
        for name, config in MODES.items():
            grads, between = steps(rank, weights, tokens, config, live)
            plain = plain or grads
            same = all((got == first).all() for got, first in zip(grads, plain, strict=True))
            error = max(
                norm(got - true) / norm(true) for got, true in zip(grads, truth, strict=True)
            )
            by_mode[name] = same, error, between
    return by_mode


def check(results, kept_bytes: int, slack: int) -> None:
    """Args: bytes kept in mode "all"; bound on the difference in bytes. Backward begins with the
    last layers, so they are still there when they are offloaded."""
    added = dict(none=0, all=kept_bytes, offload=kept_bytes * LAYERS_BEHIND / LAYERS,
                 half=kept_bytes / 2)  # fmt: skip
    for by_mode in results:
        assert by_mode["all"][0] and by_mode["offload"][0]
        for name in ("half", "half, two nodes", "half, one node"):
            assert 0 < by_mode[name][1] <= 2 * by_mode["none"][1], (name, by_mode)
        for name in MODES:
            kind, comma, nodes = name.partition(", ")  # each number of nodes has its own buffers
            extra = by_mode[name][-1] - by_mode[f"none{comma}{nodes}"][-1]
            assert abs(extra - added[kind]) <= slack, name


@pytest.mark.gpu
@needs_gpus()
def test_bits_and_bytes_of_what_is_kept():
    kept = LAYERS * TOKENS * HEADS[0] * (DIM * 2 + 4)  # out in bf16, lse in fp32
    args = ("cuda", torch.bfloat16, TOKENS)
    results = run_ranks(run, SEVERAL, *args, backend="nccl", fresh=True)
    check(results, kept, slack=LAYERS * 4096)


@pytest.mark.gpu
@needs_gpus()
def test_copies_take_no_more_memory_the_further_the_cpu_is_ahead():
    """Guards against memory that waits for the CPU to see that a copy has ended."""
    patches.apply("checkpoints")
    x = torch.randn(1 << 24, device="cuda", requires_grad=True)  # 64 MiB
    memory = HostMemory(x.device, 1 << 30)

    def layer(x):
        torch.cuda._sleep(10_000_000)  # 5 ms, in which the CPU makes the next layers' calls
        return call_kept(torch.sigmoid, (x,), {}, Keeping(pack=memory.pack)).sin()

    torch.cuda.reset_peak_memory_stats()
    y = x
    for _ in range(12):
        y = checkpoint(layer, y, use_reentrant=True)
    y.sum().backward()
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    active, allocated = (stats[f"{name}_bytes.all.peak"] for name in ("active", "allocated"))
    assert active - allocated < x.nbytes, (active, allocated)


def test_the_same_on_cpu():
    """Exact to the byte."""
    kept = LAYERS * 16 * HEADS[0] * (DIM + 1) * 4
    check(run_ranks(run, 2, "cpu", torch.float32, 16), kept, slack=0)
