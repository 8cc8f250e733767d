"""The computation: passes over tiles of logits."""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import setitem
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_burst.loss import classes, statistics
from megatron_burst.loss.attempt import Attempt
from megatron_burst.loss.classes import Target
from megatron_burst.loss.rows import Rows, wrong_classes, wrong_ids
from megatron_burst.loss.statistics import Factor, LossOptions, Stat, sum_dtype
from megatron_burst.loss.tensor_parallel import HiddenGrad, TensorParallel
from megatron_burst.loss.tiles import Tiles, choose_tiles


@dataclass(frozen=True, slots=True)
class Head:
    """A pass's parameters besides tensors."""

    options: LossOptions
    tp: TensorParallel
    tiles: Tiles
    vocab: int  # number of classes on all ranks together
    entropy: bool = False  # whether to compute it
    keep: bool = True  # whether to save the last tile of logits for backward, if that recomputes
    whole: bool = False  # whether gradients are computed along with the loss

    @property
    def extras(self) -> bool:
        return self.entropy or self.options.label_smoothing > 0


class Factors(NamedTuple):
    """What makes the gradient of raw logits."""

    rows: Tensor  # [5, blocks, n]; see `statistics.Factor`
    classes: Tensor | None = None  # [blocks, n, k]: the gradients of each token's classes


@dataclass(slots=True)
class Sums:
    """Accumulators of gradients; None for those not needed."""

    hidden: HiddenGrad | None  # of this rank's rows
    weight: Tensor | None  # [vocab_local, h] in float32 or wider
    fresh: bool = False  # whether the content of `weight` is still uninitialized


