"""The original BurstAttention's functions on this engine, so that a script changes one import only.

`burst_attn_func`, `burst_attn_func_striped`, `OpBurstAttn.apply` and `OpBurstAttnStrip.apply` have
the arguments of the package burst_attn. `burst_attention` has more options.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from megatron_burst.attention import burst_attention
from megatron_burst.config import BurstConfig
from megatron_burst.errors import Need, require

# The original's kernel -> (ours, whether heads come before tokens).
_KERNELS = {
    "cuda": ("auto", False),
    "triton": ("triton", False),
    None: ("auto", True),
    "none": ("auto", True),
}
_NONE = (None, None)


def burst_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    flash: Literal["cuda", "triton", "none"] | None = "cuda",
    causal: bool = False,
    optimize_bwd_comm: bool = False,
    deterministic: bool = False,
    process_group: dist.ProcessGroup | None = None,
    double_group: Sequence[Any] = _NONE,
) -> Tensor:
    """Attention of a sequence that is sharded over a group, with the original's arguments.

    With a causal mask, rank r of P holds chunks r and 2P-1-r of 2P, one after the other; without a
    mask, any rows. Gradients flow to q, k and v.

    Args:
        q: [b, s_local, h, d]; [b, h, s_local, d] if `flash` is None. Float64, float32, bfloat16 or
            float16.
        k: the same, with a number of heads that divides h.
        v: as k; its head dimension may differ.
        softmax_scale: scale of the scores; None is d ** -0.5.
        flash: the kernel. "cuda": the fastest that supports the call, such as FlashAttention;
            "triton": this package's own; None (or "none"): also the fastest; in the original its
            plain one, with heads before tokens. All of them support the causal mask.
        causal: whether to mask keys at later positions of the whole sequence.
        optimize_bwd_comm: in the original, send the row sums of out * dout in backward rather than
            out. Burst chooses by bytes; both values compute the same.
        deterministic: compute bitwise the same gradients every time.
        process_group: the ranks that share the sequence; None is the default group.
        double_group: [intra, inter] sub-groups of `process_group`: the ranks of a node, next to
            each other, and those with the same local rank on every node. They say how many nodes
            there are; burst makes groups of its own. Each may be a pair, as in the original.
            [None, None] detects nodes, where the original ran one ring over all ranks.

    Returns:
        out, shaped as q with v's head dimension, in q's dtype.

    Raises:
        BurstError: if `flash` is anything else, if a group is not a process group, if only one of
            `double_group` is given, or as `burst_attention` does.
    """
    given = (flash, process_group, double_group)
    return _attend((q, k, v), softmax_scale, causal, deterministic, given, "zigzag")


def burst_attn_func_striped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    flash: Literal["cuda", "triton", "none"] | None = "cuda",
    causal: bool = False,
    optimize_bwd_comm: bool = False,
    deterministic: bool = False,
    process_group: dist.ProcessGroup | None = None,
    double_group: Sequence[Any] = _NONE,
) -> Tensor:
    """As `burst_attn_func`, but rank r of P holds the positions r, r + P, r + 2P, ...

    Shards of this layout circulate in rings; nothing is gathered inside a node.
    """
    given = (flash, process_group, double_group)
    return _attend((q, k, v), softmax_scale, causal, deterministic, given, "striped")


class OpBurstAttn:
    """`burst_attn_func` under the name of the original's autograd function."""

    apply = staticmethod(burst_attn_func)


class OpBurstAttnStrip:
    """`burst_attn_func_striped` under the name of the original's autograd function."""

    apply = staticmethod(burst_attn_func_striped)


def _attend(
    tensors: tuple[Tensor, Tensor, Tensor],
    scale: float | None,
    causal: bool,
    deterministic: bool,
    given: tuple[Any, Any, Any],
    layout: Literal["zigzag", "striped"],
) -> Tensor:
    """Attention of (q, k, v).

    Args:
        given: (flash, process_group, double_group).
        layout: used with a causal mask; without one any rows will do.
    """
    flash, group, pair = given
    intra_inter: list[Any] = [one[0] if isinstance(one, tuple) else one for one in pair or _NONE]
    who = "burst_attn_func" + ("_striped" if layout == "striped" else "")
    require(who, _needs(flash, group, intra_inter))
    backend, heads_first = _KERNELS[flash]
    turned = heads_first and all(x.dim() == 4 for x in tensors)  # otherwise refused as given
    q, k, v = (x.transpose(1, 2) if turned else x for x in tensors)
    out = burst_attention(
        q, k, v, group=group, causal=causal, softmax_scale=scale,
        layout=layout if causal else "contiguous",
        config=BurstConfig(
            backend=backend, deterministic=deterministic,
            nodes=None if intra_inter[0] is None else intra_inter[1].size(),
        ),
    )  # fmt: skip
    assert isinstance(out, Tensor)  # no lse was asked for
    return out.transpose(1, 2).contiguous() if turned else out


def _needs(flash: Any, group: Any, intra_inter: Sequence[Any]) -> Iterator[Need]:
    """Checks of arguments that the original would misread or that burst does not support."""
    yield (
        flash in _KERNELS,
        "flash must be cuda, triton or None, because the order of the axes depends on it",
        repr(flash),
        "choose one of these, or call burst_attention(config=BurstConfig(backend=...))",
    )
    for one in (group, *intra_inter):
        yield (
            one is None or isinstance(one, dist.ProcessGroup),
            "groups must be torch.distributed's, because burst sends through it",
            f"a {type(one).__name__}",
            "make one of the same ranks, as examples/bmtrain_group.py does",
        )
    yield (
        [one is None for one in intra_inter] in ([True, True], [False, False]),
        "double_group must be the two groups [intra, inter], because together they tile the ranks",
        [None if one is None else dist.get_process_group_ranks(one) for one in intra_inter],
        "pass both, or leave them out",
    )
    if all(isinstance(one, dist.ProcessGroup) for one in intra_inter):
        mine, every = dist.get_rank(), dist.get_process_group_ranks(group or dist.group.WORLD)
        intra, inter = (dist.get_process_group_ranks(one) for one in intra_inter)
        row, column = divmod(every.index(mine), len(intra))
        there = every[row * len(intra) :][: len(intra)], every[column :: len(intra)]
        yield (
            (intra, inter) == there,
            "double_group must be a row and a column of process_group's ranks, because rings run "
            "inside nodes and between them",
            [intra, inter],
            "pass groups of neighbouring ranks and of those with the same place, or leave them out",
        )
