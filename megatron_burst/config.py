"""BurstConfig: the only place where flags and environment become values."""

import os
import socket
from argparse import Namespace
from dataclasses import dataclass, fields
from typing import Literal, get_args, get_origin

from megatron_burst.errors import BurstError


@dataclass(frozen=True, slots=True)
class BurstConfig:
    """How burst attention runs. All ranks of a context-parallel group must have the same.

    Attributes:
        intra: how keys come together inside a host: "ring" passes shards from rank to rank,
            "gather" collects them a few heads at a time; "auto" gathers on GPUs of one host.
        heads_per_round: key heads that are gathered at a time; None takes what fills the GPU
            within a bounded buffer.
        circulate: what travels round the rings in backward; "auto" takes what has fewer bytes.
        backend: the attention kernel by name; "auto" takes the fastest that can do the call.
        deterministic: compute bitwise the same gradients every time.
        hosts: pretend that the group spans this many hosts of contiguous ranks; None: ask them.
        grad_wire: dtype of gradients between ranks: "accumulate" is max(float32, input dtype),
            whose error does not grow with the number of ranks; "input" halves bf16's bytes.
        nccl_ctas: most thread blocks that a transfer of NCCL's may take from the GPU's
            multiprocessors; None leaves it to NCCL.
        timeout_s: seconds a rank waits for the others before it names who is missing.
    """

    intra: Literal["auto", "ring", "gather"] = "auto"
    heads_per_round: int | None = None
    circulate: Literal["auto", "kv", "q"] = "auto"
    backend: str = "auto"
    deterministic: bool = False
    hosts: int | None = None
    grad_wire: Literal["accumulate", "input"] = "accumulate"
    nccl_ctas: int | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if get_origin(field.type) is Literal and value not in get_args(field.type):
                legal = ", ".join(get_args(field.type))
                raise BurstError(
                    f"burst attention: the option {field.name} must be one of {legal}, because a "
                    f"misspelt one would be silently ignored; got {value!r}; choose one of these"
                )
        for name in ("heads_per_round", "nccl_ctas"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BurstError(
                    f"burst attention: {name} must be at least 1, because nothing would move with "
                    f"none; got {value}; leave it out"
                )
        if self.timeout_s <= 0:
            raise BurstError(
                "burst attention: timeout_s must be positive, because a rank waits that long for "
                f"the others; got {self.timeout_s}; pass seconds"
            )

    @classmethod
    def from_args(cls, args: Namespace) -> "BurstConfig":
        """The configuration in Megatron's parsed arguments (`--burst-*`)."""
        given = {f.name: getattr(args, f"burst_{f.name}", None) for f in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, slots=True)
class FusedLossConfig:
    """How the fused LM head and loss run in Megatron (`--burst-fused-loss`).

    Attributes:
        grads: "recompute" computes logits again in backward and is right for any use of the losses;
            "forward" computes gradients along with the loss, a quarter less work, and needs losses
            that are multiplied with the loss mask and one number, as pretrain_gpt.py's are; other
            uses give NaN gradients.
        label_smoothing: as Megatron's vocab_parallel_cross_entropy has it.
        z_loss: weight of the squared log-sum-exp.
        softcap: bound of the logits; 0: none.
    """

    grads: Literal["recompute", "forward"] = "recompute"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0

    @classmethod
    def from_args(cls, args: Namespace) -> "FusedLossConfig":
        """The configuration in Megatron's parsed arguments (`--burst-loss-*`)."""
        given = {f.name: getattr(args, f"burst_loss_{f.name}", None) for f in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})


def host_name() -> str:
    """What tells this process's host from others; NCCL's own override counts."""
    return os.environ.get("NCCL_HOSTID") or socket.gethostname()


def share_kernel_cache() -> None:
    """Have FlashAttention-4 keep compiled kernels on disk, where all ranks find them.

    Must be called before it is imported. Its own variables, where set, count.
    """
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
