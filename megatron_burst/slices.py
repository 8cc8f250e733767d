"""Makers of masks for `burst_attention(slices=)`: int64 [slices, 5] on the CPU.

A slice is (first query, end of queries, first key, end of keys, kind); kinds are FULL, CAUSAL (the
last query is level with the last key), INVERSE (the first query is level with the first key) and
BOTH. A maker describes one sample from its position 0 on; `packed` puts several into one.

`tokens` are those of the sample, `lengths` count tokens of its parts, in order. Integers are
Python's, numpy's or torch's; bools and floats are refused. All makers raise BurstError if an
argument is none that they describe.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from megatron_burst.errors import BurstError, Need, require
from megatron_burst.integers import MOST, as_integer, as_list, entries, integer, integers, shown

type Integers = Sequence[int]
type Span = tuple[int, int]
FULL, CAUSAL, INVERSE, BOTH = range(4)
_KINDS = {"full": FULL, "causal": CAUSAL, "inverse_causal": INVERSE, "bi_causal": BOTH}


def prefix_lm(prefix: int, tokens: int) -> Tensor:
    """A prefix of so many tokens that sees itself both ways, and what follows it causally."""
    tokens = integer("prefix_lm", "tokens", tokens, 1)
    prefix = integer("prefix_lm", "prefix", prefix, 0, tokens, "it is the beginning of the sample")
    return _table([(0, prefix, 0, prefix, FULL), (prefix, tokens, 0, tokens, CAUSAL)])


def block_causal(lengths: Sequence[int]) -> Tensor:
    """Blocks (the frames of a video) that see themselves both ways and all blocks before."""
    spans = _spans("block_causal", lengths)
    return _table((start, stop, 0, stop, FULL) for start, stop in spans)


def chunked(tokens: int, chunk: int) -> Tensor:
    """Causal attention inside of chunks of so many tokens (Llama-4's local layers); the last one
    may be shorter."""
    tokens = integer("chunked", "tokens", tokens, 1)
    chunk = integer("chunked", "chunk", chunk, 1, why="the sample is cut into chunks of that many")
    edges = pairwise((*range(0, tokens, chunk), tokens))
    return _table((start, stop, start, stop, CAUSAL) for start, stop in edges)


def causal_with_spans(spans: Iterable[Span], tokens: int) -> Tensor:
    """Causal text with spans (images), (start, stop), ascending, whose queries see all of their
    span as well."""
    who = "causal_with_spans"
    tokens, parts, end = integer(who, "tokens", tokens, 1), [], 0
    for start, stop in (*_ranges(who, "spans", spans), (tokens, tokens)):
        require(who, [(
            end <= start and stop <= tokens,
            f"spans must ascend within the sample's {tokens} tokens, because each is a part of it",
            f"({start}, {stop}) after position {end}", "sort them, and cut overlaps")])  # fmt: skip
        parts += [(end, start, 0, start, CAUSAL), (start, stop, 0, stop, FULL)]
        end = stop
    return _table(parts)


def documents(lengths: Sequence[int]) -> Tensor:
    """Causal documents one after the other."""
    spans = _spans("documents", lengths)
    return _table((start, stop, start, stop, CAUSAL) for start, stop in spans)


def tree(lengths: Integers, parents: Integers, starts: Integers | None = None) -> Tensor:
    """Segments that see themselves causally and all of each ancestor (prefix trees), stored in any
    order. Where children directly follow their parents, `prefix_tree` makes fewer slices.

    Megatron-LM #7387's `TreePackedSeqParams` has all three: `tree_segment_lengths`,
    `tree_segment_parents`, `tree_segment_starts`.

    Args:
        lengths: of the segments.
        parents: of each segment, -1 for none.
        starts: of the segments, which must not overlap; None: one after the other.
    """
    parts = []
    for own, ancestors in _segments("tree", lengths, parents, starts):
        parts += [(*own, *own, CAUSAL), *((*own, *ancestor, FULL) for ancestor in ancestors)]
    return _table(parts)


def tree_positions(lengths: Integers, parents: Integers, starts: Integers | None = None) -> Tensor:
    """Positions of the tokens of a `tree`, as rotary embeddings need them: a token's index in its
    segment, plus the tokens of all ancestors: int64 [tokens], on the CPU; 0 between segments."""
    segments = list(_segments("tree_positions", lengths, parents, starts))
    places = torch.zeros(max((stop for (_, stop), _ in segments), default=0), dtype=torch.int64)
    for (start, stop), ancestors in segments:
        before = sum(end - begin for begin, end in ancestors)
        places[start:stop] = torch.arange(before, before + stop - start)
    return places


def of_trie(trie: Any) -> Tensor:
    """A packed trie of AReaL (`areal/models/tree_attn/tree.py`), by its root: `nodes`, each with
    `start_idx`, its last token's `end_idx` and its `ancestors`; tokens are in the order of
    insertion.

    Raises:
        BurstError: if it is none.
    """
    try:
        number = {id(node): place for place, node in enumerate(trie.nodes)}
        parents = [number[id(node.ancestors[-1])] if node.ancestors else -1 for node in trie.nodes]
        starts = [node.start_idx for node in trie.nodes]
        lengths = [node.end_idx + 1 - node.start_idx for node in trie.nodes]
    except (AttributeError, TypeError, LookupError) as error:
        must = "a trie must have nodes with start_idx, end_idx and ancestors, as AReaL's tries have"
        got = f"{type(error).__name__}: {error}"
        raise BurstError(f"of_trie: {must}; got {got}; pass the root of such a trie") from None
    return tree(lengths, parents, starts)


def of_ranges(q_ranges: Sequence[Span], k_ranges: Sequence[Span],
              kinds: Sequence[int | str]) -> Tensor:  # fmt: skip
    """Ranges (start, stop) of each slice's queries and keys, as MagiAttention takes them and verl's
    prefix trees have them (`PrefixTreeParams`: `q_ranges`, `k_ranges`, `mask_types`); kinds are
    MagiAttention's numbers, which are those here, or its words."""

    def kind_of(word: Any) -> int | None:
        kind = _KINDS.get(word) if isinstance(word, str) else as_integer(word)
        return kind if kind in range(4) else None

    who = "of_ranges"
    must = f"kinds must be a sequence of {', '.join(_KINDS)}, or of 0 to 3, because a slice has one"
    numbers = entries(who, must, kinds, kind_of, "pass a list of kinds")
    queries, keys = _ranges(who, "q_ranges", q_ranges), _ranges(who, "k_ranges", k_ranges)
    require(who, [_alike(q_ranges=queries, k_ranges=keys, kinds=numbers)])
    return _table((*q, *k, kind) for q, k, kind in zip(queries, keys, numbers, strict=True))


def blocks(alive: Tensor, block: int, tokens: int, causal: bool = False) -> Tensor:
    """A block mask: which blocks of the score matrix are computed.

    Args:
        alive: bool [query blocks, key blocks].
        block: rows and columns of a block.
        tokens: of the sample; the last block may be smaller.
        causal: whether a query sees no later keys; `alive` must have none above the diagonal.
    """
    who, tokens = "blocks", integer("blocks", "tokens", tokens, 1)
    block = integer(who, "block", block, 1, why="the sample is cut into blocks of that many tokens")
    number = -(-tokens // block)
    fits = _is_bitmap(alive) and tuple(alive.shape) == (number, number)
    require(who, [
        (fits, f"a block mask must be bool [{number}, {number}], because {tokens} tokens make so "
         f"many blocks of {block}", shown(alive), "pass one entry for each pair of blocks"),
        (not (fits and causal and alive.triu(1).any()),
         "a causal block mask must have no block above the diagonal, because keys there are later "
         "than queries", "some", "leave out causal, or call tril() first"),
    ])  # fmt: skip
    parts = []
    for row, first, last in _runs(alive):
        begin, end = row * block, min((row + 1) * block, tokens)
        diagonal = causal and last == row + 1
        stop = row * block if diagonal else min(last * block, tokens)
        parts.append((begin, end, first * block, stop, FULL))
        if diagonal:
            parts.append((begin, end, begin, end, CAUSAL))
    return _table(parts)


def of_block_mask(mask: Any, causal: bool = False) -> Tensor:
    """A BlockMask of torch's FlexAttention, the same for all sequences of the batch and all heads:
    `create_block_mask(mask_mod, None, None, t, t)`. Its `mask_mod` is asked for the pairs of
    partial blocks only. `causal`: whether later keys are masked as well."""
    require("of_block_mask", _needs_of_block_mask(mask))
    (tokens, _), (block, _) = mask.seq_lengths, mask.BLOCK_SIZE
    listed = torch.zeros(2, -(-tokens // block), mask.kv_indices.shape[-1], dtype=torch.int64)
    for bitmap, counts, columns in (
        (listed[0], mask.full_kv_num_blocks, mask.full_kv_indices),
        (listed[1], mask.kv_num_blocks, mask.kv_indices),
    ):
        if counts is not None:  # a row's columns, of which those behind its count mean nothing
            valid = torch.arange(bitmap.shape[1]) < counts[0, 0].cpu().unsqueeze(1)
            bitmap.scatter_add_(1, columns[0, 0].cpu().long(), valid.long())
    whole, partly = listed.bool()
    parts = [blocks(whole.tril() if causal else whole, block, tokens, causal)]
    patterns: dict[tuple, Tensor] = {}
    places = torch.arange(tokens, device=mask.kv_indices.device).split(block)
    zero = places[0].new_zeros(())
    for row, column in partly.nonzero().tolist():
        q, k = places[row].unsqueeze(1), places[column].unsqueeze(0)
        seen = (mask.mask_mod(zero, zero, q, k) & ((k <= q) | (not causal))).cpu()
        key = seen.shape, seen.numpy().tobytes()
        if key not in patterns:
            patterns[key] = of_pairs(seen)
        parts.append(patterns[key] + torch.tensor([row * block] * 2 + [column * block] * 2 + [0]))
    return torch.cat(parts)


def _needs_of_block_mask(mask: Any) -> Iterator[Need]:
    yield (all(hasattr(mask, name) for name in ("seq_lengths", "kv_num_blocks", "mask_mod")),
           "mask must be a BlockMask of torch's FlexAttention, because its blocks are read",
           shown(mask), "make it with create_block_mask")  # fmt: skip
    (tokens, keys), (block, wide) = mask.seq_lengths, mask.BLOCK_SIZE
    yield ((*mask.shape[:-2], keys, wide) == (1, 1, tokens, block),
           "a BlockMask must be one square mask of square blocks, because all heads share slices",
           f"shape {tuple(mask.shape)}, blocks {mask.BLOCK_SIZE}",
           "pass None for B and H, and one number for BLOCK_SIZE")  # fmt: skip


def of_pairs(seen: Tensor) -> Tensor:
    """Any mask, pair by pair, bool [queries, keys]; for small ones."""
    must = "seen must be a bool tensor [queries, keys], because it says which pairs count"
    require("of_pairs", [(_is_bitmap(seen), must, shown(seen), "pass a tensor with two axes")])
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
    """Samples, by their slices, one after the other, which do not see each other."""
    who, spans = "packed", _spans("packed", lengths, least=1)
    tables = list(samples) if isinstance(samples, Iterable) and getattr(samples, "ndim", 1) else []
    require(who, [_alike(samples=tables, lengths=spans)])
    for at, (sample, (start, stop)) in enumerate(zip(tables, spans, strict=True)):
        must = "each sample must be slices [slices, 5] of its positions, because they are shifted"
        got = f"{shown(sample)} as sample {at} of {stop - start} tokens"
        change = "pass what makers return, with the number of tokens of each sample"
        require(who, [(_are_slices(sample, stop - start), must, got, change)])
    shifts = (torch.tensor([start] * 4 + [0]) for start, _ in spans)
    return torch.cat([sample.long() + by for sample, by in zip(tables, shifts, strict=True)])


def _segments(who: str, lengths: Integers, parents: Integers,
              starts: Integers | None) -> Iterator[tuple[Span, list[Span]]]:  # fmt: skip
    """Where each segment of a tree is, and where its ancestors are."""
    spans = _spans(who, lengths)
    why = "a parent is -1 or another segment"
    parents = integers(who, "parents", parents, -1, len(spans) - 1, why)
    require(who, [_alike(lengths=spans, parents=parents)])
    if starts is not None:
        starts = integers(who, "starts", starts, why="they are positions in the sample")
        require(who, [_alike(lengths=spans, starts=starts)])
        spans = [(at, at + stop - start) for at, (start, stop) in zip(starts, spans, strict=True)]
        must = "segments must not overlap, because each token is in one segment"
        for (start, stop), (after, _) in pairwise(sorted(x for x in spans if x[0] < x[1])):
            got = f"segments from {start} to {stop} and from {after} on"
            require(who, [(stop <= after, must, got, "change starts or lengths")])
    for segment, own in enumerate(spans):
        way, ancestor = {segment: own}, parents[segment]
        while ancestor != -1:
            must = "parents must form a tree: each is -1 or another segment, without a cycle"
            got = f"parent {ancestor} on the way up from segment {segment}"
            require(who, [(ancestor not in way, must, got, "number segments from 0")])
            way[ancestor] = spans[ancestor]
            ancestor = parents[ancestor]
        yield own, list(way.values())[1:]


def _alike(**lists: Sequence) -> Need:
    """That there are equally many of all."""
    counts = {name: len(entries) for name, entries in lists.items()}
    must = f"{', '.join(counts)} must be equally long, because their entries belong together"
    got = ", ".join(f"{count} {name}" for name, count in counts.items())
    return len(set(counts.values())) == 1, must, got, "pass lists of one length"


def _spans(who: str, lengths: Sequence[int], least: int = 0) -> list[Span]:
    """Where parts of these lengths begin and end, one after the other."""
    lengths = integers(who, "lengths", lengths, least, why="they count tokens")
    integer(who, "the sum of lengths", sum(lengths), 1)
    return list(pairwise((0, *accumulate(lengths))))


def _ranges(who: str, name: str, values: Iterable[Any]) -> list[Span]:
    """(start, stop) of each."""

    def pair_of(entry: Any) -> Span | None:
        match [as_integer(x) for x in as_list(entry) or ()]:
            case [int(start), int(stop)] if 0 <= start <= stop <= MOST:
                return start, stop
        return None

    must = f"{name} must be pairs (start, stop) of positions, because each is a part of the sample"
    change = "pass a list of pairs of int whose second is not smaller than the first"
    return entries(who, must, values, pair_of, change, axes=(1, 2))


def _has_data(x: object) -> bool:
    return isinstance(x, Tensor) and x.layout == torch.strided and x.device.type != "meta"


def _is_bitmap(x: object) -> bool:
    return _has_data(x) and x.dtype == torch.bool and x.dim() == 2


def _are_slices(x: object, tokens: int) -> bool:
    """Whether these are slices of positions in a sample."""
    shaped = _has_data(x) and x.dtype in (torch.int32, torch.int64) and x.dim() == 2
    if not shaped or x.shape[1] != 5 or x.device.type != "cpu":
        return False
    starts, stops, kinds = x[:, 0:4:2], x[:, 1:4:2], x[:, 4]
    inside = (starts >= 0) & (starts <= stops) & (stops <= tokens)
    return bool(inside.all() and (kinds >= FULL).all() and (kinds <= BOTH).all())


def _runs(bits: Tensor) -> Iterator[tuple[int, int, int]]:
    """(row, first column, end) of each run of true entries."""
    edges = torch.nn.functional.pad(bits.cpu().int(), (1, 1)).diff(dim=1)
    starts, ends = ((edges == sign).nonzero().tolist() for sign in (1, -1))
    for (row, first), (_, end) in zip(starts, ends, strict=True):
        yield row, first, end


def _table(slices: Iterable[tuple[int, int, int, int, int]]) -> Tensor:
    """Those that are not empty."""
    rows = [row for row in slices if row[0] < row[1] and row[2] < row[3]]
    return torch.tensor(rows, dtype=torch.int64).view(-1, 5)
