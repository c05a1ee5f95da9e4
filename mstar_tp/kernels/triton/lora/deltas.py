"""Launches of the LoRA kernels over torch tensors. No host sync: every size is a shape's.

Legend: T tokens of the step, I input and O output features, L slots, S slices, K max_rank, M =
S * K, R rows in the order, N tiles, C column blocks.
"""

from __future__ import annotations

import torch

from mstar_tp.kernels.triton.dot import widens
from mstar_tp.kernels.triton.launch import (
    BLOCK_COLUMNS,
    expand_sizes,
    fused_sizes,
    shrink_sizes,
)
from mstar_tp.kernels.triton.lora.expand import lora_expand_kernel
from mstar_tp.kernels.triton.lora.fused import lora_fused_kernel
from mstar_tp.kernels.triton.lora.shrink import lora_shrink_kernel


def launch_shrink(
    h_PRM: torch.Tensor,
    x_TI: torch.Tensor,
    a_LMI: torch.Tensor,
    order_R: torch.Tensor,
    tiles_N3: torch.Tensor,
    ranks_L: torch.Tensor,
    max_rank: int,
    block_rows: int,
) -> None:
    """``h`` [splits, R, M] float32: each row's ``A x`` in parts, packed by its slot's rank."""
    packed, num_splits = a_LMI.shape[1], h_PRM.shape[0]
    sizes = shrink_sizes(packed, block_rows, a_LMI.element_size())
    grid = (tiles_N3.shape[0], -(-packed // sizes.block_r), num_splits)
    lora_shrink_kernel[grid](
        x_TI,
        a_LMI,
        h_PRM,
        order_R,
        tiles_N3,
        ranks_L,
        x_TI.shape[1],
        x_TI.stride(0),
        a_LMI.stride(0),
        a_LMI.stride(1),
        h_PRM.stride(0),
        h_PRM.stride(1),
        max_rank,
        SLICES=packed // max_rank,
        SPLITS=num_splits,
        BLOCK_T=block_rows,
        BLOCK_R=sizes.block_r,
        BLOCK_K=sizes.block_k,
        WIDEN=widens(),
        num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
    )


def launch_expand(
    y_TO: torch.Tensor,
    h_PRM: torch.Tensor,
    b_LKO: torch.Tensor,
    order_R: torch.Tensor,
    tiles_N3: torch.Tensor,
    ranks_L: torch.Tensor,
    blocks_C3: torch.Tensor,
    block_rows: int,
) -> None:
    """``y += B h`` in place, h as ``launch_shrink`` leaves it."""
    sizes = expand_sizes(b_LKO.shape[1], block_rows, b_LKO.element_size())
    lora_expand_kernel[(tiles_N3.shape[0], blocks_C3.shape[0])](
        y_TO,
        h_PRM,
        b_LKO,
        order_R,
        tiles_N3,
        ranks_L,
        blocks_C3,
        y_TO.stride(0),
        h_PRM.stride(0),
        h_PRM.stride(1),
        b_LKO.stride(0),
        b_LKO.stride(1),
        SPLITS=h_PRM.shape[0],
        BLOCK_T=block_rows,
        BLOCK_R=sizes.block_r,
        BLOCK_O=BLOCK_COLUMNS,
        WIDEN=widens(),
        num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
    )


def launch_fused(
    y_TO: torch.Tensor,
    x_TI: torch.Tensor,
    a_LMI: torch.Tensor,
    b_LKO: torch.Tensor,
    order_R: torch.Tensor,
    tiles_N3: torch.Tensor,
    ranks_L: torch.Tensor,
    blocks_C3: torch.Tensor,
    block_rows: int,
) -> None:
    """``y += B(A x)`` in place."""
    max_rank = b_LKO.shape[1]
    sizes = fused_sizes(max_rank, a_LMI.element_size())
    lora_fused_kernel[(tiles_N3.shape[0], blocks_C3.shape[0])](
        y_TO,
        x_TI,
        a_LMI,
        b_LKO,
        order_R,
        tiles_N3,
        ranks_L,
        blocks_C3,
        x_TI.shape[1],
        y_TO.stride(0),
        x_TI.stride(0),
        a_LMI.stride(0),
        a_LMI.stride(1),
        b_LKO.stride(0),
        b_LKO.stride(1),
        max_rank,
        BLOCK_T=block_rows,
        BLOCK_R=sizes.block_r,
        BLOCK_K=sizes.block_k,
        BLOCK_O=BLOCK_COLUMNS,
        WIDEN=widens(),
        num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
    )
