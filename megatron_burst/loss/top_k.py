"""Distillation without logits: probabilities of a few classes of each token, and of all others.

A teacher's `top_k_log_probs` are computed and stored; `class_log_probs` are a student's at the same
classes, with gradients; `top_k_kl` compares both.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.loss.attempt import Attempt
from megatron_burst.loss.autograd import Recomputed
from megatron_burst.loss.checks import LossInputs, checked_rows
from megatron_burst.loss.classes import probabilities
from megatron_burst.loss.linear import head_of
from megatron_burst.loss.passes import Head, kernels_of, tile_buffer, tiles_of
from megatron_burst.loss.rows import Rows
from megatron_burst.loss.statistics import LossOptions, Stat, empty_statistics, logits, sum_dtype
from megatron_burst.loss.supervised import Supervised, valid_tokens
from megatron_burst.loss.tensor_parallel import TensorParallel
from megatron_burst.transforms import autocast_inputs, uncompiled


class ClassLogProbs(NamedTuple):
    """Values in float32 or wider; 0 for ignored tokens and ignored ids."""

    ids: Tensor  # [..., k] int64
    log_probs: Tensor  # [..., k], of these classes
    rest: Tensor  # [...], the logarithm of the probability of all other classes; -inf if none is
    entropy: Tensor | None  # [...], over the vocabulary, in nats; None if it was not asked for
    mask: Tensor  # [...] bool: false for ignored tokens


@uncompiled
def class_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, *,
                    tp_group: dist.ProcessGroup | None = None, sequence_parallel: bool = False,
                    loss_mask: Tensor | None = None, options: LossOptions | None = None,
                    entropy: bool = False, keep_logits: bool = True,
                    supervised: Supervised = "count",
                    invariant: bool = False) -> ClassLogProbs:  # fmt: skip
    """Log-probabilities of k classes of each token and of all others together, and entropies; all
    differentiable.

    The probability of all others is summed over them, so that it is exact where it is small. One
    tile of logits exists at a time. Other arguments are those of `token_log_probs`.

    Args:
        ids: [..., k] integers, the classes of each token, different ones: for instance a teacher's
            top k. -100 (`options.ignore_index`) fills up short lists; a token of which nothing else
            is named is ignored. The same on all ranks of the group.
        loss_mask: [...], 0 for tokens to ignore.
        options: `logit_scale` is 1 / temperature; smoothing and z-loss must be left out.

    Raises:
        BurstError: as of `linear_cross_entropy`; also if a token's ids name a class twice. On a GPU
            such a token's values are NaN.
    """
    hidden, weight = autocast_inputs(hidden, weight)
    options = LossOptions() if options is None else options
    tp = TensorParallel.of(tp_group, sequence_parallel)
    inputs = LossInputs(hidden, weight, ids, loss_mask, supervised, several=True)
    rows = checked_rows(inputs, tp, options, {"entropy": entropy, "invariant": invariant})
    head = head_of(inputs, options, tp, rows, invariant=invariant)
    head = replace(head, entropy=entropy, keep=keep_logits)
    log_probs, rest, entropies = Recomputed.apply(hidden, weight, rows, head)
    mask = valid_tokens(ids, loss_mask, options.ignore_index, several=True)
    return ClassLogProbs(ids, log_probs.view(ids.shape), rest.view(mask.shape),
                         entropies.view(mask.shape) if entropy else None, mask)  # fmt: skip


@uncompiled
@torch.no_grad()
def top_k_log_probs(hidden: Tensor, weight: Tensor, k: int, *,
                    tp_group: dist.ProcessGroup | None = None, sequence_parallel: bool = False,
                    loss_mask: Tensor | None = None, options: LossOptions | None = None,
                    entropy: bool = False, supervised: Supervised = "count",
                    invariant: bool = False) -> ClassLogProbs:  # fmt: skip
    """The k most probable classes of each token, in order, and the rest: a teacher's side of
    distillation. Without gradients.

    Of classes whose logits are equal, any may be taken, as by `torch.topk`. One tile of logits
    exists at a time. Other arguments are those of `class_log_probs`.

    Args:
        k: number of classes, at most those of the vocabulary.
        loss_mask: [...] for the whole sequence, 0 for tokens to ignore, whose ids are -100.

    Raises:
        BurstError: as of `linear_cross_entropy`.
    """
    hidden, weight = autocast_inputs(hidden, weight)
    options = LossOptions() if options is None else options
    tp = TensorParallel.of(tp_group, sequence_parallel)
    shape = _tokens_of(hidden, tp)
    labels = torch.zeros(shape, dtype=torch.long, device=hidden.device)
    inputs = LossInputs(hidden, weight, labels, loss_mask, supervised)
    compared: Mapping[str, object] = {"entropy": entropy, "invariant": invariant, "k": k}
    rows = checked_rows(inputs, tp, options, compared)
    head = head_of(inputs, options, tp, rows, invariant=invariant)
    head = replace(head, entropy=entropy)
    with tp.attempt(hidden, rows) as attempt:
        best = _best_pass(head, hidden, weight, rows, k, attempt)
        outputs = attempt(_outputs, head, rows, best)
    ids, log_probs, rest, entropies = (x.view(*shape, *x.shape[2:]) for x in outputs)
    mask = valid_tokens(labels, loss_mask, options.ignore_index)
    ids = ids.masked_fill(~mask.unsqueeze(-1), options.ignore_index)
    return ClassLogProbs(ids, log_probs, rest, entropies if entropy else None, mask)


def top_k_kl(student: ClassLogProbs, teacher: ClassLogProbs | Tensor, *, reverse: bool = False
             ) -> Tensor:  # fmt: skip
    """The KL divergence of each token over its k classes and all others as one more class.

    It is a lower bound of the divergence over the vocabulary, and 0 only if the student has the
    teacher's probabilities of these classes. Gradients flow to the student only.

    Args:
        student: from `class_log_probs`, at the teacher's ids.
        teacher: from `top_k_log_probs`, or its log-probabilities [..., k] alone; then the rest is
            what they lack to 1, in their precision.
        reverse: false: KL(teacher || student), which spreads the student over what the teacher
            does; true: KL(student || teacher), which concentrates it.

    Returns:
        [...] in nats, 0 for ignored tokens.
    """
    if isinstance(teacher, ClassLogProbs):
        log_probs, rest = teacher.log_probs, teacher.rest
    else:
        log_probs, rest = teacher, _rest_of(teacher.masked_fill(student.ids < 0, -torch.inf))
    p = torch.cat((log_probs, rest.unsqueeze(-1)), -1).detach()
    q = torch.cat((student.log_probs, student.rest.unsqueeze(-1)), -1)
    named = torch.nn.functional.pad(student.ids >= 0, (0, 1), value=True)
    first, second = (q, p) if reverse else (p, q)
    counts = named & student.mask.unsqueeze(-1) & (first > -torch.inf)
    # masked before, not after: the gradient of -inf is NaN
    first, second = (x.masked_fill(~counts, 0) for x in (first, second))
    return (first.exp() * (first - second)).masked_fill(~counts, 0).sum(-1)


def _rest_of(log_probs: Tensor) -> Tensor:
    """The logarithm of what probabilities lack to 1; at least the dtype's precision."""
    eps = torch.finfo(log_probs.dtype).eps
    return (-log_probs.logsumexp(-1).clamp(max=-eps).expm1()).log()


