"""Shards of a whole sample, and the whole sample again: for programs without Megatron."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.arguments import is_dense, short_repr
from megatron_burst.comm.alone import Ranks, group_or_default
from megatron_burst.comm.announce import announce, backward_of
from megatron_burst.comm.group import state_of
from megatron_burst.errors import BurstError, Need, unmet_needs
from megatron_burst.integers import MOST, as_integer
from megatron_burst.masks.documents import Documents
from megatron_burst.masks.sample import Sample, indices_of, of_last_shard
from megatron_burst.schedule.layout import Layout, positions

type LayoutName = Literal["zigzag", "contiguous", "striped", "zigzag-documents"]
type Sizes = tuple[int, int, str, torch.device]


@dataclass(frozen=True, slots=True)
class Shards:
    """How a sample is sharded, and which part of it a call passes."""

    who: str  # subject of error messages
    layout: str
    group: dist.ProcessGroup | None  # ranks that hold the rows; None if one rank holds all
    whole: bool  # whether calls pass the whole sample, not this rank's rows
    sample: Sample | None  # its documents, if it is packed

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    def rows(self, tokens: int) -> int:
        """Rows per rank, of the number of tokens that a call passes."""
        return tokens // (self.size if self.whole else 1)

    def needs(self, tokens: int, batch: int, got: str) -> Iterator[Need]:
        """Checks beyond those that `Documents` makes on boundaries."""
        yield (self.layout in tuple(Layout), f"layout must be one of {', '.join(Layout)}, because "
               "it says which rows a rank holds", repr(self.layout),
               "pass the layout in which the tokens are sharded")  # fmt: skip
        yield (self.sample is None or self.sample.cu_seqlens is not None,
               "cu_seqlens must come with cu_seqlens_padded, because it says where documents end",
               "no cu_seqlens", "pass it, or leave out cu_seqlens_padded")  # fmt: skip
        yield (self.sample is None or batch == 1,
               "packed documents must have batch size 1, because cu_seqlens describes a single "
               "sample", got, "pass a batch of one")  # fmt: skip
        yield (self.sample is not None or self.layout != Layout.DOCUMENTS,
               "cu_seqlens must be given for the layout zigzag-documents, because it shards each "
               "document on its own", "no cu_seqlens", "pass it, or another layout")  # fmt: skip
        pieces = self.size * (2 if self.layout in (Layout.ZIGZAG, Layout.DOCUMENTS) else 1)
        whole = tokens * (1 if self.whole else self.size)
        yield (self.size == 1 or (tokens > 0 and whole % pieces == 0),
               f"the sample's length must be a multiple of {pieces} tokens, because the layout "
               f"{self.layout} has equal chunks", got, "pad the sample")  # fmt: skip

    def follows(self, packed: bool) -> Iterator[Need]:
        """Checks against the group's last `shard`; `packed`: as for `of_last_shard`."""
        if self.group is not None:
            yield from of_last_shard(state_of(self.group).sharded, self.layout, packed)

    def remember(self, packed: bool, tokens: int) -> None:
        """Make it the group's last `shard`."""
        if self.group is not None:
            state_of(self.group).sharded = self.layout, packed, tokens

    def order(self, rows: int, documents: Documents | None, device: torch.device) -> Tensor:
        """Positions in the sample of all ranks' rows, rank after rank: int64 [tokens]."""
        if documents is not None and self.layout == Layout.DOCUMENTS and self.size > 1:
            return documents.rank_order
        ranks = (positions(Layout(self.layout), r, self.size, rows) for r in range(self.size))
        return indices_of(chain.from_iterable(ranks), device)

    def mine(self, rows: int, documents: Documents | None, device: torch.device) -> Tensor:
        """The part of `order` that is this rank's: int64 [rows]."""
        order = self.order(rows, documents, device)
        return order[self.rank * rows : (self.rank + 1) * rows]

    def opened(self, problem: str, sizes: Callable[[], Sizes],
               terms: Mapping[str, str] | None = None,
               data: Mapping[str, str] | None = None) -> Documents | None:  # fmt: skip
        """The documents, once all ranks make the same call.

        Args:
            problem: what this rank refuses already; then `sizes` is not called.
            sizes: tokens and sequences that the call passes, a text about them, and the device.
            terms, data: what else must be the same on all ranks, as for `announce`.

        Raises:
            BurstError: on all ranks, if one has a problem or cannot shard the sample, or if they
                make different calls.
        """
        documents, compared, failure = None, {}, None
        try:
            if not problem:
                tokens, batch, got, device = sizes()
                problem = unmet_needs(self.who, self.needs(tokens, batch, got))
                compared = {"shape": got, **(data or {})}
            if self.sample is not None and not problem:
                rows, layout = self.rows(tokens), Layout(self.layout)
                # any upper bound on length will do: no kernel uses it
                bounded = self.sample._replace(longest=rows * self.size)
                documents = Documents(bounded, (rows, self.size), layout, device, self.who)
                compared |= (documents.text or {}) if device.type == "cpu" else {}
        except BurstError as error:
            problem = str(error)
        except Exception as error:  # out of memory too: other ranks must not wait for this one
            problem, failure = f"{self.who}: {type(error).__name__}: {error}", error
        if self.group is not None:
            same = {"layout": self.layout, "documents": f"{documents is not None}", **(terms or {})}
            same, compared = ({}, {}) if problem else (same, compared)
            with nullcontext() if failure is None else suppress(BurstError):
                announce(self.group, same, self.who, problem, data=compared)
        if failure is not None:
            raise failure
        if problem:
            raise BurstError(problem)
        return documents


