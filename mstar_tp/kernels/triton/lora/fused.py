"""``y += B(A x)`` of decode rows grouped by slot in one launch, where A is small.

A block takes one tile (rows of one slot) and some columns of one slice, and computes all of that
slice's h for itself. A is so read once a column block, from the cache but for the first: worth a
launch less while a slot's A of one slice is small (see ``launch``).

Legend: T rows, R rank, K input features, O output columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mstar_tp.kernels.triton.dot import dot_add
from mstar_tp.kernels.triton.tile import load_columns, load_tile


@triton.jit
def lora_fused_kernel(
    y,
    x,
    a,
    b,
    order,
    tiles,
    ranks,
    blocks,
    in_features,
    stride_y,
    stride_x,
    stride_a_slot,
    stride_a,
    stride_b_slot,
    stride_b,
    max_rank,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_O: tl.constexpr,
    WIDEN: tl.constexpr,
):
    storage, first, stop = load_tile(tiles)
    if first >= stop:  # past the step's last tile
        return
    rank = tl.load(ranks + storage).to(tl.int32)
    if rank == 0:
        return
    part, column_O, live_O = load_columns(blocks, BLOCK_O)

    place_T = first + tl.arange(0, BLOCK_T)
    live_T = place_T < stop
    row_T = tl.load(order + place_T, mask=live_T, other=0).to(tl.int64)
    r_R = tl.arange(0, BLOCK_R)
    k_K = tl.arange(0, BLOCK_K)
    x_T = x + row_T * stride_x
    a_slice = a + storage * stride_a_slot + (part * max_rank).to(tl.int64) * stride_a
    b_O = b + storage * stride_b_slot + column_O
    sum_TO = tl.zeros((BLOCK_T, BLOCK_O), dtype=tl.float32)
    for start in range(0, rank, BLOCK_R):
        live_R = start + r_R < rank
        a_R = a_slice + (start + r_R).to(tl.int64) * stride_a
        h_TR = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
        for k in range(0, in_features, BLOCK_K):
            live_K = k + k_K < in_features
            x_TK = tl.load(
                x_T[:, None] + (k + k_K)[None, :], mask=live_T[:, None] & live_K[None, :], other=0.0
            )
            a_KR = tl.load(
                a_R[None, :] + (k + k_K)[:, None], mask=live_R[None, :] & live_K[:, None], other=0.0
            )
            h_TR = dot_add(x_TK, a_KR, h_TR, WIDEN)
        b_RO = tl.load(
            b_O[None, :] + ((start + r_R) * stride_b)[:, None],
            mask=live_R[:, None] & live_O[None, :],
            other=0.0,
        )
        sum_TO = dot_add(h_TR.to(b_RO.dtype), b_RO, sum_TO, WIDEN)
    y_TO = y + (row_T * stride_y)[:, None] + column_O[None, :]
    live_TO = live_T[:, None] & live_O[None, :]
    wide_TO = tl.load(y_TO, mask=live_TO, other=0.0).to(tl.float32) + sum_TO
    tl.store(y_TO, wide_TO.to(y.dtype.element_ty), mask=live_TO)
