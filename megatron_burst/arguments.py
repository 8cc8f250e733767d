"""What the arguments of a call must be, one by one."""

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Number, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_burst.config import BurstConfig
from megatron_burst.errors import Need, require


class CallArgs(NamedTuple):
    """Arguments of `burst_attention` besides tensors, as the caller passed them."""

    causal: bool = True
    window: tuple[int | None, int | None] | None = None
    softmax_scale: float | None = None
    softcap: float = 0.0
    layout: str = "zigzag"
    qkv_format: str = "bshd"
    return_max_logit: bool = False
    return_lse: bool = False
    config: BurstConfig = BurstConfig()
    layer: int = 0
    sample_args: tuple[str, ...] = ()  # from `sample_args_of`


def is_strided(x: object) -> bool:
    """Whether it is a tensor in rows: not sparse, nested or a DTensor (which has `to_local`)."""
    if not isinstance(x, Tensor):
        return False
    return x.layout is torch.strided and not (x.is_nested or hasattr(x, "to_local"))


def is_dense(x: object) -> bool:
    """Whether it is such a tensor with data."""
    return is_strided(x) and not x.is_meta


def is_sink(x: object) -> bool:
    return x is None or is_dense(x)


def _is_integer(x: object) -> bool:
    return isinstance(x, Integral) and not isinstance(x, bool)


def is_window(x: object) -> bool:
    if not isinstance(x, Sequence):
        return x is None
    return len(x) == 2 and all(y is None or (_is_integer(y) and y >= -1) for y in x)


class _Kind(NamedTuple):
    """What an argument must be."""

    holds: Callable[[Any], bool]
    must: str  # be, and why
    change: str


_TENSOR = _Kind(
    is_dense,
    "must be a dense tensor with data, because kernels read its rows",
    "pass a dense tensor, or call to_local() on a DTensor",
)
_SWITCH = _Kind(
    lambda x: isinstance(x, bool),
    "must be True or False, because anything else could mean either", "pass one of them",
)  # fmt: skip
_WORD = _Kind(
    lambda x: isinstance(x, str),
    "must be a string, because it is one of several names", "pass one of them",
)  # fmt: skip
KINDS = {
    **dict.fromkeys("qkv", _TENSOR),
    "sink": _TENSOR._replace(holds=is_sink, change="pass a dense tensor, or leave it out"),
    **dict.fromkeys(("causal", "return_lse", "return_max_logit"), _SWITCH),
    "window": _Kind(
        is_window,
        "must be (left, right), the numbers (0 or more) of earlier and later positions that a "
        "query attends to, with None or -1 for no bound",
        "pass such a pair",
    ),
    "softmax_scale": _Kind(
        lambda x: x is None or (isinstance(x, Real) and x is not True and not abs(x) > 3e38),
        "must be a number in float32's range, because kernels scale in it and return no gradient",
        "pass a float; if it is learned, multiply q by it and pass softmax_scale=1.0",
    ),
    "softcap": _Kind(
        lambda x: isinstance(x, Real) and x is not True and (x == 0 or 1e-30 <= x <= 1e30),
        "must be 0 or between 1e-30 and 1e30, because kernels bound the scores by it in float32",
        "pass a float, or leave it out for none",
    ),
    **dict.fromkeys(("layout", "qkv_format"), _WORD),
    "config": _Kind(
        lambda x: isinstance(x, BurstConfig),
        "must be a BurstConfig, because a BurstConfig checks its options",
        "pass BurstConfig(...), or leave it out",
    ),
    "layer": _Kind(_is_integer, "must be a whole number, because ranks compare it", "pass one"),
    "sample_args": _Kind(lambda x: True, "", ""),
}


def need_of_argument(name: str, got: str) -> Need:
    return False, f"{name} {KINDS[name].must}", got, KINDS[name].change


def short_repr(x: object) -> str:
    """What an argument is, in one short line."""
    if isinstance(x, Tensor):
        return f"a {'nested ' * x.is_nested}{type(x).__name__} ({x.layout}, {x.device.type})"
    plain = isinstance(x, str | Number | Sequence | Mapping | None)
    return " ".join(repr(x).split())[:80] if plain else f"a {type(x).__name__}"


def window_of(
    window: tuple[int | None, int | None] | None, causal: bool
) -> tuple[int | None, int | None]:
    """(left, right) as masks take it: None for no bound.

    Raises:
        BurstError: if it is not a pair of numbers of positions.
    """
    needs = () if is_window(window) else [need_of_argument("window", short_repr(window))]
    require("burst attention", needs)
    bounds = (None, None) if window is None else window
    left, right = (None if bound in (None, -1) else int(bound) for bound in bounds)
    return left, 0 if causal else right


def sample_args_of(
    cu_seqlens: object, padded: object, longest: object, parents: object, slices: object
) -> tuple[str, ...]:
    """Which arguments describe a packed sample or a mask of slices. With boundaries `max_seqlen`
    does not count, because ranks may pass it or not."""
    if cu_seqlens is slices is padded is longest is parents is None:
        return ()
    names = "cu_seqlens", "cu_seqlens_padded", "max_seqlen", "prefix_tree", "slices"
    values = cu_seqlens, padded, longest if cu_seqlens is None else None, parents, slices
    return tuple(name for name, x in zip(names, values, strict=True) if x is not None)