def shards_of(who: str, group: dist.ProcessGroup | None, layout: str,
              boundaries: tuple[Tensor | None, Tensor | None], whole: bool) -> Shards:  # fmt: skip
    """Arguments as users pass them; `boundaries`: cu_seqlens, cu_seqlens_padded."""
    ranks = None if group is None or group.size() == 1 else group
    packed = any(x is not None for x in boundaries)
    return Shards(who, str(layout), ranks, whole, Sample(*boundaries, None) if packed else None)


def _of_tensor(x: Tensor, dim: int) -> Iterator[Need]:
    yield (is_dense(x), "the tensor must be dense and have data, because its rows are copied",
           short_repr(x), "make it dense, or call to_local() on a DTensor")  # fmt: skip
    yield (type(dim) is int and -x.dim() <= dim < x.dim(),
           "dim must be an axis of the tensor, because the tensor is sharded along it",
           f"dim={dim!r} and shape {tuple(x.shape)}", "pass the axis of the sequence")  # fmt: skip


def _opened(shards: Shards, x: Tensor, dim: int, needs: Iterable[Need] = ()) -> Documents | None:
    def sizes() -> Sizes:
        batch = x.shape[0] if dim % x.dim() == 1 else 1
        return x.shape[dim], batch, f"shape {tuple(x.shape)} and {shards.size} ranks", x.device

    return shards.opened(unmet_needs(shards.who, chain(_of_tensor(x, dim), needs)), sizes)


def shard(x: Tensor, *, group: Ranks = None, layout: LayoutName = "zigzag",
          cu_seqlens: Tensor | None = None, cu_seqlens_padded: Tensor | None = None,
          dim: int = 1) -> Tensor:  # fmt: skip
    """This rank's rows of a whole sample, in the order that `burst_attention` expects.

    The group remembers the call. Until its next `shard`, `burst_attention`, `position_ids`,
    `next_tokens` and `unshard` refuse another layout, whose rows look the same, and all but
    `unshard` refuse to go without `cu_seqlens` if the sample is packed. To take a packed sample for
    one document on purpose, pass them boundaries [0, s]; attention to keys of another length needs
    none. Nothing is sent; gradients reach the rows that were taken.

    Args:
        x: any dtype, the same sample on all ranks, with `dim` axes before the sequence's.
        group: the context-parallel group, as for `burst_attention`.
        layout: which rows a rank gets, as in `burst_attention`.
        cu_seqlens: int32 or int64 [documents + 1], of a packed sample with batch size 1, as in
            `burst_attention`; needed in "zigzag-documents" only, and checked in every layout.
        cu_seqlens_padded: the same, including each document's padding.
        dim: the axis of the sequence; 1 for [b, s, ...], 0 for [s, ...].

    Returns:
        [..., s / ranks, ...], copied.

    Raises:
        BurstError: on all ranks of the group, if the layout cannot shard the sample, or if they
            pass different layouts, lengths or boundaries.
    """
    group, boundaries = group_or_default(group, "shard"), (cu_seqlens, cu_seqlens_padded)
    shards = shards_of("shard", group, layout, boundaries, True)
    documents = _opened(shards, x, dim)
    if shards.group is None:
        return x.clone()
    shards.remember(shards.sample is not None, x.shape[dim])
    return x.index_select(dim, shards.mine(shards.rows(x.shape[dim]), documents, x.device))


