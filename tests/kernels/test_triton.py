"""Our Triton attention: in Triton's interpreter against float64, and compiled without a GPU.

The interpreter multiplies bf16 as integers, so fp16 and fp32 replace it here; tests/gpu has bf16.
"""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from megatron_burst.kernels.interface import QuerySide
from megatron_burst.kernels.triton import Triton
from megatron_burst.kernels.visible import CAUSAL
from tests.kernels.attention import Tile, inputs_of
from tests.kernels.bands import Band
from tests.ranks import run_ranks
from tests.sampling import crossed, whole

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

BOUNDS = {torch.float16: 1e-3, torch.float32: 2e-6}
SHAPES = {
    "one row": Tile(1, 1, heads=1, dim_qk=1, dim_v=1),
    "square, several blocks": Tile(40, 40, heads=4, heads_kv=2, batch=2),
    "more keys than rows": Tile(33, 70, heads=2, heads_kv=1),
    "more rows than keys, full": Tile(90, 20, causal=False),
    "whole blocks, full": Tile(64, 64, heads_kv=2, causal=False),
    "padded dimensions": Tile(40, 40, dim_qk=24, dim_v=9),
    "two parts": Tile(35, 50, heads_kv=2, dim_qk=48, dim_v=32),
    "latent": Tile(20, 20, heads=1, dim_qk=192, dim_v=128),
}
SLICES = ((0, 100, 0, 256, 0), (100, 256, 0, 256, 1))  # a prefix-LM
HOW = {  # dtype, strided, rows and keys per block, TMA
    "fp16": (torch.float16, True, (16, 32), False),
    "fp32": (torch.float32, False, (32, 16), True),
}
EACH_HOW = [(how,) for how in HOW]


def check(errors, dtype):
    assert all(error <= BOUNDS[dtype] for error in errors.values()), errors


@pytest.mark.parametrize("name, how", crossed(SHAPES, EACH_HOW, 1))
def test_equals_float64(interpreter, name, how):
    """Guards against wrong loop bounds, masks, strides, groups, parts of head dimensions,
    scales."""
    dtype, strided, sizes, tma = HOW[how]
    check(interpreter(replace(SHAPES[name], dtype=dtype, strided=strided), sizes, tma), dtype)


def test_the_copy_engine_finds_heads_and_sequences_between_rows(interpreter):
    """Guards against wrong offsets of "sbhd" in a batch, and rows read past the last."""
    tile = Tile(40, 50, heads=2, heads_kv=2, batch=2, strided=True)
    check(interpreter(tile, (16, 16), True), tile.dtype)


def test_rows_without_a_key_are_empty(interpreter):
    """Guards against NaN from -inf - -inf: a causal tile with fewer keys than rows, and no keys at
    all."""
    for tile in (Tile(40, 7, dtype=torch.float32), Tile(3, 0, causal=False, dtype=torch.float32)):
        check(interpreter(tile, (16, 16), False), torch.float32)


class Machine:
    """Answers what Triton asks its driver while compiling for a GPU that is not present."""

    def __init__(self, arch):
        self.arch = arch

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch[0] * 10 + self.arch[1], 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def shared_memory(rank, arch, dims, visible):
    """Shared memory in bytes of each of the table's bf16 kernels, compiled for a GPU."""
    from triton.runtime import JITFunction, driver

    from megatron_burst.kernels import triton_backward, triton_forward
    from megatron_burst.kernels.triton_tiles import blocks_of

    used, run = {}, JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        used[self.__name__] = run(self, *args, grid=grid, warmup=True, **options).metadata.shared

    driver.set_active(Machine(arch))
    JITFunction.run = compile_only
    for module in (triton_forward, triton_backward):
        module.blocks_for = lambda which, *_: blocks_of(which, arch, 2, max(dims))
    tile = Tile(256, 256, 4, 2, *dims, dtype=torch.bfloat16)
    q, k, v, dout = inputs_of(tile, "cpu")
    _, lse = Triton().forward(q, k, v, 1.0, visible)
    Triton().backward(QuerySide(q, dout, lse, lse, None), k, v, 1.0, visible)
    return used


@pytest.mark.parametrize(
    "arch, limit, dims, visible",
    [((8, 0), 163, (128, 128), CAUSAL), *whole(((9, 0), 227, (128, 128), CAUSAL)),
     ((9, 0), 227, (128, 128), Band((100, 156), (100, 156), 50, 9).visible()),
     ((9, 0), 227, (128, 128), Band((256,), (256,), packed=False, slices=SLICES).visible()),
     *whole(((8, 9), 99, (256, 256), CAUSAL), ((9, 0), 227, (192, 128), CAUSAL))],
    ids=["8.0", "9.0", "9.0 documents with a window", "9.0 slices", "8.9 256", "9.0 192"],
)  # fmt: skip
def test_kernels_compile_without_a_gpu_and_fit_shared_memory(arch, limit, dims, visible):
    """Guards against what only the compiler refuses, and blocks in the table that are too large."""
    (used,) = run_ranks(shared_memory, 1, arch, dims, visible)
    kernels = {"_forward_kernel", "_statistics_kernel", "key_grads_kernel", "query_grads_kernel"}
    assert used.keys() == kernels
    assert max(used.values()) <= limit * 1024, used
