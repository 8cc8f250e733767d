"""The terms of a call, which must be the same on all ranks, and which of them are refused."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from numbers import Integral, Number, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_burst.config import BurstConfig
from megatron_burst.errors import Need, require
from megatron_burst.schedule.layout import Layout, check_tokens

_WHO = "burst attention"
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Asked(NamedTuple):
    """Arguments of `burst_attention` besides tensors, as the caller passed them."""

    causal: bool = True
    window: tuple[int | None, int | None] | None = None
    softmax_scale: float | None = None
    layout: str = "zigzag"
    qkv_format: str = "bshd"
    return_lse: bool = False
    config: BurstConfig = BurstConfig()
    layer: int = 0
    given: tuple[str, ...] = ()  # arguments that describe a packed sample: see `Sample.given`


@dataclass(frozen=True, slots=True)
class Terms:
    """What must be the same on all ranks; equal terms make equal calls."""

    shapes: tuple[tuple, ...]  # of q, k and v, like the next two; a batch axis of 1 in "thd"
    dtypes: tuple[torch.dtype, ...]
    devices: tuple[torch.device, ...]
    current_device: int | None  # None on CPU
    gradients: bool
    causal: bool
    window: tuple[int | None, int | None]
    given: tuple[str, ...]
    softmax_scale: float
    layout: str
    qkv_format: str
    config: BurstConfig
    wrong: tuple[tuple[str, str], ...]  # arguments of another kind, and what they are

    @property
    def packed(self) -> bool:
        """Whether the sequence is a packed sample."""
        return "cu_seqlens" in self.given

    def in_words(self) -> dict[str, str]:
        """By name; devices without what may differ between ranks."""
        words = {name: str(tuple(shape)) for name, shape in zip("qkv", self.shapes, strict=True)}
        words["dtype"] = ", ".join(map(str, self.dtypes))
        words["device"] = ", ".join(
            device.type + (" (not the current device)" if self.is_elsewhere(device) else "")
            for device in self.devices
        )
        for name in ("gradients", "causal", "softmax_scale", "layout", "qkv_format", "config"):
            words[name] = str(getattr(self, name))
        words |= dict.fromkeys(self.given, "given")
        if self.window not in ((None, None), (None, 0)):
            words["window"] = str(self.window)
        return words | dict(self.wrong)

    def configuration(self) -> "Terms":
        """The terms with batch and tokens set to 0, since these vary from call to call; ranks
        compare them once. Unchanged if the shapes do not match each other."""
        q, k, v = self.shapes
        if not (len(q) == len(k) == len(v) == 4 and q[:2] == k[:2] == v[:2]):
            return self
        rest = (torch.Size((0, 0, *shape[2:])) for shape in self.shapes)
        return replace(self, shapes=tuple(rest))

    def is_elsewhere(self, device: torch.device) -> bool:
        """Whether a device is a GPU other than the process's current one."""
        return device.type == "cuda" and device.index != self.current_device


def window_of(
    window: tuple[int | None, int | None] | None, causal: bool
) -> tuple[int | None, int | None]:
    """(left, right) as masks take it: None for no bound.

    Raises:
        BurstError: if it is not a pair of numbers of positions.
    """
    require(_WHO, () if _is_window(window) else [_need_of("window", _text(window))])
    bounds = (None, None) if window is None else window
    left, right = (None if bound in (None, -1) else int(bound) for bound in bounds)
    return left, 0 if causal else right


