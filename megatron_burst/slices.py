"""Makers of masks for `burst_attention(slices=)`: int64 [slices, 5] on the CPU.

A slice is (first query, end of queries, first key, end of keys, kind); kinds are FULL, CAUSAL (the
last query is level with the last key), INVERSE (the first query is level with the first key) and
BOTH. A maker describes one sample from its position 0 on; `packed` puts several into one.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from megatron_burst.errors import require

FULL, CAUSAL, INVERSE, BOTH = range(4)
_KINDS = {"full": FULL, "causal": CAUSAL, "inverse_causal": INVERSE, "bi_causal": BOTH}
_WHO = "burst attention"


def prefix_lm(prefix: int, tokens: int) -> Tensor:
    """A prefix that sees itself both ways, and what follows it causally.

    Args:
        prefix: its tokens.
        tokens: of the sample.
    """
    parts = [(0, prefix, 0, prefix, FULL), (prefix, tokens, 0, tokens, CAUSAL)]
    return _table(part for part in parts if part[0] < part[1])


def block_causal(lengths: Sequence[int]) -> Tensor:
    """Blocks (the frames of a video) that see themselves both ways and all blocks before.

    Args:
        lengths: of the blocks, in tokens.
    """
    return _table((start, stop, 0, stop, FULL) for start, stop in _spans(lengths))


def chunked(tokens: int, chunk: int) -> Tensor:
    """Causal attention inside of chunks (Llama-4's local layers).

    Args:
        tokens: of the sample.
        chunk: tokens of a chunk; the last one may be shorter.
    """
    starts = range(0, tokens, chunk)
    ends = (min(start + chunk, tokens) for start in starts)
    return _table((s, e, s, e, CAUSAL) for s, e in zip(starts, ends, strict=True))


def causal_with_spans(spans: Iterable[tuple[int, int]], tokens: int) -> Tensor:
    """Causal text with spans (images) whose queries see all of their span as well.

    Args:
        spans: (start, stop) of each, ascending.
        tokens: of the sample.
    """
    found, end = [], 0
    for start, stop in (*spans, (tokens, tokens)):
        found += [(end, start, 0, start, CAUSAL), (start, stop, 0, stop, FULL)]
        end = stop
    return _table(one for one in found if one[0] < one[1])


def documents(lengths: Sequence[int]) -> Tensor:
    """Causal documents one after the other.

    Args:
        lengths: of the documents, in tokens.
    """
    return _table((start, stop, start, stop, CAUSAL) for start, stop in _spans(lengths))


def tree(
    lengths: Sequence[int], parents: Sequence[int], starts: Sequence[int] | None = None
) -> Tensor:
    """Segments that see themselves causally and all of each ancestor (prefix trees), stored in any
    order. Where children directly follow their parents, `prefix_tree` is faster.

    Megatron-LM #7387's `TreePackedSeqParams` has all three: `tree_segment_lengths`,
    `tree_segment_parents`, `tree_segment_starts`.

    Args:
        lengths: of the segments, in tokens.
        parents: of each segment, -1 for none.
        starts: of the segments; None: one after the other.

    Raises:
        BurstError: if the parents are no tree.
    """
    spans, found = _spans(lengths), []
    if starts is not None:
        spans = [(start, start + n) for start, n in zip(starts, lengths, strict=True)]
    for segment, own in enumerate(spans):
        found.append((*own, *own, CAUSAL))
        seen, ancestor = {segment}, parents[segment]
        while ancestor != -1:
            is_new = 0 <= ancestor < len(spans) and ancestor not in seen
            must = "parents must be those of a tree: -1, or another segment, without a cycle"
            got = f"parent {ancestor} on the way up from segment {segment}"
            require(_WHO, [(is_new, must, got, "number segments from 0")])
            found.append((*own, *spans[ancestor], FULL))
            seen.add(ancestor)
            ancestor = parents[ancestor]
    return _table(one for one in found if one[0] < one[1] and one[2] < one[3])


def of_trie(trie: Any) -> Tensor:
    """A packed trie of AReaL (`areal/models/tree_attn/tree.py`): `nodes`, each with `start_idx`,
    its last token's `end_idx` and its `ancestors`; tokens are in the order of insertion.

    Args:
        trie: its root.
    """
    number = {id(node): place for place, node in enumerate(trie.nodes)}
    parents = [number[id(node.ancestors[-1])] if node.ancestors else -1 for node in trie.nodes]
    starts = [node.start_idx for node in trie.nodes]
    return tree([node.end_idx + 1 - node.start_idx for node in trie.nodes], parents, starts)


def of_ranges(
    q_ranges: Sequence[tuple[int, int]], k_ranges: Sequence[tuple[int, int]],
    kinds: Sequence[int | str],
) -> Tensor:  # fmt: skip
    """Ranges of queries and keys, as MagiAttention takes them and verl's prefix trees have them
    (`PrefixTreeParams`: `q_ranges`, `k_ranges`, `mask_types`).

    Args:
        q_ranges: (start, stop) of each slice's queries.
        k_ranges: the same of its keys.
        kinds: MagiAttention's numbers, which are those here; or its words.

    Raises:
        BurstError: if a kind is none of its words.
    """
    named = [kind if isinstance(kind, int) else _KINDS.get(kind) for kind in kinds]
    wrong = [kind for kind, number in zip(kinds, named, strict=True) if number is None]
    must = f"the kind of a slice must be one of {', '.join(_KINDS)}, because these are its words"
    require(_WHO, [(not wrong, must, ", ".join(map(str, wrong[:1])), "pass one of them")])
    return _table(
        (*q, *k, kind) for q, k, kind in zip(q_ranges, k_ranges, named, strict=True)
    )  # fmt: skip


def blocks(alive: Tensor, block: int, tokens: int, causal: bool = False) -> Tensor:
    """A block mask: which blocks of the score matrix are computed.

    Args:
        alive: bool [query blocks, key blocks].
        block: rows and columns of a block.
        tokens: of the sample; the last block may be smaller.
        causal: whether a query sees no later keys; `alive` must have none above the diagonal.

    Raises:
        BurstError: if the bitmap is not that of the sample.
    """
    number = -(-tokens // block)
    fits = alive.dtype == torch.bool and tuple(alive.shape) == (number, number)
    must = f"a block mask must be bool [{number}, {number}], because {tokens} tokens are so many "
    must += f"blocks of {block}"
    got, change = f"{alive.dtype} {tuple(alive.shape)}", "pass one entry for each pair of blocks"
    later = bool(alive.triu(1).any()) if fits and causal else False
    require(_WHO, [
        (fits, must, got, change),
        (not later, "a causal block mask must have no block above the diagonal, because its keys "
         "are later", "some", "leave out causal, or call tril() first"),
    ])  # fmt: skip
    edges = torch.nn.functional.pad(alive.cpu().int(), (1, 1)).diff(dim=1)
    starts, ends = ((edges == sign).nonzero().tolist() for sign in (1, -1))
    found = []
    for (row, first), (_, last) in zip(starts, ends, strict=True):
        begin, end = row * block, min((row + 1) * block, tokens)
        diagonal = causal and last == row + 1
        stop = row * block if diagonal else min(last * block, tokens)
        if first * block < stop:
            found.append((begin, end, first * block, stop, FULL))
        if diagonal:
            found.append((begin, end, begin, end, CAUSAL))
    return _table(found)


def packed(samples: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """Samples one after the other, which do not see each other.

    Args:
        samples: slices of each.
        lengths: of the samples, in tokens.
    """
    shifts = (torch.tensor([start] * 4 + [0]) for start, _ in _spans(lengths))
    return torch.cat([sample + shift for sample, shift in zip(samples, shifts, strict=True)])


def _spans(lengths: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise((0, *accumulate(lengths))))


def _table(slices: Iterable[tuple[int, int, int, int, int]]) -> Tensor:
    return torch.tensor(list(slices), dtype=torch.int64).view(-1, 5)
