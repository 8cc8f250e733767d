"""What our Triton kernels are told of a mask made of parts: walked as a kernel does, step by step,
every pair is met once, and only steps with a mask have pairs that are hidden."""

from random import Random

import numpy as np
import pytest
import torch

from megatron_burst import slices as makers
from megatron_burst.kernels.masks.block_lists import HEADER, RECORD, lists_of, regrouped
from megatron_burst.kernels.masks.parts import Parts
from megatron_burst.masks.slice_parts import Bands
from tests.oracle import seen_by_slices

pytestmark = pytest.mark.numeric
CPU = torch.device("cpu")


def grid(random, tokens):
    """Cells of a random grid: they do not overlap."""
    cuts = [sorted({0, tokens, *(random.randrange(tokens) for _ in range(4))}) for _ in range(2)]
    return [
        (*q, *k, random.randint(0, 3))
        for q in zip(cuts[0], cuts[0][1:], strict=False)
        for k in zip(cuts[1], cuts[1][1:], strict=False)
        if random.random() < 0.7
    ] or [(0, tokens, 0, tokens, 1)]


def walked(lists, of_keys, sizes, own, others):
    """How often each (own row, other) is met, whether it was in a step without a mask, and the
    steps of the blocks, in the order of the programs."""
    met, clear = np.zeros((2, own, others), dtype=int)
    size, step = sizes
    order, work = [], []
    for at in range(0, HEADER * -(-own // size), HEADER):
        block, record, *steps = lists[at : at + HEADER]
        order.append(block)
        work.append(sum(steps))
        first, rows = lists[record], slice(block * size, min((block + 1) * size, own))
        for number in range(sum(steps)):
            _, stop, *part = lists[record : record + RECORD]
            here = np.arange(first, min(first + step, others))
            if number < steps[0]:
                assert len(here) == step  # all there
                met[rows, here] += 1
                clear[rows, here] = 1
            else:
                row, key = np.arange(own).reshape(-1, 1), here
                row, key = (key, row) if of_keys else (row, key)  # parts are told of queries
                inside = (row >= part[0]) & (row < part[1]) & (key >= part[2]) & (key < part[3])
                inside &= (key >= row + part[4]) & (key <= row + part[5])
                met[rows, here[0] : here[-1] + 1] += inside[rows]
            first += step
            if first >= stop:
                record += RECORD
                first = lists[record]
    assert sorted(order) == list(range(len(order)))
    return met, clear, work


@pytest.mark.parametrize("seed", range(40))
def test_every_pair_is_met_once(seed):
    random = Random(seed)
    tokens, sizes = random.randint(1, 90), random.choice([(16, 16), (16, 32), (32, 16), (8, 4)])
    slices = grid(random, tokens)
    every, seen = (range(tokens),), seen_by_slices(slices, tokens).numpy()
    parts = Parts(Bands(np.array(slices)).parts(every, every))
    for of_keys, wanted in ((False, seen), (True, seen.T)):
        lists = lists_of(parts, of_keys, sizes, tokens, CPU)
        assert lists.dtype == torch.int32
        assert lists_of(parts, of_keys, sizes, tokens, CPU) is lists  # made once
        met, clear, work = walked(lists.tolist(), of_keys, sizes, tokens, tokens)
        assert np.array_equal(met, wanted.astype(int))
        assert wanted[clear == 1].all()
        assert work == sorted(work, reverse=True)


def test_whole_blocks_need_no_mask():
    """64 frames in blocks that divide them: not one step with a mask; causal has one or two of a
    block's."""
    every = (range(4096),)
    frames = np.array([(n, n + 64, 0, n + 64, 0) for n in range(0, 4096, 64)])
    for of_keys in (False, True):
        lists = lists_of(Parts(Bands(frames).parts(every, every)), of_keys, (64, 32), 4096, CPU)
        assert lists[: 64 * HEADER].view(-1, HEADER)[:, 3].eq(0).all()
    causal = Parts(Bands(np.array([(0, 4096, 0, 4096, 1)])).parts(every, every))
    headers = lists_of(causal, False, (64, 32), 4096, CPU)[: 64 * HEADER].view(-1, HEADER)
    assert headers[:, 3].eq(2).all() and headers[:, 2].sum() == sum(2 * n for n in range(64))


@pytest.mark.parametrize("seed", range(40))
def test_parts_of_a_tile_are_its_pairs(seed):
    """With rows and keys from several ranges of the sample; each pair in one part, none without."""
    random = Random(seed)
    tokens = random.randint(2, 60)
    slices = grid(random, tokens)
    sides = []
    for _ in range(2):
        cuts = sorted(random.sample(range(tokens + 1), 2 * random.randint(1, min(3, tokens // 2))))
        sides.append(tuple(range(*pair) for pair in zip(cuts[::2], cuts[1::2], strict=True)))
    rows, keys = ([at for place in side for at in place] for side in sides)
    table = Bands(np.array(slices)).parts(*sides)
    counts = torch.zeros(len(rows), len(keys), dtype=torch.int64)
    for one in table:
        part = Parts(one[None]).seen(slice(0, len(rows)), len(keys), CPU)
        counts += part
        begin, end, first, last = one[:4].tolist()
        part = part[begin:end, first:last]
        assert part.any(1).all() and part.any(0).all()  # no row and no key of it has no pair
    wanted = seen_by_slices(slices, tokens)[rows][:, keys]
    assert torch.equal(counts, wanted.long())
    assert torch.equal(Parts(table).seen(slice(1, len(rows)), len(keys), CPU), wanted[1:])


@pytest.mark.parametrize("seed", range(40))
def test_regrouped_parts_are_the_same_pairs(seed):
    random = Random(seed)
    tokens = random.randint(1, 60)
    slices = grid(random, tokens)
    every = (range(tokens),)
    counts = torch.zeros(tokens, tokens, dtype=torch.int64)
    for one in regrouped(Bands(np.array(slices)).parts(every, every)):
        counts += Parts(one[None]).seen(slice(0, tokens), tokens, CPU)
    assert torch.equal(counts, seen_by_slices(slices, tokens).long())


def test_lists_stay_short_where_many_parts_share_keys():
    """Each of 500 images sees all before it: key blocks have few records, though many parts."""
    tokens, every = 64_000, (range(64_000),)
    spans = [(n, n + 64) for n in range(0, tokens, 128)]
    slices = makers.causal_with_spans(spans, tokens).numpy()
    parts = Parts(Bands(slices).parts(every, every))
    for of_keys in (False, True):
        lists = lists_of(parts, of_keys, (64, 64), tokens, CPU)
        assert len(lists) < 1000 * (HEADER + 8 * RECORD)
