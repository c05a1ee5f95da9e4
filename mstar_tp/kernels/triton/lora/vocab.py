"""Launches of ``vocab_deltas`` and ``rows`` over torch tensors, without a host sync.

Legend: T rows of the step, D hidden size, V ids of this rank's part of the vocabulary, O output
features, L slots, K max_rank, R rows in the order, N tiles, S saved rows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from mstar_tp.kernels.triton.dot import widens
from mstar_tp.kernels.triton.launch import (
    BLOCK_COLUMNS,
    EMBED_COLUMNS,
    expand_sizes,
    head_rows_sizes,
    next_power,
)
from mstar_tp.kernels.triton.lora.rows import lora_bias_kernel, lora_norm_kernel
from mstar_tp.kernels.triton.lora.vocab_deltas import lora_embed_kernel, lora_head_rows_kernel


class TileTables(NamedTuple):
    """Adapter rows in tiles: their ``order`` [R], the ``table`` [N, 3], and a tile's rows."""

    order: torch.Tensor
    table: torch.Tensor
    block_rows: int


class SavedTables(NamedTuple):
    """Saved rows by slot: ids [L, S], rows [L, S, D], and how many each slot has [L]."""

    ids: torch.Tensor
    rows: torch.Tensor
    counts: torch.Tensor


def launch_embed(
    y_TD: torch.Tensor,
    ids_T: torch.Tensor,
    a_LVK: torch.Tensor,
    b_LKD: torch.Tensor,
    saved: SavedTables,
    tiles: TileTables,
    ranks_L: torch.Tensor,
    first_id: int,
) -> None:
    """``y += B a[id - first_id]`` in place, then saved rows in their ids' places."""
    width = y_TD.shape[1]
    sizes = expand_sizes(b_LKD.shape[1], tiles.block_rows, b_LKD.element_size())
    lora_embed_kernel[(tiles.table.shape[0], -(-width // EMBED_COLUMNS))](
        y_TD,
        ids_T,
        a_LVK,
        b_LKD,
        saved.ids,
        saved.rows,
        saved.counts,
        tiles.order,
        tiles.table,
        ranks_L,
        first_id,
        a_LVK.shape[1],
        width,
        y_TD.stride(0),
        a_LVK.stride(0),
        a_LVK.stride(1),
        b_LKD.stride(0),
        b_LKD.stride(1),
        saved.ids.stride(0),
        saved.rows.stride(0),
        saved.rows.stride(1),
        SEARCH=saved.ids.shape[1].bit_length(),
        BLOCK_T=tiles.block_rows,
        BLOCK_R=sizes.block_r,
        BLOCK_O=EMBED_COLUMNS,
        WIDEN=widens(),
        num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
    )


def launch_head_rows(
    y_TV: torch.Tensor,
    x_TD: torch.Tensor,
    saved: SavedTables,
    tiles: TileTables,
) -> None:
    """``y[:, ids] = rows x`` in place, each row by its slot's saved rows."""
    most = saved.ids.shape[1]
    if not most:
        return
    sizes = head_rows_sizes(most, tiles.block_rows, x_TD.element_size())
    lora_head_rows_kernel[(tiles.table.shape[0], -(-most // sizes.block_r))](
        y_TV,
        x_TD,
        saved.ids,
        saved.rows,
        saved.counts,
        tiles.order,
        tiles.table,
        x_TD.shape[1],
        y_TV.stride(0),
        x_TD.stride(0),
        saved.ids.stride(0),
        saved.rows.stride(0),
        saved.rows.stride(1),
        BLOCK_T=tiles.block_rows,
        BLOCK_S=sizes.block_r,
        BLOCK_K=sizes.block_k,
        WIDEN=widens(),
        num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
    )


def launch_bias(
    y_TO: torch.Tensor,
    bias_LO: torch.Tensor,
    tiles: TileTables,
) -> None:
    """``y += bias`` in place, each row by its slot's."""
    width = y_TO.shape[1]
    lora_bias_kernel[(tiles.table.shape[0], -(-width // BLOCK_COLUMNS))](
        y_TO,
        bias_LO,
        tiles.order,
        tiles.table,
        width,
        y_TO.stride(0),
        bias_LO.stride(0),
        BLOCK_T=tiles.block_rows,
        BLOCK_O=BLOCK_COLUMNS,
        num_warps=4,
    )


def launch_norm(
    y: torch.Tensor,
    x: torch.Tensor,
    weight_LD: torch.Tensor,
    replaced_L: torch.Tensor,
    tiles: TileTables,
    eps: float,
    unit_offset: bool,
) -> None:
    """``y`` [T, ..., D]: the norm of ``x`` under each row's slot's weight, where it has one."""
    size = x.shape[-1]
    lora_norm_kernel[(tiles.table.shape[0], tiles.block_rows)](
        y,
        x,
        weight_LD,
        replaced_L,
        tiles.order,
        tiles.table,
        size,
        math.prod(x.shape[1:-1]),
        y.stride(0),
        x.stride(0),
        weight_LD.stride(0),
        replaced_L.stride(0),
        eps,
        UNIT_OFFSET=unit_offset,
        BLOCK_D=next_power(size),
        num_warps=4 if size <= 1024 else 8,
    )
