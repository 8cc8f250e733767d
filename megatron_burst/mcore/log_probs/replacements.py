"""What replaces functions of frameworks, called with the original: see `frameworks`.

Log-probabilities and entropies, in nats, are in float32 or wider. Real logits go to the original.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_burst.loss.linear import TokenLogProbs
from megatron_burst.loss.statistics import sum_dtype
from megatron_burst.mcore.fused_loss import IGNORED, log_probs_and_entropy, values_inside
from megatron_burst.mcore.log_probs.deferred import DeferredLogits
from megatron_burst.mcore.log_probs.frameworks import takes_deferred


def log_probs_of(logits: Any, labels: Tensor, entropy: bool = True) -> TokenLogProbs | None:
    """Log-probabilities of labels under deferred logits, and entropies, in the labels' shape and
    the logits' dtype, but at least float32; None if these are real logits.

    Args:
        logits: [..., vocab / tp].
        labels: [...] integers, -100 for rows to skip.
    """
    if not isinstance(logits, DeferredLogits) or logits.source.computed is not None:
        return None
    source = logits.source

    def rows(x: Tensor | None) -> Any:
        return None if x is None else x.flatten()[logits.tokens].to(sum_dtype(source.dtype))

    targets = labels.new_full(source.shape, IGNORED)
    targets.view(-1)[logits.tokens] = labels
    with torch.set_grad_enabled(torch.is_grad_enabled() and logits.requires_grad):
        values = values_inside(
            source.layer, source.hidden, source.weight, targets, None, source.scale, entropy
        )
        return TokenLogProbs(rows(values.log_probs), rows(values.entropy), labels != IGNORED)


def of_verl(original: Callable, /, *, hidden_states, context, **others) -> Any:
    """verl's output processor with `use_fused_kernels`: [1, tokens] log-probabilities and
    entropies; also without sequence parallelism, for any hidden size, and on CPUs."""
    from verl.utils.model import CausalLMOutputForPPO

    values = log_probs_and_entropy(
        hidden_states=hidden_states, context=context.temperature, **others
    )
    return CausalLMOutputForPPO(
        hidden_states=hidden_states, log_probs=values.log_probs, entropy=values.entropy
    )


def of_ms_swift(
    original: Callable, /, logits, labels, compute_entropy=False, *others, **named
) -> tuple[Tensor, Tensor | None]:
    """[b, s] log-probabilities of shifted labels, and entropies if they are asked for; 0 where a
    label is -100."""
    values = log_probs_of(logits, labels, compute_entropy)
    if values is None:
        return original(logits, labels, compute_entropy, *others, **named)
    return values.log_probs, values.entropy


def of_slime(
    original: Callable, /, logits, tokens, tp_group, *, with_entropy=False, **options
) -> tuple[Tensor, Tensor | None]:
    """[tokens, 1] log-probabilities and [tokens] entropies; with a mask over the vocabulary
    (`--rollout-top-p`) from logits."""
    has_mask = options.get("log_prob_keep_mask") is not None
    values = None if has_mask else log_probs_of(logits, tokens, with_entropy)
    if values is None:
        tokens = tokens.clamp(min=0)
        return original(logits, tokens, tp_group, with_entropy=with_entropy, **options)
    return values.log_probs.unsqueeze(-1), values.entropy


def labels_of_slime(original: Callable, /, rows, device, unconcat_tokens, *lengths) -> Tensor:
    """[rows] next tokens, -100 in rows that slime takes no log-probability of. `lengths`: of
    documents and responses, and whether context parallelism gathers."""
    labels = original(rows, device, unconcat_tokens, *lengths)
    if not takes_deferred():
        return labels
    extract = original.__globals__["_extract_per_sample"]
    responses, _ = extract(torch.arange(rows, device=device), None, *lengths)
    targets = torch.full_like(labels, IGNORED)
    for numbers in responses:
        targets[numbers] = labels[numbers]
    return targets


def of_nemo_rl(original: Callable, /, cls, logits, target, *others, **named) -> Tensor:
    """[b, s] log-probabilities of shifted targets."""
    values = log_probs_of(logits, target, entropy=False)
    return original(cls, logits, target, *others, **named) if values is None else values.log_probs


def rows_of_roll(original: Callable, /, self, logits, *others, **named) -> Tensor:
    """Notes on deferred logits which rows count, by the mask that ROLL multiplies the result by."""
    mask = named["attention_mask"] if "attention_mask" in named else others[-1]
    if isinstance(logits, DeferredLogits) and mask is not getattr(logits, "mask", None):
        of_labels = torch.nn.functional.pad(mask[:, 1:], (0, 1))
        logits.mask, logits.entropy = mask, None
        logits.is_ignored = self._get_feature_on_this_cp_rank(of_labels, "labels") == 0
    return original(self, logits, *others, **named)


def of_roll(original: Callable, /, vocab_parallel_logits, target, *others, **named) -> Tensor:
    """[b, s] log-probabilities of shifted targets."""
    values = _values_of_roll(vocab_parallel_logits, target)
    if values is None:
        return original(vocab_parallel_logits, target, *others, **named)
    return values.log_probs


def entropy_of_roll(original: Callable, /, vocab_parallel_logits, *others, **named) -> Tensor:
    """[b, s] entropies, which may have been computed along with log-probabilities."""
    logits = vocab_parallel_logits
    if getattr(logits, "entropy", None) is None:
        any_class = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
        if _values_of_roll(logits, any_class) is None:
            return original(logits, *others, **named)
    return logits.entropy


def _values_of_roll(logits: Any, target: Tensor) -> TokenLogProbs | None:
    """Log-probabilities and entropies of the rows that count; notes entropies on the logits."""
    is_ignored = getattr(logits, "is_ignored", None)
    labels = target if is_ignored is None else target.masked_fill(is_ignored, IGNORED)
    values = log_probs_of(logits, labels)
    if values is not None:
        logits.entropy = values.entropy
    return values
