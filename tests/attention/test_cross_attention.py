"""Cross-attention: K and V of another length than Q, sharded on their own, in rings.

Random lengths, layouts, groups, heads and slices on simulated ranks, and calls of real processes,
against full attention in float64; one query; what is refused; the bytes that choices count.
"""

import re
from dataclasses import replace
from functools import partial
from random import Random

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_burst.attention import burst_attention
from megatron_burst.errors import BurstError, DisagreementError
from megatron_burst.resolve import resolve
from megatron_burst.rules import choose_circulate, inter_ring_bytes, with_wire_dtype
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.modes import program_of
from megatron_burst.schedule.spec import AttentionShape, Circulate, Direction, Spec
from megatron_burst.schedule.topology import Link, pretend_nodes
from tests.attention.engine import Way, assert_exact, problem
from tests.masks.test_slices import cut
from tests.options import burst_config
from tests.oracle import full_attention, rows_of, seen_by_slices
from tests.ranks import run_ranks
from tests.sampling import whole
from tests.schedule.cases import Case

GROUPS = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (2, 3)]
CASES = 15  # in each test
DTYPES = [torch.float64, torch.float64, torch.float32, torch.bfloat16]


def drawn_slices(random, queries, keys):
    """Cells of a random grid; each query sees a key at least."""
    found = []
    for start, stop in cut(random, queries, 3):
        own = random.randint(0, keys - 1)
        found.append((start, stop, own, own + 1, 0))
        found += [
            (start, stop, a + by, b + by, random.randint(0, 3))
            for by, room in ((0, own), (own + 1, keys - own - 1)) if room
            for a, b in cut(random, room, 2) if random.random() < 0.5
        ]  # fmt: skip
    random.shuffle(found)
    return tuple(found)


def drawn(random):
    """Nodes and ranks, queries and keys on a rank, heads, and how the call runs."""
    nodes, ranks = random.choice(GROUPS)
    layout = random.choice([Layout.ZIGZAG, Layout.CONTIGUOUS])
    even = 2 if layout is Layout.ZIGZAG else 1
    tokens, keys = (even * rows for rows in random.sample(range(1, 7), 2))
    heads_kv, circulate = random.choice([1, 2, 3, 4]), random.choice(list(Circulate))
    slices = random.random() < 0.4
    sizes = nodes * ranks * tokens, nodes * ranks * keys
    way = Way(
        "ring", circulate, layout=layout, mask=Mask(documents=slices), scale=0.7,
        backend=random.choice(["reference", "torch-cpu", *["calls"] * slices]),
        sinks=random.random() < 0.3, slices=drawn_slices(random, *sizes) if slices else (),
    )  # fmt: skip
    heads = heads_kv * random.choice([1, 2]), heads_kv
    return (nodes, ranks), (tokens, keys), heads, way


@pytest.mark.parametrize("seed", [*range(4), *whole(*range(4, 40))])
def test_any_lengths_are_exact(seed):
    random = Random(seed)
    for number in range(CASES):
        (nodes, ranks), (tokens, keys), heads, way = drawn(random)
        dims, batch = random.choice([(4, 4), (6, 3)]), random.choice([1, 2])
        tensors = problem(nodes * ranks, tokens, heads, dims, number, batch, keys)
        topology = pretend_nodes(nodes * ranks, nodes)
        assert_exact(topology, tensors, way, number, random.choice(DTYPES))


# --- real processes ---

# queries and keys on a rank, format, whether there are slices, options
CALLS = [
    (1, 5, "bshd", False, {}),  # a query on each rank; keys in no whole chunks
    (6, 2, "sbhd", False, {"circulate": "q"}),
    (2, 8, "thd", True, {"backend": "reference"}),
    (4, 6, "bshd", True, {"nodes": 2}),
    (1, 7, "bshd", False, {"nodes": 2, "circulate": "q"}),
    (2, 6, "bshd", False, {"nodes": 2, "keep": "all"}),
    (6, 4, "bshd", False, {"keep": "half", "deterministic": True}),
]


def in_format(x, qkv_format):
    """From "bshd", or back."""
    if qkv_format == "thd":
        return x.squeeze(0) if x.dim() == 4 else x.unsqueeze(0)
    return x.transpose(0, 1) if qkv_format == "sbhd" else x


