"""Labels of a language model whose tokens are sharded: the next token of each row's document."""

from collections.abc import Iterator
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.arguments import is_dense, short_repr
from megatron_burst.comm.alone import Ranks, group_or_default
from megatron_burst.comm.group import state_of
from megatron_burst.errors import Need, unmet_needs
from megatron_burst.integers import as_integer
from megatron_burst.loss.checks import digest
from megatron_burst.masks.documents import Documents
from megatron_burst.masks.sample import Sample, ends_in_one_rank, holds_whole
from megatron_burst.shards import LayoutName, Shards, Sizes, shards_of

WHO = "next tokens"
_NO_CLASS = torch.iinfo(torch.int64).max  # not in any vocabulary


def next_tokens(tokens: Tensor, *, group: Ranks = None, layout: LayoutName = "zigzag",
                cu_seqlens: Tensor | None = None, cu_seqlens_padded: Tensor | None = None,
                whole_sample: bool = False, ignore_index: int = -100,
                dim: int = 0) -> Tensor:  # fmt: skip
    """The next token of each row in its document: labels for the loss and for log-probabilities.

    At the end of a shard the next token is on another rank. One all-gather of token ids, 8 bytes
    per token of the sample, fetches it. Rows without a next token get `ignore_index`: the last row
    of each document, padding, and rows after the last document.

    Args:
        tokens: [t] or [s, b] integers, not shifted: this rank's rows, in the order of its hidden
            states; with sequence parallelism, the rows of all tensor-parallel ranks.
        group: the context-parallel group, as for `shard`.
        layout: how it is sharded, as in `burst_attention`.
        cu_seqlens: int32 or int64 [documents + 1], on the CPU or on the tokens' device: 0, then the
            end of each document of one packed sample; None: each of b sequences is one document.
        cu_seqlens_padded: the same, including each document's padding.
        whole_sample: whether `tokens` is the whole sample, in order, from which this rank's rows
            are taken; then no ids are sent.
        ignore_index: label of rows without a next token.
        dim: the axis of the sequence; 1 for tokens [b, s].

    Returns:
        labels of this rank's rows, int64, with the axes of `tokens`.

    Raises:
        BurstError: on all ranks of the group, before anything is computed, also after a `shard` in
            another layout, or of a packed sample without its boundaries. On a GPU nothing
            synchronizes: boundaries on a GPU are not checked, because attention over the same
            sample checks them. If they differ between ranks, all labels are out of range, so
            losses become NaN.
    """
    group, boundaries = group_or_default(group, WHO), (cu_seqlens, cu_seqlens_padded)
    return labels_of(shards_of(WHO, group, layout, boundaries, whole_sample), tokens, dim,
                     ignore_index)  # fmt: skip


def labels_of(shards: Shards, tokens: Tensor, dim: int, ignore_index: int = -100) -> Tensor:
    """As `next_tokens`, of a sample that is sharded so."""

    def sizes() -> Sizes:
        sequences = 1 if tokens.dim() == 1 else tokens.shape[1 - dim]
        got = f"tokens {tuple(tokens.shape)} and {shards.size} ranks"
        return tokens.shape[dim], sequences, got, tokens.device

    whole = (as_integer(ignore_index) is not None, "ignore_index must be an integer, because it is "
             "a label", repr(ignore_index), "pass an int")  # fmt: skip
    terms = {"whole_sample": str(shards.whole), "dim": str(dim)}
    if is_dense(tokens):
        terms["tokens"] = f"{tokens.dim()} axes {tokens.dtype} {tokens.device.type}"
    follows = shards.follows(shards.sample is not None)
    needs = chain([whole], _of_ids(tokens, dim), follows, _of_rows(shards, tokens, dim))
    documents = shards.opened(unmet_needs(WHO, needs), sizes, terms)
    return _labels(shards, tokens.movedim(dim, 0), documents, ignore_index).movedim(0, dim)


