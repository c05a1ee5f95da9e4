"""``y += B h`` of rows grouped by slot, all slices of the output in one launch.

A block takes one tile (rows of one slot) and some columns of one slice. It sums the splits of h in
their order, rounds them to B's dtype for the tensor cores, and accumulates in float32. Each element
of y belongs to one block.

Legend: T rows, R rank, O output columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mstar_tp.kernels.triton.dot import dot_add
from mstar_tp.kernels.triton.tile import load_columns, load_tile


@triton.jit
def lora_expand_kernel(
    y,
    h,
    b,
    order,
    tiles,
    ranks,
    blocks,
    stride_y,
    stride_split,
    stride_h,
    stride_slot,
    stride_b,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
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
    r_R = tl.arange(0, BLOCK_R)
    h_T = h + place_T.to(tl.int64) * stride_h + part * rank
    b_O = b + storage * stride_slot + column_O
    sum_TO = tl.zeros((BLOCK_T, BLOCK_O), dtype=tl.float32)
    for start in range(0, rank, BLOCK_R):
        live_R = start + r_R < rank
        live_TR = live_T[:, None] & live_R[None, :]
        h_TR = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
        for split in tl.static_range(SPLITS):
            h_TR += tl.load(
                h_T[:, None] + (split * stride_split + start + r_R)[None, :],
                mask=live_TR,
                other=0.0,
            )
        b_RO = tl.load(
            b_O[None, :] + ((start + r_R) * stride_b)[:, None],
            mask=live_R[:, None] & live_O[None, :],
            other=0.0,
        )
        sum_TO = dot_add(h_TR.to(b_RO.dtype), b_RO, sum_TO, WIDEN)
    row_T = tl.load(order + place_T, mask=live_T, other=0).to(tl.int64)
    y_TO = y + (row_T * stride_y)[:, None] + column_O[None, :]
    live_TO = live_T[:, None] & live_O[None, :]
    wide_TO = tl.load(y_TO, mask=live_TO, other=0.0).to(tl.float32) + sum_TO
    tl.store(y_TO, wide_TO.to(y.dtype.element_ty), mask=live_TO)
