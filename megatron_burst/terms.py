"""The terms of a call, which must be the same on all ranks, and which of them are refused."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError, Need, require
from megatron_burst.schedule.layout import Layout, check_tokens

_WHO = "burst attention"
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Terms:
    """What must be the same on all ranks; equal terms make equal calls."""

    shapes: tuple[tuple, ...]  # of q, k and v, like the next two
    dtypes: tuple[torch.dtype, ...]
    devices: tuple[torch.device, ...]
    current_device: int | None  # None on CPU
    gradients: bool
    causal: bool
    window: tuple[int | None, int | None]
    packed: bool
    tree: bool
    softmax_scale: float
    layout: str
    qkv_format: str
    config: BurstConfig

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
        if self.packed:
            words["cu_seqlens"] = "given"
        if self.tree:
            words["prefix_tree"] = "given"
        if self.window not in ((None, None), (None, 0)):
            words["window"] = str(self.window)
        return words

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


class Sees(NamedTuple):
    """Which keys a query sees, and where they are: arguments of `burst_attention`."""

    causal: bool
    window: tuple[int | None, int | None]  # as of `window_of`
    packed: bool
    tree: bool
    layout: str


def window_of(
    window: tuple[int | None, int | None] | None, causal: bool
) -> tuple[int | None, int | None]:
    """(left, right) as masks take it: None for no bound.

    Raises:
        BurstError: if it is not a pair of numbers of positions.
    """
    given = (None, None) if window is None else window
    if not (isinstance(given, Sequence) and len(given) == 2 and all(map(_is_bound, given))):
        raise BurstError(
            f"{_WHO}: window must be (left, right), the number of earlier and of later "
            "positions that a query attends to, each at least 0, or None or -1 for no bound; "
            f"got {window!r}; pass such a pair"
        )
    left, right = (None if bound == -1 else bound for bound in given)
    return left, 0 if causal else right


def _is_bound(bound: object) -> bool:
    if bound is None:
        return True
    return isinstance(bound, int) and not isinstance(bound, bool) and bound >= -1


def terms_of(
    q: Tensor, k: Tensor, v: Tensor, sees: Sees, scale: float, qkv_format: str,
    config: BurstConfig,
) -> Terms:  # fmt: skip
    """The terms of a call with these tensors."""
    tensors = (q, k, v)
    return Terms(
        shapes=tuple(x.shape for x in tensors),
        dtypes=tuple(x.dtype for x in tensors),
        devices=tuple(x.device for x in tensors),
        current_device=torch.cuda.current_device() if any(x.is_cuda for x in tensors) else None,
        gradients=torch.is_grad_enabled() and any(x.requires_grad for x in tensors),
        causal=sees.causal,
        window=sees.window,
        packed=sees.packed,
        tree=sees.tree,
        softmax_scale=scale,
        layout=sees.layout,
        qkv_format=qkv_format,
        config=config,
    )


def check(terms: Terms, cp_size: int) -> None:
    """Refuse invalid terms; by now they are the same on all ranks.

    Raises:
        BurstError: in one sentence.
    """
    require(_WHO, chain.from_iterable(of(terms) for of in _NEEDS))
    tokens = terms.shapes[0][0 if terms.qkv_format == "sbhd" else 1]
    check_tokens(Layout(terms.layout), cp_size, tokens)


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


def _of_tree(terms: Terms) -> Iterator[Need]:
    yield (
        terms.packed or not terms.tree,
        "cu_seqlens must come with prefix_tree, because it says where the tree's segments begin",
        "no cu_seqlens",
        "pass it, or leave out prefix_tree",
    )
    yield (
        not terms.tree or terms.window == (None, 0),
        "a prefix tree must be causal and without a window, because a query attends to all "
        "ancestors of its segment",
        f"causal={terms.causal} and window={terms.window}",
        "leave out causal and window, or prefix_tree",
    )
    yield (
        not terms.tree or terms.layout != Layout.DOCUMENTS,
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


_NEEDS = _of_names, _of_tree, _of_shapes, _of_tensors, _of_scale
