"""cuDNN and FlashAttention-2 of torch, and varlen calls (not on the reading path)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_burst.kernels.interface import Backend, Capability, QuerySide, copy_results
from megatron_burst.kernels.visible import Segments, Visible, plain_causal
from megatron_burst.schedule.mask import DOCUMENTS, WINDOWS


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Context in which torch's kernels are deterministic; restores the switch."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if not wanted or (before and not warn_only):
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


_aten = torch.ops.aten


class Cudnn(Backend):
    """aten::_scaled_dot_product_cudnn_attention and its backward: grouped heads native.

    Torch skips it if deterministic algorithms are required (check_cudnn_deterministic in
    ATen/native/transformers/cuda/sdp_utils.cpp), and cannot ask cuDNN for one. On Hopper it
    supports head dimensions up to 256 (check_cudnn_tensor_shapes there; cuDNN 9.10, as in torch
    2.9). Where the output has more than 2^31 elements, dq and dk are wrong (measured,
    cuDNN 9.19).
    """

    capability = Capability(
        name="cudnn",
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        max_dim=128,
        dim_multiple=8,
        takes_delta=False,
        deterministic=False,
        splits=True,
        archs=frozenset({8, 9, 10}),
        max_dim_on={9: 256},
        in_32_bits=True,
        speed="cuDNN's attention, which torch ships",
    )

    def missing(self) -> str | None:
        return None if torch.backends.cudnn.is_available() else "this torch has no cuDNN"

    def forward(self, q, k, v, scale, visible, into=None):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, plain_causal(visible, "cudnn"), False, scale=scale
        )
        return copy_results((out.transpose(1, 2), lse.view(q.shape[:3])), into)

    def backward(self, side: QuerySide, k, v, scale, visible, into=None, deterministic=False):
        q, k, v, dout, out = (x.transpose(1, 2) for x in (side.q, k, v, side.dout, side.out))
        no_dropout = torch.empty((), dtype=torch.int64, device=k.device)
        grads = _aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, side.lse.contiguous().unsqueeze(-1), no_dropout, no_dropout,
            None, None, None, q.shape[2], k.shape[2], 0.0, plain_causal(visible, "cudnn"),
            scale=scale,
        )  # fmt: skip
        return copy_results(tuple(grad.transpose(1, 2) for grad in grads), into)


class Flash(Backend):
    """aten::_flash_attention_forward and _backward: bf16 and fp16, grouped heads native.

    Where the output has more than 2^31 elements, backward of documents reads out of bounds
    (measured, torch 2.11). The offset of a document's or a sequence's sums of dQ is computed in 32
    bits (q_offset in flash_bwd_preprocess_kernel.h, until flash-attention's pull request 2260).
    """

    capability = Capability(
        name="flash",
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        max_dim=256,
        dim_multiple=8,
        equal_dims=True,
        takes_delta=False,
        splits=True,
        rectangular_causal=True,
        masks=frozenset({WINDOWS, DOCUMENTS}),
        archs=frozenset({8, 9, 10, 12}),
        in_32_bits=True,
        speed="FlashAttention-2, which torch ships",
    )

    def forward(self, q, k, v, scale, visible, into=None):
        if is_varlen(visible):
            return copy_results(_forward_varlen(q, k, v, scale, visible), into)
        out, lse, *_ = _aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, visible.causal, False, scale=scale
        )
        return copy_results((out, lse), into)

    def backward(self, side: QuerySide, k, v, scale, visible, into=None, deterministic=False):
        with deterministic_algorithms(deterministic):
            if is_varlen(visible):
                return copy_results(_backward_varlen(side, k, v, scale, visible), into)
            grads = _aten._flash_attention_backward(
                side.dout, side.q, k, v, side.out, side.lse.contiguous(), None, None,
                side.q.shape[1], k.shape[1], 0.0, visible.causal, *_no_dropout(k), scale=scale,
            )  # fmt: skip
        return copy_results(grads, into)


def _no_dropout(x: Tensor) -> tuple[Tensor, Tensor]:
    """A dummy RNG state, which is never read."""
    kind = {"dtype": torch.uint64, "device": x.device}
    return torch.empty(2, **kind), torch.empty((), **kind)


def _where(visible: Visible, q: Tensor, k: Tensor) -> tuple[tuple, dict[str, int | None]]:
    """Segments and band, as both passes take them."""
    # without segments each sequence of the batch is one
    segments = visible.segments or Segments(_starts(q), _starts(k), q.shape[1], k.shape[1])
    band = visible.within(q.shape[1], k.shape[1])
    # Upper bounds: max_q of 1 would make FlashAttention-2 swap rows and heads, which requires one
    # query in every segment; max_k of 0 would launch an empty grid. max_k below max_q: `is_varlen`.
    max_q = max(segments.max_q, 2)
    places = segments.cu_q, segments.cu_k, max_q, max(segments.max_k, max_q), 0.0, band.causal
    return places, {"window_size_left": band.left, "window_size_right": band.right}


def _forward_varlen(
    q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Visible
) -> tuple[Tensor, Tensor]:
    places, band = _where(visible, q, k)
    out, lse, *_ = _aten._flash_attention_forward(
        _flat(q), _flat(k), _flat(v), *places, False, scale=scale, **band
    )
    lse = lse.masked_fill_(lse == torch.inf, -torch.inf)  # of rows without a key it may be either
    return out.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).transpose(0, 1)


def _backward_varlen(
    side: QuerySide, k: Tensor, v: Tensor, scale: float, visible: Visible
) -> tuple[Tensor, ...]:
    places, band = _where(visible, side.q, k)
    tensors, lse = (side.q, k, v), side.lse.transpose(0, 1).flatten(1, 2).contiguous()  # [h, b * n]
    grads = _aten._flash_attention_backward(
        _flat(side.dout), *map(_flat, tensors), _flat(side.out), lse, *places,
        *_no_dropout(k), scale=scale, **band,
    )  # fmt: skip
    return tuple(grad.unflatten(0, x.shape[:2]) for x, grad in zip(tensors, grads, strict=True))


def is_varlen(visible: Visible) -> bool:
    """Whether to call FlashAttention-2's varlen kernel: for segments, and for windows.

    Without segments FlashAttention-2 treats a bound of at least the number of keys as no bound, and
    no right bound as that number: wrong with more queries than keys (flash_api.cpp:
    `window_size_right >= seqlen_k`, `window_size_right = seqlen_k`). The varlen kernel takes the
    maximum number of keys as an argument.
    """
    return visible.windowed or visible.segments is not None


def _starts(x: Tensor) -> Tensor:
    """Where each sequence of a batch [b, n, h, d] begins, and the end: [b + 1], int32."""
    batch, rows = x.shape[:2]
    return torch.arange(batch + 1, dtype=torch.int32, device=x.device) * rows


def _flat(x: Tensor) -> Tensor:
    """[b, n, h, d] -> [b * n, h, d]; a view for a batch of one."""
    return x[0] if x.shape[0] == 1 else x.flatten(0, 1)
