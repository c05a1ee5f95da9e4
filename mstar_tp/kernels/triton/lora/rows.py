"""Kernels that change rows one by one: by a slot's bias, or by its norm's weight.

Legend: T rows, O output columns, D normed size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mstar_tp.kernels.triton.tile import load_tile


@triton.jit
def lora_bias_kernel(
    y,
    bias,
    order,
    tiles,
    width,
    stride_y,
    stride_bias,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """``y += bias`` of each row's slot. A block takes one tile and some columns."""
    storage, first, stop = load_tile(tiles)
    if first >= stop:  # past the step's last tile
        return
    place_T = first + tl.arange(0, BLOCK_T)
    live_T = place_T < stop
    row_T = tl.load(order + place_T, mask=live_T, other=0).to(tl.int64)
    column_O = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    live_O = column_O < width
    bias_O = tl.load(bias + storage * stride_bias + column_O, mask=live_O, other=0.0)
    live_TO = live_T[:, None] & live_O[None, :]
    y_TO = y + (row_T * stride_y)[:, None] + column_O[None, :]
    out_TO = tl.load(y_TO, mask=live_TO, other=0.0).to(tl.float32) + bias_O.to(tl.float32)[None, :]
    tl.store(y_TO, out_TO.to(y.dtype.element_ty), mask=live_TO)


@triton.jit
def lora_norm_kernel(
    y,
    x,
    weight,
    replaced,
    order,
    tiles,
    size,
    parts,
    stride_y,
    stride_x,
    stride_weight,
    stride_replaced,
    eps,
    UNIT_OFFSET: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Norm each part of a row into ``y`` under its slot's weight, where the slot replaces it.

    A part is divided by its root mean square. A block takes one row: ``parts`` of ``size`` side by
    side.
    """
    tile = tl.program_id(0)
    place = tl.load(tiles + 3 * tile + 1) + tl.program_id(1)
    if place >= tl.load(tiles + 3 * tile + 2):
        return
    storage = tl.load(tiles + 3 * tile).to(tl.int64)
    if tl.load(replaced + storage * stride_replaced) == 0:
        return
    row = tl.load(order + place).to(tl.int64)
    d_D = tl.arange(0, BLOCK_D)
    live_D = d_D < size
    weight_D = tl.load(weight + storage * stride_weight + d_D, mask=live_D, other=0.0)
    wide_D = weight_D.to(tl.float32)
    for part in range(parts):
        x_D = tl.load(x + row * stride_x + part * size + d_D, mask=live_D, other=0.0)
        x_D = x_D.to(tl.float32)
        scale = tl.rsqrt(tl.sum(x_D * x_D, axis=0) / size + eps)
        out_D = x_D * scale
        if UNIT_OFFSET:  # rounded once, at the end
            out_D = out_D * (1.0 + wide_D)
        else:
            out_D = out_D.to(y.dtype.element_ty).to(tl.float32) * wide_D
        tl.store(y + row * stride_y + part * size + d_D, out_D.to(y.dtype.element_ty), mask=live_D)
