"""FlashAttention-2 as torch ships it, for NVIDIA GPUs."""

import torch

from megatron_burst.kernels.backends import Capability, QuerySide

_aten = torch.ops.aten


class Flash:
    """aten::_flash_attention_forward and _backward: bf16 and fp16, grouped heads native."""

    capability = Capability(
        name="flash",
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        max_dim=256,
        dim_multiple=8,
        equal_dims=True,
        takes_delta=False,
        speed="FlashAttention-2, which torch ships",
    )

    def forward(self, q, k, v, scale, causal):
        out, lse, *_ = _aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale
        )
        return out, lse

    def backward(self, side: QuerySide, k, v, scale, causal):
        no_dropout = torch.empty(2, dtype=torch.uint64, device=k.device)
        unused = torch.empty((), dtype=torch.uint64, device=k.device)
        return _aten._flash_attention_backward(
            side.dout, side.q, k, v, side.out, side.lse.contiguous(), None, None,
            side.q.shape[1], k.shape[1], 0.0, causal, no_dropout, unused, scale=scale,
        )  # fmt: skip
