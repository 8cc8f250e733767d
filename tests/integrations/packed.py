"""Documents that frameworks pack, and the reference: each on its own, with Megatron alone.

Import it where a test module is imported, as tests.mcore.gpt.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from tests.mcore.gpt import VOCAB, Run, _complete_grads, _sum_over_cp

LENGTHS = 5, 16, 13, 9, 3  # for two ranks: most chunks are padded, one is only padding
# Float64: 2.2e-16 a rounding, sums of 4096 terms (64 tokens by 64 channels), some 20 of them in a
# row, and a gradient ten times smaller than its terms.
TOLERANCE = 1e-9


def documents() -> list[torch.Tensor]:
    """Tokens of each document, int64 [length]."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(1, VOCAB, (length,), generator=generator) for length in LENGTHS]


def boundaries() -> torch.Tensor:
    """`cu_seqlens` of the documents without padding."""
    return torch.tensor((0, *LENGTHS)).cumsum(0).int()


def one_by_one(gpt: Callable[..., torch.Tensor]) -> Run:
    """Reference: loss, i.e. minus the log-probabilities of all next tokens, and gradients of a
    model without context parallelism that gets each document as its own sequence."""
    total = torch.zeros((), dtype=torch.float64)
    for tokens in documents():
        logits = gpt(tokens[None], torch.arange(len(tokens))[None], attention_mask=None)
        total += F.cross_entropy(logits[0, :-1], tokens[1:], reduction="sum")
    total.backward()
    return Run(total.detach(), _complete_grads(gpt))


def run_of(gpt, logits: torch.Tensor, labels: torch.Tensor) -> Run:
    """The same from logits [1, rows, V] of this rank's rows and their next tokens [rows]."""
    loss = F.cross_entropy(logits[0], labels, reduction="sum")
    loss.backward()
    return Run(_sum_over_cp(loss.detach()), _complete_grads(gpt))


def core_of(gpt) -> str:
    """Which core attention the last layer of a model has."""
    return type(gpt.decoder.layers[-1].self_attention.core_attention).__name__
