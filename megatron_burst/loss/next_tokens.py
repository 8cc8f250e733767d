"""Labels of a language model whose tokens are sharded: the next token of each row's document."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from numbers import Integral
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.call import brief, is_dense
from megatron_burst.comm.group import announce
from megatron_burst.engine.documents import Documents
from megatron_burst.engine.sample import Sample
from megatron_burst.errors import BurstError, Need, unmet
from megatron_burst.loss.checks import digest
from megatron_burst.schedule.layout import Layout, positions

WHO = "next tokens"
_NO_CLASS = torch.iinfo(torch.int64).max  # not in any vocabulary


def next_tokens(
    tokens: Tensor, *, cp_group: dist.ProcessGroup | None = None,
    layout: Literal["zigzag", "contiguous", "striped", "zigzag-documents"] = "zigzag",
    cu_seqlens: Tensor | None = None, cu_seqlens_padded: Tensor | None = None,
    whole_sample: bool = False, ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """The next token of each row in its document: labels for the loss and for log-probabilities.

    At the end of a shard the next token is on another rank. One all-gather of token ids, 8 bytes
    per token of the sample, fetches it. Rows without a next token get `ignore_index`: the last row
    of each document, padding, and rows after the last document.

    Args:
        tokens: [t] or [s, b] integers, not shifted: this rank's rows, in the order of its hidden
            states; with sequence parallelism, the rows of all tensor-parallel ranks.
        cp_group: ranks that the sample is sharded over; None: this rank has all of it.
        layout: how it is sharded, as in `burst_attention`.
        cu_seqlens: int32 or int64 [documents + 1], on the CPU or on the tokens' device: 0, then the
            end of each document of one packed sample; None: each of b sequences is one document.
        cu_seqlens_padded: the same, including each document's padding.
        whole_sample: whether `tokens` is the whole sample, in order; then no ids are sent.
        ignore_index: label of rows without a next token.

    Returns:
        labels of this rank's rows, int64 [t] or [s, b].

    Raises:
        BurstError: on all ranks of the group, before anything is computed. On a GPU nothing
            synchronizes: boundaries on a GPU are not checked, because attention over the same
            sample checks them. If they differ between ranks, all labels are out of range, so
            losses become NaN.
    """
    group = None if cp_group is None or cp_group.size() == 1 else cp_group
    sample = None if cu_seqlens is None else Sample(cu_seqlens, cu_seqlens_padded, None)
    shards = _Shards(str(layout), group, whole_sample)
    alone = (
        cu_seqlens_padded is None or cu_seqlens is not None,
        "cu_seqlens must come with cu_seqlens_padded, because it says where documents end",
        "no cu_seqlens",
        "pass it, or leave out cu_seqlens_padded",
    )
    whole = (
        isinstance(ignore_index, Integral),
        "ignore_index must be a whole number, because it is a label",
        repr(ignore_index), "pass an int",
    )  # fmt: skip
    problem = unmet(WHO, chain([alone, whole], shards.needs(tokens, sample)))
    documents = None
    if sample is not None and not problem:
        try:
            documents = shards.documents(tokens, sample)
        except BurstError as error:
            problem = str(error)
    if group is not None:
        terms = {} if problem else shards.terms(tokens, documents)
        data = {} if problem else shards.data(tokens, documents)
        announce(group, terms, WHO, problem, data=data)
    if problem:
        raise BurstError(problem)
    return _labels(shards, tokens, sample, documents, ignore_index)


@dataclass(frozen=True, slots=True)
class _Shards:
    """How the tokens of a call are sharded."""

    layout: str
    group: dist.ProcessGroup | None  # None if one rank has all
    whole_sample: bool

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    def rows(self, tokens: Tensor) -> int:
        """Rows per rank."""
        return len(tokens) // (self.size if self.whole_sample else 1)

    def needs(self, tokens: Tensor, sample: Sample | None) -> Iterator[Need]:
        """Checks beyond those that `Documents` makes on boundaries."""
        yield (
            is_dense(tokens), "tokens must be a dense tensor with data, because nothing is "
            "converted silently", brief(tokens), "make it one, of a DTensor to_local()",
        )  # fmt: skip
        shape = f"tokens {tuple(tokens.shape)} and {self.size} ranks"
        yield (
            self.layout in tuple(Layout),
            f"layout must be one of {', '.join(Layout)}, because it says where the next token is",
            repr(self.layout), "pass the one in which the tokens are sharded",
        )  # fmt: skip
        yield (
            tokens.dim() in (1, 2) and not tokens.dtype.is_floating_point
            and tokens.dtype != torch.bool,
            "tokens must be integers [t] or [s, b], because they name classes",
            f"{tokens.dtype} of shape {tuple(tokens.shape)}", "pass ids, the sequence first",
        )  # fmt: skip
        yield (
            sample is None or tokens.dim() == 1 or tokens.shape[1] == 1,
            "packed documents must have batch size 1, because cu_seqlens describes a single "
            "sample", shape, "pass a batch of one",
        )  # fmt: skip
        yield (
            sample is not None or self.layout != Layout.DOCUMENTS,
            "cu_seqlens must be given for the layout zigzag-documents, because it shards each "
            "document on its own", "no cu_seqlens", "pass it, or another layout",
        )  # fmt: skip
        pieces = self.size * (2 if self.layout in (Layout.ZIGZAG, Layout.DOCUMENTS) else 1)
        whole = len(tokens) * (1 if self.whole_sample else self.size)
        yield (
            self.size == 1 or (len(tokens) > 0 and whole % pieces == 0),
            f"the sample's length must be a multiple of {pieces} tokens, because the layout "
            f"{self.layout} has equal chunks", shape, "pad it",
        )  # fmt: skip

    def documents(self, tokens: Tensor, sample: Sample) -> Documents:
        """The documents of the sample that contains the tokens."""
        rows = self.rows(tokens)
        # any upper bound on length will do: no kernel uses it
        bounded = sample._replace(longest=rows * self.size)
        return Documents(bounded, (rows, self.size), Layout(self.layout), tokens.device, WHO)

    def terms(self, tokens: Tensor, documents: Documents | None) -> dict[str, str]:
        """What must be the same on all ranks, in each call of a kind."""
        return {
            "tokens": f"{tokens.dim()} axes {tokens.dtype} {tokens.device.type}",
            "layout": self.layout,
            "whole_sample": str(self.whole_sample),
            "documents": str(documents is not None),
        }

    def data(self, tokens: Tensor, documents: Documents | None) -> dict[str, str]:
        """What else must be; boundaries on the CPU only."""
        known = documents is not None and tokens.device.type == "cpu"
        words = dict(documents.known or {}) if known else {}
        return {"shape": str(tuple(tokens.shape)), **words}

    def order(self, rows: int, documents: Documents | None, device: torch.device) -> Tensor:
        """Positions in the sample of all ranks' rows, rank after rank: int64 [tokens]."""
        if documents is not None and self.layout == Layout.DOCUMENTS and self.size > 1:
            return documents.rank_order
        ranks = (positions(Layout(self.layout), r, self.size, rows) for r in range(self.size))
        places = (at for of in ranks for at in of)
        return torch.cat([torch.arange(at.start, at.stop, at.step, device=device) for at in places])


