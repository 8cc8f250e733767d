"""Attention forward in Triton, by blocks of query rows (not on the reading path)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_burst.kernels.triton_tiles import (
    LN_2,
    LOG2_E,
    VARYING,
    Chooser,
    KernelPass,
    blocks_for,
    bounds_of,
    box,
    capped,
    columns_of,
    heads_together,
    load_rows,
    next_step,
    operand,
    part_of,
    place_of,
    places_of,
    rows_between,
    seen_of,
    statistics,
    steps_of,
    store_rows,
    tile_of_program,
)
from megatron_burst.kernels.visible import Visible


def empty_largest(q: Tensor) -> Tensor:
    """Memory for the largest score of each row [b, h, n], -inf where a kernel writes none."""
    batch, rows, heads = q.shape[:3]
    return q.new_full((batch, heads, rows), -torch.inf, dtype=torch.float32)


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor | None, scale: float, visible: Visible, out: Tensor | None,
    lse: Tensor | None, sink: Tensor | None = None, choose: Chooser | None = None,
    softcap: float = 0.0, largest: Tensor | None = None,
) -> None:  # fmt: skip
    """Write out [b, n, h, dv] and lse [b, h, n]; see `Backend.forward`.

    `choose` replaces the table of block sizes; `largest` [b, h, n] gets the largest score of each
    row. Without v there are no out and lse, and only `largest` is written.
    """
    batch, n_q, heads, dim_qk = q.shape
    n_k, dim_v = k.shape[1], 16 if v is None else v.shape[3]
    if batch * n_q * heads == 0:
        return
    group, segments = heads // k.shape[2], visible.segments
    blocks = (choose or blocks_for)(KernelPass.FORWARD, q, dim_qk, dim_v)
    count, table, lists = places_of(visible, blocks, n_q, q.device)
    values, bounded = bounds_of(visible, n_q, n_k)
    longest = n_k if segments is None else segments.max_k
    together = group * heads_together(k, longest * (dim_qk + dim_v) * k.itemsize)
    sizes = (q, blocks.rows), (k, blocks.keys), (v, blocks.keys)
    boxes = [None if x is None else box(x, size, blocks.tma) for x, size in sizes]
    operands = [None if x is None else operand(x) for x in (q, k, v, out, lse, largest)]
    with torch.cuda.device_of(q):  # Triton launches on the current device, wherever the tensors are
        _forward_kernel[(count * heads * batch,)](
            *operands, sink, *boxes, table,
            lists, scale, softcap or 1.0, n_q, n_k, *values.values(), count, heads, group,
            batch * heads, together, **bounded, CAPPED=softcap > 0,
            **columns_of(dim_qk, dim_v), **blocks.options(),
        )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def _forward_kernel(
    q, k, v, out, lse, most, sink, q_box, k_box, v_box, table, lists, scale, softcap, n_q, n_k,
    left, right, count, heads, group, all_heads, together, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    CAPPED: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr,
    WIDTH: tl.constexpr, REST: tl.constexpr, WIDTH_V: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    block, head = tile_of_program(count, all_heads, together, RIGHT)
    if lists is not None:
        block, clear_steps, masked_steps, record, first_key = steps_of(lists, block)
    batch, head = head // heads, head % heads
    head_kv = head // group
    first_row, row_end, key_begin, key_end = place_of(table, block, n_q, n_k, ROWS)
    ahead = key_end - row_end
    band = (row_end, key_end, ahead - left, ahead + right)
    scale *= LOG2_E  # weights are powers of two: exp2 is one instruction
    queries = load_rows(q, q_box, batch, head, first_row, row_end, 0, DIM_QK, ROWS, WIDTH, False)
    queries_rest = queries
    if REST > 0:
        queries_rest = load_rows(
            q, q_box, batch, head, first_row, row_end, WIDTH, DIM_QK, ROWS, REST, False
        )
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH_V], tl.float32)
    if lists is not None:
        for masked in tl.static_range(2):
            for _ in range(masked_steps if masked else clear_steps):
                largest, total, sums = _add_keys(
                    largest, total, sums, queries, queries_rest, k, v, k_box, v_box, scale, softcap,
                    batch, head_kv, first_row, first_key, band, part_of(record) if masked else None,
                    LEFT, RIGHT, masked == 0, CAPPED,
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
                    largest, total, sums = _add_keys(
                        largest, total, sums, queries, queries_rest, k, v, k_box, v_box, scale,
                        softcap, batch, head_kv, first_row, first_key, band, None,
                        LEFT, RIGHT, third == 1, CAPPED,
                        DIM_QK, DIM_V, WIDTH, REST, WIDTH_V, ROWS, KEYS,
                    )  # fmt: skip
    inside = first_row + tl.arange(0, ROWS) < row_end
    if most is not None:
        tl.store(statistics(most, batch, head, first_row, ROWS), largest * LN_2, mask=inside)
    if sink is not None:
        score = tl.load(sink + head).to(tl.float32) * LOG2_E
        with_sink = tl.maximum(largest, score)
        shift = tl.where(with_sink == -float("inf"), 0.0, with_sink)
        shrink = tl.exp2(largest - shift)
        total, sums = total * shrink + tl.exp2(score - shift), sums * shrink[:, None]
        largest = with_sink
    if v is not None:
        sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        store_rows(out, sums, batch, head, first_row, row_end, 0, DIM_V, ROWS, WIDTH_V)
        row_lse = (largest + tl.log2(total)) * LN_2
        tl.store(statistics(lse, batch, head, first_row, ROWS), row_lse, mask=inside)


@triton.jit
def _add_keys(
    largest, total, sums, queries, queries_rest, k, v, k_box, v_box, scale, softcap, batch, head_kv,
    first_row, first_key, band, part, LEFT: tl.constexpr, RIGHT: tl.constexpr, CLEAR: tl.constexpr,
    CAPPED: tl.constexpr,
    DIM_QK: tl.constexpr, DIM_V: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
    WIDTH_V: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Softmax over one more block of keys, or without values the largest scores alone; if CLEAR,
    all keys exist and all rows see them."""
    keys = load_rows(k, k_box, batch, head_kv, first_key, band[1], 0, DIM_QK, KEYS, WIDTH, CLEAR)
    scores = tl.dot(queries, tl.trans(keys), input_precision="tf32x3")
    if REST > 0:
        rest = load_rows(
            k, k_box, batch, head_kv, first_key, band[1], WIDTH, DIM_QK, KEYS, REST, CLEAR
        )
        scores = tl.dot(queries_rest, tl.trans(rest), scores, input_precision="tf32x3")
    if v is not None:
        values = load_rows(
            v, v_box, batch, head_kv, first_key, band[1], 0, DIM_V, KEYS, WIDTH_V, CLEAR
        )
    if CAPPED:
        scores, scale = capped(scores, scale, softcap), 1.0
    if not CLEAR:
        seen = seen_of(first_row, first_key, band, part, LEFT, RIGHT, ROWS, KEYS)
        scores = tl.where(seen, scores, -float("inf"))
    new_largest = tl.maximum(largest, tl.max(scores, axis=1) * scale)
    if v is not None:
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