def statistics_pass(
    head: Head, hidden: Tensor, weight: Tensor, rows: Rows, attempt: Attempt
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Statistics [4, blocks, n] of the whole vocabulary, by one collective for all rows; where each
    token has several classes, these are left out, and their logits z [blocks, n, k] are returned;
    and the tile buffer, which still holds the last tile's logits. None after a failure."""
    shape, dtype = (len(Stat), *rows.valid.shape), sum_dtype(hidden.dtype)
    stats = attempt(hidden.new_empty, shape, dtype=dtype)
    several = rows.labels.dim() > 2
    z = attempt(hidden.new_zeros, rows.labels.shape, dtype=dtype) if several else None
    buffer = attempt(tile_buffer, head, hidden)
    for piece, x in head.tp.chunks(attempt, hidden, rows, head.tiles.rows):
        local = attempt(_chunk_statistics, head, x, weight, rows, piece, buffer, z)
        attempt(setitem, stats, (..., piece), local)
    whole = head.tp.combine(attempt, attempt.or_nan(stats, shape, dtype))
    if several:
        z = head.tp.add_up(attempt, z, rows.labels.shape, dtype)
    return attempt(_poisoned, whole), z, buffer


def gradient_pass(head: Head, hidden: Tensor, weight: Tensor, rows: Rows, factors: Factors | None,
                  sums: Sums, attempt: Attempt, tile: Tensor | None = None) -> None:  # fmt: skip
    """Accumulate gradients, recomputing logits; tiles go from last to first.

    `tile`: the buffer of a statistics pass, which is overwritten.
    """
    computed = tile is not None
    buffer = tile if computed else attempt(tile_buffer, head, hidden)
    for piece, x in head.tp.chunks(attempt, hidden, rows, head.tiles.rows, backwards=True):
        tiles = tiles_of(head, x, weight, rows, piece, buffer, computed, backwards=True)
        total = attempt(_chunk_gradient, head, x, weight, tiles, factors, piece, sums)
        computed = False
        if sums.hidden is not None:
            sums.hidden.put(piece, total)
        del x, tiles, total  # before the next ones are made


def _chunk_gradient(
    head: Head, x: Tensor, weight: Tensor, tiles: Iterator, factors: Factors, piece: slice,
    sums: Sums,
) -> Tensor | None:  # fmt: skip
    """Add the weight's gradient; returns the hidden states' [blocks * some, h], if needed."""
    total = None
    for part, raw, columns in tiles:
        _to_gradient(raw, columns, factors, piece, head.options)
        if sums.weight is not None:
            add_product(sums.weight[part], raw.t(), x)
        if sums.hidden is not None:
            first = total is None
            total = x.new_empty(x.shape, dtype=sum_dtype(x.dtype)) if first else total
            add_product(total, raw, weight[part], first)
    return total


def forward_gradient_pass(
    head: Head, hidden: Tensor, weight: Tensor, rows: Rows, row_weight: Tensor, sums: Sums,
    attempt: Attempt, target: Target | None = None,
) -> Tensor | None:  # fmt: skip
    """Losses [blocks, n] and, from the same logits, gradients of sum(row_weight * loss), row_weight
    [blocks, n]; tiles have all classes. `target`: what the loss compares with, if each token has
    several classes.

    Each chunk needs statistics of the whole vocabulary, hence one collective per chunk; two if each
    token has several classes.
    """
    blocks, dtype = len(rows.labels), sum_dtype(hidden.dtype)
    # of a target the losses; else statistics, of which losses are made behind the last collective
    shape = rows.valid.shape if target else (len(Stat), *rows.valid.shape)
    of_rows = attempt(hidden.new_empty, shape, dtype=dtype)
    several = rows.labels.dim() > 2
    z = attempt(hidden.new_zeros, rows.labels.shape, dtype=dtype) if several else None
    buffer = attempt(tile_buffer, head, hidden)

    def gradient(piece: slice, x: Tensor, whole: Tensor, of_classes: Tensor) -> Tensor | None:
        stats, weights = _poisoned(whole), row_weight[:, piece]
        if target is None:
            results, *both = stats, loss_factors(head, stats, weights)
        else:
            ids = rows.labels[:, piece]
            results, *both = target.compare(ids, stats, of_classes, weights, piece, head.options)
        of_rows[..., piece], factors = results, Factors(*both)
        if sums.hidden is None and sums.weight is None:
            return None
        ((_, raw, columns),) = tiles_of(head, x, weight, rows, piece, buffer, computed=True)
        _to_gradient(raw, columns, factors, slice(None), head.options)
        if sums.weight is not None:
            add_product(sums.weight, raw.t(), x, first=sums.fresh and piece.start == 0)
        return None if sums.hidden is None else torch.mm(raw, weight)

    for piece, x in head.tp.chunks(attempt, hidden, rows, head.tiles.rows):
        local = attempt(_chunk_statistics, head, x, weight, rows, piece, buffer, z)
        shape = len(Stat), blocks, piece.stop - piece.start
        whole = head.tp.combine(attempt, attempt.or_nan(local, shape, dtype))
        some = None
        if several:
            shape = blocks, shape[-1], rows.labels.shape[-1]
            some = head.tp.add_up(attempt, attempt(lambda at=piece: z[:, at]), shape, dtype)
        grad = attempt(gradient, piece, x, whole, some)
        if sums.hidden is not None:
            sums.hidden.put(piece, grad)
        del x, grad  # before the next ones are made
    if sums.fresh and rows.count == 0:
        attempt(sums.weight.zero_)
    return of_rows if target else attempt(losses, head, of_rows)


def _to_gradient(
    raw: Tensor, columns: Tensor, factors: Factors, piece: slice, options: LossOptions
) -> None:
    """Replace a tile's raw logits by their gradient; `piece`: its rows' factors."""
    of_rows = factors.rows[:, :, piece].flatten(1)
    if factors.classes is None:
        kernels_of(raw).gradient_(raw, columns, of_rows, options)
    else:
        gradients = factors.classes[:, piece].flatten(0, 1)
        classes.gradient_of_all_(kernels_of(raw), raw, columns, of_rows, gradients, options)


def largest_class(
    hidden: Tensor, weight: Tensor, tp: TensorParallel, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Largest logits [s, b], in the model's dtype, and their classes [s, b], int64 from 0 on each
    rank, on this rank's part of the vocabulary; without gradients.

    `hidden`: [s, b, h], or with sequence parallelism this rank's part of s; `weight`: [vocab / tp,
    h]; `scale`: positive factor of the logits.
    """
    tokens = hidden.shape[:-1].numel()
    tiles = choose_tiles(tp.sizes(tokens * tp.blocks, hidden, weight), whole=True)
    labels = torch.zeros(tp.blocks, tokens, dtype=torch.long, device=hidden.device)
    rows = Rows(labels, labels == 0, tp.block, None, tokens)
    values, classes = hidden.new_empty(tp.blocks, tokens), torch.empty_like(labels)
    with tp.attempt(hidden) as attempt:
        for piece, x in tp.chunks(attempt, hidden, rows, tiles.rows):
            largest = attempt(lambda x: torch.mm(x, weight.t()).max(dim=1), x)
            if largest is not None:
                values[:, piece] = largest.values.view(tp.blocks, -1)
                classes[:, piece] = largest.indices.view(tp.blocks, -1)
    full = hidden.shape[0] * tp.blocks, *hidden.shape[1:-1]
    return values.view(full) * scale, classes.view(full)


def losses(head: Head, stats: Tensor) -> Tensor:
    """Loss per row [blocks, n], before any reduction."""
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


def _chunk_statistics(
    head: Head, x: Tensor, weight: Tensor, rows: Rows, piece: slice, buffer: Tensor,
    z: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Statistics [4, blocks, some] of this rank's classes; adds to logits of named classes."""
    stats = statistics.empty_statistics(x.shape[0], x)
    labels, valid = rows.labels[:, piece], rows.valid[:, piece]
    if z is None:
        wrong = wrong_classes(labels, head.vocab)
    else:
        wrong = wrong_ids(labels, head.vocab, head.options.ignore_index).any(-1)
    stats[Stat.TARGET].masked_fill_((valid & wrong).flatten(), torch.nan)
    for _, raw, targets in tiles_of(head, x, weight, rows, piece, buffer):
        if z is None:
            kernels_of(raw).merge_statistics(stats, raw, targets, head.options, head.extras)
        else:
            z[:, piece] += classes.merge_others(
                kernels_of(raw), stats, raw, targets, head.options, head.extras
            ).view_as(labels)
    return stats.view(len(Stat), len(labels), -1)


def _poisoned(stats: Tensor) -> Tensor:
    """Statistics with LSE NaN wherever TARGET is: loss and gradient become NaN."""
    target = stats[Stat.TARGET]
    stats[Stat.LSE] = torch.where(target.isnan(), target, stats[Stat.LSE])
    return stats


def tiles_of(head: Head, x: Tensor, weight: Tensor, rows: Rows, piece: slice, buffer: Tensor,
           computed=False, backwards=False) -> Iterator[tuple[slice, Tensor, Tensor]]:  # fmt: skip
    """Tiles of a chunk: (classes, raw logits, columns of the labels); all in one buffer, which
    still holds the first tile's logits if they are `computed`."""
    labels = rows.labels[:, piece].flatten(0, 1) - head.tp.rank * weight.shape[0]
    starts = range(0, weight.shape[0], head.tiles.classes)
    for start in reversed(starts) if backwards else starts:
        classes = slice(start, min(start + head.tiles.classes, weight.shape[0]))
        raw = buffer[: x.shape[0] * (classes.stop - start)].view(x.shape[0], -1)
        if not computed:
            _multiply(x, weight[classes].t(), raw, head.tiles.rows if head.tiles.fixed else 0)
        computed = False
        yield classes, raw, labels - start


def _multiply(x: Tensor, weight: Tensor, raw: Tensor, rows: int) -> None:
    """raw = x @ weight, as a product of so many rows, if not 0: their number chooses the kernel."""
    if rows:  # without `out`: only then Megatron's batch-invariant kernels replace torch.mm
        padded = torch.nn.functional.pad(x, (0, 0, 0, rows - len(x)))
        raw.copy_(torch.mm(padded, weight)[: len(x)])
    else:
        torch.mm(x, weight, out=raw)


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool = False) -> None:
    """total += a @ b, accumulated in total's float32 or wider; `first`: overwrite total."""
    beta = 0 if first else 1
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=beta)
    elif total.is_cuda:  # one cuBLAS call: 16-bit inputs, float32 sums read and written
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, beta=beta, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)


def tile_buffer(head: Head, hidden: Tensor) -> Tensor:
    """Memory for one tile of logits."""
    return hidden.new_empty(head.tiles.rows * head.tiles.classes)


def kernels_of(raw: Tensor) -> Any:
    """Triton's on GPUs, torch's elsewhere and for float64."""
    if not raw.is_cuda or raw.dtype == torch.float64:
        return statistics
    from megatron_burst.loss import fused

    return fused
