"""Options of the fused LM head and loss in Megatron."""

from argparse import Namespace
from dataclasses import dataclass, fields
from typing import Literal

from megatron_burst.force import check_words


@dataclass(frozen=True, slots=True)
class FusedLossConfig:
    """Options of the fused LM head and loss in Megatron (`--burst-fused-loss`).

    Attributes:
        grads: "recompute" computes logits again in backward, which is a third more work, and is
            correct for any use of the losses. "forward" computes gradients along with the loss. It
            needs a second float32 gradient of the weight, and losses that are multiplied by the
            loss mask and one number, as in pretrain_gpt.py; other uses give NaN gradients.
        label_smoothing: as in Megatron's vocab_parallel_cross_entropy.
        z_loss: weight of the squared log-sum-exp.
        softcap: soft cap of the logits; 0: none.
    """

    grads: Literal["recompute", "forward"] = "recompute"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0

    def __post_init__(self) -> None:
        check_words(self, "--burst-fused-loss")

    @classmethod
    def from_args(cls, args: Namespace) -> "FusedLossConfig":
        """The configuration in Megatron's parsed arguments (`--burst-loss-*`)."""
        options = {f.name: getattr(args, f"burst_loss_{f.name}", None) for f in fields(cls)}
        return cls(**{name: value for name, value in options.items() if value is not None})
