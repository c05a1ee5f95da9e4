"""GEMMs of all experts in one launch, over rows sorted by expert, and the weighted sum behind them.

Legend: T rows, K input features, O output columns, D hidden size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mstar_tp.kernels.triton.dot import dot_add
from mstar_tp.kernels.triton.tile import load_tile


@triton.jit
def expert_linear_kernel(
    y,
    x,
    weight,
    order,
    tiles,
    in_features,
    width,
    per,
    stride_y,
    stride_x,
    stride_expert,
    stride_weight,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """``y[pair] = weight[expert] x[pair // per]``. A block takes one tile and some columns."""
    expert, first, stop = load_tile(tiles)
    if first >= stop:  # past the step's last tile
        return
    place_T = first + tl.arange(0, BLOCK_T)
    live_T = place_T < stop
    pair_T = tl.load(order + place_T, mask=live_T, other=0)
    column_O = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    live_O = column_O < width
    k_K = tl.arange(0, BLOCK_K)
    x_T = x + (pair_T // per).to(tl.int64) * stride_x
    w_O = weight + expert * stride_expert + column_O.to(tl.int64) * stride_weight
    sum_TO = tl.zeros((BLOCK_T, BLOCK_O), dtype=tl.float32)
    for k in range(0, in_features, BLOCK_K):
        live_K = k + k_K < in_features
        x_TK = tl.load(
            x_T[:, None] + (k + k_K)[None, :], mask=live_T[:, None] & live_K[None, :], other=0.0
        )
        w_KO = tl.load(
            w_O[None, :] + (k + k_K)[:, None], mask=live_O[None, :] & live_K[:, None], other=0.0
        )
        sum_TO = dot_add(x_TK, w_KO, sum_TO, WIDEN)
    y_TO = y + (pair_T.to(tl.int64) * stride_y)[:, None] + column_O[None, :]
    tl.store(y_TO, sum_TO.to(y.dtype.element_ty), mask=live_T[:, None] & live_O[None, :])


@triton.jit
def expert_sum_kernel(
    out,
    y,
    weights,
    width,
    choices,
    stride_out,
    stride_y,
    BLOCK_D: tl.constexpr,
):
    """Each token's rows, weighted and summed in float32 in their order."""
    token = tl.program_id(0).to(tl.int64)
    d_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    live_D = d_D < width
    sum_D = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for choice in range(choices):
        pair = token * choices + choice
        weight = tl.load(weights + pair)
        sum_D += weight * tl.load(y + pair * stride_y + d_D, mask=live_D, other=0.0).to(tl.float32)
    tl.store(out + token * stride_out + d_D, sum_D.to(out.dtype.element_ty), mask=live_D)
