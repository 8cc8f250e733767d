"""The interface of BurstAttention and BurstEngine (the package burst_attn) on this engine, so that
a script changes one import only.

docs/versions.md has a table of all arguments, and how each differs from the original.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_burst import slices
from megatron_burst.attention import burst_attention
from megatron_burst.config import BurstConfig
from megatron_burst.errors import Need, require
from megatron_burst.loss.linear import linear_cross_entropy

# The original's kernel -> (ours, whether heads come before tokens).
_KERNELS = {"cuda": ("auto", False), "triton": ("triton", False), None: ("auto", True),
            "none": ("auto", True)}  # fmt: skip
_KEEP: dict[str, Any] = {"none": "none", "seq-wise": "half", "full": "all"}
_NONE = (None, None)
type Result = Tensor | tuple[Tensor, ...]
type Flash = Literal["cuda", "triton", "none"] | None
type Checkpoint = Literal["none", "full", "seq-wise"]
type Window = tuple[int, int] | None


def burst_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, flash: Flash = "cuda",
    causal: bool = False, optimize_bwd_comm: bool = False, deterministic: bool = False,
    process_group: Any = None, double_group: Sequence[Any] = _NONE, return_lse: bool = False,
    grad_ckpt: Checkpoint = "none", layer_idx: int = -1, sliding_window: Window = None,
    cu_seqlen: Tensor | None = None,
) -> Result:  # fmt: skip
    """Attention of a sequence that is sharded over a group, with the original's arguments.

    Rank r of P holds chunks r and 2P-1-r of 2P, one after the other; if nothing is masked, any
    rows. Gradients flow to q, k and v.

    Args:
        q: [b, s_local, h, d]; [b, h, s_local, d] if `flash` is None. Float64, float32, bfloat16 or
            float16.
        k: the same, with a number of heads that divides h; if nothing is masked, of any length.
        v: as k; its head dimension may differ.
        softmax_scale: scale of the scores; None is d ** -0.5.
        flash: "cuda" or None: the fastest kernel that supports the call; "triton": this package's
            own. In the original None (or "none") is the plain one, with heads before tokens.
        causal: whether to mask keys at later positions of the whole sequence.
        optimize_bwd_comm: no effect: burst never sends out in backward.
        deterministic: compute bitwise the same gradients every time.
        process_group: the ranks that share the sequence, or a pair whose first is used; None is
            the default group.
        double_group: [intra, inter] sub-groups of it: the ranks of a node, next to each other, and
            those with the same local rank on every node. They only say how many nodes there are;
            each may be a pair. [None, None] detects nodes.
        return_lse: whether to also return the log-sum-exp of the scores.
        grad_ckpt: what `torch.utils.checkpoint` around the call need not recompute: "none", all
            rows ("full"), or the later half of the sequence ("seq-wise").
        layer_idx: a number of the caller's choice, which errors name.
        sliding_window: (left, right) positions of the whole sequence that a query sees, -1 for all.
        cu_seqlen: [documents + 1], 0 and the end of each document of the whole sequence.

    Returns:
        out, shaped as q with v's head dimension, in q's dtype; with return_lse also lse [b, h,
        s_local] in max(float32, input dtype), which carries no gradient.

    Raises:
        BurstError: if `flash` or `grad_ckpt` is anything else, if a group is not a process group,
            if only one of `double_group` is given, or as `burst_attention` does.
    """
    call = "burst_attn_func", "zigzag", flash, grad_ckpt, layer_idx
    return _attend((q, k, v), call, (process_group, double_group), deterministic, causal=causal,
                   softmax_scale=softmax_scale, return_lse=return_lse,
                   window=sliding_window or None, cu_seqlens=cu_seqlen)  # fmt: skip


def burst_attn_func_striped(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, flash: Flash = "cuda",
    causal: bool = False, optimize_bwd_comm: bool = False, deterministic: bool = False,
    process_group: Any = None, double_group: Sequence[Any] = _NONE, return_lse: bool = False,
    grad_ckpt: Checkpoint = "none", layer_idx: int = -1, sliding_window: Window = None,
    cu_seqlen: Tensor | None = None,
) -> Result:  # fmt: skip
    """As `burst_attn_func`, but rank r of P holds the positions r, r + P, r + 2P, ...

    Shards of this layout circulate in rings; nothing is gathered inside a node.

    Raises:
        BurstError: as there; and for `cu_seqlen`, because documents need rows in chunks.
    """
    call = "burst_attn_func_striped", "striped", flash, grad_ckpt, layer_idx
    return _attend((q, k, v), call, (process_group, double_group), deterministic, causal=causal,
                   softmax_scale=softmax_scale, return_lse=return_lse,
                   window=sliding_window or None, cu_seqlens=cu_seqlen)  # fmt: skip


def burst_attn_func_sparse(
    q: Tensor, k: Tensor, v: Tensor, mask_mod: Any, softmax_scale: float | None = None,
    causal: bool = False, process_group: Any = None, double_group: Sequence[Any] = _NONE,
    return_lse: bool = False, grad_ckpt: Checkpoint = "none", layer_idx: int = -1,
) -> Result:  # fmt: skip
    """Block-sparse attention; arguments as of `burst_attn_func`, in its rows.

    Args:
        mask_mod: a BlockMask of torch's `create_block_mask` over the whole sequence, or over a
            rank's rows, as in the original: then row i of it means the positions from i * P on. Or
            int64 [slices, 5] (`megatron_burst.slices`). Each query must see a key.
        causal: whether later keys are masked as well; slices must then have none.
    """
    call = "burst_attn_func_sparse", "zigzag", "cuda", grad_ckpt, layer_idx
    return _attend((q, k, v), call, (process_group, double_group), causal=causal, slices=mask_mod,
                   softmax_scale=softmax_scale, return_lse=return_lse)  # fmt: skip


def _apply(function: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
    method, layer = (arguments[11:12] or (None,))[0] or ("none", -1)
    mask = dict(zip(("sliding_window", "cu_seqlen"), arguments[12:], strict=False))
    return function(*arguments[:11], grad_ckpt=method, layer_idx=layer, **mask, **options)


class OpBurstAttn:
    """`burst_attn_func` as the original's autograd function: arguments up to `return_lse`, then
    None or (grad_ckpt, layer_idx)."""

    apply = staticmethod(partial(_apply, burst_attn_func))


class OpBurstAttnStrip:
    """`burst_attn_func_striped` in the same way; then `sliding_window` and `cu_seqlen`."""

    apply = staticmethod(partial(_apply, burst_attn_func_striped))


def sl_proj_loss(x: Tensor, weight: Tensor, target: Tensor, num_splits: int,
                 ignore_index: int = -100, scale: bool = False) -> Tensor:  # fmt: skip
    """Losses [tokens] in float32 of x [tokens, h] and an LM head [vocab, h]; logits exist one tile
    at a time. `num_splits` changes nothing: tiles are chosen by memory. `scale` divides logits by
    h ** 0.5."""
    return SLFusedProjLoss(weight, None, ignore_index, "none", proj_scale=scale)(x, target)


class SLFusedProjLoss(nn.Module):
    """The sequence-level fusion of LM head and loss: `linear_cross_entropy`.

    Args:
        proj_weight: [vocab, h], the LM head.
        cls_weight: [vocab], weights of the targets' classes; "mean" divides by their sum.
        ignore_index: target of ignored tokens.
        reduction: "none", "sum" or "mean", over this rank's tokens.
        label_smoothing: as in Megatron's vocab_parallel_cross_entropy.
        proj_scale: whether to divide logits by h ** 0.5.
    """

    def __init__(self, proj_weight: Tensor, cls_weight: Tensor | None = None,
                 ignore_index: int = -100, reduction: Literal["none", "sum", "mean"] = "mean",
                 label_smoothing: float = 0.0, proj_scale: bool = False) -> None:  # fmt: skip
        super().__init__()
        self.proj_weight, self.cls_weight = proj_weight, cls_weight
        self.ignore_index, self.reduction = ignore_index, reduction
        self.label_smoothing, self.proj_scale = label_smoothing, proj_scale

    def forward(self, input: Tensor, target: Tensor, num_splits: int = 4) -> Tensor:
        """The loss of input [tokens, h] and target [tokens]; `num_splits` changes nothing."""
        weights = None
        if self.cls_weight is not None:
            ignored = target == self.ignore_index
            weights = self.cls_weight[target.masked_fill(ignored, 0)] * ~ignored
        loss = linear_cross_entropy(
            input, self.proj_weight, target, reduction=self.reduction, loss_mask=weights,
            ignore_index=self.ignore_index, label_smoothing=self.label_smoothing,
            logit_scale=self.proj_weight.shape[1] ** -0.5 if self.proj_scale else 1.0,
        )  # fmt: skip
        assert isinstance(loss, Tensor)
        return loss * weights if weights is not None and self.reduction == "none" else loss


def _attend(tensors: tuple[Tensor, Tensor, Tensor], call: tuple, groups: tuple[Any, Any],
            deterministic: bool = False, **options: Any) -> Result:  # fmt: skip
    """Attention of (q, k, v); `call`: the function's name, the layout if a mask is given, flash,
    grad_ckpt and layer_idx; `groups`: process_group and double_group."""
    who, layout, flash, grad_ckpt, layer = call
    # of each the group that the original sends keys through, of it and that of dQ
    group, *nested = (x[0] if isinstance(x, tuple | list) else x
                      for x in (groups[0], *(groups[1] or _NONE)))  # fmt: skip
    require(who, _needs(flash, grad_ckpt, group, nested))
    if "slices" in options:
        size = dist.get_world_size(group) if dist.is_initialized() else 1
        sizes = tensors[0].shape[1], tensors[1].shape[1], size
        options["slices"] = _slices_of(who, options["slices"], options["causal"], *sizes)
    backend, heads_first = _KERNELS[flash]
    turned = heads_first and all(x.dim() == 4 for x in tensors)  # otherwise refused as given
    q, k, v = (x.transpose(1, 2) if turned else x for x in tensors)
    masked = any(options.get(name) is not None for name in ("window", "cu_seqlens", "slices"))
    result = burst_attention(
        q, k, v, group=group, layer=max(layer, 0), **options,
        layout=layout if masked or options["causal"] else "contiguous",
        config=BurstConfig(
            backend=backend, deterministic=deterministic, keep=_KEEP[grad_ckpt],
            nodes=None if nested[0] is None else nested[1].size(),
        ),
    )  # fmt: skip
    if not turned:
        return result
    out, *lse = result if isinstance(result, tuple) else (result,)
    out = out.transpose(1, 2).contiguous()
    return (out, lse[0]) if lse else out


def _slices_of(who: str, mask: Any, causal: bool, rows: int, keys: int, size: int) -> Tensor:
    """The slices that a mask means for ranks of so many rows, and keys; refuses one that is neither
    slices nor a BlockMask of these or of all rows."""
    length = getattr(mask, "seq_lengths", (None,))[0]
    require(who, [
        (length or isinstance(mask, Tensor),
         "mask_mod must be a BlockMask or slices, because a function would be called for each pair",
         f"a {type(mask).__name__}", "pass create_block_mask(mask_mod, None, None, t, t)"),
        (length in (None, rows, rows * size),
         "a BlockMask must be of the whole sequence or of a rank's rows, because it says which "
         "rows see each other", f"{length} rows", f"make one of {rows * size} or {rows} rows"),
        (length is None or keys == rows,
         "a BlockMask must come with as many keys as queries, because both are the rows of one "
         "sequence", f"{keys} keys and {rows} queries", "pass slices"),
    ])  # fmt: skip
    return _stretched(mask, causal, rows * size // length) if length else mask


@lru_cache(maxsize=8)  # a process's layers share a few masks
def _stretched(mask: Any, causal: bool, by: int) -> Tensor:
    """The slices of a BlockMask, of which each row stands for so many positions."""
    return slices.of_block_mask(mask, causal) * torch.tensor([by] * 4 + [1])


def _needs(flash: Any, grad_ckpt: Any, group: Any, nested: Sequence[Any]) -> Iterator[Need]:
    """Checks of arguments that the original would misread or that burst does not support."""
    yield (flash in _KERNELS, "flash must be cuda, triton or None, because the order of the axes "
           "depends on it", repr(flash), "choose one of these, or call "
           "burst_attention(config=BurstConfig(backend=...))")  # fmt: skip
    yield (grad_ckpt in _KEEP, "grad_ckpt must be none, full or seq-wise, because a misspelt value "
           "would keep nothing", repr(grad_ckpt), "choose one of these")  # fmt: skip
    for own in (group, *nested):
        yield (own is None or isinstance(own, dist.ProcessGroup),
               "groups must be process groups of torch.distributed, because burst sends through it",
               f"a {type(own).__name__}",
               "make a group of the same ranks, as examples/bmtrain_group.py does")  # fmt: skip
    ranks = [None if own is None else dist.get_process_group_ranks(own) for own in nested]
    yield ([x is None for x in ranks] in ([True, True], [False, False]),
           "double_group must be the two groups [intra, inter], because together they tile the "
           "ranks", ranks, "pass both groups, or leave double_group out")  # fmt: skip
    if ranks[0] is not None:
        all_ranks, size = dist.get_process_group_ranks(group or dist.group.WORLD), len(ranks[0])
        row, column = divmod(all_ranks.index(dist.get_rank()), size)
        yield (ranks == [all_ranks[row * size :][:size], all_ranks[column::size]],
               "double_group must be a row and a column of process_group's ranks, because rings "
               "run inside nodes and between them", ranks, "pass a row of neighbouring ranks and a "
               "column across rows, or leave double_group out")  # fmt: skip