def called(call, tensors, rank, world):
    """(out, dq, dk, dv) of a rank, inside of a checkpoint."""
    *sizes, qkv_format, sliced, options = call
    layout = Layout.CONTIGUOUS if any(size % 2 for size in sizes) else Layout.ZIGZAG
    shard = [x[:, rows_of(layout, rank, world, x.shape[1] // world)] for x in tensors]
    *leaves, dout = (in_format(x, qkv_format).clone() for x in shard)
    leaves = [x.requires_grad_() for x in leaves]
    made = torch.tensor(slices_of(sizes, world)) if sliced else None
    attend = partial(
        burst_attention, causal=False, slices=made, qkv_format=qkv_format, softmax_scale=0.7,
        config=burst_config(**options),
    )  # fmt: skip
    out = checkpoint(attend, *leaves, use_reentrant=False)
    found = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    return [in_format(x, qkv_format) for x in found], layout


def slices_of(sizes, world):
    return drawn_slices(Random(f"{[*sizes]}"), *(world * size for size in sizes))


def errors(rank, world):
    """The largest error of each call over out, dq, dk and dv; made twice, as buffers persist."""
    found = []
    for call in CALLS:
        tokens, keys, qkv_format, sliced, _ = call
        batch = 1 if qkv_format == "thd" else 2
        tensors = problem(world, tokens, (8, 4), (4, 6), 3, batch, keys)
        leaves = [x.clone().requires_grad_() for x in tensors[:3]]
        sizes = world * tokens, world * keys
        seen = seen_by_slices(slices_of((tokens, keys), world), *sizes) if sliced else None
        out = full_attention(*leaves, False, 0.7, seen)
        truth = [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]
        for _ in range(2):
            got, layout = called(call, tensors, rank, world)
            here = [x[:, rows_of(layout, rank, world, x.shape[1] // world)] for x in truth]
            pairs = zip(got, here, strict=True)
            found.append(max(float((one - other).abs().max()) for one, other in pairs))
    return found


def test_calls_of_real_processes_are_exact():
    for found in run_ranks(errors, 4, 4):
        assert len(found) == 2 * len(CALLS) and max(found) <= 1e-12, found


def odd_one_out(rank):
    """Rank 1 passes more keys; then the same query on all ranks."""
    q, kv = torch.ones(1, 2, 2, 8), torch.ones(1, 6 + 2 * rank, 2, 8)
    burst_attention(q, kv[:, :4], kv[:, :4], causal=False)
    with pytest.raises(DisagreementError) as error:
        burst_attention(q, kv, kv, causal=False)
    return str(error.value)


def test_ranks_with_other_numbers_of_keys_are_named():
    for text in run_ranks(odd_one_out, 2):
        assert re.search(r"k=\(1, 6, 2, 8\).* on cp rank.* k=\(1, 8, 2, 8\)", text), text


def one_query(rank, world):
    """The same query on each rank: its output is whole on each, and gradients of keys are those of
    the ranks that pass a gradient of the output."""
    *_, dout = tensors = problem(world, 1, (2, 1), (4, 4), 1, 1, 3)
    q, k, v = tensors[0][:, :1], *(x[:, rank * 3 : rank * 3 + 3] for x in tensors[1:3])
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = burst_attention(*leaves, causal=False)
    grads = torch.autograd.grad(out, leaves, dout[:, :1] * (rank == 0))
    whole = [x.clone().requires_grad_() for x in (q, *tensors[1:3])]
    expected = full_attention(*whole, False, 0.5)
    truth = torch.autograd.grad(expected, whole, dout[:, :1])
    own = [x[:, rank * 3 : rank * 3 + 3] for x in truth[1:]]
    pairs = [(out, expected), (grads[0], truth[0] * (rank == 0)), *zip(grads[1:], own, strict=True)]
    return max(float((one - other).abs().max()) for one, other in pairs)


def test_one_query_is_passed_on_all_ranks():
    assert max(run_ranks(one_query, 3, 3)) <= 1e-12


# --- programs and choices ---


def refused(rank):
    """What each way says that pairs a rank's queries with as many keys."""
    q, kv = torch.ones(1, 2, 4, 8), torch.ones(1, 4, 4, 8)
    sentences = []
    for options in ({"intra": "gather"}, {"intra": "a2a"}, {"inter": "a2a"}, {"invariant": True}):
        with pytest.raises(BurstError) as error:
            burst_attention(q, kv, kv, causal=False, config=burst_config(**options))
        sentences.append(str(error.value))
    return sentences


def test_other_modes_are_refused_in_a_sentence():
    for sentences in run_ranks(refused, 2):
        for sentence in sentences:
            assert re.search("different lengths must run in rings.*got 2 queries and 4", sentence)


def test_one_program_serves_all_lengths_of_a_ratio():
    case = Case("ring", pretend_nodes(4, 2), Layout.ZIGZAG, Mask.FULL, tokens=6, tokens_kv=4)
    for direction in Direction:
        small = case.spec(direction).in_units()
        longer = replace(case, tokens=6 << 10, tokens_kv=4 << 10).spec(direction).in_units()
        assert (small[1], longer[1]) == (1, 1 << 10)
        assert replace(longer[0], unit_rows=1) == small[0]
        assert (small[0].shape.tokens, small[0].shape.keys) == (6, 4)


@pytest.mark.parametrize("keys", [128, 1024, 8192])
def test_the_choice_counts_the_bytes_that_are_sent(keys):
    """Between two nodes of one rank, where everything is sent there."""
    shape, topology = AttentionShape(1, 1024, 8, 8, 128, 128, 2, 4, 4, keys), pretend_nodes(2, 2)

    def sent(**options):
        spec = resolve(Spec(topology, shape, mask=Mask.FULL, **options))[0]
        ways = (spec.program_spec(0, direction) for direction in Direction)
        return sum(program_of(way).sent_bytes()[Link.INTER] for way in ways)

    on = with_wire_dtype(shape, None)
    rings = {}
    for circulate in Circulate:
        rings[circulate] = inter_ring_bytes(on, topology, circulate)
        assert sent(circulate=circulate) == rings[circulate]
    assert choose_circulate(on).value == min(rings, key=rings.__getitem__)
    assert choose_circulate(on).value == ("kv" if keys < 1024 else "q")
