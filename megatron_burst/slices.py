"""Makers of masks for `burst_attention(slices=)`: int64 [slices, 5] on the CPU.

A slice is (first query, end of queries, first key, end of keys, kind); kinds are FULL, CAUSAL (the
last query is level with the last key), INVERSE (the first query is level with the first key) and
BOTH. A maker describes one sample from its position 0 on; `packed` puts several into one.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from megatron_burst.errors import Need, require

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

    Raises:
        BurstError: if `chunk` is no size.
    """
    require(_WHO, [_size("a chunk", chunk)])
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
    order. Where children directly follow their parents, `prefix_tree` makes fewer slices.

    Megatron-LM #7387's `TreePackedSeqParams` has all three: `tree_segment_lengths`,
    `tree_segment_parents`, `tree_segment_starts`.

    Args:
        lengths: of the segments, in tokens.
        parents: of each segment, -1 for none.
        starts: of the segments; None: one after the other.

    Raises:
        BurstError: if the parents are no tree, or not one for each segment.
    """
    found = []
    for own, ancestors in _segments(lengths, parents, starts):
        found += [(*own, *own, CAUSAL), *((*own, *ancestor, FULL) for ancestor in ancestors)]
    return _table(one for one in found if one[0] < one[1] and one[2] < one[3])


def tree_positions(
    lengths: Sequence[int], parents: Sequence[int], starts: Sequence[int] | None = None
) -> Tensor:
    """Positions of a tree's tokens, as rotary embeddings need them: a token's index in its segment,
    plus the tokens of all ancestors.

    Args:
        lengths, parents, starts: as for `tree`.

    Returns:
        int64 [tokens], on the CPU; 0 between segments.

    Raises:
        BurstError: as `tree`.
    """
    segments = list(_segments(lengths, parents, starts))
    found = torch.zeros(max((stop for (_, stop), _ in segments), default=0), dtype=torch.int64)
    for (start, stop), ancestors in segments:
        before = sum(end - begin for begin, end in ancestors)
        found[start:stop] = torch.arange(before, before + stop - start)
    return found


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
        BurstError: if a kind is none of its words, or a range is missing.
    """
    require(_WHO, [_alike(q_ranges=q_ranges, k_ranges=k_ranges, kinds=kinds)])
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
    require(_WHO, [_size("a block", block)])
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
    found = []
    for row, first, last in _runs(alive):
        begin, end = row * block, min((row + 1) * block, tokens)
        diagonal = causal and last == row + 1
        stop = row * block if diagonal else min(last * block, tokens)
        if first * block < stop:
            found.append((begin, end, first * block, stop, FULL))
        if diagonal:
            found.append((begin, end, begin, end, CAUSAL))
    return _table(found)


