"""Our backward kernels in Triton: dk and dv, and dq (not on the reading path)."""

import triton
import triton.language as tl

from megatron_burst.kernels.triton_tiles import (
    LOG2_E,
    VARYING,
    capped,
    load_rows,
    next_step,
    part_of,
    place_of,
    rows_between,
    seen_of,
    slope_of,
    steps_of,
    store_rows,
    tile_of_program,
)


@triton.jit(do_not_specialize=VARYING)
def key_grads_kernel(
    dk, dv, q, k, v, dout, lse, delta, q_box, k_box, v_box, dout_box, lse_box, delta_box,
    table, lists, stride, scale, softcap, n_q, n_k, left, right, count, heads_kv, group,
    all_heads, together, LEFT: tl.constexpr, RIGHT: tl.constexpr, CAPPED: tl.constexpr,
    DIM_QK: tl.constexpr, DIM_V: tl.constexpr,
    WIDTH: tl.constexpr, REST: tl.constexpr, WIDTH_V: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    block, head = tile_of_program(count, all_heads, together, False)
    if lists is not None:
        block, clear_steps, masked_steps, record, _ = steps_of(lists, block)
    batch, head_kv = head // heads_kv, head % heads_kv
    first_key, key_end, row_begin, row_end = place_of(table, block, n_k, n_q, KEYS)
    ahead = key_end - row_end
    band = (row_end, key_end, ahead - left, ahead + right)
    keys = load_rows(k, k_box, batch, head_kv, first_key, key_end, 0, DIM_QK, KEYS, WIDTH, False)
    values = load_rows(v, v_box, batch, head_kv, first_key, key_end, 0, DIM_V, KEYS, WIDTH_V, False)
    keys_rest = keys
    key_grads = tl.zeros([KEYS, WIDTH], tl.float32)
    key_grads_rest = key_grads
    value_grads = tl.zeros([KEYS, WIDTH_V], tl.float32)
    if REST > 0:
        keys_rest = load_rows(
            k, k_box, batch, head_kv, first_key, key_end, WIDTH, DIM_QK, KEYS, REST, False
        )
        key_grads_rest = tl.zeros([KEYS, REST], tl.float32)
    if lists is not None:
        for member in range(group):
            head = head_kv * group + member
            at, first_row = record, tl.load(record)
            for masked in tl.static_range(2):
                for _ in range(masked_steps if masked else clear_steps):
                    key_grads, key_grads_rest, value_grads = _add_rows(
                        key_grads, key_grads_rest, value_grads, keys, keys_rest, values, q, dout,
                        lse, delta, q_box, dout_box, lse_box, delta_box, stride, scale, softcap,
                        batch, head, heads_kv * group, first_row, first_key, band,
                        part_of(at) if masked else None, LEFT, RIGHT, masked == 0, CAPPED,
                        DIM_QK, DIM_V, WIDTH, REST, WIDTH_V, ROWS, KEYS,
                    )  # fmt: skip
                    at, first_row = next_step(at, first_row, ROWS)
    else:  # rows that are not there weigh 0, if next to no others
        edges = rows_between(
            first_key, row_begin, row_end, -band[3], -band[2], RIGHT, LEFT, table is None,
            KEYS, ROWS,
        )  # fmt: skip
        for member in range(group):
            head = head_kv * group + member
            for third in tl.static_range(3):  # the second needs no mask
                if (third > 0 or RIGHT) and (third < 2 or LEFT or table is not None):
                    for first_row in range(edges[third], edges[third + 1], ROWS):
                        key_grads, key_grads_rest, value_grads = _add_rows(
                            key_grads, key_grads_rest, value_grads, keys, keys_rest, values, q,
                            dout, lse, delta, q_box, dout_box, lse_box, delta_box, stride, scale,
                            softcap, batch, head, heads_kv * group, first_row, first_key, band,
                            None, LEFT, RIGHT, third == 1, CAPPED,
                            DIM_QK, DIM_V, WIDTH, REST, WIDTH_V, ROWS, KEYS,
                        )  # fmt: skip
    store_rows(dv, value_grads, batch, head_kv, first_key, key_end, 0, DIM_V, KEYS, WIDTH_V)
    key_grads *= scale
    store_rows(dk, key_grads, batch, head_kv, first_key, key_end, 0, DIM_QK, KEYS, WIDTH)
    if REST > 0:
        key_grads_rest *= scale
        store_rows(
            dk, key_grads_rest, batch, head_kv, first_key, key_end, WIDTH, DIM_QK, KEYS, REST
        )


@triton.jit
def _load_statistics(x, box, head, stride, first_row, ROWS: tl.constexpr):
    """[1, ROWS] of a statistic from `ready_statistics`."""
    if box is not None:
        return box.load([head, first_row])
    return tl.load(x + tl.cast(head, tl.int64) * stride + first_row + tl.arange(0, ROWS))[None, :]


@triton.jit
def _add_rows(
    key_grads, key_grads_rest, value_grads, keys, keys_rest, values, q, dout, lse, delta,
    q_box, dout_box, lse_box, delta_box, stride, scale, softcap, batch, head, heads, first_row,
    first_key, band, part, LEFT: tl.constexpr, RIGHT: tl.constexpr, CLEAR: tl.constexpr,
    CAPPED: tl.constexpr,
    DIM_QK: tl.constexpr, DIM_V: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
    WIDTH_V: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Add one more block of query rows to dk / scale and dv; all transposed: keys x rows.

    Gradients of keys beyond the last are not stored, so only edges of a band or segment need a
    mask.
    """
    queries = load_rows(q, q_box, batch, head, first_row, band[0], 0, DIM_QK, ROWS, WIDTH, False)
    queries_rest = queries
    scores = tl.dot(keys, tl.trans(queries), input_precision="tf32x3")
    if REST > 0:
        queries_rest = load_rows(
            q, q_box, batch, head, first_row, band[0], WIDTH, DIM_QK, ROWS, REST, False
        )
        scores = tl.dot(keys_rest, tl.trans(queries_rest), scores, input_precision="tf32x3")
    row_lse = _load_statistics(lse, lse_box, batch * heads + head, stride, first_row, ROWS)
    row_delta = _load_statistics(delta, delta_box, batch * heads + head, stride, first_row, ROWS)
    scores = capped(scores, scale * LOG2_E, softcap) if CAPPED else scores * (scale * LOG2_E)
    weights = tl.exp2(scores - row_lse)
    if not CLEAR:
        seen = seen_of(first_row, first_key, band, part, LEFT, RIGHT, ROWS, KEYS)
        weights = tl.where(tl.trans(seen), weights, 0.0)
    out_grads = load_rows(
        dout, dout_box, batch, head, first_row, band[0], 0, DIM_V, ROWS, WIDTH_V, False
    )
    value_grads = tl.dot(
        weights.to(out_grads.dtype), out_grads, value_grads, input_precision="tf32x3"
    )
    weight_grads = tl.dot(values, tl.trans(out_grads), input_precision="tf32x3")
    weights = weights * slope_of(scores, softcap) if CAPPED else weights
    score_grads = (weights * (weight_grads - row_delta)).to(queries.dtype)
    key_grads = tl.dot(score_grads, queries, key_grads, input_precision="tf32x3")
    if REST > 0:
        key_grads_rest = tl.dot(score_grads, queries_rest, key_grads_rest, input_precision="tf32x3")
    return key_grads, key_grads_rest, value_grads


@triton.jit(do_not_specialize=VARYING)
def query_grads_kernel(
    dq, q, k, v, dout, lse, delta, q_box, k_box, v_box, dout_box, lse_box, delta_box,
    table, lists, stride, scale, softcap, n_q, n_k, left, right, count, heads_kv, group,
    all_heads, together, LEFT: tl.constexpr, RIGHT: tl.constexpr, CAPPED: tl.constexpr,
    DIM_QK: tl.constexpr, DIM_V: tl.constexpr,
    WIDTH: tl.constexpr, REST: tl.constexpr, WIDTH_V: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    block, head = tile_of_program(count, all_heads, together, RIGHT)
    if lists is not None:
        block, clear_steps, masked_steps, record, first_key = steps_of(lists, block)
    batch, head = head // (heads_kv * group), head % (heads_kv * group)
    head_kv = head // group
    first_row, row_end, key_begin, key_end = place_of(table, block, n_q, n_k, ROWS)
    ahead = key_end - row_end
    band = (row_end, key_end, ahead - left, ahead + right)
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
    if lists is not None:
        for masked in tl.static_range(2):
            for _ in range(masked_steps if masked else clear_steps):
                grads, grads_rest = _add_keys(
                    grads, grads_rest, queries, queries_rest, out_grads, row_lse, row_delta, k, v,
                    k_box, v_box, scale, softcap, batch, head_kv, first_row, first_key, band,
                    part_of(record) if masked else None, LEFT, RIGHT, masked == 0, CAPPED,
                    DIM_QK, DIM_V, WIDTH, REST, WIDTH_V, ROWS, KEYS,
                )  # fmt: skip
                record, first_key = next_step(record, first_key, KEYS)
    else:
        edges = rows_between(
            first_row, key_begin, key_end, band[2], band[3], LEFT, RIGHT, False, ROWS, KEYS
        )
        for third in tl.static_range(3):  # the second needs no mask
            if third > 0 or LEFT:
                for first_key in range(edges[third], edges[third + 1], KEYS):
                    grads, grads_rest = _add_keys(
                        grads, grads_rest, queries, queries_rest, out_grads, row_lse, row_delta,
                        k, v, k_box, v_box, scale, softcap, batch, head_kv, first_row, first_key,
                        band, None, LEFT, RIGHT, third == 1, CAPPED,
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
    scale, softcap, batch, head_kv, first_row, first_key, band, part,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, CLEAR: tl.constexpr, CAPPED: tl.constexpr,
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
    scores = capped(scores, scale * LOG2_E, softcap) if CAPPED else scores * (scale * LOG2_E)
    weights = tl.exp2(scores - row_lse[:, None])
    if not CLEAR:
        seen = seen_of(first_row, first_key, band, part, LEFT, RIGHT, ROWS, KEYS)
        weights = tl.where(seen, weights, 0.0)
    weight_grads = tl.dot(out_grads, tl.trans(values), input_precision="tf32x3")
    weights = weights * slope_of(scores, softcap) if CAPPED else weights
    score_grads = (weights * (weight_grads - row_delta[:, None])).to(keys.dtype)
    grads = tl.dot(score_grads, keys, grads, input_precision="tf32x3")
    if REST > 0:
        grads_rest = tl.dot(score_grads, keys_rest, grads_rest, input_precision="tf32x3")
    return grads, grads_rest