def terms_of(tensors: Sequence[Tensor], asked: Asked) -> Terms:
    """The terms of a call with q, k and v.

    An argument of another kind is only named, so that ranks can still compare their terms.
    """
    given = zip((*"qkv", *Asked._fields), (*tensors, *asked), strict=True)
    wrong = tuple((name, _text(x)) for name, x in given if not _KINDS[name].holds(x))
    if wrong:
        tensors = [x if _is_dense(x) else torch.empty(0) for x in tensors]
        usual = Asked._field_defaults
        asked = asked._replace(**{name: usual[name] for name, _ in wrong if name in usual})
    added = (1,) if asked.qkv_format == "thd" else ()
    scale, dim = asked.softmax_scale, tensors[0].shape[-1] if tensors[0].dim() else 1
    return Terms(
        shapes=tuple((*added, *x.shape) for x in tensors),
        dtypes=tuple(x.dtype for x in tensors),
        devices=tuple(x.device for x in tensors),
        current_device=torch.cuda.current_device() if any(x.is_cuda for x in tensors) else None,
        gradients=torch.is_grad_enabled() and any(x.requires_grad for x in tensors),
        causal=asked.causal,
        window=window_of(asked.window, asked.causal),
        given=asked.given,
        softmax_scale=max(dim, 1) ** -0.5 if scale is None else float(scale),
        layout=asked.layout,
        qkv_format=asked.qkv_format,
        config=asked.config,
        wrong=wrong,
    )


# ---- kinds of arguments -----------------------------------------------------------------------


def _is_dense(x: object) -> bool:
    if not isinstance(x, Tensor):
        return False
    return x.layout is torch.strided and not (x.is_nested or x.is_meta)


def _is_bool(x: object) -> bool:
    return isinstance(x, bool)


def _is_word(x: object) -> bool:
    return isinstance(x, str)


def _is_whole(x: object) -> bool:
    return isinstance(x, Integral) and not isinstance(x, bool)


def _is_window(x: object) -> bool:
    if not isinstance(x, Sequence):
        return x is None
    return len(x) == 2 and all(y is None or (_is_whole(y) and y >= -1) for y in x)


def _is_scale(x: object) -> bool:
    return x is None or (isinstance(x, Real) and not isinstance(x, bool))


def _is_config(x: object) -> bool:
    return isinstance(x, BurstConfig)


class _Kind(NamedTuple):
    """What an argument must be."""

    holds: Callable[[Any], bool]
    must: str  # be, and why
    change: str


_TENSOR = _Kind(
    _is_dense, "must be a dense tensor with data, because kernels read its rows", "pass one"
)
_SWITCH = _Kind(
    _is_bool, "must be True or False, because anything else could mean either", "pass one of them"
)
_WORD = _Kind(_is_word, "must be a word, because it names one of several ways", "pass one of them")
_KINDS = {
    **dict.fromkeys("qkv", _TENSOR),
    "causal": _SWITCH,
    "return_lse": _SWITCH,
    "window": _Kind(
        _is_window,
        "must be (left, right), the number of earlier and of later positions that a query attends "
        "to, each at least 0, or None or -1 for no bound",
        "pass such a pair",
    ),
    "softmax_scale": _Kind(
        _is_scale,
        "must be a number, because attention returns no gradient of it",
        "pass a float; if it is learned, multiply q by it and pass softmax_scale=1.0",
    ),
    "layout": _WORD,
    "qkv_format": _WORD,
    "config": _Kind(
        _is_config,
        "must be a BurstConfig, because that checks its options",
        "pass BurstConfig.of(...), or leave it out",
    ),
    "layer": _Kind(_is_whole, "must be a whole number, because ranks compare it", "pass one"),
    "given": _Kind(lambda given: True, "", ""),
}


def _need_of(name: str, got: str) -> Need:
    return False, f"{name} {_KINDS[name].must}", got, _KINDS[name].change


def _text(x: object) -> str:
    """What an argument is, in one short line."""
    if isinstance(x, Tensor):
        return f"a {'nested ' * x.is_nested}{type(x).__name__} ({x.layout}, {x.device.type})"
    plain = isinstance(x, str | Number | Sequence | Mapping | None)
    return " ".join(repr(x).split())[:80] if plain else f"a {type(x).__name__}"


def check_terms(terms: Terms, cp_size: int) -> None:
    """Refuse invalid terms; by now they are the same on all ranks.

    Raises:
        BurstError: in one sentence.
    """
    require(_WHO, chain.from_iterable(of(terms) for of in _NEEDS))
    tokens = terms.shapes[0][0 if terms.qkv_format == "sbhd" else 1]
    check_tokens(Layout(terms.layout), cp_size, tokens)


def _of_kinds(terms: Terms) -> Iterator[Need]:
    yield from (_need_of(name, got) for name, got in terms.wrong)


