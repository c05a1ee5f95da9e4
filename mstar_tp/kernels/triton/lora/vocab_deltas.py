"""Kernels for deltas of the embedding and the head, of rows grouped by slot.

The embedding's take one launch; the head's are the logits of rows that an adapter replaces.

Legend: T rows, R rank, K hidden features, O output columns, S saved rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mstar_tp.kernels.triton.dot import dot_add
from mstar_tp.kernels.triton.tile import load_tile


@triton.jit
def lora_embed_kernel(
    y,
    ids,
    a,
    b,
    saved_ids,
    saved_rows,
    saved_counts,
    order,
    tiles,
    ranks,
    first_id,
    part_size,
    width,
    stride_y,
    stride_a_slot,
    stride_a,
    stride_b_slot,
    stride_b,
    stride_ids,
    stride_rows_slot,
    stride_rows,
    SEARCH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Add ``B a[id]`` to ``y``, then put a saved row in the place of its id's.

    A block takes one tile and some columns. ``SEARCH``: steps that find any of a slot's saved ids,
    which are in order.
    """
    storage, first, stop = load_tile(tiles)
    if first >= stop:  # past the step's last tile
        return
    rank = tl.load(ranks + storage).to(tl.int32)
    count = tl.load(saved_counts + storage).to(tl.int32)
    if (rank == 0) & (count == 0):
        return

    place_T = first + tl.arange(0, BLOCK_T)
    live_T = place_T < stop
    row_T = tl.load(order + place_T, mask=live_T, other=0).to(tl.int64)
    id_T = tl.load(ids + row_T, mask=live_T, other=-1) - first_id
    here_T = live_T & (id_T >= 0) & (id_T < part_size)
    column_O = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    live_O = column_O < width

    r_R = tl.arange(0, BLOCK_R)
    a_T = a + storage * stride_a_slot + id_T * stride_a
    b_O = b + storage * stride_b_slot + column_O
    sum_TO = tl.zeros((BLOCK_T, BLOCK_O), dtype=tl.float32)
    for start in range(0, rank, BLOCK_R):
        live_R = start + r_R < rank
        h_TR = tl.load(
            a_T[:, None] + (start + r_R)[None, :], mask=here_T[:, None] & live_R[None, :], other=0.0
        )
        b_RO = tl.load(
            b_O[None, :] + ((start + r_R) * stride_b)[:, None],
            mask=live_R[:, None] & live_O[None, :],
            other=0.0,
        )
        sum_TO = dot_add(h_TR, b_RO, sum_TO, WIDEN)
    live_TO = here_T[:, None] & live_O[None, :]
    y_TO = y + (row_T * stride_y)[:, None] + column_O[None, :]
    out_TO = tl.load(y_TO, mask=live_TO, other=0.0).to(tl.float32) + sum_TO

    if count > 0:
        low_T = tl.zeros((BLOCK_T,), dtype=tl.int32)
        high_T = tl.zeros((BLOCK_T,), dtype=tl.int32) + count
        ids_of = saved_ids + storage * stride_ids
        for _ in range(SEARCH):
            open_T = low_T < high_T
            middle_T = (low_T + high_T) // 2
            below_T = tl.load(ids_of + middle_T, mask=here_T & open_T, other=0) < id_T
            low_T = tl.where(open_T & below_T, middle_T + 1, low_T)
            high_T = tl.where(open_T & (below_T == 0), middle_T, high_T)
        there_T = here_T & (low_T < count)
        found_T = there_T & (tl.load(ids_of + low_T, mask=there_T, other=-1) == id_T)
        saved_T = saved_rows + storage * stride_rows_slot + low_T.to(tl.int64) * stride_rows
        saved_TO = tl.load(
            saved_T[:, None] + column_O[None, :], mask=found_T[:, None] & live_O[None, :], other=0.0
        )
        out_TO = tl.where(found_T[:, None], saved_TO.to(tl.float32), out_TO)
    tl.store(y_TO, out_TO.to(y.dtype.element_ty), mask=live_TO)


@triton.jit
def lora_head_rows_kernel(
    y,
    x,
    saved_ids,
    saved_rows,
    saved_counts,
    order,
    tiles,
    in_features,
    stride_y,
    stride_x,
    stride_ids,
    stride_rows_slot,
    stride_rows,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """``y[:, ids] = rows x``. A block takes one tile and some of its slot's saved rows."""
    storage, first, stop = load_tile(tiles)
    if first >= stop:  # past the step's last tile
        return
    count = tl.load(saved_counts + storage).to(tl.int32)
    start = tl.program_id(1) * BLOCK_S
    if start >= count:
        return

    place_T = first + tl.arange(0, BLOCK_T)
    live_T = place_T < stop
    row_T = tl.load(order + place_T, mask=live_T, other=0).to(tl.int64)
    s_S = start + tl.arange(0, BLOCK_S)
    live_S = s_S < count
    k_K = tl.arange(0, BLOCK_K)
    x_T = x + row_T * stride_x
    rows_S = saved_rows + storage * stride_rows_slot + s_S.to(tl.int64) * stride_rows
    sum_TS = tl.zeros((BLOCK_T, BLOCK_S), dtype=tl.float32)
    for k in range(0, in_features, BLOCK_K):
        live_K = k + k_K < in_features
        x_TK = tl.load(
            x_T[:, None] + (k + k_K)[None, :], mask=live_T[:, None] & live_K[None, :], other=0.0
        )
        w_KS = tl.load(
            rows_S[None, :] + (k + k_K)[:, None], mask=live_S[None, :] & live_K[:, None], other=0.0
        )
        sum_TS = dot_add(x_TK, w_KS, sum_TS, WIDEN)
    id_S = tl.load(saved_ids + storage * stride_ids + s_S, mask=live_S, other=0)
    tl.store(
        y + (row_T * stride_y)[:, None] + id_S[None, :],
        sum_TS.to(y.dtype.element_ty),
        mask=live_T[:, None] & live_S[None, :],
    )
