"""What FlashAttention-4 is told of a mask made of parts: its blocks, read as the kernel does, have
every pair once, and where that is worth it."""

from random import Random

import numpy as np
import pytest
import torch

from megatron_burst import slices as makers
from megatron_burst.kernels.backends import backends
from megatron_burst.kernels.interface import Problem
from megatron_burst.kernels.masks.block_sparse import SIZE, block_sparse_of, is_worth
from megatron_burst.kernels.masks.parts import Parts
from megatron_burst.masks.slice_calls import Calls
from megatron_burst.masks.slice_parts import Bands
from tests.kernels.test_block_lists import grid
from tests.oracle import seen_by_slices

CPU = torch.device("cpu")


def parts_of(slices, tokens):
    every = (range(tokens),)
    return Parts(Bands(np.array(slices)).parts(every, every))


def met(blocks, lists, of_keys, own, others):
    """How often each (own row, other) is met."""
    found = np.zeros((-(-own // SIZE) * SIZE, -(-others // SIZE) * SIZE), dtype=int)
    for block in range(lists.some_count.shape[2]):
        for count, index, whole in ((*lists[:2], False), (*lists[2:], True)):
            numbers = index[0, 0, block, : count[0, 0, block]].tolist()
            assert numbers == sorted(numbers)
            for other in numbers:
                inside = np.ones((SIZE, SIZE), dtype=int)
                if not whole:
                    row, key = (other, block) if of_keys else (block, other)
                    place = blocks.places[1 + row * blocks.places[0] + key]
                    words = blocks.bits[place : place + 4 * SIZE].view(SIZE, 4).numpy()
                    inside = (words[:, :, None] >> np.arange(32) & 1).reshape(SIZE, SIZE)
                    inside = inside.T if of_keys else inside
                rows, columns = (slice(n * SIZE, (n + 1) * SIZE) for n in (block, other))
                found[rows, columns] += inside
    return found[:own, :others]


@pytest.mark.parametrize("seed", range(40))
def test_every_pair_is_met_once(seed):
    random = Random(seed)
    tokens = random.randint(1, 700)
    slices = grid(random, tokens)
    parts, seen = parts_of(slices, tokens), seen_by_slices(slices, tokens).numpy().astype(int)
    blocks = block_sparse_of(parts, tokens, tokens, CPU)
    assert block_sparse_of(parts, tokens, tokens, CPU) is blocks  # made once
    assert not (blocks.some & blocks.whole).any()
    assert np.array_equal(met(blocks, blocks.of_rows, False, tokens, tokens), seen)
    assert np.array_equal(met(blocks, blocks.of_keys, True, tokens, tokens), seen.T)
    assert {x.dtype for x in (*blocks.of_rows, blocks.bits, blocks.places)} == {torch.int32}
    for x in (*blocks.of_rows, *blocks.of_keys):
        assert x.stride() == torch.empty(x.shape).stride()  # also where an axis has one


def test_many_parts_of_a_block_share_its_bits():
    """300 images of a few tokens in a causal text: parts are regrouped, and most blocks have
    several."""
    tokens = 1500
    slices = makers.causal_with_spans([(at, at + 3) for at in range(0, tokens, 5)], tokens)
    parts, seen = parts_of(slices.numpy(), tokens), seen_by_slices(slices.tolist(), tokens)
    blocks = block_sparse_of(parts, tokens, tokens, CPU)
    got = met(blocks, blocks.of_rows, False, tokens, tokens)
    assert np.array_equal(got, seen.numpy().astype(int))


def calls_of(slices, tokens):
    return Calls(parts_of(slices.numpy(), tokens), CPU, together=True)


@pytest.mark.parametrize(
    ("dims", "arch", "deterministic", "taken"),
    [
        ((128, 128), 9, False, True),
        ((64, 64), 9, False, True),
        ((128, 128), 10, False, False),  # two blocks of rows are one there; not run
        ((192, 128), 9, False, False),  # backward has blocks of 96 keys
        ((256, 256), 9, False, False),
        ((128, 128), 9, True, False),
    ],
)
def test_only_flash_attention_4_takes_blocks_and_only_on_hopper(dims, arch, deterministic, taken):
    problem = Problem("cuda", torch.bfloat16, *dims, arch=arch, deterministic=deterministic)
    able = {name for name, one in backends().items() if one.capability.takes_blocks(problem)}
    assert able == ({"fa4"} if taken else set())


def test_blocks_are_worth_it_where_nearly_all_are_whole():
    tokens = 64 * SIZE
    tree = makers.tree([1000, 3000, 192, 4000], [-1, 0, 1, 0])
    assert calls_of(tree, tokens).overlap and is_worth(calls_of(tree, tokens).parts, tokens, tokens)
    window = torch.tensor([[0, tokens, 0, tokens, makers.CAUSAL]])
    narrow = makers.tree([60] * 128, [-1, *[0] * 127])
    assert not is_worth(calls_of(narrow, tokens).parts, tokens, tokens)
    assert not calls_of(window, tokens).overlap  # one call
    frames = makers.block_causal([SIZE] * 16)
    assert not calls_of(frames, 16 * SIZE).overlap  # a call each, whose rows are its own
