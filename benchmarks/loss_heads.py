"""LM heads that `benchmarks.loss` measures: their sizes, tensors and true gradients."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.errors import BurstError
from megatron_burst.tools.units import in_units, whole_numbers

_WHO = "benchmarks.loss"


@dataclass(frozen=True, slots=True)
class LossCase:
    """One head and batch.

    Attributes:
        tokens: of all tensor-parallel ranks together; each has all of them.
        hidden: width of the hidden states.
        vocab: classes of all ranks.
        dtype: torch's name.
    """

    tokens: int
    hidden: int
    vocab: int
    dtype: str

    def __str__(self) -> str:
        return (
            f"{in_units(self.tokens)} tokens, {self.hidden} x {in_units(self.vocab)} classes, "
            f"{self.dtype}"
        )

    def flops(self, ranks: int) -> float:
        """Operations of a rank: three GEMMs of [tokens, hidden, classes]."""
        return 3 * 2.0 * self.tokens * self.hidden * self.vocab / ranks


_K = 1024
LOSS_PRESETS = {  # widths, vocabularies, tokens: what a run that is cut short should have first
    "quick": ((4096,), (128 * _K,), (32 * _K, 8 * _K, 128 * _K)),
    "full": (
        (4096, 8192), (128 * _K, 32 * _K, 256 * _K), (32 * _K, 8 * _K, 128 * _K, 256 * _K),
    ),
}  # fmt: skip


def cases_of(preset: str, tokens: str, hidden: str, vocab: str, dtype: str) -> list[LossCase]:
    """Every combination of the lists, and of the preset's where one is empty.

    Raises:
        BurstError: if a list is none.
    """
    given = ((hidden, "--hidden"), (vocab, "--vocab"), (tokens, "--tokens"))
    widths, vocabularies, lengths = (
        whole_numbers(text, option, _WHO) if text else default
        for (text, option), default in zip(given, LOSS_PRESETS[preset], strict=True)
    )
    return [LossCase(n, h, v, dtype) for n in lengths for h in widths for v in vocabularies]


def listed_cases(texts: Sequence[str], dtype: str) -> list[LossCase]:
    """Heads such as "32K,4096,128K": tokens, width, classes.

    Raises:
        BurstError: if one has another number of sizes.
    """
    found = []
    for text in texts:
        sizes = whole_numbers(text, "--case", _WHO)
        if len(sizes) != 3:
            raise BurstError(
                f"{_WHO}: --case must name tokens, width and classes, because these make a "
                f"problem; got {text!r}; write for example 32K,4096,128K"
            )
        found.append(LossCase(*sizes, dtype))
    return found


@dataclass(slots=True)
class HeadTensors:
    """A rank's tensors.

    Attributes:
        hidden: [tokens, h], the same on all ranks; takes a gradient.
        weight: [vocab / ranks, h]; takes a gradient.
        labels: [tokens] int64.
        group: of the ranks that share the vocabulary.
    """

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    group: dist.ProcessGroup

    def first(self, tokens: int) -> "HeadTensors":
        """The same head with the first tokens only; shares no gradient."""
        hidden, weight = (x.detach().clone() for x in (self.hidden[:tokens], self.weight))
        leaves = (x.requires_grad_() for x in (hidden, weight))
        return HeadTensors(*leaves, self.labels[:tokens], self.group)


def draw(case: LossCase, rank: int, device: torch.device, group) -> HeadTensors:
    """Random tensors of a rank; logits have a deviation of about 1."""
    options = {"device": device, "dtype": getattr(torch, case.dtype)}
    shared = torch.Generator(device).manual_seed(3)
    hidden = torch.randn(case.tokens, case.hidden, generator=shared, **options)
    labels = torch.randint(0, case.vocab, (case.tokens,), generator=shared, device=device)
    own = torch.Generator(device).manual_seed(100 + rank)
    shape = case.vocab // group.size(), case.hidden
    weight = torch.randn(*shape, generator=own, **options) * case.hidden**-0.5
    return HeadTensors(hidden.requires_grad_(), weight.requires_grad_(), labels, group)


@torch.no_grad()
def truth_of(x: HeadTensors) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, dX, dW) by definition, in float64."""
    hidden, weight = x.hidden.double(), x.weight.double()
    logits, first = hidden @ weight.t(), x.group.rank() * weight.shape[0]
    parts = [torch.empty_like(lse) for lse in [logits.logsumexp(1)] * x.group.size()]
    dist.all_gather(parts, logits.logsumexp(1), x.group)
    lse = torch.stack(parts).logsumexp(0)
    places = x.labels - first
    here = (places >= 0) & (places < weight.shape[0])
    rows = here.nonzero().flatten()
    picked = torch.zeros_like(lse)
    picked[rows] = logits[rows, places[rows]]
    dist.all_reduce(picked, group=x.group)
    dlogits = (logits - lse[:, None]).exp()
    dlogits[rows, places[rows]] -= 1
    dlogits /= len(x.labels)
    dhidden = dlogits @ weight
    dist.all_reduce(dhidden, group=x.group)
    return (lse - picked).mean(), dhidden, dlogits.t() @ hidden
