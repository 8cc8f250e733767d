"""The compiled Triton kernels, on the shapes that tests/kernels interprets and on larger ones."""

import sys

import pytest
import torch

from megatron_burst.kernels import partial
from tests.gpu import needs_gpus
from tests.kernels.test_fused import (
    DELTAS,
    MANY,
    MIXES,
    SHAPES,
    check_delta,
    check_merge,
    check_sum,
    compare_corners,
    compare_delta,
    compare_merge,
    compare_sum,
)
from tests.sampling import whole

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(),
]
LARGE = [(2, 1000, 5, 128), (1, 4097, 8, 64), (1, 2048, 4, 256), (1, 999, 3, 72)]
EVERY = [*LARGE, SHAPES[1], *whole((SHAPES[0],), *((shape,) for shape in SHAPES[2:]))]


@pytest.mark.parametrize("shape", EVERY, ids=str)
@pytest.mark.parametrize("in_place", [True, *whole(False)], ids=["in place", "apart"])
@pytest.mark.parametrize("dtypes", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("sinks", [True, *whole(False)], ids=["sinks", ""])
def test_merging(shape, dtypes, in_place, sinks):
    """Guards against what the interpreter cannot show: in place, a thread that overwrites what
    another reads; misalignment; bf16 not rounded to nearest."""
    check_merge(compare_merge(partial, "cuda", shape, dtypes, in_place, sinks))


@pytest.mark.parametrize("shape", EVERY, ids=str)
@pytest.mark.parametrize("in_place", [True, *whole(False)], ids=["in place", "apart"])
@pytest.mark.parametrize("dtypes", (MIXES | MANY).values(), ids=MIXES | MANY)
def test_sums(shape, dtypes, in_place):
    """Guards against sums that differ from torch's bitwise, and misalignment."""
    check_sum(compare_sum(partial, "cuda", shape, dtypes, in_place))


@pytest.mark.parametrize("shape", EVERY, ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.parametrize("dtypes", DELTAS.values(), ids=DELTAS)
def test_delta_and_its_stand_in(shape, dtypes, scale):
    """Guards against an entry, sign or column misread from the packed keys."""
    check_delta(compare_delta(partial, "cuda", shape, dtypes, scale))


def test_corners():
    """Guards against what only expanded, empty, very narrow or wide tensors and extreme values
    show."""
    corners = compare_corners(partial, "cuda")
    assert all(corners.values()), corners


def test_cuda_tensors_go_to_the_kernels_except_float64():
    """Otherwise the tests above would compare torch with itself."""
    x = torch.ones(1, 1, 1, 8, device="cuda")
    fused = sys.modules["megatron_burst.kernels.fused"]
    assert partial._fused(x, x.bfloat16()) is fused
    assert partial._fused(x, x.double()) is None and partial._fused(x.cpu()) is None


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_offsets_beyond_32_bits(axis):
    """Guards against int32 offsets: the last index along one axis is 2^31 elements from the
    first."""
    far, near = 2**30, [1024, 256, 128]
    strides = [far if i == axis else near[i] for i in range(3)]
    shape = [3 if i == axis else 2 for i in range(3)]
    memory = torch.zeros(2 * far + 4096, dtype=torch.bfloat16, device="cuda")
    target = memory.as_strided((*shape, 128), (*strides, 1))
    torch.manual_seed(0)
    part = torch.randn(*shape, 128, device="cuda").bfloat16()
    partial.sum_parts(target, [part])
    assert torch.equal(target, part) and int(memory.count_nonzero()) == int(part.count_nonzero())
    lse = torch.zeros(shape[0], shape[2], shape[1], device="cuda")
    doubled = torch.empty_like(part)
    partial.merge_parts(doubled, lse, [(target, lse), (target, lse)])
    assert torch.equal(doubled, part)


def test_other_lengths_do_not_compile_again():
    """Guards against recompiling at every new length; multiples of 16 and others may compile once
    each."""
    from megatron_burst.kernels import fused

    kernels = fused._sum_kernel, fused._merge_kernel, fused._delta_kernel, fused._stand_in_kernel

    def compiled():
        device = torch.cuda.current_device()
        return [len(kernel.device_caches[device][0]) for kernel in kernels]

    def run(length):
        x = torch.ones(1, length, 4, 128, device="cuda").bfloat16()
        delta = partial.row_delta(x, x)
        partial.surrogate_out(x, delta)
        partial.sum_parts(x, [x, x])
        partial.merge_parts(x, delta, [(x, delta), (x, delta)])

    run(16)
    run(17)
    before = compiled()
    for length in (32, 33, 100, 4000, 4001, 100_000):
        run(length)
    assert compiled() == before


@pytest.mark.parametrize("shape", EVERY, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_views_are_copied_bit_by_bit(shape, dtype):
    batch, tokens, heads, dim = shape
    fused = torch.randn(batch, tokens, heads, 3 * dim, device="cuda", dtype=dtype)
    source = fused[..., dim : 2 * dim]
    target = torch.empty(batch, heads, tokens, dim, device="cuda", dtype=dtype).transpose(1, 2)
    partial.copy_rows(target, source)
    assert not source.is_contiguous() and torch.equal(target, source)
    target.zero_()
    partial.copy_rows(target, source.contiguous())
    assert torch.equal(target, source)