def of_block_mask(mask: Any, causal: bool = False) -> Tensor:
    """A BlockMask of torch's FlexAttention: `create_block_mask(mask_mod, None, None, t, t)`. Its
    `mask_mod` is asked for the pairs of partial blocks only.

    Args:
        mask: the same for all sequences of the batch and all heads.
        causal: whether later keys are masked as well.

    Raises:
        BurstError: if sequences or heads have masks of their own, or blocks are not square.
    """
    (tokens, keys), (block, wide) = mask.seq_lengths, mask.BLOCK_SIZE
    must = "a BlockMask must be one square mask of square blocks, because all heads share slices"
    fits = (*mask.shape[:-2], keys, wide) == (1, 1, tokens, block)
    got = f"shape {tuple(mask.shape)}, blocks {mask.BLOCK_SIZE}"
    require(_WHO, [(fits, must, got, "pass None for B and H, and one number for BLOCK_SIZE")])
    listed = torch.zeros(2, -(-tokens // block), mask.kv_indices.shape[-1], dtype=torch.int64)
    for bitmap, counts, columns in (
        (listed[0], mask.full_kv_num_blocks, mask.full_kv_indices),
        (listed[1], mask.kv_num_blocks, mask.kv_indices),
    ):
        if counts is not None:  # a row's columns, of which those behind its count mean nothing
            valid = torch.arange(bitmap.shape[1]) < counts[0, 0].cpu().unsqueeze(1)
            bitmap.scatter_add_(1, columns[0, 0].cpu().long(), valid.long())
    whole, partly = listed.bool()
    found = [blocks(whole.tril() if causal else whole, block, tokens, causal)]
    known: dict[tuple, Tensor] = {}
    places = torch.arange(tokens, device=mask.kv_indices.device).split(block)
    zero = places[0].new_zeros(())
    for row, column in partly.nonzero().tolist():
        q, k = places[row].unsqueeze(1), places[column].unsqueeze(0)
        seen = (mask.mask_mod(zero, zero, q, k) & ((k <= q) | (not causal))).cpu()
        pattern = seen.shape, seen.numpy().tobytes()
        if pattern not in known:
            known[pattern] = of_pairs(seen)
        found.append(known[pattern] + torch.tensor([row * block] * 2 + [column * block] * 2 + [0]))
    return torch.cat(found)


def of_pairs(seen: Tensor) -> Tensor:
    """Any mask, pair by pair; for small ones.

    Args:
        seen: bool [queries, keys].
    """
    strips: list[list] = []  # of each: first row, end, first key; keys of its last row; kind
    for row, start, stop in _runs(seen):
        for strip in strips:
            _, end, _, *last, kind = strip
            later, longer = start - last[0], stop - last[1]
            if end == row and {later, longer} <= {0, 1} and kind in (None, 2 * later + longer):
                strip[1], strip[3:] = row + 1, [start, stop, 2 * later + longer]
                break
        else:
            strips.append([row, row + 1, start, start, stop, None])
    return _table((q, end, k, stop, kind or FULL) for q, end, k, _, stop, kind in strips)


def packed(samples: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """Samples one after the other, which do not see each other.

    Args:
        samples: slices of each.
        lengths: of the samples, in tokens.

    Raises:
        BurstError: if there is not one length for each sample.
    """
    require(_WHO, [_alike(samples=samples, lengths=lengths)])
    shifts = (torch.tensor([start] * 4 + [0]) for start, _ in _spans(lengths))
    return torch.cat([sample + shift for sample, shift in zip(samples, shifts, strict=True)])


def _segments(
    lengths: Sequence[int], parents: Sequence[int], starts: Sequence[int] | None
) -> Iterator[tuple[tuple[int, int], list[tuple[int, int]]]]:
    """Where each segment of a tree is, and where its ancestors are."""
    require(_WHO, [_alike(lengths=lengths, parents=parents)])
    spans = _spans(lengths)
    if starts is not None:
        require(_WHO, [_alike(lengths=lengths, starts=starts)])
        spans = [(start, start + n) for start, n in zip(starts, lengths, strict=True)]
    for segment, own in enumerate(spans):
        way, ancestor = {segment: own}, parents[segment]
        while ancestor != -1:
            is_new = 0 <= ancestor < len(spans) and ancestor not in way
            must = "parents must be those of a tree: -1, or another segment, without a cycle"
            got = f"parent {ancestor} on the way up from segment {segment}"
            require(_WHO, [(is_new, must, got, "number segments from 0")])
            way[ancestor] = spans[ancestor]
            ancestor = parents[ancestor]
        yield own, list(way.values())[1:]


def _alike(**given: Sequence) -> Need:
    """That there are equally many of all."""
    counts = {name: len(some) for name, some in given.items()}
    must = f"{', '.join(counts)} must be equally many, because they belong together one by one"
    got = ", ".join(f"{count} {name}" for name, count in counts.items())
    return len(set(counts.values())) == 1, must, got, "pass one of each"


def _size(what: str, tokens: int) -> Need:
    must = f"{what} must have at least 1 token, because the sample is cut into them"
    return tokens >= 1, must, tokens, "pass its tokens"


def _runs(bits: Tensor) -> Iterator[tuple[int, int, int]]:
    """(row, first column, end) of each run of true entries."""
    edges = torch.nn.functional.pad(bits.cpu().int(), (1, 1)).diff(dim=1)
    starts, ends = ((edges == sign).nonzero().tolist() for sign in (1, -1))
    for (row, first), (_, end) in zip(starts, ends, strict=True):
        yield row, first, end


def _spans(lengths: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise((0, *accumulate(lengths))))


def _table(slices: Iterable[tuple[int, int, int, int, int]]) -> Tensor:
    return torch.tensor(list(slices), dtype=torch.int64).view(-1, 5)
