"""Attention of rows with one query over their pages, in two passes over split keys.

A block takes one row, the query heads that share a key head, and one part of the row's keys. Into
how many parts a row is cut follows from its own length and the launch's limit. A row of one part
is written at once; the parts of others are added in their order by a second kernel: no atomics.
Rows of several queries are left out; rows without keys (padding) give zeros.

Legend: G query heads of a key head, N keys, D head size, S parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mstar_tp.kernels.triton.attention.block import attend_block, split_keys


@triton.jit(do_not_specialize=["num_splits", "stride_row", "stride_page", "window"])
def attend_decode_kernel(
    out,
    sums,
    weights,
    q,
    cache_k,
    cache_v,
    pages,
    lengths,
    starts,
    num_splits,
    window,
    scale,
    softcap,
    stride_out,
    stride_q,
    stride_row,
    stride_page,
    stride_slot,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LEAST_KEYS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDEN: tl.constexpr,
):
    row = tl.program_id(0)
    token = tl.load(starts + row)
    if tl.load(starts + row + 1) - token != 1:
        return
    length = tl.load(lengths + row)
    low = 0
    if WINDOW:
        low = tl.maximum(length - window, 0)
    parts, chunk = split_keys(length - low, num_splits, LEAST_KEYS, BLOCK_N)
    split = tl.program_id(2)
    if split >= parts:
        return

    kv_head = tl.program_id(1) // HEAD_BLOCKS
    g_G = (tl.program_id(1) % HEAD_BLOCKS) * BLOCK_G + tl.arange(0, BLOCK_G)
    head_G = kv_head * GROUP + g_G
    d_D = tl.arange(0, BLOCK_D)
    live_GD = (g_G < GROUP)[:, None] & (d_D < HEAD_DIM)[None, :]
    at_GD = head_G[:, None] * HEAD_DIM + d_D[None, :]
    q_GD = tl.load(q + token.to(tl.int64) * stride_q + at_GD, mask=live_GD, other=0.0)

    begin = low + split * chunk
    end = tl.minimum(length, begin + chunk)
    most_G = tl.full((BLOCK_G,), float("-inf"), dtype=tl.float32)
    weight_G = tl.zeros((BLOCK_G,), dtype=tl.float32)
    sum_GD = tl.zeros((BLOCK_G, BLOCK_D), dtype=tl.float32)
    for first in range(begin, end, BLOCK_N):
        key_N = first + tl.arange(0, BLOCK_N)
        live_N = key_N < end
        most_G, weight_G, sum_GD = attend_block(
            q_GD,
            cache_k + kv_head * HEAD_DIM,
            cache_v + kv_head * HEAD_DIM,
            pages + row * stride_row,
            stride_page,
            stride_slot,
            key_N,
            live_N,
            live_N[None, :],
            most_G,
            weight_G,
            sum_GD,
            scale,
            softcap,
            HEAD_DIM,
            PAGE_SIZE,
            SOFTCAP,
            BLOCK_D,
            WIDEN,
        )
    mean_GD = sum_GD / tl.where(weight_G == 0, 1.0, weight_G)[:, None]
    if parts == 1:
        out_GD = out + token.to(tl.int64) * stride_out + at_GD
        tl.store(out_GD, mean_GD.to(out.dtype.element_ty), mask=live_GD)
    else:
        part = (row * num_splits + split).to(tl.int64)
        tl.store(sums + part * (HEADS * HEAD_DIM) + at_GD, mean_GD, mask=live_GD)
        log_G = most_G + tl.log2(weight_G)
        tl.store(weights + part * HEADS + head_G, log_G, mask=g_G < GROUP)


@triton.jit(do_not_specialize=["num_splits", "window"])
def combine_decode_kernel(
    out,
    sums,
    weights,
    lengths,
    starts,
    num_splits,
    window,
    stride_out,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    LEAST_KEYS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One head of one row: the mean of its parts' means, by their weights (logarithms, base 2)."""
    row = tl.program_id(0)
    token = tl.load(starts + row)
    if tl.load(starts + row + 1) - token != 1:
        return
    span = tl.load(lengths + row)
    if WINDOW:
        span = tl.minimum(span, window)
    parts, _ = split_keys(span, num_splits, LEAST_KEYS, BLOCK_N)
    if parts == 1:
        return

    head = tl.program_id(1)
    s_S = tl.arange(0, BLOCK_S)
    d_D = tl.arange(0, BLOCK_D)
    first = (row * num_splits).to(tl.int64)
    logs = weights + first * HEADS + head
    most = tl.max(tl.load(logs + s_S * HEADS, mask=s_S < parts, other=float("-inf")), 0)
    base = tl.where(most == float("-inf"), 0.0, most)
    total = 0.0
    sum_D = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for split in range(0, parts):
        weight = tl.exp2(tl.load(logs + split * HEADS) - base)
        mean_D = tl.load(
            sums + ((first + split) * HEADS + head) * HEAD_DIM + d_D, mask=d_D < HEAD_DIM, other=0.0
        )
        sum_D += weight * mean_D
        total += weight
    out_D = out + token.to(tl.int64) * stride_out + head * HEAD_DIM + d_D
    tl.store(out_D, (sum_D / total).to(out.dtype.element_ty), mask=d_D < HEAD_DIM)