def unshard(x: Tensor, *, group: Ranks = None, layout: LayoutName = "zigzag",
            cu_seqlens: Tensor | None = None, cu_seqlens_padded: Tensor | None = None,
            dim: int = 1) -> Tensor:  # fmt: skip
    """The whole sample from all ranks' rows, on every rank: the reverse of `shard`.

    One all-gather. The gradient is that of the sum of all ranks' losses, by one reduce-scatter: if
    each rank computes the same loss of the whole sample and gradients are averaged over ranks, as
    DDP and FSDP do, they are those of that loss. If one rank runs backward, all must.

    Args:
        x: this rank's rows, otherwise as for `shard`, with the same other arguments.
        group, layout, cu_seqlens, cu_seqlens_padded, dim: as for `shard`.

    Returns:
        [..., s, ...], in the order of the sample.

    Raises:
        BurstError: as `shard`.
    """
    group, boundaries = group_or_default(group, "unshard"), (cu_seqlens, cu_seqlens_padded)
    shards = shards_of("unshard", group, layout, boundaries, False)
    documents = _opened(shards, x, dim, shards.follows(packed=True))
    if shards.group is None:
        return x.clone()
    gathered = _Gathered.apply(x.movedim(dim, 0), shards.group)
    indices = shards.order(x.shape[dim], documents, x.device).argsort()
    return gathered.index_select(0, indices).movedim(0, dim)


class _Gathered(torch.autograd.Function):
    """Rows of all ranks, one rank after the other."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.announce = group, backward_of(group)
        gathered = x.new_empty(group.size() * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x.contiguous(), group)
        return gathered

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.announce()
        grad = grads[0].contiguous()
        own = grad.new_empty(len(grad) // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(own, grad, group=ctx.group)
        return own, None


def position_ids(tokens: int, *, group: Ranks = None, layout: LayoutName = "zigzag",
                 cu_seqlens: Tensor | None = None, cu_seqlens_padded: Tensor | None = None,
                 device: torch.device | str = "cpu") -> Tensor:  # fmt: skip
    """Positions of this rank's rows in their documents, for rotary embeddings.

    Args:
        tokens: of the whole sample.
        group, layout, cu_seqlens, cu_seqlens_padded: as for `shard`.
        device: of the result.

    Returns:
        int64 [tokens / ranks]. Without cu_seqlens the sample is one document. Rows after the last
        document count from 0 too.

    Raises:
        BurstError: as `shard`.
    """
    who, boundaries, device = "position ids", (cu_seqlens, cu_seqlens_padded), torch.device(device)
    shards = shards_of(who, group_or_default(group, who), layout, boundaries, True)
    got = f"{tokens} tokens and {shards.size} ranks"
    number, must = as_integer(tokens), "tokens must be an integer from 0 on, because it counts rows"
    fits = number is not None and 0 <= number <= MOST
    need = fits, must, short_repr(tokens), "pass the sample's length"
    problem = unmet_needs(who, chain([need], shards.follows(shards.sample is not None)))
    tokens = number or 0
    documents = shards.opened(problem, lambda: (tokens, 1, got, device))
    places = shards.mine(shards.rows(tokens), documents, device)
    return in_documents(places, cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded)


def in_documents(places: Tensor, starts: Tensor | None) -> Tensor:
    """Positions in a sample as positions in its documents, which start there; None: one."""
    if starts is None:
        return places
    starts = starts.to(places)
    return places - starts[torch.searchsorted(starts, places, right=True) - 1]
