"""Checksums of tensors. Guards against bits, or row orders, that do not affect them."""

import pytest
import torch

from megatron_burst.recompute.recording import checksum

BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}


def flipped(tensor, row, column, bit):
    """The tensor with one bit flipped."""
    other = tensor.clone()
    width = 8 * tensor.itemsize
    other.view(BITS[tensor.dtype])[row, column] ^= (1 << bit) - (bit == width - 1) * (1 << width)
    return other


@pytest.mark.parametrize("dtype", BITS)
def test_every_bit_changes_the_checksum(dtype):
    tensor = torch.linspace(-1, 1, 24).view(8, 3).to(dtype)
    first = checksum(tensor)
    for row in range(8):
        for bit in range(8 * dtype.itemsize):
            assert checksum(flipped(tensor, row, 1, bit)) != first, (row, bit)
    assert checksum(tensor.clone()) == checksum(tensor.T.contiguous().T) == first


@pytest.mark.parametrize("dtype", BITS)
def test_so_do_signs_that_change_in_pairs_and_another_order(dtype):
    tensor = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    others = [-tensor, tensor.flip(0), tensor.flip(1), tensor.T.reshape(8, 4)]
    sign = 8 * dtype.itemsize - 1
    others += [flipped(flipped(tensor, 1, 1, sign), row, 2, sign) for row in range(8)]
    sums = [checksum(x) for x in (tensor, *others)]
    assert len(set(sums)) == len(sums)


def test_any_shape_and_type_has_one():
    found = [checksum(torch.tensor(x)) for x in (1.5, 2.5, True, [], [3], [[3, 0]])]
    assert len(set(found)) == len(found)
