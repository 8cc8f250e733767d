"""Masks of slices on simulated ranks: random slices, layouts, groups, modes, dtypes and sinks,
against pair-by-pair masks in float64; and what is refused.

The environment variable MASKS sets the number of cases (e.g. 3000).
"""

from itertools import accumulate, pairwise
from math import gcd, lcm
from random import Random

import numpy as np
import pytest
import torch

from megatron_burst import slices as makers
from megatron_burst.attention import burst_attention
from megatron_burst.errors import BurstError
from megatron_burst.kernels.masks.parts import Parts
from megatron_burst.kernels.reference import hidden
from megatron_burst.kernels.visible import Visible, segments_of
from megatron_burst.masks import slice_calls
from megatron_burst.masks.slice_calls import Calls
from megatron_burst.masks.slice_checks import counted_twice, sees_nothing, work_of_ranks
from megatron_burst.masks.slice_parts import Bands
from megatron_burst.masks.slices import Slices
from megatron_burst.schedule.layout import Layout, positions
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.modes import EMITTERS
from megatron_burst.schedule.spec import Circulate
from megatron_burst.schedule.topology import pretend_nodes
from tests.attention.engine import ByCalls, Way, assert_exact, problem
from tests.oracle import full_attention, rows_of, seen_by_slices
from tests.ranks import run_ranks
from tests.sampling import seeds

pytestmark = pytest.mark.numeric
GROUPS = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (2, 3)]
CASES = 30  # in each test
CPU = torch.device("cpu")
DTYPES = [torch.float64, torch.float64, torch.float32, torch.bfloat16]


def cut(random: Random, tokens: int, most: int) -> list[tuple[int, int]]:
    """The sample in spans."""
    edges = {0, tokens, *(random.randrange(tokens) for _ in range(random.randint(0, most)))}
    return list(pairwise(sorted(edges)))


def drawn_slices(random: Random, tokens: int, causal: bool) -> tuple[tuple[int, ...], ...]:
    """Cells of a random grid; each row of the grid has keys that all of its queries see, before
    them if `causal`."""
    found = []
    for start, stop in cut(random, tokens, 4):
        if causal:
            own = random.choice([start, random.randint(0, start)])
            found.append((start, stop, own, stop, 1))
            before = cut(random, own, 2) if own else []
        else:
            own = random.randint(0, tokens - 1)
            found.append((start, stop, own, own + 1, 0))
            before = (cut(random, own, 2) if own else []) + [
                (a + own + 1, b + own + 1) for a, b in (cut(random, tokens - own - 1, 2)
                                                        if own < tokens - 1 else [])]  # fmt: skip
        for keys in before:
            if random.random() < 0.5:
                kind = random.choice([0, 0, 1, 2, 3])
                if not (causal and keys[1] > start):
                    found.append((start, stop, *keys, kind))
    random.shuffle(found)
    return tuple(found)


