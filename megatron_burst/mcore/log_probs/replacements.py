"""What replaces functions of frameworks, called with the original: see `frameworks`.

Log-probabilities and entropies, in nats, are in float32 or wider. Real logits go to the original.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_burst.loss.linear import TokenLogProbs
from megatron_burst.loss.statistics import sum_dtype
from megatron_burst.mcore.fused_loss import log_probs_and_entropy, values_inside
from megatron_burst.mcore.log_probs.deferred import DeferredLogits
from megatron_burst.mcore.log_probs.frameworks import takes_deferred

IGNORED = -100


def log_probs_of(logits: Any, labels: Tensor, entropy: bool = True) -> TokenLogProbs | None:
    """Log-probabilities of labels under deferred logits, and entropies, in the labels' shape and
    the logits' dtype, but at least float32; None if these are real logits.

    Args:
        logits: [..., vocab / tp].
        labels: [...] integers, -100 for rows to skip.
    """
    if not isinstance(logits, DeferredLogits) or logits.source.computed is not None:
        return None
    source, tokens = logits.source, logits.tokens().reshape(-1)
    seq, batch, _ = source.shape
    targets = labels.new_full((seq * batch,), IGNORED)
    targets[tokens] = labels.reshape(-1)
    with torch.set_grad_enabled(torch.is_grad_enabled() and logits.requires_grad):
        values = values_inside(
            source.layer, source.hidden, source.weight, targets.view(seq, batch), None,
            source.scale, entropy,
        )  # fmt: skip
        log_probs, entropies, mask = (
            None if x is None else x.reshape(-1)[tokens].view(labels.shape) for x in values
        )
        dtype = sum_dtype(source.dtype)
        entropies = None if entropies is None else entropies.to(dtype)
        return TokenLogProbs(log_probs.to(dtype), entropies, mask)


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
    original: Callable, /, logits, labels, compute_entropy=False, entropy_chunk_size=512
) -> tuple[Tensor, Tensor | None]:
    """[b, s] log-probabilities of shifted labels, and entropies if they are asked for; 0 where a
    label is -100."""
    values = log_probs_of(logits, labels, compute_entropy)
    if values is None:
        return original(logits, labels, compute_entropy, entropy_chunk_size)
    return values.log_probs, values.entropy


def of_slime(
    original: Callable, /, logits, tokens, tp_group, with_entropy=False, chunk_size=-1,
    log_prob_keep_mask=None, with_entropy_grad=True,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """[tokens, 1] log-probabilities and [tokens] entropies; with a mask over the vocabulary
    (`--rollout-top-p`) from logits."""
    values = None if log_prob_keep_mask is not None else log_probs_of(logits, tokens, with_entropy)
    if values is None:
        return original(
            logits, tokens.clamp(min=0), tp_group, with_entropy=with_entropy,
            chunk_size=chunk_size, log_prob_keep_mask=log_prob_keep_mask,
            with_entropy_grad=with_entropy_grad,
        )  # fmt: skip
    entropy = values.entropy
    if entropy is not None and not with_entropy_grad:
        entropy = entropy.detach()
    return values.log_probs.unsqueeze(-1), entropy


def labels_of_slime(original: Callable, /, rows, device, unconcat_tokens, *lengths) -> Tensor:
    """[rows] next tokens, -100 in rows that slime takes no log-probability of. `lengths`: of
    documents and responses, and whether context parallelism gathers."""
    labels = original(rows, device, unconcat_tokens, *lengths)
    if not takes_deferred():
        return labels
    numbers = torch.arange(rows, device=device)
    extract = original.__globals__["_extract_per_sample"]
    counted, _ = extract(numbers, None, *lengths)
    is_counted = torch.zeros(rows, dtype=torch.bool, device=device)
    is_counted[torch.cat([numbers[:0], *counted])] = True
    return labels.masked_fill(~is_counted, IGNORED)


def of_nemo_rl(original: Callable, /, cls, logits, target, *others, **named) -> Tensor:
    """[b, s] log-probabilities of shifted targets."""
    values = log_probs_of(logits, target, entropy=False)
    return original(cls, logits, target, *others, **named) if values is None else values.log_probs


def rows_of_roll(original: Callable, /, self, logits, *others, **named) -> Tensor:
    """Notes on deferred logits which rows count, by the mask that ROLL multiplies the result by."""
    mask = named["attention_mask"] if "attention_mask" in named else others[-1]
    if isinstance(logits, DeferredLogits) and mask is not getattr(logits, "mask", None):
        counted = torch.nn.functional.pad(mask[:, 1:], (0, 1))
        logits.mask, logits.entropy = mask, None
        logits.is_counted = self._get_feature_on_this_cp_rank(counted, "labels") != 0
    return original(self, logits, *others, **named)


def of_roll(original: Callable, /, vocab_parallel_logits, target, use_fused_kernel=True) -> Tensor:
    """[b, s] log-probabilities of shifted targets; entropies are computed along with them."""
    logits = vocab_parallel_logits
    if isinstance(logits, DeferredLogits) and hasattr(logits, "is_counted"):
        masked = target.masked_fill(~logits.is_counted, IGNORED)
        values = log_probs_of(logits, masked)
        if values is not None:
            logits.entropy = values.entropy
    else:
        values = log_probs_of(logits, target, entropy=False)
    return original(logits, target, use_fused_kernel) if values is None else values.log_probs


def entropy_of_roll(
    original: Callable, /, vocab_parallel_logits, used_fp32=True, use_fused_kernel=True
) -> Tensor:
    """[b, s] entropies."""
    logits = vocab_parallel_logits
    if getattr(logits, "entropy", None) is not None:
        return logits.entropy
    labels = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    if hasattr(logits, "is_counted"):
        labels = labels.masked_fill(~logits.is_counted, IGNORED)
    values = log_probs_of(logits, labels)
    if values is None:
        return original(logits, used_fp32, use_fused_kernel)
    assert values.entropy is not None  # computed by default
    return values.entropy
