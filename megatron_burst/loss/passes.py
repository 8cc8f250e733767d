"""The computation: passes over tiles of logits."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_burst.loss import statistics
from megatron_burst.loss.options import LossOptions
from megatron_burst.loss.parallel import (
    HiddenGrad,
    TensorParallel,
    first_class,
    out_of_range,
    poisoned,
)
from megatron_burst.loss.rows import Rows
from megatron_burst.loss.statistics import Factor, Stat, Transform, sum_dtype
from megatron_burst.loss.tiles import Tiles
from megatron_burst.loss.weight_grad import add_product


@dataclass(frozen=True, slots=True)
class Head:
    """What a pass needs to know besides tensors.

    Attributes:
        options: of the loss.
        tp: ranks that share the vocabulary.
        tiles: how much at once.
        vocab: number of classes of all ranks.
        entropy: whether it is wanted.
        keep: whether the last tile of logits waits for backward, if logits are computed there.
    """

    options: LossOptions
    tp: TensorParallel
    tiles: Tiles
    vocab: int
    entropy: bool = False
    keep: bool = True

    @property
    def transform(self) -> Transform:
        return Transform(self.options.logit_scale, self.options.softcap)

    @property
    def extras(self) -> bool:
        return self.entropy or self.options.label_smoothing > 0


@dataclass(slots=True)
class Sums:
    """Where gradients are added up; None where one is not wanted.

    Attributes:
        hidden: of this rank's rows.
        weight: [vocab_local, h] in float32 or wider.
        fresh: whether what is in `weight` so far means nothing.
    """

    hidden: HiddenGrad | None
    weight: Tensor | None
    fresh: bool = False


def statistics_pass(
    head: Head, hidden: Tensor, weight: Tensor, rows: Rows
) -> tuple[Tensor, Tensor]:
    """Statistics [4, blocks, n] of the whole vocabulary; one collective for all rows.

    Returns:
        (statistics, the memory of a tile, with the last tile's logits in it).
    """
    stats = statistics.empty_statistics(rows.labels.numel(), hidden)
    stats = stats.view(len(Stat), *rows.labels.shape)
    buffer = _tile_buffer(head, hidden)
    for piece, x in head.tp.chunks(hidden, rows, head.tiles.rows):
        stats[:, :, piece] = _chunk_statistics(head, x, weight, rows, piece, buffer)
    return poisoned(head.tp.combine(stats)), buffer


def gradient_pass(
    head: Head, hidden: Tensor, weight: Tensor, rows: Rows, factors: Tensor, sums: Sums,
    kept: Tensor | None = None,
) -> None:  # fmt: skip
    """Add the gradients up, computing logits once more; tiles come from the last to the first.

    Args:
        head: of the call.
        hidden: as the caller gave them.
        weight: [vocab_local, h].
        rows: what is computed.
        factors: [5, blocks, n].
        sums: where to.
        kept: a statistics pass's memory of a tile, written to: its logits are not computed again.
    """
    buffer, computed = _tile_buffer(head, hidden) if kept is None else kept, kept is not None
    for piece, x in head.tp.chunks(hidden, rows, head.tiles.rows, backwards=True):
        chunk_factors = factors[:, :, piece].flatten(1)
        total = None
        for classes, raw, targets in _tiles(
            head, x, weight, rows, piece, buffer, computed, backwards=True
        ):
            _kernels(raw).gradient_(raw, targets, chunk_factors, head.transform)
            if sums.weight is not None:
                add_product(sums.weight[classes], raw.t(), x)
            if sums.hidden is not None:
                first = total is None
                if first:
                    total = x.new_empty(x.shape, dtype=sum_dtype(x.dtype))
                add_product(total, raw, weight[classes], first)
        computed = False
        if sums.hidden is not None:
            sums.hidden.put(piece, total)
        del x, total  # before the next ones come


def forward_gradient_pass(
    head: Head, hidden: Tensor, weight: Tensor, rows: Rows, row_weight: Tensor, sums: Sums
) -> Tensor:
    """Statistics as of `statistics_pass` and, from the same logits, gradients of sum(w * loss).

    Each chunk needs the statistics of the whole vocabulary, so has a collective of its own.

    Args:
        head: of the call; its tiles have all classes.
        hidden: as the caller gave them.
        weight: [vocab_local, h].
        rows: what is computed.
        row_weight: w, [blocks, n].
        sums: where gradients go.
    """
    stats = hidden.new_empty(len(Stat), *rows.labels.shape, dtype=sum_dtype(hidden.dtype))
    buffer = _tile_buffer(head, hidden)
    for piece, x in head.tp.chunks(hidden, rows, head.tiles.rows):
        mine = _chunk_statistics(head, x, weight, rows, piece, buffer)
        stats[:, :, piece] = poisoned(head.tp.combine(mine))
        factors = loss_factors(head, stats[:, :, piece], row_weight[:, piece]).flatten(1)
        ((_, raw, targets),) = _tiles(head, x, weight, rows, piece, buffer, computed=True)
        _kernels(raw).gradient_(raw, targets, factors, head.transform)
        if sums.hidden is not None:
            sums.hidden.put(piece, torch.mm(raw, weight))
        if sums.weight is not None:
            add_product(sums.weight, raw.t(), x, first=sums.fresh and piece.start == 0)
    if sums.fresh and rows.count == 0:
        sums.weight.zero_()
    return stats


def losses(head: Head, stats: Tensor) -> Tensor:
    """Loss of each row [blocks, n], before any reduction."""
    lse, target, total, _ = stats
    s = head.options.smoothing(head.vocab)
    loss = lse - (1 - s) * target
    if s:
        loss = loss - total * (s / head.vocab)
    return loss + head.options.z_loss * lse.square() if head.options.z_loss else loss


def loss_factors(head: Head, stats: Tensor, grad: Tensor) -> Tensor:
    """Factors of the gradient of sum(grad * loss); see `statistics.Factor`.

    d lse / dz = p, so dz = grad ((1 + 2 z_loss lse) p - (1 - s) [y] - s / V).
    """
    lse = stats[Stat.LSE]
    s = head.options.smoothing(head.vocab)
    factors = lse.new_zeros(len(Factor), *lse.shape)
    factors[Factor.LSE] = lse
    factors[Factor.SOFTMAX] = grad * (1 + 2 * head.options.z_loss * lse)
    factors[Factor.LABEL] = grad * (1 - s)
    factors[Factor.ALL] = grad * (s / head.vocab)
    return factors


def _chunk_statistics(head, x, weight, rows: Rows, piece: slice, buffer) -> Tensor:
    """Statistics [4, blocks, some] of this rank's classes."""
    stats = statistics.empty_statistics(x.shape[0], x)
    wrong = out_of_range(rows, head.vocab)[:, piece].flatten()
    stats[Stat.TARGET].masked_fill_(wrong, torch.nan)
    for _, raw, targets in _tiles(head, x, weight, rows, piece, buffer):
        _kernels(raw).merge_statistics(stats, raw, targets, head.transform, head.extras)
    return stats.view(len(Stat), rows.labels.shape[0], -1)


def _tiles(
    head: Head, x: Tensor, weight: Tensor, rows: Rows, piece: slice, buffer: Tensor, computed=False,
    backwards=False,
) -> Iterator[tuple[slice, Tensor, Tensor]]:  # fmt: skip
    """Tiles of a chunk: (classes, raw logits, columns of the labels); all in the same memory.

    `computed`: the first of these tiles' logits still are in the buffer.
    """
    labels = rows.labels[:, piece].flatten() - first_class(head.tp, weight)
    starts = range(0, weight.shape[0], head.tiles.classes)
    for start in reversed(starts) if backwards else starts:
        classes = slice(start, min(start + head.tiles.classes, weight.shape[0]))
        raw = buffer[: x.shape[0] * (classes.stop - start)].view(x.shape[0], -1)
        if not computed:
            torch.mm(x, weight[classes].t(), out=raw)
        computed = False
        yield classes, raw, labels - start


def _tile_buffer(head: Head, hidden: Tensor) -> Tensor:
    return hidden.new_empty(head.tiles.rows * head.tiles.classes)


def _kernels(raw: Tensor):
    """Triton's on GPUs, torch's elsewhere and for float64."""
    if not raw.is_cuda or raw.dtype == torch.float64:
        return statistics
    from megatron_burst.loss import fused

    return fused