def _of_names(terms: Terms) -> Iterator[Need]:
    yield (
        terms.qkv_format in ("bshd", "sbhd", "thd"),
        "qkv_format must be bshd, sbhd or thd, because it names the order of the axes",
        repr(terms.qkv_format),
        "pass one of these",
    )
    yield (
        terms.layout in tuple(Layout),
        f"layout must be one of {', '.join(Layout)}, because it decides which keys a query may "
        "attend to",
        repr(terms.layout),
        "pass the one in which the tokens are sharded",
    )
    yield (
        terms.packed or terms.layout != Layout.DOCUMENTS,
        "cu_seqlens must be given for the layout zigzag-documents, because it shards each "
        "document on its own",
        "no cu_seqlens",
        "pass it, or another layout",
    )


def _of_sample(terms: Terms) -> Iterator[Need]:
    others, tree = ", ".join(terms.given), "prefix_tree" in terms.given
    yield (
        terms.packed or not terms.given,
        f"cu_seqlens must come with {others}, because it says where documents begin and end",
        "no cu_seqlens",
        f"pass it, or leave out {others}",
    )
    yield (
        not tree or terms.window == (None, 0),
        "a prefix tree must be causal and without a window, because a query attends to all "
        "ancestors of its segment",
        f"causal={terms.causal} and window={terms.window}",
        "leave out causal and window, or prefix_tree",
    )
    yield (
        not tree or terms.layout != Layout.DOCUMENTS,
        "a prefix tree must be sharded as one sample, because segments attend to each other",
        f"layout {terms.layout}",
        "shard the sample in zigzag or contiguous, without padding",
    )


def _of_shapes(terms: Terms) -> Iterator[Need]:
    q, k, v = terms.shapes
    packed = terms.qkv_format == "thd"  # with a batch axis of 1 added
    got = ", ".join(f"{n} {tuple(x)[packed:]}" for n, x in zip("qkv", terms.shapes, strict=True))
    yield (
        all(len(shape) == 4 for shape in (q, k, v)),
        f"q, k and v must have {'three' if packed else 'four'} axes ({terms.qkv_format}), "
        "because heads have an axis of their own",
        got,
        "reshape them",
    )
    yield (
        not terms.packed or q[1 if terms.qkv_format == "sbhd" else 0] == 1,
        "packed documents must have batch size 1, because cu_seqlens describes a single sample",
        got,
        "pass a batch of one",
    )
    yield (
        q[:2] == k[:2] and k[:3] == v[:3] and q[3] == k[3],
        "q, k and v must agree in batch and tokens, k and v in heads, q and k in head dimension, "
        "because this is self-attention",
        got,
        "pass matching shards",
    )
    yield (
        0 not in (*q, *v) and q[2] % k[2] == 0,
        "the number of KV heads must divide that of query heads and no axis may be empty, because "
        "each KV head serves equally many query heads",
        got,
        "change the heads (--num-query-groups) or the batch",
    )


def _of_tensors(terms: Terms) -> Iterator[Need]:
    yield (
        terms.dtypes[0] in _DTYPES and len(set(terms.dtypes)) == 1,
        "q, k and v must have one dtype among float64, float32, bfloat16 and float16, because "
        "nothing is converted silently",
        ", ".join(map(str, terms.dtypes)),
        "cast them",
    )
    yield (
        len(set(terms.devices)) == 1,
        "q, k and v must be on one device, because one kernel reads them",
        ", ".join(map(str, terms.devices)),
        "move them",
    )
    device = terms.devices[0]
    yield (
        not terms.is_elsewhere(device),
        "q, k and v must be on the process's current device, because streams and transfers belong "
        "to it",
        f"{device} while cuda:{terms.current_device} is current",
        "call torch.cuda.set_device(LOCAL_RANK) first",
    )


def _of_scale(terms: Terms) -> Iterator[Need]:
    yield (
        0 < terms.softmax_scale < float("inf"),
        "softmax_scale must be positive and finite, because kernels take the largest score "
        "before they scale it",
        terms.softmax_scale,
        "leave it out for d ** -0.5",
    )


_NEEDS = _of_kinds, _of_names, _of_sample, _of_shapes, _of_tensors, _of_scale
