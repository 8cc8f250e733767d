"""Gradients of queries in Triton: a program loops over the keys of a block of query rows."""

import triton
import triton.language as tl

from megatron_burst.kernels.triton_bands import place_of, range_of, seen_of
from megatron_burst.kernels.triton_tiles import (
    LOG2_E,
    VARYING,
    load_rows,
    store_rows,
    tile_of_program,
)


@triton.jit(do_not_specialize=VARYING)
def query_grads_kernel(
    dq, q, k, v, dout, lse, delta, q_box, k_box, v_box, dout_box, lse_box, delta_box,
    table, stride, scale, n_q, n_k, left, right, count, heads_kv, group, all_heads, together,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr,
    WIDTH: tl.constexpr, REST: tl.constexpr, WIDTH_V: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    block, head = tile_of_program(count, all_heads, together, RIGHT)
    batch, head = head // (heads_kv * group), head % (heads_kv * group)
    head_kv = head // group
    first_row, row_end, key_begin, key_end = place_of(table, block, n_q, n_k, ROWS)
    ahead = key_end - row_end
    band = (row_end, key_end, ahead - left, ahead + right)
    start, clear, edge, stop = range_of(
        first_row, key_begin, key_end, band[2], band[3], LEFT, RIGHT, False, ROWS, KEYS
    )
    queries = load_rows(q, q_box, batch, head, first_row, row_end, 0, DIM_QK, ROWS, WIDTH, False)
    out_grads = load_rows(
        dout, dout_box, batch, head, first_row, row_end, 0, DIM_V, ROWS, WIDTH_V, False
    )
    at = tl.cast(batch * (heads_kv * group) + head, tl.int64) * stride + first_row
    at += tl.arange(0, ROWS)
    row_lse, row_delta = tl.load(lse + at), tl.load(delta + at)
    queries_rest = queries
    grads = tl.zeros([ROWS, WIDTH], tl.float32)
    grads_rest = grads
    if REST > 0:
        queries_rest = load_rows(
            q, q_box, batch, head, first_row, row_end, WIDTH, DIM_QK, ROWS, REST, False
        )
        grads_rest = tl.zeros([ROWS, REST], tl.float32)
    if LEFT:
        for first_key in range(start, clear, KEYS):
            grads, grads_rest = _add_keys(
                grads, grads_rest, queries, queries_rest, out_grads, row_lse, row_delta, k, v,
                k_box, v_box, scale, batch, head_kv, first_row, first_key, band, LEFT, RIGHT, False,
                DIM_QK, DIM_V, WIDTH, REST, WIDTH_V, ROWS, KEYS,
            )  # fmt: skip
    for first_key in range(clear, edge, KEYS):
        grads, grads_rest = _add_keys(
            grads, grads_rest, queries, queries_rest, out_grads, row_lse, row_delta, k, v,
            k_box, v_box, scale, batch, head_kv, first_row, first_key, band, LEFT, RIGHT, True,
            DIM_QK, DIM_V, WIDTH, REST, WIDTH_V, ROWS, KEYS,
        )  # fmt: skip
    for first_key in range(edge, stop, KEYS):
        grads, grads_rest = _add_keys(
            grads, grads_rest, queries, queries_rest, out_grads, row_lse, row_delta, k, v,
            k_box, v_box, scale, batch, head_kv, first_row, first_key, band, LEFT, RIGHT, False,
            DIM_QK, DIM_V, WIDTH, REST, WIDTH_V, ROWS, KEYS,
        )  # fmt: skip
    grads *= scale
    store_rows(dq, grads, batch, head, first_row, row_end, 0, DIM_QK, ROWS, WIDTH)
    if REST > 0:
        grads_rest *= scale
        store_rows(dq, grads_rest, batch, head, first_row, row_end, WIDTH, DIM_QK, ROWS, REST)


@triton.jit
def _add_keys(
    grads, grads_rest, queries, queries_rest, out_grads, row_lse, row_delta, k, v, k_box, v_box,
    scale, batch, head_kv, first_row, first_key, band,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, CLEAR: tl.constexpr,
    DIM_QK: tl.constexpr, DIM_V: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
    WIDTH_V: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Add the contribution of one more block of keys to dq / scale."""
    keys = load_rows(k, k_box, batch, head_kv, first_key, band[1], 0, DIM_QK, KEYS, WIDTH, CLEAR)
    keys_rest = keys
    scores = tl.dot(queries, tl.trans(keys), input_precision="tf32x3")
    if REST > 0:
        keys_rest = load_rows(
            k, k_box, batch, head_kv, first_key, band[1], WIDTH, DIM_QK, KEYS, REST, CLEAR
        )
        scores = tl.dot(queries_rest, tl.trans(keys_rest), scores, input_precision="tf32x3")
    values = load_rows(v, v_box, batch, head_kv, first_key, band[1], 0, DIM_V, KEYS, WIDTH_V, CLEAR)
    weights = tl.exp2(scores * (scale * LOG2_E) - row_lse[:, None])
    if not CLEAR:
        seen = seen_of(first_row, first_key, band, LEFT, RIGHT, ROWS, KEYS)
        weights = tl.where(seen, weights, 0.0)
    weight_grads = tl.dot(out_grads, tl.trans(values), input_precision="tf32x3")
    score_grads = (weights * (weight_grads - row_delta[:, None])).to(keys.dtype)
    grads = tl.dot(score_grads, keys, grads, input_precision="tf32x3")
    if REST > 0:
        grads_rest = tl.dot(score_grads, keys_rest, grads_rest, input_precision="tf32x3")
    return grads, grads_rest
