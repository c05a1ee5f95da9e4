"""``h = A x`` of rows grouped by slot, and the choice of its launch.

A block takes one tile (rows of one slot), some of the slot's rows of A, and one split of the input
features. A slot's rows of A are packed over the output's slices by the slot's own rank: row j is
row ``j % rank`` of slice ``j // rank``, so padding up to max_rank is neither read nor computed.
Splits are written side by side and summed in a fixed order by who reads them: no atomics.

Legend: T rows, R packed rank, K input features.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mstar_tp.kernels.triton.dot import dot_add
from mstar_tp.kernels.triton.tile import load_tile


@triton.jit
def lora_shrink_kernel(
    x,
    a,
    h,
    order,
    tiles,
    ranks,
    in_features,
    stride_x,
    stride_slot,
    stride_a,
    stride_split,
    stride_h,
    max_rank,
    SLICES: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    storage, first, stop = load_tile(tiles)
    if first >= stop:  # past the step's last tile
        return
    rank = tl.load(ranks + storage).to(tl.int32)
    packed = rank * SLICES
    start = tl.program_id(1) * BLOCK_R
    if start >= packed:
        return

    place_T = first + tl.arange(0, BLOCK_T)
    live_T = place_T < stop
    row_T = tl.load(order + place_T, mask=live_T, other=0).to(tl.int64)
    j_R = start + tl.arange(0, BLOCK_R)
    live_R = j_R < packed
    a_row_R = (j_R // rank) * max_rank + j_R % rank
    k_K = tl.arange(0, BLOCK_K)
    x_T = x + row_T * stride_x
    a_R = a + storage * stride_slot + a_row_R.to(tl.int64) * stride_a

    chunk = tl.cdiv(tl.cdiv(in_features, BLOCK_K), SPLITS) * BLOCK_K
    split = tl.program_id(2)
    low = split * chunk
    high = tl.minimum(in_features, low + chunk)
    h_TR = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
    for k in range(low, high, BLOCK_K):
        live_K = k + k_K < high
        x_TK = tl.load(
            x_T[:, None] + (k + k_K)[None, :], mask=live_T[:, None] & live_K[None, :], other=0.0
        )
        a_KR = tl.load(
            a_R[None, :] + (k + k_K)[:, None], mask=live_R[None, :] & live_K[:, None], other=0.0
        )
        h_TR = dot_add(x_TK, a_KR, h_TR, WIDEN)
    h_T = h + split.to(tl.int64) * stride_split + place_T.to(tl.int64) * stride_h
    tl.store(h_T[:, None] + j_R[None, :], h_TR, mask=live_T[:, None] & live_R[None, :])
