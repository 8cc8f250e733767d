"""Whatever is passed as an integer or as a sequence of them: one sentence, or what is asked for.

Guards against masks that attention refuses in words about slices, against 0.5 that becomes 0, and
against bare exceptions of Python, numpy and torch.
"""

from bisect import bisect
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_burst import slices
from megatron_burst.balance import BatchGrid, Costs, Sampler, assign, assign_fewest, pairs_of
from megatron_burst.errors import BurstError
from megatron_burst.integers import as_integer, as_list, shown
from tests.oracle import seen_by_slices
from tests.sampling import examples

T = 10
WRONG = (
    -1, 0.5, 4.0, float("nan"), float("inf"), True, None, "x", b"4", 1 << 80, 10**5000, 1j, [3],
    (), {}, np.float32(2), np.bool_(True), np.array([2, 3]), torch.tensor(2.0),
    torch.tensor(True), torch.tensor([1, 2]), torch.empty((), dtype=torch.int64, device="meta"),
    object(), {1, 2}, np.array("x"),
)  # fmt: skip
ints = st.integers(0, T)
numbers = st.one_of(ints, ints.map(np.int32), ints.map(torch.tensor), st.sampled_from(WRONG))
good = st.one_of(ints, ints.map(np.uint8), ints.map(torch.tensor))
lists = st.one_of(
    st.lists(good, max_size=4), st.lists(numbers, max_size=4), st.lists(ints).map(np.array),
    st.lists(ints, max_size=4).map(torch.tensor), st.sampled_from(WRONG),
)  # fmt: skip
parents = st.one_of(st.lists(st.integers(-1, 3), max_size=4), lists)
pairs = st.one_of(
    st.lists(st.tuples(ints, ints).map(sorted), max_size=3),
    st.lists(st.tuples(good, good), max_size=3), st.lists(numbers, max_size=2), lists,
)  # fmt: skip
kinds = st.one_of(st.lists(st.sampled_from(["full", "causal", 0, 3, 4, "diagonal"])), lists)
bits = st.one_of(
    st.integers(0, 511).map(lambda n: torch.tensor([n >> at & 1 for at in range(9)]).bool()),
    st.sampled_from([torch.ones(2, 2), torch.ones(2, 2).bool().to_sparse(), *WRONG]),
).map(lambda x: x.view(3, 3) if isinstance(x, torch.Tensor) and x.numel() == 9 else x)  # fmt: skip
samples = st.one_of(
    st.lists(st.sampled_from([slices.chunked(4, 3), slices.prefix_lm(1, 2), torch.ones(2, 5)])),
    lists,
)  # fmt: skip


def part_of(lengths, at):
    return bisect(list(accumulate(lengths)), at)


def prefix_lm(prefix, tokens):
    return lambda q, k: q < tokens and (k <= q or max(q, k) < prefix)


def chunked(tokens, chunk):
    return lambda q, k: k <= q < tokens and q // chunk == k // chunk


def block_causal(lengths):
    return lambda q, k: q < sum(lengths) and part_of(lengths, k) <= part_of(lengths, q)


def documents(lengths):
    return lambda q, k: k <= q < sum(lengths) and part_of(lengths, k) == part_of(lengths, q)


def causal_with_spans(spans, tokens):
    return lambda q, k: q < tokens and (k <= q or any(a <= q < b and a <= k < b for a, b in spans))


def tree(lengths, parents):
    def sees(q, k):
        own, segment = part_of(lengths, q), part_of(lengths, k)
        if q >= sum(lengths) or (own == segment and k > q):
            return False
        while own != segment and own >= 0:
            own = parents[own]
        return own == segment

    return sees


def of_ranges(q_ranges, k_ranges, kinds):
    def sees(q, k):
        for (a, b), (c, d), kind in zip(q_ranges, k_ranges, kinds, strict=True):
            kind = {"full": 0, "causal": 1}.get(kind, kind)
            inside = a <= q < b and c <= k < d
            if inside and (not kind & 1 or k - d <= q - b) and (not kind & 2 or k - c >= q - a):
                return True
        return False

    return sees


