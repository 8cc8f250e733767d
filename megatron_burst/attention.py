"""burst_attention: exact attention over a process group, with autograd."""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_burst.comm.groups import board_of, communicator_of
from megatron_burst.config import BurstConfig
from megatron_burst.engine.call import Call
from megatron_burst.engine.run import run_backward, run_forward
from megatron_burst.engine.setup import Pattern, set_up
from megatron_burst.errors import BurstError
from megatron_burst.plan.layout import Layout, check_tokens
from megatron_burst.plan.mask import Mask
from megatron_burst.recompute.half import keeping_of
from megatron_burst.recompute.keep import run_kept

_WHO = "burst attention"
_DENSE = torch.contiguous_format
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def burst_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    layout: Literal["zigzag", "contiguous", "striped"] = "zigzag",
    qkv_format: Literal["bshd", "sbhd"] = "bshd",
    return_lse: bool = False,
    config: BurstConfig | None = None,
    hcp_groups: Sequence[dist.ProcessGroup] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact softmax attention of a sequence that is dealt out over the ranks of a group.

    Every rank passes its own rows and gets its own rows of the output. On the GPUs of one host keys
    are gathered a few heads at a time. Elsewhere K and V travel round nested rings in forward; in
    backward K, V, dK, dV or Q, dO, dQ do, whichever is fewer bytes. Results are merged and
    gradients summed in max(float32, input dtype). Under `torch.no_grad` nothing is kept. All ranks
    of the group must call with the same shapes and options, and all of them must run backward
    through the output if one does: each needs the others' shards. Inside a checkpoint
    (`torch.utils.checkpoint`, or Megatron's) `config.keep` lets the replay take what the first pass
    has computed (from the second checkpoint of the process on: the first call sees to it).

    Args:
        q: [b, s_local, h, d_qk], or [s_local, b, h, d_qk] for "sbhd"; float64, float32, bfloat16
            or float16.
        k: [b, s_local, h_kv, d_qk]; h_kv divides h, and heads are not expanded.
        v: [b, s_local, h_kv, d_v].
        group: the context-parallel group; None is the default group.
        causal: mask keys at later positions of the whole sequence.
        softmax_scale: of the scores; None is d_qk ** -0.5.
        layout: which positions a rank holds; "zigzag" (Megatron's): chunks r and 2P-1-r of 2P.
        qkv_format: order of the first two axes.
        return_lse: also return the log-sum-exp of the scores.
        config: how it runs.
        hcp_groups: existing [intra, inter] sub-groups to read over; None makes own ones.

    Returns:
        out, shaped as q with d_v for d_qk and in q's dtype; with return_lse also lse [b, h,
        s_local] in max(float32, input dtype), which carries no gradient.

    Raises:
        BurstError: if the input does not fit; before anything is sent, and on all ranks if they
            pass the same, or if one differs in a call that the others have not made before. A
            rank that differs in a later call is found out by its hops, within `timeout_s` on CPU.

    Source: BurstAttention (arXiv 2403.09347), BurstEngine (arXiv 2509.19836).
    """
    config = config or BurstConfig()
    group = _group(group)
    scale = softmax_scale if softmax_scale is not None else _default_scale(q)
    terms = _terms(q, k, v, causal, scale, layout, qkv_format, config)
    board = board_of(group, config.timeout_s)
    is_new = board.agree(terms, _WHO)
    _check(q, k, v, scale, layout, qkv_format, group.size())
    if qkv_format == "sbhd":
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    q, k, v = (_readable(x) for x in (q, k, v))
    carrier = communicator_of(group, config, hcp_groups)
    mask = Mask.CAUSAL if causal else Mask.FULL
    pattern = Pattern(Layout(layout), mask, scale)
    call, choices = set_up(q, k, v, carrier, pattern, config)
    keeping, kept = keeping_of(q, k, v, carrier, pattern, config)
    if is_new:
        board.agree({"backend": call.backend.capability.name}, _WHO)
        board.say_once(f"{_WHO}: {choices}{kept}")
    run = partial(_attend, call=call)
    out, lse = run_kept(run, (q, k, v), keeping) if keeping else run(q, k, v)
    out = out.transpose(0, 1) if qkv_format == "sbhd" else out
    return (out, lse) if return_lse else out


def _attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    return BurstAttentionFunction.apply(q, k, v, call)


class BurstAttentionFunction(torch.autograd.Function):
    """Forward and backward of one `Call`; saves q, k, v, out and lse."""

    @staticmethod
    def forward(ctx, q, k, v, call):
        with torch.autocast(q.device.type, enabled=False):  # the sums keep their dtype
            out, lse = run_forward(call, q, k, v)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, _dlse):
        if dout is None:
            return None, None, None, None
        q, k, v, out, lse = ctx.saved_tensors
        dout = _readable(dout)
        with torch.autocast(q.device.type, enabled=False):
            grads = run_backward(ctx.call, q, k, v, out, lse, dout)
        return *(grad.to(q.dtype) for grad in grads), None


def _readable(x: Tensor) -> Tensor:
    """As it is if kernels can read it, else a copy: rows that overlap, are not dense or not aligned
    (to the 16 bytes that the GPU's tensor copies move)."""
    sizes = zip(x.shape, x.stride(), strict=True)
    apart = all(size == 1 or stride for size, stride in sizes)
    steps = (x.data_ptr(), *(stride * x.itemsize for stride in x.stride()[:-1]))
    aligned = not x.is_cuda or all(step % 16 == 0 for step in steps)
    return x if x.stride(-1) == 1 and apart and aligned else x.clone(memory_format=_DENSE)


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise BurstError(
            f"{_WHO}: torch.distributed must be initialised, because the sequence is dealt out "
            "over a process group; got no default group; call init_process_group, or torchrun's"
        )
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise BurstError(
            f"{_WHO}: the calling rank must belong to the group, because each rank passes its own "
            f"rows; got global rank {dist.get_rank()} outside of it; call on its members only"
        )
    return group


def _default_scale(q: Tensor) -> float:
    return max(q.shape[-1], 1) ** -0.5 if q.dim() else 1.0


def _terms(q, k, v, causal, scale, layout, qkv_format, config) -> dict[str, str]:
    """What all ranks must have in common, in words."""
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    terms = {name: str(tuple(x.shape)) for name, x in (("q", q), ("k", k), ("v", v))}
    terms["dtype"] = ", ".join(str(x.dtype) for x in (q, k, v))
    terms["device"] = ", ".join(_device_name(x) for x in (q, k, v))
    terms["causal"] = str(causal)
    terms |= {"softmax_scale": repr(scale), "layout": layout, "qkv_format": qkv_format}
    return terms | {"gradients": str(needs_grad), "config": str(config)}


def _device_name(x: Tensor) -> str:
    others = x.is_cuda and x.device.index != torch.cuda.current_device()
    return x.device.type + (" (not the current device)" if others else "")


def _check(q, k, v, scale, layout, qkv_format, cp_size) -> None:
    """Refuse what does not fit; the facts are the same on all ranks by now."""
    if qkv_format not in ("bshd", "sbhd"):
        raise BurstError(
            f"{_WHO}: qkv_format must be bshd or sbhd, because it names the order of the axes; got "
            f"{qkv_format!r}; pass one of these"
        )
    if layout not in tuple(Layout):
        raise BurstError(
            f"{_WHO}: layout must be one of {', '.join(Layout)}, because it decides which keys a "
            f"query may see; got {layout!r}; pass the one in which the tokens are dealt out"
        )
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if any(x.dim() != 4 for x in (q, k, v)):
        raise BurstError(
            f"{_WHO}: q, k and v must have four axes ({qkv_format}), because heads and batch are "
            f"separate; got {shapes}; reshape them"
        )
    if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise BurstError(
            f"{_WHO}: q, k and v must agree in batch and tokens, k and v in heads, q and k in head "
            f"dimension, because this is self-attention; got {shapes}; pass matching shards"
        )
    if 0 in (*q.shape, *v.shape) or q.shape[2] % k.shape[2]:
        raise BurstError(
            f"{_WHO}: the number of key heads must divide that of query heads and no axis may be "
            f"empty, because each key head serves equally many query heads; got {shapes}; change "
            "the heads (--num-query-groups) or the batch"
        )
    if q.dtype not in _DTYPES or {k.dtype, v.dtype} != {q.dtype}:
        raise BurstError(
            f"{_WHO}: q, k and v must have one dtype among float64, float32, bfloat16 and float16, "
            f"because nothing is converted silently; got {q.dtype}, {k.dtype}, {v.dtype}; cast them"
        )
    if len({x.device for x in (q, k, v)}) > 1:
        raise BurstError(
            f"{_WHO}: q, k and v must be on one device, because one kernel reads them; got "
            f"{q.device}, {k.device}, {v.device}; move them"
        )
    if "(" in _device_name(q):
        raise BurstError(
            f"{_WHO}: q, k and v must be on the process's current device, because streams and "
            f"transfers belong to it; got {q.device} while cuda:{torch.cuda.current_device()} is "
            "current; call torch.cuda.set_device(LOCAL_RANK) first"
        )
    if not 0 < scale < float("inf"):
        raise BurstError(
            f"{_WHO}: softmax_scale must be positive and finite, because kernels look for the "
            f"largest score before they scale it; got {scale}; leave it out for d ** -0.5"
        )
    check_tokens(Layout(layout), cp_size, q.shape[0 if qkv_format == "sbhd" else 1])
