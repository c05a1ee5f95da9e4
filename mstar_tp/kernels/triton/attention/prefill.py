"""Attention of rows with several queries over their pages: prompts, whole or in chunks, causal.

A block takes one tile of a row's queries with some of the query heads that share a key head, and
goes through the keys that any of them sees, in blocks that begin at multiples of the block size. So
a query's bits depend neither on its tile nor on its chunk.

Legend: M pairs of a query and a head, N keys, D head size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mstar_tp.kernels.triton.attention.block import attend_block


@triton.jit(do_not_specialize=["stride_row", "stride_page", "window"])
def attend_prefill_kernel(
    out,
    q,
    cache_k,
    cache_v,
    pages,
    lengths,
    starts,
    tiles,
    window,
    scale,
    softcap,
    stride_out,
    stride_q,
    stride_row,
    stride_page,
    stride_slot,
    GROUP: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDEN: tl.constexpr,
):
    tile = tl.program_id(0)
    row = tl.load(tiles + 2 * tile)
    if row < 0:  # past the step's last tile
        return
    first_token = tl.load(tiles + 2 * tile + 1)
    stop_token = tl.load(starts + row + 1)
    shift = tl.load(lengths + row) - stop_token  # from a token's place in the step to its position

    kv_head = tl.program_id(1) // HEAD_BLOCKS
    m_M = tl.arange(0, BLOCK_M)
    g_M = (tl.program_id(1) % HEAD_BLOCKS) * BLOCK_G + m_M % BLOCK_G
    token_M = first_token + m_M // BLOCK_G
    position_M = shift + token_M
    d_D = tl.arange(0, BLOCK_D)
    live_MD = ((token_M < stop_token) & (g_M < GROUP))[:, None] & (d_D < HEAD_DIM)[None, :]
    at_MD = ((kv_head * GROUP + g_M) * HEAD_DIM)[:, None] + d_D[None, :]
    q_MD = tl.load(q + (token_M.to(tl.int64) * stride_q)[:, None] + at_MD, mask=live_MD, other=0.0)

    end = shift + tl.minimum(stop_token, first_token + BLOCK_M // BLOCK_G)
    low = 0
    if WINDOW:
        low = tl.maximum(shift + first_token + 1 - window, 0)
    most_M = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    weight_M = tl.zeros((BLOCK_M,), dtype=tl.float32)
    sum_MD = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for first in range((low // BLOCK_N) * BLOCK_N, end, BLOCK_N):
        key_N = first + tl.arange(0, BLOCK_N)
        seen_MN = key_N[None, :] <= position_M[:, None]
        if WINDOW:
            seen_MN = seen_MN & (key_N[None, :] > position_M[:, None] - window)
        most_M, weight_M, sum_MD = attend_block(
            q_MD,
            cache_k + kv_head * HEAD_DIM,
            cache_v + kv_head * HEAD_DIM,
            pages + row * stride_row,
            stride_page,
            stride_slot,
            key_N,
            (key_N >= low) & (key_N < end),
            seen_MN,
            most_M,
            weight_M,
            sum_MD,
            scale,
            softcap,
            HEAD_DIM,
            PAGE_SIZE,
            SOFTCAP,
            BLOCK_D,
            WIDEN,
        )
    mean_MD = sum_MD / tl.where(weight_M == 0, 1.0, weight_M)[:, None]
    out_MD = out + (token_M.to(tl.int64) * stride_out)[:, None] + at_MD
    tl.store(out_MD, mean_MD.to(out.dtype.element_ty), mask=live_MD)