def _tokens_of(hidden: Tensor, tp: TensorParallel) -> tuple[int, ...]:
    """The axes of all ranks' tokens; what is no tensor is refused later."""
    first, *others = getattr(hidden, "shape", (0,))[:-1] or (0,)
    return first * tp.blocks, *others


class _Best(NamedTuple):
    """The most probable classes of rows, and statistics of all others."""

    raw: Tensor  # [rows, k], logits in the model's dtype, the largest first
    ids: Tensor  # [rows, k] int64
    stats: Tensor  # [4, rows]

    def after(self, raw: Tensor, ids: Tensor, k: int, head: Head) -> "_Best":
        """With other candidates [rows, some] too; those that are not kept count as others."""
        raw, order = torch.cat((self.raw, raw), 1).sort(dim=1, descending=True, stable=True)
        ids = torch.cat((self.ids, ids), 1).gather(1, order)
        if raw.shape[1] > k:
            dropped, none = raw[:, k:].contiguous(), ids.new_full(ids.shape[:1], -1)
            options = head.options, head.extras
            kernels_of(raw).merge_statistics(self.stats, dropped, none, *options)
        return _Best(raw[:, :k], ids[:, :k], self.stats)


def _best_pass(
    head: Head, hidden: Tensor, weight: Tensor, rows: Rows, k: int, attempt: Attempt
) -> _Best | None:
    """The most probable classes of the whole vocabulary, in [blocks * n] rows."""
    pieces: list[_Best] = []
    buffer = attempt(tile_buffer, head, hidden)

    def chunk(piece: slice, x: Tensor) -> None:
        pieces.append(_best_of_chunk(head, x, weight, rows, piece, k, buffer))

    for piece, x in head.tp.chunks(attempt, hidden, rows, head.tiles.rows):
        attempt(chunk, piece, x)
    best = attempt(_joined, pieces, rows, hidden, min(k, len(weight)))
    if head.tp.size == 1:
        return best
    shape = rows.valid.numel(), min(k, len(weight))
    return _of_all_ranks(head, best, shape, sum_dtype(hidden.dtype), k, attempt)


