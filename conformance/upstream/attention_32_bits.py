"""Backward of attention where the output of a GPU has more than 2^31 elements.

python conformance/upstream/attention_32_bits.py cudnn 520000     # cuDNN's, below the limit
python conformance/upstream/attention_32_bits.py cudnn 540000     # above it
python conformance/upstream/attention_32_bits.py varlen 520000    # FlashAttention-2's for documents
python conformance/upstream/attention_32_bits.py varlen 540000
python conformance/upstream/attention_32_bits.py batch 512000     # for sequences of a batch
python conformance/upstream/attention_32_bits.py batch 516000

Needs a GPU with 60 GiB free and torch. The number is of tokens, of 32 heads of 128; of `varlen` and
`batch` a multiple of 4000. Sequences of a batch are padded to multiples of 128 tokens, which is why
they overflow earlier. Prints the largest error of a part's gradients against those of the same part
computed alone, relative to the largest value.
"""

import sys

HEADS, DIM, KEYS, DOCUMENT = 32, 128, 2000, 4000
Parts = dict[str, float]


def tensors(count: int, rows: int) -> list:
    """Random bf16 tensors [rows, heads, dim]."""
    import torch

    sizes = {"device": "cuda", "dtype": torch.bfloat16}
    return [torch.empty(rows, HEADS, DIM, **sizes).normal_() for _ in range(count)]


def off(found, alone) -> float:
    return ((found.float() - alone.float()).abs().max() / alone.float().abs().max()).item()


def gradients(attend, q, k, v, dout) -> tuple:
    import torch

    given = [x.detach().requires_grad_() for x in (q, k, v)]
    attend(*given).backward(dout)
    torch.cuda.synchronize()
    return tuple(x.grad for x in given)


def cudnn_errors(rows: int) -> Parts:
    """Of queries without a mask over few keys, so that queries do not depend on each other."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def attend(q, k, v):
        q, k, v = (x[None].transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v).transpose(1, 2)[0]

    (q, dout), (k, v) = tensors(2, rows), tensors(2, KEYS)
    whole, _, _ = gradients(attend, q, k, v, dout)
    parts = {"first": slice(KEYS), "last": slice(rows - KEYS, rows)}
    alone = {name: gradients(attend, q[at], k, v, dout[at]) for name, at in parts.items()}
    return {f"dq of the {name}": off(whole[at], alone[name][0]) for name, at in parts.items()}


def document_errors(attend, rows: int) -> Parts:
    """Of causal documents, with `attend` for any number of them."""
    if rows % DOCUMENT:
        raise SystemExit(f"the number must be a multiple of {DOCUMENT}")
    q, k, v, dout = tensors(4, rows)
    whole, at = gradients(attend, q, k, v, dout), slice(rows - DOCUMENT, rows)
    alone = gradients(attend, q[at], k[at], v[at], dout[at])
    return {f"{name} of the last": off(x[at], y) for name, x, y in zip(
        ("dq", "dk", "dv"), whole, alone, strict=True)}  # fmt: skip


def varlen_errors(rows: int) -> Parts:
    """Of documents of one sequence."""
    import torch
    from torch.nn.attention.varlen import varlen_attn

    def attend(q, k, v):
        starts = torch.arange(0, len(q) + 1, DOCUMENT, dtype=torch.int32, device="cuda")
        return varlen_attn(q, k, v, starts, starts, DOCUMENT, DOCUMENT, window_size=(-1, 0))

    return document_errors(attend, rows)


def batch_errors(rows: int) -> Parts:
    """Of documents that are the sequences of a batch."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def attend(*given):
        q, k, v = (x.unflatten(0, (-1, DOCUMENT)).transpose(1, 2) for x in given)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).flatten(0, 1)

    return document_errors(attend, rows)


def main() -> None:
    kind, rows = sys.argv[1], int(sys.argv[2])
    errors = {"cudnn": cudnn_errors, "varlen": varlen_errors, "batch": batch_errors}[kind](rows)
    share = rows * HEADS * DIM / 2**31
    found = ", ".join(f"{part} off by {error:.4f}" for part, error in errors.items())
    print(f"{kind}, {rows} tokens, {share:.2f} of 2^31 elements: {found}")


if __name__ == "__main__":
    main()
