"""Makers of slices against masks written down pair by pair."""

from itertools import accumulate
from random import Random
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from megatron_burst import slices
from megatron_burst.errors import BurstError
from tests.oracle import seen_by_slices

T = 24


def pairs(sees):
    """[T, T] of a predicate of (query, key)."""
    return torch.tensor([[bool(sees(q, k)) for k in range(T)] for q in range(T)])


def of(lengths):
    """The number of the part that each position is in."""
    return [part for part, length in enumerate(lengths) for _ in range(length)]


FRAMES, TEXT = [3, 8, 1, 12], [(4, 9), (9, 12), (20, 24)]
FRAME = of(FRAMES)
IMAGE = [next((n for n, (a, b) in enumerate(TEXT) if a <= at < b), None) for at in range(T)]
LENGTHS, PARENTS = [4, 3, 5, 2, 6, 4], [-1, 4, 0, 2, 0, -1]
SEGMENT = of(LENGTHS)


def ancestors(segment):
    found = []
    while segment != -1:
        found.append(segment)
        segment = PARENTS[segment]
    return found


CASES = {
    "prefix": (slices.prefix_lm(7, T), lambda q, k: k <= q or max(q, k) < 7),
    "all prefix": (slices.prefix_lm(T, T), lambda q, k: True),
    "no prefix": (slices.prefix_lm(0, T), lambda q, k: k <= q),
    "frames": (slices.block_causal(FRAMES), lambda q, k: FRAME[k] <= FRAME[q]),
    "chunks": (slices.chunked(T, 7), lambda q, k: k <= q and k // 7 == q // 7),
    "images": (
        slices.causal_with_spans(TEXT, T),
        lambda q, k: k <= q or (IMAGE[q] is not None and IMAGE[q] == IMAGE[k]),
    ),
    "documents": (slices.documents(FRAMES), lambda q, k: k <= q and FRAME[q] == FRAME[k]),
    "tree": (
        slices.tree(LENGTHS, PARENTS),
        lambda q, k: SEGMENT[k] in ancestors(SEGMENT[q]) and (SEGMENT[q] != SEGMENT[k] or k <= q),
    ),
    "packed": (
        slices.packed([slices.prefix_lm(4, 10), slices.chunked(14, 5)], [10, 14]),
        lambda q, k: (
            (k <= q and (q < 10 or ((q - 10) // 5 == (k - 10) // 5 and k >= 10))) or max(q, k) < 4
        ),
    ),
}


@pytest.mark.parametrize("made, sees", CASES.values(), ids=CASES)
def test_what_is_made_is_what_is_said(made, sees):
    assert made.dtype == torch.int64
    assert torch.equal(seen_by_slices(made.tolist(), T), pairs(sees))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [4, 5])
def test_block_masks(block, causal):
    random, number = Random(block), -(-T // block)
    for _ in range(20):
        alive = torch.tensor(
            [[random.random() < 0.5 for _ in range(number)] for _ in range(number)]
        )
        alive = alive.tril() if causal else alive
        made = slices.blocks(alive, block, T, causal)
        wanted = pairs(lambda q, k, a=alive: a[q // block, k // block] and (k <= q or not causal))
        assert torch.equal(seen_by_slices(made.tolist(), T), wanted)


SEEN = torch.rand(T, T, generator=torch.Generator().manual_seed(3)) < 0.5
MODS = {
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q - k).abs() <= 3,
    "documents": lambda b, h, q, k: torch.tensor(FRAME)[q] == torch.tensor(FRAME)[k],
    "prefix": lambda b, h, q, k: (k <= q) | (k < 7),
    "columns": lambda b, h, q, k: k % 3 < 2,
    "random": lambda b, h, q, k: SEEN[q, k],
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [4, 7, 32])
@pytest.mark.parametrize("mod", MODS)
def test_block_masks_of_flex_attention(mod, block, causal):
    """Blocks that are whole, partial or empty, and last ones that are smaller."""
    wanted = create_mask(MODS[mod], 1, 1, T, T, device="cpu")[0, 0]
    wanted = wanted.tril() if causal else wanted
    mask = create_block_mask(MODS[mod], None, None, T, T, device="cpu", BLOCK_SIZE=block)
    made = slices.of_block_mask(mask, causal)
    assert torch.equal(seen_by_slices(made.tolist(), T), wanted)
    assert torch.equal(seen_by_slices(slices.of_pairs(wanted).tolist(), T), wanted)


def test_a_block_mask_takes_few_slices():
    """Each row of blocks: those before the diagonal, and the diagonal one."""
    mask = create_block_mask(MODS["causal"], None, None, 64, 64, device="cpu", BLOCK_SIZE=8)
    assert len(slices.of_block_mask(mask)) == 7 + 8
    bare = BlockMask.from_kv_blocks(
        mask.kv_num_blocks, mask.kv_indices, BLOCK_SIZE=8, mask_mod=MODS["causal"],
        seq_lengths=(64, 64),
    )  # fmt: skip
    made = slices.of_block_mask(bare)  # the diagonal alone
    assert made.tolist() == [[at, at + 8, at, at + 8, 1] for at in range(0, 64, 8)]


def test_many_documents_are_one_slice_each():
    assert len(slices.documents([1] * T)) == T == list(accumulate([1] * T))[-1]


def in_paths(paths, tokens):
    """[tokens, tokens]: each path sees itself causally."""
    seen = torch.zeros(tokens, tokens, dtype=torch.bool)
    for path in paths:
        for place, query in enumerate(path):
            seen[query, path[: place + 1]] = True
    return seen


def test_trees_of_others():
    """Megatron-LM #7387's, with the segments of that draft's own test: an inner branch, its child,
    a sibling. AReaL's: a third sequence continues the first one behind the second. verl's
    rectangles."""
    made = slices.tree((48, 32, 16, 32), (-1, 0, 1, 0), (0, 48, 80, 96))
    paths = [[*range(96)], [*range(48), *range(96, 128)]]
    assert torch.equal(seen_by_slices(made.tolist(), 128), in_paths(paths, 128))

    root = SimpleNamespace(start_idx=0, end_idx=2, ancestors=[])
    first = SimpleNamespace(start_idx=3, end_idx=5, ancestors=[root])
    third = SimpleNamespace(start_idx=8, end_idx=9, ancestors=[root, first])
    second = SimpleNamespace(start_idx=6, end_idx=7, ancestors=[root])
    made = slices.of_trie(SimpleNamespace(nodes=[root, first, third, second]))
    paths = [[0, 1, 2, 3, 4, 5, 8, 9], [0, 1, 2, 6, 7]]
    assert torch.equal(seen_by_slices(made.tolist(), 10), in_paths(paths, 10))

    ranges = [(0, 4), (4, 6), (4, 6), (6, 9), (6, 9)], [(0, 4), (0, 4), (4, 6), (0, 4), (6, 9)]
    made = slices.of_ranges(*ranges, ["causal", "full", "causal", "full", "causal"])
    paths = [[*range(6)], [*range(4), *range(6, 9)]]
    assert torch.equal(seen_by_slices(made.tolist(), 9), in_paths(paths, 9))
    assert slices.of_ranges([(0, 2)], [(1, 3)], [3]).tolist() == [[0, 2, 1, 3, 3]]


SAMPLES = ([7, 1, 2, 0], [7, 1, 2, 5, 5, 1], [7, 1], [7, 3, 3], [7, 1, 2, 5, 4])
# what verl's draft #6689 (7aeb42a: build_tree_dynamic, build_layout_from_tree_node) packs of them:
# nodes breadth first, each seen by itself and all below; tokens and positions
VERLS_NODES = ((0, 1), (1, 2), (2, 4), (4, 5), (5, 6), (6, 7), (7, 8), (8, 10))
VERLS_BELOW = ((1, 2, 3, 4, 5, 6, 7), (3, 4, 5, 6, 7), (), (4, 5, 6, 7), (), (6, 7), (), ())
VERLS = (7, 1, 3, 3, 2, 0, 5, 4, 5, 1), (0, 1, 1, 2, 2, 3, 3, 4, 4, 5)
# and AReaL (4aef98d, areal/models/tree_attn/tree.py: _compress_trie, trie_to_parent_array): first
# and last token and ancestors of each node, in the order of its list; each token's parent
AREALS_NODES = ((0, 0, ()), (1, 1, (0,)), (2, 2, (0, 1)), (3, 3, (0, 1, 2)), (4, 4, (0, 1, 2)),
                (9, 9, (0, 1, 2, 4)), (5, 6, (0, 1, 2, 4)), (7, 8, (0,)))  # fmt: skip
AREALS_PARENTS = (-1, 0, 1, 2, 2, 4, 5, 0, 7, 4)


def test_trees_that_others_packed():
    """Facts of what their code made; tests/integrations runs the code itself."""
    ranges = []
    for node, below in zip(VERLS_NODES, VERLS_BELOW, strict=True):
        ranges.append((node, node, "causal"))
        ranges += [(VERLS_NODES[n], node, "full") for n in below]
    made = slices.of_ranges(*zip(*ranges, strict=True))
    tokens, places = map(torch.tensor, VERLS)
    seen = seen_by_slices(made.tolist(), len(tokens))
    keys = [row.nonzero().flatten() for row in seen]
    spelt = [tuple(tokens[some[places[some].argsort()]].tolist()) for some in keys]
    assert sorted(spelt) == sorted({tuple(s[:n]) for s in SAMPLES for n in range(1, len(s) + 1)})
    assert places.tolist() == [len(some) - 1 for some in spelt]

    nodes: list[SimpleNamespace] = []
    for start, end, _ in AREALS_NODES:
        nodes.append(SimpleNamespace(start_idx=start, end_idx=end))
    for node, (*_, above) in zip(nodes, AREALS_NODES, strict=True):
        node.ancestors = [nodes[n] for n in above]
    made = slices.of_trie(SimpleNamespace(nodes=nodes))
    wanted = torch.eye(len(AREALS_PARENTS), dtype=torch.bool)
    for token, parent in enumerate(AREALS_PARENTS):  # parents come first
        wanted[token] |= wanted[parent] & (parent >= 0)
    assert torch.equal(seen_by_slices(made.tolist(), len(wanted)), wanted)


@pytest.mark.parametrize(
    "make, words",
    [
        (
            lambda: slices.of_ranges([(0, 3)], [(0, 3)], ["diagonal"]),
            "full, causal.*got 'diagonal'",
        ),
        (lambda: slices.tree([3, 3], [1, 0]), "without a cycle; got parent 0 on the way up"),
        (lambda: slices.tree([3, 3], [-1, 2]), "from -1 to 1, .*got 2 at index 1"),
        (
            lambda: slices.blocks(torch.ones(3, 3).bool(), 4, T),
            r"bool \[6, 6\].*got shape \(3, 3\) of torch.bool",
        ),
        (lambda: slices.blocks(torch.ones(6, 6), 4, T), "of torch.float32"),
        (
            lambda: slices.of_block_mask(
                create_block_mask(MODS["causal"], 2, None, T, T, device="cpu")
            ),
            r"square mask of.*got shape \(2, 1, 24, 24\), blocks \(128, 128\); pass None for B",
        ),
        (
            lambda: slices.of_block_mask(
                create_block_mask(MODS["causal"], None, None, T, 2 * T, device="cpu")
            ),
            r"got shape \(1, 1, 24, 48\)",
        ),
        (lambda: slices.blocks(torch.ones(6, 6).bool(), 4, T, True), "no block above the diagonal"),
        (
            lambda: slices.blocks(torch.ones(6, 6).bool(), 0, T),
            "blocks: block must be an integer from 1 .*got 0",
        ),
        (lambda: slices.chunked(T, 0), "chunked: chunk must be an integer from 1 .*got 0; pass"),
        (lambda: slices.tree([3, 3], [-1]), "lengths, parents must be equally long.*1 par"),
        (lambda: slices.tree([3, 3], [-1, 0, 0]), "together; got 2 lengths, 3 parents; pass"),
        (lambda: slices.tree([3, 3], [-1, 0], [0]), "lengths, starts must be equally long"),
        (lambda: slices.packed([slices.chunked(4, 2)], [4, 4]), "samples, lengths must be"),
        (lambda: slices.of_ranges([(0, 3)], [(0, 3)], []), "q_ranges, k_ranges, kinds must"),
    ],
)
def test_wrong_masks_are_one_sentence(make, words):
    with pytest.raises(BurstError, match=words):
        make()
