"""cuDNN's fused attention as torch ships it, for NVIDIA GPUs since Ampere."""

import torch

from megatron_burst.kernels.backends import Capability, QuerySide, deliver
from megatron_burst.kernels.band import plain_causal

_aten = torch.ops.aten


class Cudnn:
    """aten::_scaled_dot_product_cudnn_attention and its backward: grouped heads native.

    Torch skips it if deterministic algorithms are required (check_cudnn_deterministic in
    ATen/native/transformers/cuda/sdp_utils.cpp), and cannot ask cuDNN for one. On Hopper it
    supports head dimensions up to 256 (check_cudnn_tensor_shapes there; cuDNN 9.10, as in torch
    2.9).
    """

    capability = Capability(
        name="cudnn",
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        max_dim=128,
        dim_multiple=8,
        takes_delta=False,
        deterministic=False,
        archs=frozenset({8, 9, 10}),
        max_dim_on={9: 256},
        speed="cuDNN's attention, which torch ships",
    )

    def missing(self) -> str | None:
        return None if torch.backends.cudnn.is_available() else "this torch has no cuDNN"

    def forward(self, q, k, v, scale, visible, into=None):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, plain_causal(visible, "cudnn"), False, scale=scale
        )
        return deliver((out.transpose(1, 2), lse.view(q.shape[:3])), into)

    def backward(self, side: QuerySide, k, v, scale, visible, into=None, deterministic=False):
        q, k, v, dout, out = (x.transpose(1, 2) for x in (side.q, k, v, side.dout, side.out))
        no_dropout = torch.empty((), dtype=torch.int64, device=k.device)
        grads = _aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, side.lse.contiguous().unsqueeze(-1), no_dropout, no_dropout,
            None, None, None, q.shape[2], k.shape[2], 0.0, plain_causal(visible, "cudnn"),
            scale=scale,
        )  # fmt: skip
        return deliver(tuple(grad.transpose(1, 2) for grad in grads), into)