def _best_of_chunk(head: Head, x: Tensor, weight: Tensor, rows: Rows, piece: slice, k: int,
                   buffer: Tensor) -> _Best:  # fmt: skip
    """The most probable of this rank's classes."""
    none = torch.full(x.shape[:1], -1, device=x.device)
    first = head.tp.rank * len(weight)
    best = _Best(x.new_empty(len(x), 0), none.new_empty(len(x), 0), empty_statistics(len(x), x))
    for classes, raw, _ in tiles_of(head, x, weight, rows, piece, buffer):
        kernels = kernels_of(raw)
        largest, columns = raw.topk(min(k, raw.shape[1]), dim=1)
        kernels.swap_(raw, columns, largest.new_full((), -torch.inf).expand_as(largest))
        kernels.merge_statistics(best.stats, raw, none, head.options, head.extras)
        best = best.after(largest, columns + (first + classes.start), k, head)
    return best


def _joined(pieces: Sequence[_Best], rows: Rows, hidden: Tensor, k: int) -> _Best:
    """Pieces of [blocks, some] rows each, as [blocks * n] rows."""
    blocks = len(rows.valid)
    if not pieces:
        none = torch.empty(0, k, dtype=torch.long, device=hidden.device)
        return _Best(hidden.new_empty(0, k), none, empty_statistics(0, hidden))

    def join(parts: Iterable[Tensor]) -> Tensor:
        return torch.cat([part.unflatten(0, (blocks, -1)) for part in parts], 1).flatten(0, 1)

    stats = join(piece.stats.t() for piece in pieces).t().contiguous()
    raw, ids = (join(piece[i] for piece in pieces) for i in (0, 1))
    return _Best(raw, ids, stats)


def _of_all_ranks(
    head: Head, best: _Best | None, shape: tuple[int, int], dtype: torch.dtype, k: int,
    attempt: Attempt,
) -> _Best | None:  # fmt: skip
    """The most probable of all ranks' classes. `shape`: of a rank's; `dtype`: of statistics."""
    exact = torch.float64  # for both logits and ids
    own = attempt(lambda: torch.stack((best.raw.to(exact), best.ids.to(exact))))
    stats = attempt.or_nan(best and best.stats, (len(Stat), shape[0]), dtype)
    whole = head.tp.combine(attempt, stats)
    parts = head.tp.gather(attempt, attempt.or_nan(own, (2, *shape), exact))

    def merge() -> _Best:
        raw, ids = parts.permute(1, 2, 0, 3).flatten(2).unbind()
        none = _Best(best.raw[:, :0], best.ids[:, :0], whole)
        return none.after(raw.to(best.raw.dtype), ids.long(), k, head)

    return attempt(merge)


def _outputs(head: Head, rows: Rows, best: _Best) -> tuple[Tensor, ...]:
    """Ids, log-probabilities, the rest and entropies of all tokens."""
    z = logits(best.raw, head.options)
    log_probs, rest, entropies, _lse = probabilities(
        best.ids, best.stats, z, head.options, head.entropy
    )
    blocks = len(rows.valid)
    values = best.ids, log_probs, rest, entropies
    return tuple(rows.spread(x.unflatten(0, (blocks, -1))) for x in values)
