"""The public functions of the loss."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.loss.autograd import GradientsInForward, Recomputed, held_bytes
from megatron_burst.loss.checks import LossInputs, checked_rows
from megatron_burst.loss.passes import Head
from megatron_burst.loss.rows import Rows
from megatron_burst.loss.statistics import Grads, LossOptions, Reduction, sum_dtype
from megatron_burst.loss.supervised import Supervised, valid_tokens
from megatron_burst.loss.tensor_parallel import TensorParallel
from megatron_burst.loss.tiles import choose_tiles, fixed_tiles
from megatron_burst.transforms import autocast_inputs, compilable, uncompiled


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False, reduction: Reduction = "mean", ignore_index: int = -100,
    loss_mask: Tensor | None = None, label_smoothing: float = 0.0, z_loss: float = 0.0,
    softcap: float = 0.0, logit_scale: float = 1.0, return_lse: bool = False,
    grads: Grads = "auto", keep_logits: bool = True, supervised: Supervised = "all",
    invariant: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Cross entropy of `hidden @ weight.T`, computed one tile of logits at a time.

    Needs less than 1 GiB on top of its inputs, their gradients and one float32 gradient of the
    weight, for any number of tokens. If Megatron's `main_grad` is that gradient, computing
    gradients in forward needs one more. Statistics, loss and sums are in float32 (float64 for
    float64); logits and their gradients are rounded to the model's dtype for the GEMMs. It never
    synchronizes with the GPU, but for supervised="count". Under torch's autocast hidden and weight
    are cast to its dtype, as for torch's own products. A token is ignored (loss 0, gradient 0,
    whatever its hidden state) if its label is `ignore_index` or its mask is 0. In torch.compile it
    is one operator of the graph if gradients are computed in forward, else a graph break.

    Args:
        hidden: [..., h] in bf16, fp16, fp32 or fp64; any strides. In Megatron [s, b, h]; with
            sequence_parallel [s / tp, b, h], the first axis sharded over the group in rank order.
        weight: [vocab / tp, h], contiguous, in hidden's dtype: this rank's classes, in rank order.
        labels: [...] integers, for the whole sequence, the same on all ranks of the group. A label
            out of range is refused on the CPU; on a GPU it makes its token's loss and all gradients
            NaN on all ranks. Labels or masks that differ between ranks are refused on the CPU; on a
            GPU all losses become NaN.
        tp_group: ranks that the vocabulary is sharded over; None: this rank has all of it.
        sequence_parallel: whether the sequence is sharded over them too.
        reduction: "none": [...] float32 losses; "sum" or "mean" of loss * loss_mask over the tokens
            that are not ignored; "mean" divides by the sum of the masks (0 if that is 0).
        ignore_index: label of ignored tokens.
        loss_mask: [...] weights of tokens in the reduction; with "none" only 0 matters.
        label_smoothing, z_loss, softcap, logit_scale: see `LossOptions`.
        return_lse: whether to also return each token's log-sum-exp.
        grads: "recompute" recomputes logits in backward: 4 GEMMs, one collective for the
            statistics, any gradient of the losses. "forward" computes gradients along with the
            loss: 3 GEMMs, one collective per chunk. Only a scalar factor may then come later: with
            "none", the losses' gradients must be proportional to loss_mask, otherwise all gradients
            become NaN. "auto" is "forward" for sums and means in bf16, fp32 and fp64 without
            return_lse, else "recompute".
        keep_logits: if logits are recomputed in backward, whether to save the last tile of them, in
            the memory above; pass False if several losses wait for backward at the same time.
        supervised: what skips ignored tokens on a GPU; on the CPU they are always skipped. A result
            of `count_supervised`: a count below this call's is refused, on a GPU all losses become
            NaN. "count": they are counted now, for which the CPU waits for the GPU. "all": none
            is skipped. With sequence parallelism ranks share the work evenly, whoever has the
            tokens.
        invariant: whether a token's loss must not depend on how many tokens there are, to the last
            bit: logits then come from products of a fixed number of rows, with zeros if need be.

    Returns:
        the loss, in float32 or wider; with return_lse a pair of it and [...] log-sum-exps (0 for
        ignored tokens).

    Raises:
        BurstError: on all ranks together, before anything is computed.
        DisagreementError: if another rank of the group fails (out of memory). Only on CPUs: on GPUs
            the loss or its gradients are NaN then.

    Source:
        the vocabulary split of Megatron-Core's tensor_parallel/cross_entropy.py; gradients in
        forward as in Liger-Kernel's fused_linear_cross_entropy.
    """
    settings = dict(
        sequence_parallel=sequence_parallel, reduction=reduction, ignore_index=ignore_index,
        label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap, logit_scale=logit_scale,
        return_lse=return_lse, grads=grads, keep_logits=keep_logits, supervised=supervised,
        invariant=invariant,
    )  # fmt: skip
    return _linear_cross_entropy(hidden, weight, labels, loss_mask, tp_group, settings)


