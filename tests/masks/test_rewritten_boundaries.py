"""Boundaries, trees and slices written again by the caller in ways that torch does not count.

Guards against attention that keeps the documents of an earlier sample, in either pass.
"""

from array import array
from functools import partial

import numpy as np
import pytest
import torch

from megatron_burst import BurstError, position_ids
from megatron_burst.attention import burst_attention
from megatron_burst.masks.sample import identity
from tests.ranks import run_ranks

pytestmark = pytest.mark.numeric
FIRST, SECOND = [0, 5, 8, 16], [0, 3, 12, 16]


def of_numpy(values):
    array = np.array(values)
    return torch.from_numpy(array), lambda new: array.__setitem__(slice(None), new)


def of_buffer(values):
    buffer = bytearray(np.array(values).tobytes())
    tensor = torch.frombuffer(buffer, dtype=torch.int64)
    return tensor, lambda new: buffer.__setitem__(slice(None), np.array(new).tobytes())


def of_inference(values):
    with torch.inference_mode():
        tensor = torch.tensor(values)

    def write(new):
        with torch.inference_mode():
            tensor.copy_(torch.tensor(new))

    return tensor, write


def of_tensor(write):
    def made(values):
        tensor = torch.tensor(values)
        return tensor, lambda new: write(tensor, torch.tensor(new))

    return made


WAYS = {  # tensors, and how they are written again
    "in place": of_tensor(lambda x, new: x.copy_(new)),
    "under inference_mode": of_inference,
    "from_numpy": of_numpy,
    "frombuffer": of_buffer,
    "numpy()": of_tensor(lambda x, new: np.copyto(x.numpy(), new.numpy())),
    "data.copy_": of_tensor(lambda x, new: x.data.copy_(new)),
    "data =": of_tensor(lambda x, new: setattr(x, "data", new)),
    "DLPack": of_tensor(lambda x, new: torch.from_dlpack(x).copy_(new)),
    "untyped_storage": of_tensor(lambda x, new: x.untyped_storage().copy_(new.untyped_storage())),
}


def shards(seed=0):
    torch.manual_seed(seed)
    return [torch.randn(1, 8, 2, 4, requires_grad=True) for _ in range(3)]


def attend(qkv, starts, **options):
    return burst_attention(*qkv, cu_seqlens=starts, **options)


def written_again(rank):
    """By way: whether a call after it has the new documents, and a backward the old ones."""
    qkv, found = shards(rank), {}
    old, new = (attend(qkv, torch.tensor(values)) for values in (FIRST, SECOND))
    (old_grad,) = torch.autograd.grad(old.sum(), qkv[1])
    for way, made in WAYS.items():
        starts, write = made(FIRST)
        before = attend(qkv, starts)
        write(SECOND)
        after = attend(qkv, starts)
        (grad,) = torch.autograd.grad(before.sum(), qkv[1])
        found[way] = (
            torch.equal(before, old) and torch.equal(after, new),
            torch.equal(grad, old_grad) and not torch.equal(old, new),
        )
    return found


def test_boundaries_that_are_written_again_are_those_of_the_next_call():
    for found in run_ranks(written_again, 2):
        assert found == dict.fromkeys(WAYS, (True, True))


def test_boundaries_beside_the_cpu_are_known_by_torchs_count_and_without_one_not_at_all():
    # on "meta", as a GPU's values are not read
    counted = torch.zeros(3, dtype=torch.int32, device="meta")
    with torch.inference_mode():
        uncounted = torch.zeros(3, dtype=torch.int32, device="meta")
    before = identity(counted), identity(uncounted)
    assert before[0] == identity(counted) and before[1] != identity(uncounted)
    assert before[0] != identity(counted.add_(1))


def another_tree(rank):
    qkv, starts = shards(rank), torch.tensor([0, 5, 8, 16])
    parents = np.array([-1, 0, 0])
    tree = torch.from_numpy(parents)
    before = attend(qkv, starts, prefix_tree=tree)
    parents[2] = -1
    after = attend(qkv, starts, prefix_tree=tree)
    expected = attend(qkv, starts, prefix_tree=[-1, 0, -1])
    return torch.equal(after, expected), torch.equal(before, expected)


