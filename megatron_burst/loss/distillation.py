"""Distillation without logits: probabilities of a few classes of each token, and of all others.

A teacher's `top_k_log_probs` are computed and stored; `class_log_probs` are a student's at the same
classes, with gradients, and `top_k_kl` compares both; `distillation_loss` does these two at once.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.arguments import short_repr
from megatron_burst.errors import Need, require
from megatron_burst.loss.autograd import GradientsInForward, Recomputed, held_bytes
from megatron_burst.loss.checks import LossInputs, checked_rows
from megatron_burst.loss.classes import Target, divergence, probabilities
from megatron_burst.loss.linear import head_of, row_weights
from megatron_burst.loss.passes import Head
from megatron_burst.loss.rows import Rows
from megatron_burst.loss.statistics import LossOptions, Reduction, logits
from megatron_burst.loss.supervised import Supervised, valid_tokens
from megatron_burst.loss.tensor_parallel import TensorParallel
from megatron_burst.loss.top_k import Best, top_k_pass
from megatron_burst.transforms import autocast_inputs, uncompiled

_WHO = "distillation"


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
    settings: Mapping[str, object] = {"entropy": entropy, "invariant": invariant, "k": k}
    rows = checked_rows(inputs, tp, options, settings)
    head = head_of(inputs, options, tp, rows, whole=True, invariant=invariant)
    head = replace(head, entropy=entropy)
    hidden, weight = hidden.detach(), weight.detach()
    with tp.attempt(hidden, rows) as attempt:
        best = top_k_pass(head, hidden, weight, rows, k, attempt)
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
    require(_WHO, _of_pair(student, teacher))
    q = torch.cat((student.log_probs, student.rest.unsqueeze(-1)), -1)
    pair = _with_rest(teacher, student.ids).detach(), q
    counts = torch.nn.functional.pad(student.ids >= 0, (0, 1), value=True)
    counts &= student.mask.unsqueeze(-1)
    return divergence(*(reversed(pair) if reverse else pair), counts)


@uncompiled
def distillation_loss(hidden: Tensor, weight: Tensor, teacher: ClassLogProbs, *,
                      reverse: bool = False, reduction: Reduction = "mean",
                      tp_group: dist.ProcessGroup | None = None, sequence_parallel: bool = False,
                      loss_mask: Tensor | None = None, options: LossOptions | None = None,
                      supervised: Supervised = "count",
                      invariant: bool = False) -> Tensor:  # fmt: skip
    """The mean or sum of `top_k_kl` over tokens, with gradients that are computed along with it: 3
    GEMMs, where `class_log_probs` has 4.

    Memory is that of `linear_cross_entropy` with grads="forward". Other arguments are those of
    `linear_cross_entropy`.

    Args:
        teacher: from `top_k_log_probs`, for all tokens of the sequence, the same on all ranks.
        reverse: as of `top_k_kl`.
        reduction: "mean" or "sum" of loss * loss_mask over the tokens that are not ignored.

    Raises:
        BurstError: as of `class_log_probs`.
    """
    hidden, weight = autocast_inputs(hidden, weight)
    options = LossOptions() if options is None else options
    tp = TensorParallel.of(tp_group, sequence_parallel)
    ids = getattr(teacher, "ids", None)
    inputs = LossInputs(hidden, weight, ids, loss_mask, supervised, several=True)
    settings = {"entropy": False, "invariant": invariant, "reduction": reduction}
    rows = checked_rows(inputs, tp, options, settings, _of_call(teacher, reduction))
    rows, weights = row_weights(rows, loss_mask, reduction, hidden.dtype, tp)
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad, weight.requires_grad)
    sums = held_bytes(weight) if needs_grad and needs_grad[1] else 0
    head = head_of(inputs, options, tp, rows, whole=True, sum_bytes=sums, invariant=invariant)
    p = _with_rest(teacher, teacher.ids).detach().view(len(rows.valid), rows.tokens, -1)
    target = Target(p, reverse)
    losses = GradientsInForward.apply(hidden, weight, weights, rows, head, target)
    return (losses * weights).sum()


def _of_call(teacher: Any, reduction: str) -> Iterator[Need]:
    is_whole = isinstance(teacher, ClassLogProbs)
    yield (is_whole, "teacher must be what top_k_log_probs or class_log_probs returns, because its "
           "ids are the classes that are compared", type(teacher).__name__,
           "pass ClassLogProbs(ids, log_probs, rest, None, mask)")  # fmt: skip
    ids, log_probs, rest = (tuple(x.shape) for x in teacher[:3])
    yield (log_probs == ids and rest == ids[:-1], "a teacher's log-probabilities must have the "
           "axes of its ids, and its rest those of tokens, because each class has one",
           f"{log_probs} and {rest} for {ids}", "reshape them")  # fmt: skip
    yield (reduction in ("sum", "mean"), "reduction must be sum or mean, because gradients are "
           "computed along with the loss", repr(reduction),
           "call class_log_probs and top_k_kl for a loss of each token")  # fmt: skip


def _of_pair(student: object, teacher: object) -> Iterator[Need]:
    values = teacher.log_probs if isinstance(teacher, ClassLogProbs) else teacher
    yield (isinstance(student, ClassLogProbs) and isinstance(values, Tensor)
           and values.shape == student.ids.shape, "student and teacher must have values of the "
           "same classes of the same tokens, because these are compared",
           f"{short_repr(student)} and {short_repr(values)}", "compute the student's "
           "class_log_probs at the teacher's ids")  # fmt: skip


def _with_rest(teacher: ClassLogProbs | Tensor, ids: Tensor) -> Tensor:
    """A teacher's log-probabilities [..., k + 1], of the classes and of all others."""
    if isinstance(teacher, ClassLogProbs):
        log_probs, rest = teacher.log_probs, teacher.rest
    else:
        log_probs, rest = teacher, _rest_of(teacher.masked_fill(ids < 0, -torch.inf))
    return torch.cat((log_probs, rest.unsqueeze(-1)), -1)


def _rest_of(log_probs: Tensor) -> Tensor:
    """The logarithm of what probabilities lack to 1; at least the dtype's precision."""
    eps = torch.finfo(log_probs.dtype).eps
    return (-log_probs.logsumexp(-1).clamp(max=-eps).expm1()).log()


def _tokens_of(hidden: Tensor, tp: TensorParallel) -> tuple[int, ...]:
    """The axes of all ranks' tokens; what is no tensor is refused later."""
    first, *others = getattr(hidden, "shape", (0,))[:-1] or (0,)
    return first * tp.blocks, *others


def _outputs(head: Head, rows: Rows, best: Best) -> tuple[Tensor, ...]:
    """Ids, log-probabilities, the rest and entropies of all tokens."""
    z = logits(best.raw, head.options)
    log_probs, rest, entropies, _lse = probabilities(
        best.ids, best.stats, z, head.options, head.entropy
    )
    blocks = len(rows.valid)
    values = best.ids, log_probs, rest, entropies
    return tuple(rows.spread(x.unflatten(0, (blocks, -1))) for x in values)
