"""Fused RoPE where Q, K and V of a GPU have more than 2^31 elements.

python conformance/upstream/fused_rope_32_bits.py te 131072   # TransformerEngine's, below the limit
python conformance/upstream/fused_rope_32_bits.py te 144000   # above it
python conformance/upstream/fused_rope_32_bits.py mla 80000    # Megatron's for MLA with YaRN
python conformance/upstream/fused_rope_32_bits.py mla 90000

Needs a GPU with 16 GiB free, Megatron-Core and, for `te`, TransformerEngine. The number is of
tokens. Prints how far the last token is off, which should be rounding.
"""

import sys

WIDTHS = {"te": 15360, "mla": 128 * 192}  # elements of a token


def te_error(rows: int) -> float:
    """Of one head of K in a tensor of Q, K and V, as self-attention projects them (40 heads)."""
    import torch
    from megatron.core.extensions.transformer_engine import fused_apply_rotary_pos_emb

    qkv = torch.empty(rows, 1, 1, WIDTHS["te"], device="cuda", dtype=torch.bfloat16).normal_()
    k = qkv[..., 5120:5248]
    tokens = torch.arange(rows, device="cuda", dtype=torch.float32)
    angles = tokens[:, None] * torch.rand(64, device="cuda")
    angles = angles.repeat(1, 2)[:, None, None]
    out = fused_apply_rotary_pos_emb(k, angles)[-1:].float()
    one, two = k[-1:].float().chunk(2, -1)
    turned = k[-1:].float() * angles[-1:].cos() + torch.cat((-two, one), -1) * angles[-1:].sin()
    return (out - turned).abs().max().item()


def mla_error(rows: int) -> float:
    """Of the first of 128 heads of 128 + 64; angles are 0, so that elements only change places."""
    import torch
    from megatron.core.fusions.fused_mla_yarn_rope_apply import fused_apply_mla_rope_for_q

    q = torch.empty(rows, 1, 128, 192, device="cuda", dtype=torch.bfloat16).normal_()
    before = q[-1, 0, 0, 128:].float().clone()
    sin = torch.zeros(rows, 1, 1, 64, device="cuda", dtype=torch.bfloat16)
    out = fused_apply_mla_rope_for_q(q, torch.ones_like(sin), sin, 128, 64)[-1, 0, 0, 128:].float()
    return (out - torch.cat((before[0::2], before[1::2]))).abs().max().item()


def main() -> None:
    kind, rows = sys.argv[1], int(sys.argv[2])
    error = {"te": te_error, "mla": mla_error}[kind](rows)
    share = rows * WIDTHS[kind] / 2**31
    print(f"{kind}, {rows} tokens, {share:.2f} of 2^31 elements: last token off by {error:.4f}")


if __name__ == "__main__":
    main()