def blocks(alive, block, tokens, causal=False):
    return lambda q, k: (
        max(q, k) < tokens and alive[q // block][k // block] and (k <= q or not causal)
    )


def of_pairs(seen):
    return lambda q, k: q < len(seen) and k < len(seen[0]) and seen[q][k]


def packed(samples, lengths):
    wanted, at = torch.zeros(sum(lengths) + 1, sum(lengths) + 1, dtype=torch.bool), 0
    for sample, length in zip(samples, lengths, strict=True):
        own = seen_by_slices(sample, length)
        wanted[at : at + length, at : at + length] = own
        at += length
    return lambda q, k: wanted[q, k]


MAKERS = {
    prefix_lm: (numbers, numbers), chunked: (numbers, numbers), block_causal: (lists,),
    documents: (lists,), causal_with_spans: (pairs, numbers), tree: (lists, parents),
    of_ranges: (pairs, pairs, kinds), blocks: (bits, numbers, numbers), of_pairs: (bits,),
    packed: (samples, lists),
}  # fmt: skip


def plain(value):
    """Arguments as Python's own integers and lists."""
    number, entries = as_integer(value), as_list(value)
    if isinstance(value, torch.Tensor) and value.dim() > 1:
        return value.tolist()
    if number is not None:
        return number
    return value if entries is None else [plain(entry) for entry in entries]


@pytest.mark.parametrize("sees", MAKERS, ids=lambda sees: sees.__name__)
def test_a_maker_refuses_in_its_own_words_or_makes_the_mask(sees):
    make = getattr(slices, sees.__name__)

    @settings(examples(60, 2000), deadline=None)
    @given(st.tuples(*MAKERS[sees]))
    def check(args):
        try:
            made = make(*args)
        except BurstError as error:
            assert str(error).startswith(f"{sees.__name__}: ") and "; got " in str(error)
            return
        assert made.dtype == torch.int64 and made.shape[1:] == (5,)
        assert (made[:, 0] < made[:, 1]).all() and (made[:, 2] < made[:, 3]).all()
        wide = max(1, int(made.max()) if len(made) else 1)
        rule, places = sees(*map(plain, args)), range(wide + 1)
        wanted = torch.tensor([[bool(rule(q, k)) for k in places] for q in places])
        assert torch.equal(seen_by_slices(made.tolist(), len(places)), wanted)

    check()


@settings(examples(60, 2000), deadline=None)
@given(lists, parents)
def test_positions_in_a_tree_count_the_other_tokens_that_are_seen(lengths, parents):
    try:
        positions = slices.tree_positions(lengths, parents)
    except BurstError as error:
        assert str(error).startswith("tree_positions: ") and "; got " in str(error)
        return
    sees, places = tree(plain(lengths), plain(parents)), range(len(positions))
    assert positions.tolist() == [sum(sees(q, k) for k in places) - 1 for q in places]


@pytest.mark.parametrize("maker", [slices.of_trie, slices.of_block_mask])
def test_other_makers_refuse_what_they_do_not_describe(maker):
    for value in WRONG:
        with pytest.raises(BurstError, match="; got "):
            maker(value)


GRID, COSTS = BatchGrid(1, 2, 2, 64), Costs(1e-4, 1e-7)
LENGTHS = [5, 9, 3, 30]
HUGE = (*WRONG, 5_000_000_000, -5, np.array([5e9]), np.array([5_000_000_000]), [[1]], [1.0])
BALANCE = {
    "assign": lambda x: assign(x, GRID, COSTS), "fewest": lambda x: assign_fewest(x, GRID, COSTS),
    "multiple": lambda x: assign_fewest(LENGTHS, GRID, COSTS, x),
    "sizes": lambda x: assign(LENGTHS, GRID, COSTS, x),
    "grid": lambda x: assign(LENGTHS, x, COSTS), "costs": lambda x: assign(LENGTHS, GRID, x),
    "limit": lambda x: BatchGrid(1, 2, 2, x), "dp": lambda x: BatchGrid(x, 2, 2, 64),
    "token": lambda x: Costs(x, 1e-7), "transfer": lambda x: Costs(1e-4, 1e-7, 0.0, x),
    "seed": lambda x: Sampler(LENGTHS, GRID, COSTS, 4, seed=x),
    "consumed": lambda x: Sampler(LENGTHS, GRID, COSTS, 4, consumed=x),
    "documents": lambda x: Sampler(LENGTHS, GRID, COSTS, x),
    "data set": lambda x: Sampler(x, GRID, COSTS, 4), "pairs": pairs_of,
    "rank": lambda x: assign(LENGTHS, GRID, COSTS).of_rank(0, x),
}  # fmt: skip
LISTS = ["array([2, 3])", "tensor([1, 2])"]
ACCEPTED = {
    "assign": LISTS, "fewest": LISTS, "data set": ["[3]", *LISTS],
    "pairs": ["[3]", "()", *LISTS], "seed": ["None", "5000000000"], "consumed": ["5000000000"],
    "sizes": ["None", LISTS[1]], "token": ["0.5", "4.0", "np.float32(2.0)"], "transfer": ["{}"],
}  # fmt: skip


@pytest.mark.parametrize("argument", BALANCE)
def test_balance_refuses_what_counts_nothing(argument):
    accepted = []
    for value in HUGE:
        try:
            BALANCE[argument](value)
        except BurstError as error:
            assert "; got " in str(error) and len(str(error)) < 600
        else:
            accepted.append(shown(value) if type(value) is int else repr(value))
    assert accepted == ACCEPTED.get(argument, [])


@settings(examples(40, 1000), deadline=None)
@given(lists, st.one_of(st.none(), lists))
def test_an_assignment_has_each_document_once(lengths, sizes):
    try:
        plan = assign(lengths, GRID, COSTS, sizes)
    except BurstError:
        return
    slots = [one for rank in plan.micro_batches for slot in rank for one in slot]
    assert sorted(at for one in slots for at in one.documents) == list(range(len(plain(lengths))))
    for one in slots:
        own = [plain(lengths)[at] for at in one.documents]
        assert one.tokens == sum(own) <= GRID.token_limit * one.cp
        assert one.area == sum(n * (n + 1) // 2 for n in own)


def test_integers_of_numpy_and_torch_are_those_of_python():
    grid = BatchGrid(np.int64(1), torch.tensor(2), np.uint8(2), 64)
    assert grid == GRID and f"{grid}" == f"{GRID}"
    several = [assign(x, grid, COSTS, np.array([1, 2])) for x in
               (LENGTHS, np.array(LENGTHS, np.uint64), torch.tensor(LENGTHS))]  # fmt: skip
    assert several[0] == several[1] == several[2]
    assert pairs_of(np.array([1 << 31, 70000], dtype=np.uint32)).tolist() == [
        (1 << 30) * ((1 << 31) + 1), 35000 * 70001,
    ]  # fmt: skip