def _of_ids(tokens: Tensor, dim: int) -> Iterator[Need]:
    yield (is_dense(tokens),
           "tokens must be a dense tensor with data, because nothing is converted silently",
           short_repr(tokens), "pass a dense tensor, or call to_local() on a DTensor")  # fmt: skip
    yield (tokens.dim() in (1, 2) and not tokens.dtype.is_floating_point
           and tokens.dtype != torch.bool,
           "tokens must be integers [t] or [s, b], because they name classes",
           f"{tokens.dtype} of shape {tuple(tokens.shape)}", "pass token ids")  # fmt: skip
    yield (type(dim) is int and (dim == 0 or (dim == 1 and tokens.dim() == 2)),
           "dim must be the axis of the sequence, because the next token is along that axis",
           f"dim={dim!r} and shape {tuple(tokens.shape)}",
           "pass 0 for [t] and [s, b], 1 for [b, s]")  # fmt: skip


def _of_rows(shards: Shards, tokens: Tensor, dim: int) -> Iterator[Need]:
    """Not if the sample has as many, by the group's last `shard` or by boundaries on the CPU."""
    if shards.group is None or shards.whole:
        return
    rows, last = tokens.shape[dim], state_of(shards.group).sharded
    sample = shards.sample
    bounds = [] if sample is None else [sample.padded, sample.cu_seqlens]
    ends = [int(x.max()) for x in bounds if holds_whole(x) and x.numel() and not x.is_cuda][:1]
    whole = last is not None and last[2] == rows
    whole |= ends == [rows] and ends_in_one_rank(rows, rows * shards.size, shards.size)
    yield (not whole, "without whole_sample=True, tokens must be this rank's rows, because the "
           "rows of all ranks are gathered", f"the {rows} tokens of the whole sample",
           "pass whole_sample=True, or shard them")  # fmt: skip


def _labels(shards: Shards, tokens: Tensor, documents: Documents | None, ignored: int) -> Tensor:
    """Labels of this rank's rows, for a valid call."""
    rows, ids, same = shards.rows(len(tokens)), tokens.long(), None
    if len(ids) == 0:
        return ids
    order = shards.order(rows, documents, ids.device)
    if shards.group is not None and not shards.whole:
        gathered, same = _gather(ids, shards)
        ids = torch.empty_like(gathered).index_copy_(0, order, gathered)
    if documents is None:
        followed = torch.arange(len(ids), device=ids.device) < len(ids) - 1
    else:
        followed = documents.followed
    followed = followed.view(-1, *(1,) * (ids.dim() - 1))
    labels = torch.where(followed, ids.roll(-1, 0), ignored)
    labels = labels[order[shards.rank * rows : (shards.rank + 1) * rows]]
    return labels if same is None else torch.where(same, labels, _NO_CLASS)


def _gather(ids: Tensor, shards: Shards) -> tuple[Tensor, Tensor]:
    """(ids of all ranks, concatenated; whether all have the same boundaries)."""
    failure, size = None, 1 + ids.numel()
    try:
        own = torch.cat((_digest(shards.sample, ids).view(1), ids.flatten()))
    except Exception as error:  # other ranks wait for this one; what it sends is no digest
        failure, own = error, torch.full((size,), _NO_CLASS, device=ids.device)
    assert shards.group is not None
    gathered = own.new_empty(shards.size, size)
    dist.all_gather_into_tensor(gathered.view(-1), own, shards.group)
    if failure is not None:
        raise failure
    return gathered[:, 1:].reshape(-1, *ids.shape[1:]), (gathered[:, 0] == own[0]).all()


def _digest(sample: Sample | None, like: Tensor) -> Tensor:
    """A hash of the boundaries, on the device."""
    if sample is None:
        return like.new_zeros(())
    bounds = (x for x in (sample.cu_seqlens, sample.padded) if x is not None)
    return digest(x.to(like.device, torch.int64, non_blocking=True) for x in bounds)
