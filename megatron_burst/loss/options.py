"""What the loss is: numbers that change it, and how its gradients come about."""

from dataclasses import dataclass
from typing import Literal

from megatron_burst.errors import BurstError

WHO = "linear cross-entropy"
Reduction = Literal["none", "sum", "mean"]
Grads = Literal["auto", "forward", "recompute"]


@dataclass(frozen=True, slots=True)
class LossOptions:
    """Numbers that define the loss of a token; z are its logits, y its label, V the vocabulary.

    z = cap(logit_scale * hidden @ weight.T), cap(x) = softcap * tanh(x / softcap);
    loss = lse(z) - (1 - s) z[y] - s mean(z) + z_loss * lse(z)^2, s = label_smoothing * V / (V - 1).

    Attributes:
        label_smoothing: probability dealt out evenly over the V - 1 other classes, as Megatron's
            vocab_parallel_cross_entropy has it; torch's cross_entropy deals it out over all V
            classes, which is the same for torch's label_smoothing = s.
        z_loss: weight of lse(z)^2, which keeps logits from drifting.
        softcap: bound of |z|; 0 switches it off.
        logit_scale: factor of logits before the cap; 1 / temperature, or MuP's output multiplier.
        ignore_index: tokens with this label are left out.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    logit_scale: float = 1.0
    ignore_index: int = -100

    def __post_init__(self) -> None:
        needs = (
            (0 <= self.label_smoothing < 1, "label_smoothing", "be in [0, 1)", "a probability"),
            (self.z_loss >= 0, "z_loss", "not be negative", "it would reward drifting logits"),
            (0 <= self.softcap < float("inf"), "softcap", "be 0 or positive", "0 means no cap"),
            (0 < self.logit_scale < float("inf"), "logit_scale", "be positive and finite",
             "the order of the classes would change"),
        )  # fmt: skip
        for holds, name, must, why in needs:
            if not holds:
                raise BurstError(
                    f"{WHO}: {name} must {must}, because {why}; got {getattr(self, name)}; change "
                    "it or leave it out"
                )

    def smoothing(self, vocab: int) -> float:
        """s of the formula above."""
        return self.label_smoothing * vocab / (vocab - 1) if vocab > 1 else 0.0
