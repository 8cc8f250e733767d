"""FlashAttention-2 as torch ships it, for NVIDIA GPUs."""

import torch

from megatron_burst.kernels.backends import Capability, QuerySide, deliver
from megatron_burst.kernels.determinism import deterministic_algorithms

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
        rectangular_causal=True,
        archs=frozenset({8, 9, 10, 12}),
        speed="FlashAttention-2, which torch ships",
    )

    def missing(self) -> str | None:
        return None

    def forward(self, q, k, v, scale, visible, into=None):
        out, lse, *_ = _aten._flash_attention_forward(
            q,
            k,
            v,
            None,
            None,
            q.shape[1],
            k.shape[1],
            0.0,
            visible.causal,
            False,
            scale=scale,
        )
        return deliver((out, lse), into)

    def backward(self, side: QuerySide, k, v, scale, visible, into=None, deterministic=False):
        no_dropout = torch.empty(2, dtype=torch.uint64, device=k.device)
        unused = torch.empty((), dtype=torch.uint64, device=k.device)
        with deterministic_algorithms(deterministic):
            grads = _aten._flash_attention_backward(
                side.dout, side.q, k, v, side.out, side.lse.contiguous(), None, None,
                side.q.shape[1], k.shape[1], 0.0, visible.causal, no_dropout, unused, scale=scale,
            )  # fmt: skip
        return deliver(grads, into)
