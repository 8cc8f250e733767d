"""Full attention by definition, and the rows of it that a rank has."""

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from megatron_burst.schedule.layout import Layout, positions, positions_in_documents
from megatron_burst.schedule.mask import Mask


def full_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, seen: Tensor | None = None,
    sink: Tensor | None = None, softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    """Softmax attention of [b, s, h, d] tensors, differentiable; KV heads are expanded; a sink [h]
    is one more key that all rows see, with a value of 0, and is not capped."""
    v = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2).transpose(1, 2)
    scores = all_scores(q, k, scale, softcap)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    if sink is not None:
        of_rows = sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, of_rows), -1)
        v = torch.nn.functional.pad(v, (0, 0, 0, 1))
        if seen is not None:
            seen = torch.nn.functional.pad(seen, (0, 1), value=True)
    if seen is not None:  # [queries, keys]; queries may see nothing
        scores = scores.masked_fill(~seen, -torch.inf)
        weights = scores.masked_fill(~seen.any(-1, keepdim=True), 0.0).softmax(-1)
        return ((weights * seen) @ v).transpose(1, 2)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def all_scores(q: Tensor, k: Tensor, scale: float, softcap: float = 0.0) -> Tensor:
    """Scores [b, h, queries, keys], scaled and capped; KV heads are expanded."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * scale
    return softcap * (scores / softcap).tanh() if softcap else scores


def largest_of(
    q: Tensor, k: Tensor, scale: float, seen: Tensor, softcap: float = 0.0
) -> Tensor:  # fmt: skip
    """The largest score of each head [h], of keys that some query sees."""
    return all_scores(q, k, scale, softcap).masked_fill(~seen, -torch.inf).amax((0, 2, 3))


def truth_of(
    tensors: Sequence[Tensor], scale: float, causal: bool = False, seen: Tensor | None = None,
    sink: Tensor | None = None, softcap: float = 0.0,
) -> list[Tensor]:  # fmt: skip
    """(out, dq, dk, dv) of `full_attention` in float64, from (q, k, v, dout), on their device.

    One KV head of one sequence at a time: scores of all would take memory that ranks share.
    """
    q, k, v, dout = (x.double() for x in tensors)
    group, found = q.shape[2] // k.shape[2], [torch.empty_like(x) for x in (dout, q, k, v)]
    with torch.device(q.device):
        for batch, head in product(range(q.shape[0]), range(k.shape[2])):
            one, many = slice(head, head + 1), slice(head * group, (head + 1) * group)
            places = [(slice(batch, batch + 1), slice(None), x) for x in (many, many, one, one)]
            leaves = [x[at].requires_grad_() for x, at in zip((q, k, v), places[1:], strict=True)]
            mine = None if sink is None else sink[many].double()
            out = full_attention(*leaves, causal, scale, seen, mine, softcap)
            grads = torch.autograd.grad(out, leaves, dout[places[0]])
            for whole, at, part in zip(found, places, (out.detach(), *grads), strict=True):
                whole[at] = part
    return found


def seen_by(
    mask: Mask, edges: Sequence[int], tokens: int, parents: Sequence[int] = (),
    keys: int | None = None,
) -> Tensor:  # fmt: skip
    """Which keys each query sees, [queries, keys].

    Args:
        mask: by position.
        edges: where documents begin, and where the last one ends; tokens behind it are none.
        tokens: of the sample.
        parents: of documents that are segments of a tree; -1 for none.
        keys: of the sample, if not as many as queries.
    """
    place = torch.arange(tokens)
    away = torch.arange(keys or tokens) - place.unsqueeze(1)
    seen = torch.ones(tokens, keys or tokens, dtype=torch.bool)
    if mask.left is not None:
        seen &= away >= -mask.left
    if mask.right is not None:
        seen &= away <= mask.right
    if mask.documents:
        document = (place.unsqueeze(1) >= torch.tensor(edges)).sum(1)
        inside = (document > 0) & (place < edges[-1])
        related = torch.eye(len(edges) + 1, dtype=torch.bool)  # [of a query, of a key], from 1
        for segment, parent in enumerate(parents, 1):
            related[segment] |= related[parent + 1] & (parent >= 0)
        seen &= related[document.unsqueeze(1), document] & inside & inside.unsqueeze(1)
    return seen


def seen_by_slices(slices: Sequence[Sequence[int]], tokens: int, keys: int | None = None) -> Tensor:
    """Which keys each query sees, [queries, keys], pair by pair; None: as many keys."""
    seen = torch.zeros(tokens, keys or tokens, dtype=torch.int64)
    for q_start, q_stop, k_start, k_stop, kind in slices:
        row = torch.arange(q_start, q_stop).unsqueeze(1)
        key = torch.arange(k_start, k_stop)
        part = torch.ones(len(row), len(key), dtype=torch.bool)
        if kind & 1:  # the last query is level with the last key
            part &= key - (k_stop - 1) <= row - (q_stop - 1)
        if kind & 2:  # the first query is level with the first key
            part &= key - k_start >= row - q_start
        seen[q_start:q_stop, k_start:k_stop] += part
    assert seen.max() <= 1
    return seen.bool()


def rows_of(
    layout: Layout, cp_rank: int, cp_size: int, tokens: int, edges: Sequence[int] = ()
) -> Tensor:
    """Positions that a rank holds, as an index; `edges`: of documents, where these tell."""
    if layout is Layout.DOCUMENTS:
        places = positions_in_documents(edges, cp_rank, cp_size)
        return torch.tensor([p for span in places for p in span], dtype=torch.long)
    return torch.tensor([p for span in positions(layout, cp_rank, cp_size, tokens) for p in span])