@compilable("megatron_burst.loss.operators:traced_loss")
def _linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, loss_mask: Tensor | None,
    tp_group: dist.ProcessGroup | None, settings: Mapping[str, Any],
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`linear_cross_entropy`; `settings`: its other arguments."""
    hidden, weight = autocast_inputs(hidden, weight)
    enabled = torch.is_grad_enabled()  # what is no tensor is refused below
    needs_grad = tuple(enabled and getattr(x, "requires_grad", False) for x in (hidden, weight))
    inputs = LossInputs(hidden, weight, labels, loss_mask)
    rows, weights, head = ready_loss(inputs, tp_group, settings, needs_grad)
    if head.whole:
        loss = GradientsInForward.apply(hidden, weight, weights, rows, head)
    else:
        loss, lse, _ = Recomputed.apply(hidden, weight, rows, head)
    is_rows = settings["reduction"] == "none"
    loss = loss.view(labels.shape) if is_rows else (loss * weights).sum()
    return (loss, lse.view(labels.shape)) if settings["return_lse"] else loss


def ready_loss(
    inputs: LossInputs, tp_group: dist.ProcessGroup | None, settings: Mapping[str, Any],
    needs_grad: tuple[bool, ...],
) -> tuple[Rows, Tensor | None, Head]:  # fmt: skip
    """A call that all ranks agree on: its rows, the weights of losses in the reduction, [blocks,
    tokens], and its head. `needs_grad`: whether hidden states and the weight need gradients."""
    hidden, weight, loss_mask = inputs.hidden, inputs.weight, inputs.loss_mask
    options = LossOptions(*(settings[field.name] for field in fields(LossOptions)))
    tp = TensorParallel.of(tp_group, settings["sequence_parallel"])
    compared = {name: settings[name] for name in ("reduction", "grads", "return_lse", "invariant")}
    reduction, grads, return_lse, invariant = compared.values()
    inputs = inputs._replace(supervised=settings["supervised"])
    rows = checked_rows(inputs, tp, options, compared)
    # in forward fp16 is not loss-scaled yet
    late = hidden.dtype == torch.float16 or return_lse or reduction == "none"
    mode = grads if grads != "auto" else "recompute" if late else "forward"
    whole = mode == "forward" and any(needs_grad)
    rows, weights = row_weights(rows, loss_mask, reduction, hidden.dtype, tp)
    sum_bytes = held_bytes(weight) if whole and needs_grad[1] else 0
    head = head_of(inputs, options, tp, rows, whole, sum_bytes, invariant)
    keep = head.keep if whole else settings["keep_logits"]
    return rows, weights, replace(head, keep=keep, whole=whole)


class TokenLogProbs(NamedTuple):
    """Values per token, [...] in float32 or wider; 0 for ignored tokens."""

    log_probs: Tensor  # of the labels
    entropy: Tensor | None  # over the vocabulary, in nats; None if it was not asked for
    mask: Tensor  # bool: false for ignored tokens


@uncompiled
def token_log_probs(hidden: Tensor, weight: Tensor, labels: Tensor, *,
                    tp_group: dist.ProcessGroup | None = None, sequence_parallel: bool = False,
                    loss_mask: Tensor | None = None, options: LossOptions | None = None,
                    entropy: bool = True, keep_logits: bool = True,
                    supervised: Supervised = "count",
                    invariant: bool = False) -> TokenLogProbs:  # fmt: skip
    """Log-probabilities of labels and entropies, for reinforcement learning; both differentiable.

    For sharded or packed samples pass `next_tokens(tokens, ...)` as labels: each row's next token
    in its document, even if another rank has it. The other arguments are those of
    `linear_cross_entropy`.

    Args:
        loss_mask: 0 for tokens to ignore.
        options: `logit_scale` is 1 / temperature; smoothing and z-loss must be left out.
        entropy: whether to compute entropies.
        keep_logits: whether to save up to 0.9 GiB of logits for backward; pass False if several
            calls wait for backward at the same time.
        supervised: as of `linear_cross_entropy`. By default the CPU waits for a count of the tokens
            that are not ignored; to go on without, pass a count of `count_supervised`, or "all".
        invariant: whether a token's values must not depend on how many tokens there are, to the
            last bit, as with `BurstConfig.invariant`.

    Raises:
        BurstError: as of `linear_cross_entropy`.
    """
    hidden, weight, options, tp = to_compute(hidden, weight, options, tp_group, sequence_parallel)
    inputs = LossInputs(hidden, weight, labels, loss_mask, supervised)
    rows = checked_rows(inputs, tp, options, {"entropy": entropy, "invariant": invariant})
    head = head_of(inputs, options, tp, rows, invariant=invariant)
    head = replace(head, entropy=entropy, keep=keep_logits)
    loss, _, entropies = Recomputed.apply(hidden, weight, rows, head)
    mask = valid_tokens(labels, loss_mask, options.ignore_index)
    entropies = entropies.view(labels.shape) if entropy else None
    return TokenLogProbs(-loss.view(labels.shape), entropies, mask)


def to_compute(
    hidden: Tensor, weight: Tensor, options: LossOptions | None,
    tp_group: dist.ProcessGroup | None, sequence_parallel: bool,
) -> tuple[Tensor, Tensor, LossOptions, TensorParallel]:  # fmt: skip
    """Arguments of a call about log-probabilities: inputs under autocast, options, the ranks."""
    hidden, weight = autocast_inputs(hidden, weight)
    options = LossOptions() if options is None else options
    return hidden, weight, options, TensorParallel.of(tp_group, sequence_parallel)


def row_weights(
    rows: Rows, loss_mask: Tensor | None, reduction: str, dtype: torch.dtype, tp: TensorParallel
) -> tuple[Rows, Tensor | None]:
    """The rows, and weights of losses in the reduction; if this fails, rows say so, since the rank
    makes the pass's collectives nevertheless, as others wait for them."""
    if rows.failure is not None:
        return rows, None
    try:
        return rows, _weights(rows, loss_mask, reduction, dtype)
    except Exception as error:
        if tp.group is None:
            raise
        return replace(rows, failure=error), None


def _weights(rows: Rows, loss_mask: Tensor | None, reduction: str, dtype: torch.dtype) -> Tensor:
    """Weight of each token's loss in the reduction, [blocks, tokens]."""
    weights = rows.spread(rows.valid.new_ones(rows.valid.shape, dtype=sum_dtype(dtype)))
    if loss_mask is not None:
        weights = weights * loss_mask.reshape(weights.shape)
    if reduction != "mean":
        return weights
    total = weights.sum()
    return torch.where(total == 0, 0, weights / total)


def head_of(
    inputs: LossInputs, options: LossOptions, tp: TensorParallel, rows: Rows, whole: bool = False,
    sum_bytes: int = 0, invariant: bool = False,
) -> Head:  # fmt: skip
    """The head of a call, with tiles for its sizes."""
    choose, weight = fixed_tiles if invariant else choose_tiles, inputs.weight
    tiles = choose(tp.sizes(rows.valid.numel(), inputs.hidden, weight, sum_bytes), whole)
    return Head(options, tp, tiles, weight.shape[0] * tp.size)
