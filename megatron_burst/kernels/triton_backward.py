"""Attention backward in Triton from lse and delta: no atomics, so the same bits every time.

One kernel takes a block of keys through the query rows that see it and keeps dk and dv; the other
takes a block of query rows through its keys and keeps dq. Scores are computed in both, which is 7
products where 5 would do; in return nothing is added up in memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction

from megatron_burst.kernels.triton_blocks import Chooser, Pass, blocks_for
from megatron_burst.kernels.triton_statistics import ready_statistics
from megatron_burst.kernels.triton_tiles import (
    LOG2_E,
    box,
    heads_together,
    key_range,
    load_rows,
    operand,
    padded,
    statistics_box,
    store_rows,
    tile_of_program,
    visible,
    widths,
)
from megatron_burst.kernels.visible import Visible


def launch_backward(
    query_side: tuple[Tensor, Tensor, Tensor, Tensor], k: Tensor, v: Tensor, scale: float,
    visible: Visible, grads: tuple[Tensor, Tensor, Tensor], choose: Chooser | None = None,
) -> None:  # fmt: skip
    """Compute (dq, dk, dv) where they are, from (q, dout, lse, delta); see `Backend.backward`.

    `choose` takes the place of the table of blocks.
    """
    q, dout, lse, delta = query_side
    batch, n_q, heads, dim_qk = q.shape
    n_k, heads_kv, dim_v = v.shape[1:]
    group, row_bytes = heads // heads_kv, (dim_qk + dim_v) * k.itemsize
    ready = ready_statistics(lse, delta)
    width, rest = widths(dim_qk)
    constants = dict(
        CAUSAL=visible.causal, DIM_QK=dim_qk, DIM_V=dim_v,
        WIDTH=width, REST=rest, WIDTH_V=padded(dim_v),
    )  # fmt: skip

    def launch(kernel: JITFunction, which: Pass, outputs: tuple[Tensor, ...], together: int):
        blocks = (choose or blocks_for)(which, q, dim_qk, dim_v)
        rows, columns = (n_k, blocks.keys) if which is Pass.KEY_GRADS else (n_q, blocks.rows)
        all_heads = batch * (heads_kv if which is Pass.KEY_GRADS else heads)
        sizes = blocks.rows, blocks.keys, blocks.keys, blocks.rows
        read = q, k, v, dout
        kernel[(triton.cdiv(rows, columns) * all_heads,)](
            *map(operand, outputs), *map(operand, read), *ready,
            *(box(x, n, blocks.tma) for x, n in zip(read, sizes, strict=True)),
            *(statistics_box(x, blocks.rows, blocks.tma) for x in ready),
            ready.shape[-1], scale, n_q, n_k, heads_kv, group, all_heads, together,
            **constants, **blocks.options(),
        )  # fmt: skip

    with torch.cuda.device_of(q):  # Triton launches on the current device, whatever it gets
        if grads[1].shape[1]:
            together = heads_together(q, n_q * row_bytes)
            launch(_key_grads_kernel, Pass.KEY_GRADS, grads[1:], together)
        if grads[0].shape[1]:
            together = group * heads_together(k, n_k * row_bytes)
            launch(_query_grads_kernel, Pass.QUERY_GRADS, grads[:1], together)


@triton.jit(do_not_specialize=["n_q", "n_k", "heads_kv", "group", "all_heads", "together"])
def _key_grads_kernel(
    dk, dv, q, k, v, dout, lse, delta, q_box, k_box, v_box, dout_box, lse_box, delta_box, stride,
    scale, n_q, n_k, heads_kv, group, all_heads, together,
    CAUSAL: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr,
    WIDTH: tl.constexpr, REST: tl.constexpr, WIDTH_V: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    block, head = tile_of_program(tl.cdiv(n_k, KEYS), all_heads, together, False)
    batch, head_kv = head // heads_kv, head % heads_kv
    first_key = block * KEYS
    ahead = n_k - n_q
    keys = load_rows(k, k_box, batch, head_kv, first_key, n_k, 0, DIM_QK, KEYS, WIDTH, False)
    values = load_rows(v, v_box, batch, head_kv, first_key, n_k, 0, DIM_V, KEYS, WIDTH_V, False)
    keys_rest = keys
    key_grads = tl.zeros([KEYS, WIDTH], tl.float32)
    key_grads_rest = key_grads
    value_grads = tl.zeros([KEYS, WIDTH_V], tl.float32)
    if REST > 0:
        keys_rest = load_rows(
            k, k_box, batch, head_kv, first_key, n_k, WIDTH, DIM_QK, KEYS, REST, False
        )
        key_grads_rest = tl.zeros([KEYS, REST], tl.float32)
    begin = 0
    clear = 0
    if CAUSAL:  # rows before `begin` see none of the keys, from `clear` on all of them
        begin = tl.maximum(first_key - ahead, 0) // ROWS * ROWS
        clear = tl.cdiv(tl.maximum(first_key + KEYS - 1 - ahead, 0), ROWS) * ROWS
        clear = tl.minimum(clear, tl.cdiv(n_q, ROWS) * ROWS)
    for member in range(group):
        head = head_kv * group + member
        for first_row in range(begin, clear, ROWS):
            key_grads, key_grads_rest, value_grads = _add_rows(
                key_grads, key_grads_rest, value_grads, keys, keys_rest, values, q, dout, lse,
                delta, q_box, dout_box, lse_box, delta_box, stride, scale, batch, head,
                heads_kv * group, first_row, first_key, n_q, n_k, ahead, False,
                DIM_QK, DIM_V, WIDTH, REST, WIDTH_V, ROWS, KEYS,
            )  # fmt: skip
        for first_row in range(clear, n_q, ROWS):
            key_grads, key_grads_rest, value_grads = _add_rows(
                key_grads, key_grads_rest, value_grads, keys, keys_rest, values, q, dout, lse,
                delta, q_box, dout_box, lse_box, delta_box, stride, scale, batch, head,
                heads_kv * group, first_row, first_key, n_q, n_k, ahead, True,
                DIM_QK, DIM_V, WIDTH, REST, WIDTH_V, ROWS, KEYS,
            )  # fmt: skip
    store_rows(dv, value_grads, batch, head_kv, first_key, n_k, 0, DIM_V, KEYS, WIDTH_V)
    key_grads *= scale
    store_rows(dk, key_grads, batch, head_kv, first_key, n_k, 0, DIM_QK, KEYS, WIDTH)
    if REST > 0:
        key_grads_rest *= scale
        store_rows(dk, key_grads_rest, batch, head_kv, first_key, n_k, WIDTH, DIM_QK, KEYS, REST)


@triton.jit
def _load_statistics(x, box, head, stride, first_row, ROWS: tl.constexpr):
    """[1, ROWS] of a statistic that is ready."""
    if box is not None:
        return box.load([head, first_row])
    return tl.load(x + tl.cast(head, tl.int64) * stride + first_row + tl.arange(0, ROWS))[None, :]


@triton.jit
def _add_rows(
    key_grads, key_grads_rest, value_grads, keys, keys_rest, values, q, dout, lse, delta,
    q_box, dout_box, lse_box, delta_box, stride, scale, batch, head, heads, first_row, first_key,
    n_q, n_k, ahead, CLEAR: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr,
    WIDTH: tl.constexpr, REST: tl.constexpr,
    WIDTH_V: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """What one more block of query rows adds to dk / scale and dv; all transposed: keys x rows.

    What keys beyond the last collect is not stored, so only a causal edge needs a mask.
    """
    queries = load_rows(q, q_box, batch, head, first_row, n_q, 0, DIM_QK, ROWS, WIDTH, False)
    queries_rest = queries
    scores = tl.dot(keys, tl.trans(queries), input_precision="tf32x3")
    if REST > 0:
        queries_rest = load_rows(
            q, q_box, batch, head, first_row, n_q, WIDTH, DIM_QK, ROWS, REST, False
        )
        scores = tl.dot(keys_rest, tl.trans(queries_rest), scores, input_precision="tf32x3")
    row_lse = _load_statistics(lse, lse_box, batch * heads + head, stride, first_row, ROWS)
    row_delta = _load_statistics(delta, delta_box, batch * heads + head, stride, first_row, ROWS)
    weights = tl.exp2(scores * (scale * LOG2_E) - row_lse)
    if not CLEAR:
        seen = visible(first_row, first_key, n_k, ahead, True, ROWS, KEYS)
        weights = tl.where(tl.trans(seen), weights, 0.0)
    out_grads = load_rows(
        dout, dout_box, batch, head, first_row, n_q, 0, DIM_V, ROWS, WIDTH_V, False
    )
    value_grads = tl.dot(
        weights.to(out_grads.dtype), out_grads, value_grads, input_precision="tf32x3"
    )
    weight_grads = tl.dot(values, tl.trans(out_grads), input_precision="tf32x3")
    score_grads = (weights * (weight_grads - row_delta)).to(queries.dtype)
    key_grads = tl.dot(score_grads, queries, key_grads, input_precision="tf32x3")
    if REST > 0:
        key_grads_rest = tl.dot(score_grads, queries_rest, key_grads_rest, input_precision="tf32x3")
    return key_grads, key_grads_rest, value_grads


@triton.jit(do_not_specialize=["n_q", "n_k", "heads_kv", "group", "all_heads", "together"])
def _query_grads_kernel(
    dq, q, k, v, dout, lse, delta, q_box, k_box, v_box, dout_box, lse_box, delta_box, stride,
    scale, n_q, n_k, heads_kv, group, all_heads, together,
    CAUSAL: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr,
    WIDTH: tl.constexpr, REST: tl.constexpr, WIDTH_V: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    block, head = tile_of_program(tl.cdiv(n_q, ROWS), all_heads, together, CAUSAL)
    batch, head = head // (heads_kv * group), head % (heads_kv * group)
    head_kv = head // group
    first_row = block * ROWS
    ahead = n_k - n_q
    clear, end = key_range(first_row, n_k, ahead, CAUSAL, ROWS, KEYS)
    queries = load_rows(q, q_box, batch, head, first_row, n_q, 0, DIM_QK, ROWS, WIDTH, False)
    out_grads = load_rows(
        dout, dout_box, batch, head, first_row, n_q, 0, DIM_V, ROWS, WIDTH_V, False
    )
    at = tl.cast(batch * (heads_kv * group) + head, tl.int64) * stride + first_row
    at += tl.arange(0, ROWS)
    row_lse, row_delta = tl.load(lse + at), tl.load(delta + at)
    queries_rest = queries
    grads = tl.zeros([ROWS, WIDTH], tl.float32)
    grads_rest = grads
    if REST > 0:
        queries_rest = load_rows(
            q, q_box, batch, head, first_row, n_q, WIDTH, DIM_QK, ROWS, REST, False
        )
        grads_rest = tl.zeros([ROWS, REST], tl.float32)
    for first_key in range(0, clear, KEYS):
        grads, grads_rest = _add_keys(
            grads, grads_rest, queries, queries_rest, out_grads, row_lse, row_delta, k, v,
            k_box, v_box, scale, batch, head_kv, first_row, first_key, n_k, ahead, CAUSAL, True,
            DIM_QK, DIM_V, WIDTH, REST, WIDTH_V, ROWS, KEYS,
        )  # fmt: skip
    for first_key in range(clear, end, KEYS):
        grads, grads_rest = _add_keys(
            grads, grads_rest, queries, queries_rest, out_grads, row_lse, row_delta, k, v,
            k_box, v_box, scale, batch, head_kv, first_row, first_key, n_k, ahead, CAUSAL, False,
            DIM_QK, DIM_V, WIDTH, REST, WIDTH_V, ROWS, KEYS,
        )  # fmt: skip
    grads *= scale
    store_rows(dq, grads, batch, head, first_row, n_q, 0, DIM_QK, ROWS, WIDTH)
    if REST > 0:
        grads_rest *= scale
        store_rows(dq, grads_rest, batch, head, first_row, n_q, WIDTH, DIM_QK, ROWS, REST)


@triton.jit
def _add_keys(
    grads, grads_rest, queries, queries_rest, out_grads, row_lse, row_delta, k, v, k_box, v_box,
    scale, batch, head_kv, first_row, first_key, n_k, ahead,
    CAUSAL: tl.constexpr, CLEAR: tl.constexpr,
    DIM_QK: tl.constexpr, DIM_V: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
    WIDTH_V: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """What one more block of keys adds to dq / scale."""
    keys = load_rows(k, k_box, batch, head_kv, first_key, n_k, 0, DIM_QK, KEYS, WIDTH, CLEAR)
    keys_rest = keys
    scores = tl.dot(queries, tl.trans(keys), input_precision="tf32x3")
    if REST > 0:
        keys_rest = load_rows(
            k, k_box, batch, head_kv, first_key, n_k, WIDTH, DIM_QK, KEYS, REST, CLEAR
        )
        scores = tl.dot(queries_rest, tl.trans(keys_rest), scores, input_precision="tf32x3")
    values = load_rows(v, v_box, batch, head_kv, first_key, n_k, 0, DIM_V, KEYS, WIDTH_V, CLEAR)
    weights = tl.exp2(scores * (scale * LOG2_E) - row_lse[:, None])
    if not CLEAR:
        seen = visible(first_row, first_key, n_k, ahead, CAUSAL, ROWS, KEYS)
        weights = tl.where(seen, weights, 0.0)
    weight_grads = tl.dot(out_grads, tl.trans(values), input_precision="tf32x3")
    score_grads = (weights * (weight_grads - row_delta[:, None])).to(keys.dtype)
    grads = tl.dot(score_grads, keys, grads, input_precision="tf32x3")
    if REST > 0:
        grads_rest = tl.dot(score_grads, keys_rest, grads_rest, input_precision="tf32x3")
    return grads, grads_rest