def _labels(
    shards: _Shards, tokens: Tensor, sample: Sample | None, documents: Documents | None,
    ignored: int,
) -> Tensor:  # fmt: skip
    """Labels of this rank's rows, for a valid call."""
    rows, ids, same = shards.rows(tokens), tokens.long(), None
    if len(ids) == 0:
        return ids
    order = shards.order(rows, documents, ids.device)
    if shards.group is not None and not shards.whole_sample:
        everyones, same = _gather(ids, _digest(sample, ids), shards.group)
        ids = torch.empty_like(everyones).index_copy_(0, order, everyones)
    if documents is None:
        followed = torch.arange(len(ids), device=ids.device) < len(ids) - 1
    else:
        followed = documents.followed
    followed = followed.view(-1, *(1,) * (ids.dim() - 1))
    labels = torch.where(followed, ids.roll(-1, 0), ignored)
    labels = labels[order[shards.rank * rows : (shards.rank + 1) * rows]]
    return labels if same is None else torch.where(same, labels, _NO_CLASS)


def _gather(
    ids: Tensor, digest: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(ids of all ranks, concatenated; whether all have this digest)."""
    mine = torch.cat((digest.view(1), ids.flatten()))
    everyones = mine.new_empty(group.size(), len(mine))
    dist.all_gather_into_tensor(everyones.view(-1), mine, group)
    return everyones[:, 1:].reshape(-1, *ids.shape[1:]), (everyones[:, 0] == digest).all()


def _digest(sample: Sample | None, like: Tensor) -> Tensor:
    """A hash of the boundaries, on the device."""
    if sample is None:
        return like.new_zeros(())
    given = (sample.cu_seqlens, sample.padded)
    return digest(
        torch.cat(
            [x.to(like.device, torch.int64, non_blocking=True) for x in given if x is not None]
        )
    )
