"""Megatron's --attention-backend, said in burst's kernels."""

from argparse import Namespace
from dataclasses import replace

from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from megatron_burst.say import say

_FAMILIES = {
    "flash": "fa4,fa3,flash-attn,flash,torch-cpu",
    "fused": "cudnn,te",
    "unfused": "reference",
}


def with_attention_backend(burst: BurstConfig, asked: object) -> BurstConfig:
    """The configuration with the kernels that Megatron's option stands for.

    Args:
        burst: as given.
        asked: Megatron's `attention_backend`, the enum's member or its name; None: not given.

    Raises:
        BurstError: if it names Megatron's own attention, or other kernels than `burst.backend`.
    """
    name = getattr(asked, "name", asked)
    if name in (None, "auto"):
        return burst
    if name not in _FAMILIES:
        raise BurstError(
            "--attention-backend: a kernel must be named that burst can run, because "
            f"{name} is Megatron's own attention, which burst replaces; got {name}; leave it out, "
            "or pass unfused for attention in plain PyTorch"
        )
    family = _FAMILIES[name]
    if burst.backend == "auto":
        return replace(burst, backend=family)
    if not set(burst.backend.split(",")) <= set(family.split(",")):
        raise BurstError(
            f"--burst-backend: must be among {family} under --attention-backend {name}, because "
            f"both name the kernel; got --burst-backend {burst.backend}; leave one of them out"
        )
    return burst


def say_attention_backend(args: Namespace) -> None:
    """Say what --attention-backend means, if it is given."""
    asked = getattr(args, "attention_backend", None)
    backend = with_attention_backend(BurstConfig(), asked).backend
    if backend != "auto" and args.rank == 0:
        say(
            f"burst attention: --attention-backend {getattr(asked, 'name', asked)} stands for the "
            f"first of its kernels {backend} that can do a call"
        )