def test_so_are_the_parents_of_a_tree():
    assert run_ranks(another_tree, 2) == [(True, False)] * 2


def of_memory(values):
    memory = memoryview(array("q", values))
    return memory, lambda new: memory.__setitem__(slice(None), array("q", new))


def another_list(rank):
    """By argument: whether a call after its memory was written again has the new values, the
    backward of the one before it the old ones, and these differ."""
    qkv, parents, found = shards(rank), ([-1, 0, 0], [-1, 0, -1]), []
    slices = [0, 16, 0, 16, 1], [0, 16, 2, 3, 0]
    tree = partial(attend, qkv, torch.tensor(FIRST))
    sliced = partial(burst_attention, *qkv, causal=False)
    cases = (
        (lambda x: tree(prefix_tree=x), of_memory, parents),
        (lambda x: sliced(slices=x.view(1, 5)), of_numpy, slices),
        (lambda x: sliced(slices=x.view(1, 5)), of_inference, slices),
        (lambda x: sliced(slices=x.view(1, 5)), of_buffer, slices),
    )
    for call, made, (first, second) in cases:
        expected = [
            (out, torch.autograd.grad(out.sum(), qkv[1])[0])
            for out in (call(torch.tensor(each)) for each in (first, second))
        ]
        given, write = made(first)
        before = call(given)
        write(second)
        after = call(given)
        for out, (truth, truth_grad) in zip((before, after), expected, strict=True):
            (grad,) = torch.autograd.grad(out.sum(), qkv[1])
            found.append(torch.equal(out, truth) and torch.equal(grad, truth_grad))
        found.append(not torch.equal(before, after))
    return found


def test_so_are_parents_in_a_buffer_and_slices():
    assert run_ranks(another_list, 2) == [[True] * 12] * 2


SHORT = ([0, 5, 8], [0, 5, 7], [0, 1])  # of a sample of 16 rows, 8 on a rank
CLOSE = torch.tensor([0, 2])  # rows after it pad a sample of 4 to equal chunks


def short(rank):
    """What is said of boundaries and slices that end within one rank's rows; and whether rows are
    right where the others are told as padding."""

    def of_slices(end, *more):
        return burst_attention(*shards(), slices=torch.tensor([[0, end, 0, end, 1], *more]))

    calls = [partial(attend, shards(), torch.tensor(ends)) for ends in SHORT]
    calls += [partial(of_slices, 8), partial(position_ids, 16, cu_seqlens=torch.tensor([0, 8]))]
    said = []
    for call in calls:
        with pytest.raises(BurstError) as raised:
            call()
        said.append(str(raised.value))
    padded = attend(shards(), torch.tensor([0, 5, 8]), cu_seqlens_padded=torch.tensor([0, 5, 16]))
    apart = attend(shards(), torch.tensor([0, 5, 8, 16]))
    attend([x[:, :2] for x in shards()], CLOSE)
    rows = slice(None, 4) if rank == 0 else slice(0)  # of 8 in zigzag, those of documents
    found = of_slices(8, [8, 16, 8, 9, 0])[:, rows], of_slices(9)[:, rows]
    return said, torch.equal(padded[:, rows], apart[:, rows]) and torch.equal(*found)


def test_boundaries_and_slices_of_a_shard_are_refused_on_all_ranks():
    for said, right in run_ranks(short, 2):
        for text, (*_, end) in zip(said, SHORT, strict=False):
            assert "cu_seqlens must have the boundaries of the whole sample" in text
            assert f"an end at {end}, within the 8 rows of one of 2 ranks" in text
        *_, slices, positions = said
        assert "slices must be those of the whole sample" in slices and "an end at 8," in slices
        assert positions.startswith("position ids: cu_seqlens must have the boundaries of the")
        assert right
