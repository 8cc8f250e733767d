"""Gradients of FlashAttention-4 on Hopper with a V dimension below the QK dimension of 128.

python conformance/upstream/fa4_narrow_values.py

Needs a Hopper GPU and flash-attn-4 (4.0.0b36). Compares with attention in float32, by V's head
dimension, with and without a causal mask, and shows which rows of dq are wrong.
"""

import math

HEADS, ROWS, DIM = 4, 1024, 128
TILE = 80  # query rows of a tile of the backward without a mask (_tile_size_bwd_sm90)


def rows_past_a_tile(dim_v: int, tile: int = TILE, threads: int = 256) -> int:
    """How many rows the preprocessing covers behind a tile of the backward.

    flash_bwd_preprocess.py: a row takes as many threads as its block of 128, 64 or 32 columns of
    bfloat16 needs at 16 bytes a thread; what the threads cover at once does not stop at the tile.
    """
    columns = next(each for each in (128, 64, 32, 16) if dim_v % each == 0)
    rows = threads // (columns // 8)
    return math.ceil(tile / rows) * rows - tile


def attention(q, k, v, causal: bool):
    """In float32, [b, s, h, d]."""
    import torch

    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(DIM)
    if causal:
        scores = scores.masked_fill(
            torch.ones(ROWS, ROWS, device=q.device).triu(1).bool(), -math.inf
        )
    return (scores.softmax(-1) @ v).transpose(1, 2)


def grads(function, tensors, dout):
    """dq, dk, dv in float32."""
    import torch

    tensors = [x.detach().requires_grad_() for x in tensors]
    out = function(*tensors)
    out = out[0] if isinstance(out, tuple) else out
    return [x.float() for x in torch.autograd.grad(out, tensors, dout.to(out.dtype))]


def compare(dim_v: int, causal: bool) -> str:
    """Each gradient's largest error relative to its largest value; which rows of dq are wrong."""
    import torch
    from flash_attn.cute import flash_attn_func

    torch.manual_seed(0)
    q, k = torch.randn(2, 1, ROWS, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    v, dout = torch.randn(2, 1, ROWS, HEADS, dim_v, device="cuda", dtype=torch.bfloat16)
    true = grads(lambda *x: attention(*x, causal), (q, k, v), dout)
    found = grads(lambda *x: flash_attn_func(*x, causal=causal), (q, k, v), dout)
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, true, strict=True)]
    off = ((found[0] - true[0]).abs().amax(-1) > 0.02 * true[0].abs().max())[0]
    rows = [sorted(off[:, head].nonzero()[:, 0].tolist()) for head in range(HEADS)]
    told = " ".join(f"{x:.3f}" for x in errors)
    return f"errors of dq, dk, dv {told}; wrong rows of dq by head {rows}"


def main() -> None:
    for dim_v in (128, 96, 64, 32):
        past = rows_past_a_tile(dim_v)
        print(f"V of {dim_v}: the preprocessing covers {past} rows behind a tile of {TILE}")
        for causal in (False, True):
            try:
                said = compare(dim_v, causal)
            except Exception as error:  # of the compiler: it refuses some dimensions
                said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            print(f"    {'causal' if causal else 'no mask'}: {said}")


if __name__ == "__main__":
    main()
