"""torch's own flash attention for CPU: the fastest attention that torch has there."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_burst.kernels.backends import Capability, QuerySide, deliver
from megatron_burst.kernels.partial import accumulate_dtype

_aten = torch.ops.aten


class TorchCpu:
    """aten::_scaled_dot_product_flash_attention_for_cpu, computed in max(float32, input dtype).

    Its bf16 and fp16 gradients would be summed in bf16 and fp16 across blocks, hence the upcast.
    It needs equal head dimensions: the smaller one is padded with zeros, which change nothing.
    """

    capability = Capability(
        name="torch-cpu",
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
        max_dim=0,
        dim_multiple=1,
        takes_delta=False,
        wide_grads=True,
        speed="the fastest attention that torch has on CPU",
    )

    def missing(self) -> str | None:
        return None

    def forward(self, q, k, v, scale, visible, into=None):
        dim_v = v.shape[-1]
        q, k, v = _for_kernel(q, k, v)
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, is_causal=visible.causal, scale=scale
        )
        return deliver((out[..., :dim_v].transpose(1, 2), lse), into)

    def backward(self, side: QuerySide, k, v, scale, visible, into=None, deterministic=False):
        dim_qk, dim_v = k.shape[-1], v.shape[-1]
        q, k, v, dout, out = _for_kernel(side.q, k, v, side.dout, side.out)
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, side.lse, 0.0, visible.causal, scale=scale
        )
        dq, dk, dv = dq[..., :dim_qk], dk[..., :dim_qk], dv[..., :dim_v]
        return deliver((dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)), into)


def _for_kernel(*tensors: Tensor) -> list[Tensor]:
    """[b, n, h, d] -> [b, h, n, widest d], upcast, with a dense last axis."""
    widest = max(x.shape[-1] for x in tensors)
    dtype = accumulate_dtype(tensors[0].dtype)
    prepared = []
    for x in tensors:
        x = x.to(dtype)
        if x.shape[-1] < widest:
            x = pad(x, (0, widest - x.shape[-1]))
        prepared.append(x.transpose(1, 2))
    return prepared