def drawn_way(random: Random) -> tuple[tuple[int, int], int, tuple[int, int], Way]:
    """Nodes and ranks, tokens on a rank, heads, and how the call runs."""
    nodes, ranks = random.choice(GROUPS)
    size, tokens, edges = nodes * ranks, 2 * random.randint(1, 6), ()
    mode = random.choice(list(EMITTERS)) if size > 1 else "ring"
    layout = random.choice([Layout.ZIGZAG, Layout.CONTIGUOUS, Layout.DOCUMENTS])
    if layout is Layout.DOCUMENTS:
        lengths = [2 * size * random.randint(0, 2) for _ in range(random.randint(1, 3))]
        edges = tuple(accumulate([0, *lengths, 2 * size]))
        tokens = edges[-1] // size
    causal = random.random() < 0.4
    in_order = causal and layout is not Layout.DOCUMENTS
    heads_kv = random.choice([1, 2, 3, 4])
    circulate = random.choice(list(Circulate))
    leaves = mode == "a2a" or (mode == "gather" and nodes > 1 and circulate is Circulate.KV)
    sharing = size if mode == "a2a" else ranks
    way = Way(
        mode, circulate, random.randint(1, heads_kv // gcd(heads_kv, sharing)), True,
        leaves and random.random() < 0.5, layout, Mask(None, 0 if in_order else None, True),
        random.choice(["reference", "torch-cpu", "calls", "calls"]), 0.7,
        random.choice([False, True]) if nodes == 1 and mode != "ring" else False,
        edges, sinks=random.random() < 0.3, slices=drawn_slices(random, size * tokens, causal),
    )  # fmt: skip
    heads_q = lcm(heads_kv, sharing if mode == "a2a" else 1) * random.choice([1, 2])
    return (nodes, ranks), tokens, (heads_q, heads_kv), way


@pytest.mark.parametrize("seed", seeds(CASES, 2, 10))
def test_any_slices_are_exact(seed, monkeypatch):
    random = Random(seed)
    for number in range(CASES):
        monkeypatch.setattr(slice_calls, "_MANY", random.choice([2, 64]))
        (nodes, ranks), tokens, heads, way = drawn_way(random)
        batch = 1 if way.edges else random.choice([1, 2])
        tensors = problem(
            nodes * ranks, tokens, heads, random.choice([(4, 4), (6, 3)]), number, batch
        )
        topology = pretend_nodes(nodes * ranks, nodes)
        assert_exact(topology, tensors, way, number, random.choice(DTYPES))


@pytest.mark.parametrize("seed", range(10))
def test_pairscounted_twice_and_queries_without_keys_are_found(seed):
    """Against a count of every pair."""
    random, found = Random(seed), []
    for _ in range(200):
        tokens = random.randint(1, 12)
        spans = [
            sorted(random.sample(range(tokens + 1), 2)) for _ in range(2 * random.randint(1, 4))
        ]
        slices = [
            (*q, *k, random.randint(0, 3)) for q, k in zip(spans[::2], spans[1::2], strict=True)
        ]
        counts = torch.zeros(tokens, tokens, dtype=torch.int64)
        for one in slices:
            counts += seen_by_slices([one], tokens)
        seeing = counts.sum(1).bool().tolist()
        last = max((row for row, sees in enumerate(seeing) if sees), default=0)
        blind = next((row for row in range(last + 1) if not seeing[row]), None)
        given = np.array(slices)
        assert (counted_twice(given) is not None) == bool((counts > 1).any()), slices
        assert sees_nothing(given) == blind, slices
        found.append((bool((counts > 1).any()), blind is not None))
    assert len(set(found)) == 4  # both, either and neither


GOOD = [[0, 8, 0, 8, 1]]
WRONG = {  # slices of a sample of 8 tokens, more arguments, words
    "a list": ([[0, 8, 0, 8, 1]], {}, "slices must be a tensor.*got list"),
    "four columns": (torch.tensor(GOOD)[:, :4], {}, r"slices must be a tensor.*\(1, 4\)"),
    "floats": (torch.tensor(GOOD).float(), {}, "slices must be a tensor of int32.*float32"),
    "sparse": (torch.tensor(GOOD).to_sparse(), {}, "slices must be a tensor.*sparse_coo"),
    "on a GPU": (torch.tensor(GOOD).to("meta"), {}, "slices must be .*meta"),
    "none": (torch.empty(0, 5, dtype=torch.int32), {}, r"at least one.*\(0, 5\)"),
    "outside": ([[0, 9, 0, 8, 0]], {}, r"within the 8 queries and 8 keys.*got \[0, 9, 0, 8, 0\]"),
    "empty": ([[0, 8, 3, 3, 0]], {}, "none may be empty"),
    "a kind": ([[0, 8, 0, 8, 4]], {}, r"kind of a slice must be 0 \(full\)"),
    "later keys": ([[0, 8, 0, 8, 0]], {"causal": True}, "no slice may have a key at a later"),
    "twice": ([[0, 8, 0, 8, 1], [6, 8, 0, 1, 0]], {}, "must not overlap.* and "),
    "blind": ([[0, 2, 0, 2, 1], [4, 8, 0, 8, 0]], {}, "must see a key.*got query 2"),
    "a window": (GOOD, {"window": (2, 0)}, "slices must come without a window"),
    "striped": (GOOD, {"layout": "striped"}, "sharded in chunks.*got layout striped"),
    "documents": (GOOD, {"cu_seqlens": torch.tensor([0, 8])}, "slices must come without cu_seql"),
    "a kernel": (GOOD, {"backend": "flash"}, "flash must be able.*"),
}


def sentences(rank):
    from megatron_burst.config import BurstConfig

    found = {}
    for name, (slices, options, _) in WRONG.items():
        options = {"causal": False} | options
        if backend := options.pop("backend", None):
            options["config"] = BurstConfig(backend=backend)
        made = isinstance(slices, list) and name != "a list"
        slices = torch.tensor(slices) if made else slices
        with pytest.raises(BurstError) as error:
            burst_attention(*(torch.ones(1, 4, 2, 8) for _ in "qkv"), slices=slices, **options)
        found[name] = str(error.value)
    out = burst_attention(*(torch.ones(1, 4, 2, 8) for _ in "qkv"), slices=torch.tensor(GOOD))
    return found, bool(out.isfinite().all())


def test_wrong_slices_are_one_sentence_on_every_rank():
    import re

    for found, good in run_ranks(sentences, 2):
        assert good and found.keys() == WRONG.keys()
        for name, (*_, words) in WRONG.items():
            assert re.search(words, found[name]), (name, found[name])
            assert "\n" not in found[name]


def others(rank):
    """Rank 1 passes other slices."""
    slices = [[0, 8, 0, 8, 1]] if rank else [[0, 8, 0, 8, 0]]
    with pytest.raises(BurstError) as error:
        burst_attention(
            *(torch.ones(1, 4, 2, 8) for _ in "qkv"), slices=torch.tensor(slices), causal=False
        )
    return str(error.value)


def test_ranks_with_other_slices_are_named():
    for text in run_ranks(others, 2):
        assert "slices=" in text and "on cp rank" in text, text


def test_a_new_sample_makes_no_new_program():
    """Slices are data of a call: what a program and a kernel's shapes depend on stays."""
    from megatron_burst.schedule.modes import program_of

    def attend(number):
        slices = torch.tensor([[0, 4 + number, 0, 4 + number, 0], [4 + number, 16, 0, 16, 0]])
        burst_attention(*(torch.ones(1, 16, 2, 8) for _ in "qkv"), slices=slices, causal=False)

    attend(0)
    before = program_of.cache_info().misses
    for number in range(1, 6):
        attend(number)
    assert program_of.cache_info().misses == before


def test_many_slices_are_checked_quickly():
    """Without loops over pairs of slices: 20,000 of them in half a second, with a wide margin."""
    from time import process_time

    edges = torch.arange(0, 20_001) * 16
    slices = torch.stack((edges[:-1], edges[1:], 0 * edges[:-1], edges[1:], 0 * edges[:-1]), 1)
    begun = process_time()
    Slices(slices, False, (20_000, 16, 1, 20_000), Layout.ZIGZAG, CPU)
    assert process_time() - begun < 3


def test_a_thousand_slices_of_a_new_sample_take_little_time():
    """Images in a text of 1M tokens: to check, and the calls of a tile of rank 0 of 8. The goal is
    3 ms, and it takes about 1 on an idle core; the margin is for a busy machine."""
    from time import process_time

    tokens, spent = 1 << 20, []
    spans = [(n, n + 64) for n in range(0, tokens - 64, tokens // 500)]
    made = makers.causal_with_spans(spans, tokens)
    assert len(made) >= 1000
    q, keys = (positions(Layout.ZIGZAG, rank, 8, tokens // 8) for rank in (0, 7))
    for _ in range(5):
        begun = process_time()
        slices = Slices(made, False, (tokens // 8, 8, 1, tokens // 8), Layout.ZIGZAG, CPU)
        assert slices.visible(Visible(), (q, keys), 1, ByCalls()).calls
        spent.append(process_time() - begun)
    assert min(spent) < 0.009


@pytest.mark.parametrize("layout", [Layout.ZIGZAG, Layout.CONTIGUOUS])
def test_the_work_of_ranks_is_counted_pair_by_pair(layout):
    random = Random(1)
    for _ in range(100):
        size, tokens = random.randint(1, 4), 2 * random.randint(1, 5)
        slices = drawn_slices(random, size * tokens, causal=random.random() < 0.5)
        pairs = seen_by_slices(slices, size * tokens).sum(1)
        padding = 2 * random.randint(0, 2)  # rows of each rank
        pairs, tokens = torch.cat((pairs, pairs.new_zeros(size * padding))), tokens + padding
        wanted = [int(pairs[rows_of(layout, rank, size, tokens)].sum()) for rank in range(size)]
        assert work_of_ranks(torch.tensor(slices), size, layout, size * tokens) == wanted


def calls(made, tokens, together=True):
    """The kernel calls of a sample as one tile, and whether they are right."""
    every = (range(tokens),)
    found = Calls(Parts(Bands(made.numpy()).parts(every, every)), CPU, together).calls
    seen = torch.zeros(tokens, tokens, dtype=torch.int64)
    for call in found:
        shape = torch.empty(1, len(call.rows), 1, 1), torch.empty(1, len(call.keys), 1, 1)
        for rows, keys in segments_of(call.visible, len(call.rows), len(call.keys)):
            of = shape[0][:, rows], shape[1][:, keys]
            ahead = of[1].shape[1] - of[0].shape[1]
            part = ~hidden(call.visible, *of, ahead)
            seen[call.rows.slice, call.keys.slice][rows, keys] += part
    assert torch.equal(seen, seen_by_slices(made.tolist(), tokens).long())
    return len(found)


class Counting(ByCalls):
    """Counts its calls."""

    def __init__(self):
        self.count = 0

    def forward(self, *args, **options):
        self.count += 1
        return super().forward(*args, **options)


@pytest.mark.parametrize("frames, count", [(64, 64), (65, 0)])
def test_many_parts_are_one_call_of_another_kernel(frames, count):
    """Frames share no calls; beyond 64 the kernel that takes bands is not called."""
    made, every = makers.block_causal([2] * frames), (range(2 * frames),)
    calls = Calls(Parts(Bands(made.numpy()).parts(every, every)), CPU, True)
    run = Counting()
    q, k, v = torch.randn(3, 1, 2 * frames, 2, 8, dtype=torch.float64).unbind()
    out, _ = calls.forward(run, q, k, v, 0.5)
    seen = seen_by_slices(made.tolist(), 2 * frames)
    assert (out - full_attention(q, k, v, False, 0.5, seen)).abs().max() < 1e-12
    assert run.count == count and calls.are_many is (frames > 64)


def test_parts_share_kernel_calls():
    """Chunks and packed samples are segments of one call, so are the own parts of a tree; its
    children see their parent in one call together."""
    assert calls(makers.prefix_lm(9, 40), 40) == 2
    assert calls(makers.chunked(40, 7), 40) == 1
    assert calls(makers.chunked(40, 7), 40, together=False) == 6
    assert calls(makers.documents([3, 1, 20, 16]), 40) == 1
    assert calls(makers.tree([8, *[4] * 8], [-1, *[0] * 8]), 40) == 2
    assert calls(makers.tree([8, 4, 4, 4, 4], [-1, 0, 1, 1, 0]), 24) == 3
    assert calls(makers.block_causal([10] * 4), 40) == 4
    assert (
        calls(makers.packed([makers.prefix_lm(3, 20), makers.prefix_lm(3, 20)], [20] * 2), 40) == 2
    )
