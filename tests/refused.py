"""Attention that no layer of burst computes: what provokes each refusal, and the table of
docs/models.md, which has the sentences."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch

from megatron_burst.errors import BurstError
from megatron_burst.kernels.backends import choose_backend
from megatron_burst.kernels.interface import Problem
from megatron_burst.mcore.refusals import refuse


def _option(feature: str, name: str, value: object) -> Callable[[], None]:
    """Of Megatron's, asked where a layer is built or called."""
    return partial(refuse, feature, SimpleNamespace(**{name: value}), "burst", ())


def _wide() -> None:
    """On Hopper."""
    choose_backend(Problem("cuda", torch.bfloat16, 512, 512, arch=9), "auto")


REFUSED: dict[str, Callable[[], None]] = {
    "DSA (DeepSeek-V3.2, GLM-5; `D` in hybrid patterns), other selected keys": _option(
        "attention", "experimental_attention_variant", "dsa"
    ),
    "linear attention of its own (KDA of Kimi-K3, lightning attention)": _option(
        "attention", "experimental_attention_variant", "kda"
    ),
    "images of Gemma-3's vision model, seen both ways by an attention bias": _option(
        "call", "attention_bias", (1, 1, 4, 4)
    ),
    "head dimensions above 256 on GPUs (Gemma-4's 512)": _wide,
    "masks as tensors": _option("call", "attention_mask", (1, 1, 4, 4)),
    "fp8 attention": _option("attention", "fp8_dot_product_attention", True),
    "dropout": _option("attention", "attention_dropout", 0.1),
    "cross-attention (T5)": _option("attention", "attention_type", "cross"),
}


def sentence(provoke: Callable[[], None]) -> str:
    """What the error says, without who says it."""
    try:
        provoke()
    except BurstError as error:
        return str(error).partition(": ")[2]
    raise AssertionError("nothing was refused")


def table() -> str:
    """In Markdown."""
    rows = (f"| {name} | {sentence(provoke)} |" for name, provoke in REFUSED.items())
    return "\n".join(("| attention | the error says |", "| --- | --- |", *rows))
