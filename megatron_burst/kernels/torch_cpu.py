"""torch's own flash attention for CPUs, its fastest there (not on the reading path)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_burst.kernels.interface import Backend, Capability, QuerySide, copy_results
from megatron_burst.kernels.partial import accumulate_dtype
from megatron_burst.kernels.reference import hidden
from megatron_burst.kernels.visible import Visible, plain_causal, segments_of
from megatron_burst.schedule.mask import DOCUMENTS, SLICES

_aten = torch.ops.aten


class TorchCpu(Backend):
    """aten::_scaled_dot_product_flash_attention_for_cpu, computed in max(float32, input dtype).

    Its bf16 and fp16 gradients would be summed in bf16 and fp16 across blocks, hence the upcast.
    It needs equal head dimensions: the smaller one is padded with zeros, which change nothing.
    Segments are computed one by one; causal ones that are not square, and slices, use a mask in
    memory.
    """

    capability = Capability(
        name="torch-cpu",
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
        max_dim=0,
        dim_multiple=1,
        takes_delta=False,
        masks=frozenset({DOCUMENTS, SLICES}),
        wide_grads=True,
        speed="torch's fastest attention on CPUs",
    )

    def forward(self, q, k, v, scale, visible, into=None):
        parts = [
            _forward(q[:, rows], k[:, keys], v[:, keys], scale, visible)
            for rows, keys in segments_of(visible, q.shape[1], k.shape[1])
        ]
        outs, lses = zip(*parts, strict=True)
        return copy_results((_joined(outs, 1), _joined(lses, 2)), into)

    def backward(self, side: QuerySide, k, v, scale, visible, into=None, deterministic=False):
        parts = [
            _backward(side.rows(rows), k[:, keys], v[:, keys], scale, visible)
            for rows, keys in segments_of(visible, side.q.shape[1], k.shape[1])
        ]
        return copy_results(tuple(_joined(each, 1) for each in zip(*parts, strict=True)), into)


def _joined(parts: Sequence[Tensor], axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Visible
) -> tuple[Tensor, Tensor]:
    """(out, lse) of one segment."""
    batch, rows, heads, dim_v = *q.shape[:3], v.shape[-1]
    if not rows or not k.shape[1]:  # not supported by the kernel
        dtype = accumulate_dtype(q.dtype)
        lse = q.new_full((batch, heads, rows), -torch.inf, dtype=dtype)
        return q.new_zeros(batch, rows, heads, dim_v, dtype=dtype), lse
    band = _band(visible, q, k)
    q, k, v = _for_kernel(q, k, v)
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, **band, scale=scale)
    unseen = rows - k.shape[2]
    if visible.causal and unseen > 0:
        lse[:, :, :unseen] = -torch.inf  # the kernel returns 0
    if visible.parts is not None:
        blank = (band["attn_mask"] == -torch.inf).all(-1)
        lse[:, :, blank], out[:, :, blank] = -torch.inf, 0
    return out[..., :dim_v].transpose(1, 2), lse


def _backward(
    side: QuerySide, k: Tensor, v: Tensor, scale: float, visible: Visible
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of one segment."""
    if not side.q.shape[1] or not k.shape[1]:
        dtype = accumulate_dtype(k.dtype)
        return tuple(torch.zeros_like(x, dtype=dtype) for x in (side.q, k, v))
    dim_qk, dim_v, band = k.shape[-1], v.shape[-1], _band(visible, side.q, k)
    q, k, v, dout, out = _for_kernel(side.q, k, v, side.dout, side.out)
    lse = side.lse.masked_fill(side.lse == -torch.inf, torch.inf)  # weights of 0, not NaN
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, **band, scale=scale
    )
    dq, dk, dv = dq[..., :dim_qk], dk[..., :dim_qk], dv[..., :dim_v]
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _band(visible: Visible, q: Tensor, k: Tensor) -> dict[str, Any]:
    """The kernel's mask arguments; its own causal mask is aligned top left."""
    rows, keys, dtype = q.shape[1], k.shape[1], accumulate_dtype(q.dtype)
    if visible.parts is not None:
        unseen = ~visible.parts.seen(slice(0, rows), keys, q.device)
    else:
        causal = plain_causal(visible, "torch-cpu", packed=True)
        if not causal or rows == keys:
            return {"is_causal": causal}
        unseen = hidden(visible, q, k, keys - rows)
    mask = torch.zeros(rows, keys, dtype=dtype).masked_fill_(unseen, -torch.inf)
    return {"is_causal": False, "attn_mask": mask}


def _for_kernel(*tensors: Tensor) -> list[Tensor]:
    """[b, n, h, d] -> [b, h, n, widest d], upcast, with a dense last axis."""
    widest = max(x.shape[-1] for x in tensors)
    dtype = accumulate_dtype(tensors[0].dtype)
    upcast = [x.to(dtype) for x in tensors]
    padded = [x if x.shape[-1] == widest else pad(x, (0, widest - x.shape[-1])) for x in upcast]
    return [x.transpose(1, 2) for x in padded]
