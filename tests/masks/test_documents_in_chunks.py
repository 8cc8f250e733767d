"""Documents sharded in two chunks per rank: row orders, segments, and runs on real processes."""

from contextlib import nullcontext
from itertools import accumulate, pairwise

import pytest
import torch

from megatron_burst.attention import burst_attention
from megatron_burst.comm.store import BoundedDict
from megatron_burst.comm.transport import Placement
from megatron_burst.masks.documents import Documents, documents_of
from megatron_burst.masks.sample import Sample
from megatron_burst.schedule.chunks import chunk_pairs, chunks_by_rank, chunks_in_order
from megatron_burst.schedule.layout import (
    Layout,
    chunks_of,
    positions_in_documents,
    positions_of_chunks,
)
from megatron_burst.schedule.mask import Mask
from tests.attention.engine import problem
from tests.options import backward_as_a2a, burst_config
from tests.oracle import full_attention, rows_of, seen_by
from tests.ranks import run_ranks


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_order_of_a_sample_of_documents(size):
    """Rows of all ranks, concatenated, put into sequence order and back."""
    lengths = [2 * size * n for n in (2, 0, 1, 5)]
    edges = list(accumulate([0, *lengths]))
    documents = Documents(
        Sample(torch.tensor(edges), None, None), (edges[-1] // size, size), Layout.DOCUMENTS,
        torch.device("cpu"),
    )  # fmt: skip
    src_blocks, every = chunks_by_rank(range(size), size), chunks_in_order(range(size), size)
    ranks = [positions_in_documents(edges, rank, size) for rank in range(size)]
    places = torch.tensor([place for rank in ranks for some in rank for place in some])
    assert places[documents.arrange_index(src_blocks, every)].tolist() == list(range(edges[-1]))
    (back,) = documents.restore_index(src_blocks, every)
    assert documents.arrange_index(src_blocks, every)[back].tolist() == list(range(edges[-1]))


def test_a_sample_is_known_again_on_the_stream_that_has_made_it(monkeypatch):
    """No other stream is ordered after the kernels that made its tables."""
    streams = iter((1, 2, 1))
    monkeypatch.setattr(Placement, "of", classmethod(lambda cls, x: cls(x.device, next(streams))))
    cache, sample = BoundedDict(4), Sample(torch.tensor([0, 8]), None, None)
    ask = (cache, sample, (4, 2), "zigzag", torch.zeros(4))
    one, other, again = (documents_of(*ask) for _ in range(3))
    assert other is not one and again is one


def test_chunks_that_are_seen_twice_and_never():
    """Rows of a duplicated chunk are found in both copies, those of a missing chunk in none."""
    documents = Documents(
        Sample(torch.tensor([0, 8, 12]), None, None), (6, 2), Layout.DOCUMENTS, torch.device("cpu")
    )
    src_blocks, seen = ((0, 3), (1, 2)), (0, 0, 2)  # chunks of two rows and of one
    assert documents.arrange_index(src_blocks, seen).tolist() == [0, 1, 0, 1, 8, 9, 4, 4, 11]
    assert documents.restore_index(src_blocks, seen).tolist() == [
        [0, 1, -1, -1, 6, -1, -1, -1, 4, 5, -1, 8],
        [2, 3, -1, -1, 7, -1, -1, -1, -1, -1, -1, -1],
    ]


@pytest.mark.parametrize("owners", [(0,), (1,), (2,), (3,), (0, 2), (3, 1), (0, 1, 2, 3)])
@pytest.mark.parametrize("mask", [Mask(right=0, documents=True), Mask(documents=True)], ids=str)
def test_padded_chunks_meet_as_documents_do(mask, owners):
    """Segments of rank 1's queries and the keys of some ranks; documents are padded at the end."""
    starts, padded = [0, 11, 11, 14, 30], [0, 16, 16, 24, 48]
    sample = Sample(torch.tensor(starts), torch.tensor(padded), None)
    documents = Documents(sample, (12, 4), Layout.DOCUMENTS, torch.device("cpu"))
    met = chunk_pairs(chunks_of(1, 4), chunks_by_rank(owners, 4), mask, 6)
    numbers = chunks_of(1, 4), met.dst_chunks
    q, k = ([p for span in positions_of_chunks(padded, some, 4) for p in span] for some in numbers)
    found, band = [], met.tile.mask
    segments = documents.segments_of(met.tile.positions)
    assert (segments.cu_q[-1], segments.cu_k[-1]) == (len(q), len(k))
    for rows, keys in zip(
        segments.cu_q.unfold(0, 2, 1), segments.cu_k.unfold(0, 2, 1), strict=True
    ):
        rows, keys = range(*rows.tolist()), range(*keys.tolist())
        for n, row in enumerate(rows):
            seen = len(keys) if band.full else len(keys) - len(rows) + n + 1
            found += [(q[row], k[key]) for key in keys[:seen]]
    lengths = torch.tensor(starts).diff().tolist()
    src_blocks = [(at, at + length) for at, length in zip(padded, lengths, strict=False)]
    held = [p for span in positions_of_chunks(padded, chunks_in_order(owners, 4), 4) for p in span]
    assert sorted(found) == sorted(
        (one, other)
        for start, stop in src_blocks
        for one in q
        for other in held
        if start <= one < stop and start <= other < stop and (mask.full or other <= one)
    )


WAYS = (
    {}, {"intra": "ring"}, {"intra": "ring", "circulate": "q"},
    {"intra": "gather", "heads_per_round": 1}, {"intra": "gather", "circulate": "q"},
    {"intra": "a2a"}, {"inter": "a2a"}, {"flat": True},
)  # fmt: skip
MIXED = {"intra": "gather", "heads_per_round": 2}  # whose backward is made an all-to-all


def ways_on(nodes):
    return WAYS if nodes > 1 else (*WAYS[:-2], MIXED)


def errors_of_chunks(rank, world, nodes):
    """By mode, errors of out, dq, dk, dv for documents that are sharded separately, some padded."""
    lengths = [2 * world * count for count in (3, 0, 1, 4)]
    padded = list(accumulate([0, *lengths]))
    starts = list(accumulate([0, *(max(0, length - 3) for length in lengths)]))
    src_blocks = [(at, at + b - a) for at, (a, b) in zip(padded, pairwise(starts), strict=False)]
    tensors = problem(world, padded[-1] // world, (2 * world, world), (6, 4), 1, batch=1)
    real = torch.zeros(padded[-1], dtype=torch.bool)
    for span in src_blocks:
        real[slice(*span)] = True
    tensors[3][:, ~real] = 0
    rows, errors = rows_of(Layout.DOCUMENTS, rank, world, 0, padded), {}
    for causal in (True, False):
        mask = Mask(right=0 if causal else None, documents=True)
        seen = seen_by(mask, padded, padded[-1]) & real & real.unsqueeze(1)
        leaves = [x.clone().requires_grad_() for x in tensors[:3]]
        out = full_attention(*leaves, False, 6**-0.5, seen)
        truth = [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]
        for way in ways_on(nodes):
            q, k, v = (x[:, rows].clone().requires_grad_() for x in tensors[:3])
            with backward_as_a2a() if way is MIXED else nullcontext():
                out = burst_attention(
                    q, k, v, causal=causal, cu_seqlens=torch.tensor(starts),
                    layout="zigzag-documents", cu_seqlens_padded=torch.tensor(padded),
                    config=burst_config(nodes=nodes, **way),
                )  # fmt: skip
            found = [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3][:, rows])]
            both = zip(found, truth, strict=True)
            errors[causal, str(way)] = max(float((x - y[:, rows]).abs().max()) for x, y in both)
    return errors


@pytest.mark.parametrize("nodes, world", [(1, 3), (2, 2), (2, 4), (3, 3)])
def test_documents_each_for_itself_on_processes(nodes, world):
    """Guards against what simulated ranks cannot show: wrong groups, and choices that refuse or
    lose the layout."""
    for errors in run_ranks(errors_of_chunks, world, world, nodes):
        assert len(errors) == 2 * len(ways_on(nodes))
        assert max(errors.values()) <= 1e-12, errors
