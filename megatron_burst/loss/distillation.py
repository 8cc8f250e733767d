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

from megatron_burst.arguments import is_dense
from megatron_burst.errors import Need, require
from megatron_burst.loss.autograd import GradientsInForward, Recomputed, held_bytes
from megatron_burst.loss.checks import LossInputs, checked_rows
from megatron_burst.loss.classes import Target, divergence, probabilities, with_rest
from megatron_burst.loss.linear import head_of, row_weights, to_compute
from megatron_burst.loss.passes import Head
from megatron_burst.loss.rows import Rows
from megatron_burst.loss.statistics import LossOptions, Reduction, logits
from megatron_burst.loss.supervised import Supervised, valid_tokens
from megatron_burst.loss.tensor_parallel import TensorParallel
from megatron_burst.loss.top_k import Best, top_k_pass
from megatron_burst.transforms import uncompiled

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
    hidden, weight, options, tp = to_compute(hidden, weight, options, tp_group, sequence_parallel)
    inputs = LossInputs(hidden, weight, ids, loss_mask, supervised, several=True)
    rows = checked_rows(inputs, tp, options, {"entropy": entropy, "invariant": invariant})
    head = head_of(inputs, options, tp, rows, invariant=invariant)
    head = replace(head, entropy=entropy, keep=keep_logits)
    log_probs, rest, entropies = Recomputed.apply(hidden, weight, rows, head)
    mask = valid_tokens(ids, loss_mask, options.ignore_index, several=True)
    ids = ids.masked_fill(~mask.unsqueeze(-1), options.ignore_index)
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
    hidden, weight, options, tp = to_compute(hidden, weight, options, tp_group, sequence_parallel)
    shape = _tokens_of(hidden, tp)
    labels = torch.zeros(shape, dtype=torch.long, device=getattr(hidden, "device", None))
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
    q, mask = with_rest(student.log_probs, student.rest), student.mask
    if isinstance(teacher, ClassLogProbs):
        log_probs, rest, mask = teacher.log_probs, teacher.rest, mask & teacher.mask
    else:
        log_probs, rest = teacher, _rest_of(teacher.masked_fill(student.ids < 0, -torch.inf))
        rest = rest.masked_fill(student.rest == -torch.inf, -torch.inf)
    p = with_rest(log_probs, rest).detach().to(q.dtype)
    counts = torch.nn.functional.pad(student.ids >= 0, (0, 1), value=True) & mask.unsqueeze(-1)
    return divergence(q, p, counts) if reverse else divergence(p, q, counts)


@uncompiled
def distillation_loss(hidden: Tensor, weight: Tensor, teacher: ClassLogProbs, *,
                      reverse: bool = False, reduction: Reduction = "mean",
                      tp_group: dist.ProcessGroup | None = None, sequence_parallel: bool = False,
                      loss_mask: Tensor | None = None, options: LossOptions | None = None,
                      supervised: Supervised = "count",
                      invariant: bool = False) -> Tensor:  # fmt: skip
    """The mean or sum of `top_k_kl` over tokens, with gradients that are computed along with it: 3
    GEMMs, where `class_log_probs` has 4.

    Memory is that of `linear_cross_entropy` with grads="forward", and about 24 bytes for each id.
    In fp16, whose gradients are not scaled yet, there are 4 GEMMs. Other arguments are those of
    `linear_cross_entropy`.

    Args:
        teacher: from `top_k_log_probs`, for all tokens of the sequence, the same on all ranks.
        reverse: as of `top_k_kl`.
        reduction: "mean" or "sum" of loss * loss_mask over the tokens that are not ignored.

    Raises:
        BurstError: as of `class_log_probs`.
    """
    hidden, weight, options, tp = to_compute(hidden, weight, options, tp_group, sequence_parallel)
    is_teacher = isinstance(teacher, ClassLogProbs)
    ids, *values = teacher[:3] if is_teacher else (None,)
    inputs = LossInputs(hidden, weight, ids, loss_mask, supervised, True, tuple(values))
    settings = {"entropy": False, "invariant": invariant, "reduction": reduction,
                "reverse": reverse}  # fmt: skip
    rows = checked_rows(inputs, tp, options, settings, _of_call(teacher, hidden, reduction))
    rows, weights = row_weights(rows, loss_mask, reduction, hidden.dtype, tp)
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    whole = needs_grad and hidden.dtype != torch.float16
    sums = held_bytes(weight) if whole and weight.requires_grad else 0
    head = head_of(inputs, options, tp, rows, whole, sums, invariant)
    target = Target(*values, reverse)
    if whole:
        losses = GradientsInForward.apply(hidden, weight, weights, rows, head, target)
    else:
        log_probs, rest, _ = Recomputed.apply(hidden, weight, rows, head)
        mask = valid_tokens(ids, loss_mask, options.ignore_index, several=True)
        values = log_probs.view(ids.shape), rest.view(mask.shape), None, mask
        student = ClassLogProbs(ids, *values)
        losses = top_k_kl(student, teacher, reverse=reverse).view(weights.shape)
    return (losses * weights).sum()


def _of_call(teacher: Any, hidden: Any, reduction: str) -> Iterator[Need]:
    yield (isinstance(teacher, ClassLogProbs), "teacher must be what top_k_log_probs or "
           "class_log_probs returns, because its ids are the classes that are compared",
           type(teacher).__name__,
           "pass ClassLogProbs(ids, log_probs, rest, None, mask)")  # fmt: skip
    ids, *values, _, mask = teacher
    tensors = ids, *values, mask
    yield (all(map(is_dense, tensors)) and all(x.is_floating_point() for x in values),
           "a teacher must be dense tensors, with real log-probabilities, because nothing is "
           "converted silently", [type(x).__name__ for x in tensors], "convert them")  # fmt: skip
    shapes = [tuple(x.shape) for x in tensors]
    tokens = shapes[0][:-1]
    yield (shapes == [shapes[0], shapes[0], tokens, tokens], "a teacher's log-probabilities must "
           "have the axes of its ids, its rest and mask those of tokens, because each class has "
           "one", shapes, "reshape them")  # fmt: skip
    devices = {str(x.device) for x in (hidden, *tensors) if isinstance(x, Tensor)}
    yield (len(devices) == 1, "hidden and teacher must be on one device, because one kernel reads "
           "them", ", ".join(sorted(devices)), "move them")  # fmt: skip
    yield (reduction in ("sum", "mean"), "reduction must be sum or mean, because gradients are "
           "computed along with the loss", repr(reduction),
           "call class_log_probs and top_k_kl for a loss of each token")  # fmt: skip


def _of_pair(student: object, teacher: object) -> Iterator[Need]:
    values = teacher.log_probs if isinstance(teacher, ClassLogProbs) else teacher
    yield (isinstance(student, ClassLogProbs) and isinstance(values, Tensor)
           and values.shape == student.ids.shape, "student and teacher must have values of the "
           "same classes of the same tokens, because these are compared",
           f"{type(student).__name__} and {getattr(values, 'shape', values)}", "compute the "
           "student's class_log_probs at the teacher's ids")  # fmt: skip
    yield (not isinstance(teacher, ClassLogProbs) or (
               isinstance(teacher.rest, Tensor) and teacher.rest.shape == values.shape[:-1]),
           "a teacher's rest must have the axes of tokens, because all other classes are compared "
           "too", type(teacher).__name__, "pass its log_probs alone")  # fmt: skip


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
