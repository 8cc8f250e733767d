"""Attention forward in Triton: a program takes a block of query rows through its keys."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_burst.kernels.triton_blocks import Chooser, Pass, blocks_for
from megatron_burst.kernels.triton_tiles import (
    LN_2,
    LOG2_E,
    box,
    heads_together,
    key_range,
    load_rows,
    operand,
    padded,
    statistics,
    store_rows,
    tile_of_program,
    visible,
    widths,
)
from megatron_burst.kernels.visible import Visible


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Visible, out: Tensor, lse: Tensor,
    choose: Chooser | None = None,
) -> None:  # fmt: skip
    """Compute out [b, n, h, dv] and lse [b, h, n] where they are; see `Backend.forward`.

    `choose` takes the place of the table of blocks.
    """
    batch, n_q, heads, dim_qk = q.shape
    n_k, dim_v = v.shape[1], v.shape[3]
    if out.numel() == 0:
        return
    group = heads // k.shape[2]
    blocks = (choose or blocks_for)(Pass.FORWARD, q, dim_qk, dim_v)
    width, rest = widths(dim_qk)
    together = group * heads_together(k, n_k * (dim_qk + dim_v) * k.itemsize)
    sizes = (q, blocks.rows), (k, blocks.keys), (v, blocks.keys)
    boxes = [box(x, size, blocks.tma) for x, size in sizes]
    with torch.cuda.device_of(q):  # Triton launches on the current device, whatever it gets
        _forward_kernel[(triton.cdiv(n_q, blocks.rows) * heads * batch,)](
            *map(operand, (q, k, v, out, lse)), *boxes,
            scale, n_q, n_k, heads, group, batch * heads, together,
            CAUSAL=visible.causal, DIM_QK=dim_qk, DIM_V=dim_v,
            WIDTH=width, REST=rest, WIDTH_V=padded(dim_v), **blocks.options(),
        )  # fmt: skip


@triton.jit(do_not_specialize=["n_q", "n_k", "heads", "group", "all_heads", "together"])
def _forward_kernel(
    q, k, v, out, lse, q_box, k_box, v_box, scale, n_q, n_k, heads, group, all_heads, together,
    CAUSAL: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr,
    WIDTH: tl.constexpr, REST: tl.constexpr, WIDTH_V: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    block, head = tile_of_program(tl.cdiv(n_q, ROWS), all_heads, together, CAUSAL)
    batch, head = head // heads, head % heads
    head_kv = head // group
    first_row = block * ROWS
    ahead = n_k - n_q
    clear, end = key_range(first_row, n_k, ahead, CAUSAL, ROWS, KEYS)
    scale *= LOG2_E  # weights are powers of two: exp2 is one instruction
    queries = load_rows(q, q_box, batch, head, first_row, n_q, 0, DIM_QK, ROWS, WIDTH, False)
    queries_rest = queries
    if REST > 0:
        queries_rest = load_rows(
            q, q_box, batch, head, first_row, n_q, WIDTH, DIM_QK, ROWS, REST, False
        )
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH_V], tl.float32)
    for first_key in range(0, clear, KEYS):
        largest, total, sums = _add_keys(
            largest, total, sums, queries, queries_rest, k, v, k_box, v_box, scale, batch, head_kv,
            first_row, first_key, n_k, ahead, CAUSAL, True,
            DIM_QK, DIM_V, WIDTH, REST, WIDTH_V, ROWS, KEYS,
        )  # fmt: skip
    for first_key in range(clear, end, KEYS):
        largest, total, sums = _add_keys(
            largest, total, sums, queries, queries_rest, k, v, k_box, v_box, scale, batch, head_kv,
            first_row, first_key, n_k, ahead, CAUSAL, False,
            DIM_QK, DIM_V, WIDTH, REST, WIDTH_V, ROWS, KEYS,
        )  # fmt: skip
    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    store_rows(out, sums, batch, head, first_row, n_q, 0, DIM_V, ROWS, WIDTH_V)
    row_lse = (largest + tl.log2(total)) * LN_2
    inside = first_row + tl.arange(0, ROWS) < n_q
    tl.store(statistics(lse, batch, head, first_row, ROWS), row_lse, mask=inside)


@triton.jit
def _add_keys(
    largest, total, sums, queries, queries_rest, k, v, k_box, v_box, scale, batch, head_kv,
    first_row, first_key, n_k, ahead, CAUSAL: tl.constexpr, CLEAR: tl.constexpr,
    DIM_QK: tl.constexpr, DIM_V: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
    WIDTH_V: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Softmax over one more block of keys; all are there and seen by all rows if CLEAR."""
    keys = load_rows(k, k_box, batch, head_kv, first_key, n_k, 0, DIM_QK, KEYS, WIDTH, CLEAR)
    scores = tl.dot(queries, tl.trans(keys), input_precision="tf32x3")
    if REST > 0:
        rest = load_rows(k, k_box, batch, head_kv, first_key, n_k, WIDTH, DIM_QK, KEYS, REST, CLEAR)
        scores = tl.dot(queries_rest, tl.trans(rest), scores, input_precision="tf32x3")
    values = load_rows(v, v_box, batch, head_kv, first_key, n_k, 0, DIM_V, KEYS, WIDTH_V, CLEAR)
    if not CLEAR:
        seen = visible(first_row, first_key, n_k, ahead, CAUSAL, ROWS, KEYS)
        scores = tl.where(seen, scores, -float("inf"))
    new_largest = tl.maximum(largest, tl.max(scores, axis=1) * scale)
    shift = new_largest
    if not CLEAR:  # -inf - -inf is NaN: a row that has seen no key yet
        shift = tl.where(new_largest == -float("inf"), 0.0, new_largest)
    weights = tl.exp2(scores * scale - shift[:, None])
    shrink = tl.exp2(largest - shift)
    total = total * shrink + tl.sum(weights, axis=1)
    sums = tl.dot(
        weights.to(values.dtype), values, sums * shrink[:, None], input_precision="tf32x3"
    )
    return new_largest, total, sums
