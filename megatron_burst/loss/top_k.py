"""The most probable classes of each token, a tile of logits at a time."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_burst.loss.attempt import Attempt
from megatron_burst.loss.passes import Head, kernels_of, tile_buffer, tiles_of
from megatron_burst.loss.rows import Rows
from megatron_burst.loss.statistics import Stat, empty_statistics, sum_dtype

_GROUP = 16  # classes whose largest logit is found first
_MOST = 128  # groups whose members are compared
_ROWS_AT_ONCE = 1 << 14  # for which ranks compare their classes


class Best(NamedTuple):
    """The most probable classes of rows, and statistics of all others."""

    raw: Tensor  # [rows, k], logits in the model's dtype, the largest first
    ids: Tensor  # [rows, k] int64
    stats: Tensor  # [4, rows]

    def after(self, raw: Tensor, ids: Tensor, k: int, head: Head) -> "Best":
        """With other candidates [rows, some] too; those that are not kept count as others."""
        raw, order = torch.cat((self.raw, raw), 1).sort(dim=1, descending=True, stable=True)
        ids = torch.cat((self.ids, ids), 1).gather(1, order)
        if raw.shape[1] > k:
            dropped, none = raw[:, k:].contiguous(), ids.new_full(ids.shape[:1], -1)
            options = head.options, head.extras
            kernels_of(raw).merge_statistics(self.stats, dropped, none, *options)
        return Best(raw[:, :k], ids[:, :k], self.stats)


def top_k_pass(
    head: Head, hidden: Tensor, weight: Tensor, rows: Rows, k: int, attempt: Attempt
) -> Best | None:
    """The most probable classes of the whole vocabulary, in [blocks * n] rows."""
    pieces: list[Best] = []
    buffer = attempt(tile_buffer, head, hidden)

    def chunk(piece: slice, x: Tensor) -> None:
        pieces.append(_best_of_chunk(head, x, weight, rows, piece, k, buffer))

    for piece, x in head.tp.chunks(attempt, hidden, rows, head.tiles.rows):
        attempt(chunk, piece, x)
    best = attempt(_joined, pieces, rows, hidden, min(k, len(weight)))
    if head.tp.size == 1:
        return best
    shape = rows.valid.numel(), min(k, len(weight))
    return _of_all_ranks(head, best, shape, hidden, k, attempt) if shape[0] else best


def _best_of_chunk(head: Head, x: Tensor, weight: Tensor, rows: Rows, piece: slice, k: int,
                   buffer: Tensor) -> Best:  # fmt: skip
    """The most probable of this rank's classes."""
    none = torch.full(x.shape[:1], -1, device=x.device)
    first = head.tp.rank * len(weight)
    best = Best(x.new_empty(len(x), 0), none.new_empty(len(x), 0), empty_statistics(len(x), x))
    for classes, raw, _ in tiles_of(head, x, weight, rows, piece, buffer):
        kernels = kernels_of(raw)
        largest, columns = _largest(raw, min(k, raw.shape[1]))
        kernels.swap_(raw, columns, largest.new_full((), -torch.inf).expand_as(largest))
        kernels.merge_statistics(best.stats, raw, none, head.options, head.extras)
        best = best.after(largest, columns + (first + classes.start), k, head)
    return best


def _largest(raw: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`raw.topk(k)`, which reads a wide tile only once: the largest are in the groups of classes
    whose own largest are. Classes of a group lie apart, so that adjacent ones are read together."""
    groups = raw.shape[1] // _GROUP
    if groups <= k or k > _MOST:
        return raw.topk(k, dim=1)
    whole = groups * _GROUP
    best = raw[:, :whole].unflatten(1, (_GROUP, groups)).amax(1).topk(k, dim=1, sorted=False)
    members = torch.arange(0, whole, groups, device=raw.device)
    columns = (best.indices.unsqueeze(2) + members).flatten(1)
    others = torch.arange(whole, raw.shape[1], device=raw.device).expand(len(raw), -1)
    columns = torch.cat((columns, others), 1)
    values, places = raw.gather(1, columns).topk(k, dim=1)
    return values, columns.gather(1, places)


def _joined(pieces: Sequence[Best], rows: Rows, hidden: Tensor, k: int) -> Best:
    """Pieces of [blocks, some] rows each, as [blocks * n] rows."""
    blocks = len(rows.valid)
    if not pieces:
        none = torch.empty(0, k, dtype=torch.long, device=hidden.device)
        return Best(hidden.new_empty(0, k), none, empty_statistics(0, hidden))

    def join(parts: Iterable[Tensor]) -> Tensor:
        return torch.cat([part.unflatten(0, (blocks, -1)) for part in parts], 1).flatten(0, 1)

    stats = join(piece.stats.t() for piece in pieces).t().contiguous()
    raw, ids = (join(piece[i] for piece in pieces) for i in (0, 1))
    return Best(raw, ids, stats)


def _of_all_ranks(
    head: Head, best: Best | None, shape: tuple[int, int], like: Tensor, k: int, attempt: Attempt
) -> Best | None:
    """The most probable of all ranks' classes. `shape`: of a rank's; `like`: has logits' dtype."""
    dtypes = like.dtype, torch.int64, sum_dtype(like.dtype)
    pieces: list[Best] = []

    def merge(raw: Tensor, ids: Tensor, stats: Tensor) -> None:
        raw, ids = (x.movedim(0, 1).flatten(1) for x in (raw, ids))
        pieces.append(Best(raw[:, :0], ids[:, :0], stats).after(raw, ids, k, head))

    for first in range(0, shape[0], _ROWS_AT_ONCE):
        rows = slice(first, min(first + _ROWS_AT_ONCE, shape[0]))
        count = rows.stop - first
        shapes = (count, shape[1]), (count, shape[1]), (len(Stat), count)
        own = attempt(lambda at=rows: (best.raw[at], best.ids[at], best.stats[:, at]))
        raw, ids, stats = map(attempt.or_nan, own or (None,) * 3, shapes, dtypes)
        whole = head.tp.combine(attempt, stats)
        attempt(merge, head.tp.gather(attempt, raw), head.tp.gather(attempt, ids), whole)
    return attempt(_stacked, pieces)


def _stacked(pieces: Sequence[Best]) -> Best:
    """All pieces' rows, one after another."""
    raw, ids, stats = zip(*pieces, strict=True)
    return Best(torch.cat(raw), torch.cat(ids), torch.cat(stats, 1))
