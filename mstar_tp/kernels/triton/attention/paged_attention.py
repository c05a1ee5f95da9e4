"""Launches of the attention kernels over torch tensors. No host sync: every size is a shape's.

Legend: T tokens of the step, B rows, W pages a row, N tiles, X = heads * head size, H heads,
P splits, D head size.
"""

from __future__ import annotations

import torch

from mstar_tp.kernels.triton.attention.decode import attend_decode_kernel, combine_decode_kernel
from mstar_tp.kernels.triton.attention.kv_write import kv_write_kernel
from mstar_tp.kernels.triton.attention.prefill import attend_prefill_kernel
from mstar_tp.kernels.triton.attention.sizes import (
    LEAST_SPLIT_KEYS,
    WRITE_COLUMNS,
    AttendSizes,
    decode_sizes,
    decode_splits,
    head_blocks,
    prefill_sizes,
)
from mstar_tp.kernels.triton.dot import widens
from mstar_tp.kernels.triton.launch import next_power


def launch_write(
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    k_TX: torch.Tensor,
    v_TX: torch.Tensor,
    slots_T: torch.Tensor,
) -> None:
    """Tokens' keys and values into their slots; caches [pages, page_size, K, D], contiguous."""
    width = k_TX.shape[1]
    block = min(WRITE_COLUMNS, next_power(width))
    kv_write_kernel[(k_TX.shape[0], -(-width // block))](
        cache_k,
        cache_v,
        k_TX,
        v_TX,
        slots_T,
        k_TX.stride(0),
        v_TX.stride(0),
        WIDTH=width,
        BLOCK=block,
        num_warps=4 if block >= 512 else 1,
    )


def launch_decode(
    out_TX: torch.Tensor,
    q_TX: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    pages_BW: torch.Tensor,
    lengths_B: torch.Tensor,
    starts: torch.Tensor,
    window: int,
    scale: float,
    softcap: float,
    invariant: bool,
) -> None:
    """Rows of one query, in place on their tokens of ``out``; 0: no window, no cap."""
    _, page_size, kv_heads, dim = cache_k.shape
    rows, width = pages_BW.shape
    heads = q_TX.shape[1] // dim
    group = heads // kv_heads
    sizes = decode_sizes(group, dim, cache_k.element_size())
    blocks = head_blocks(group, sizes)
    splits = decode_splits(rows, kv_heads * blocks, width * page_size, invariant=invariant)
    parts = (rows, splits) if splits > 1 else (0, 0)
    sums = q_TX.new_empty((*parts, heads, dim), dtype=torch.float32)
    weights = q_TX.new_empty((*parts, heads), dtype=torch.float32)
    attend_decode_kernel[(rows, kv_heads * blocks, splits)](
        out_TX,
        sums,
        weights,
        q_TX,
        cache_k,
        cache_v,
        pages_BW,
        lengths_B,
        starts,
        splits,
        window,
        scale,
        softcap,
        out_TX.stride(0),
        q_TX.stride(0),
        pages_BW.stride(0),
        pages_BW.stride(1),
        kv_heads * dim,
        GROUP=group,
        HEADS=heads,
        HEAD_BLOCKS=blocks,
        HEAD_DIM=dim,
        PAGE_SIZE=page_size,
        WINDOW=window > 0,
        SOFTCAP=softcap > 0,
        LEAST_KEYS=LEAST_SPLIT_KEYS,
        BLOCK_G=sizes.block_heads,
        BLOCK_N=sizes.block_keys,
        BLOCK_D=sizes.block_dim,
        WIDEN=widens(),
        num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
    )
    if splits > 1:
        _combine(out_TX, sums, weights, lengths_B, starts, window, sizes)


def _combine(
    out_TX: torch.Tensor,
    sums: torch.Tensor,
    weights: torch.Tensor,
    lengths_B: torch.Tensor,
    starts: torch.Tensor,
    window: int,
    sizes: AttendSizes,
) -> None:
    """Join the splits' float32 ``sums`` [B, P, H, D] and ``weights`` [B, P, H] in ``out``."""
    rows, splits, heads, dim = sums.shape
    combine_decode_kernel[(rows, heads)](
        out_TX,
        sums,
        weights,
        lengths_B,
        starts,
        splits,
        window,
        out_TX.stride(0),
        HEADS=heads,
        HEAD_DIM=dim,
        WINDOW=window > 0,
        LEAST_KEYS=LEAST_SPLIT_KEYS,
        BLOCK_N=sizes.block_keys,
        BLOCK_S=next_power(splits),
        BLOCK_D=sizes.block_dim,
        num_warps=1,
    )


def launch_prefill(
    out_TX: torch.Tensor,
    q_TX: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    pages_BW: torch.Tensor,
    lengths_B: torch.Tensor,
    starts: torch.Tensor,
    tiles_N2: torch.Tensor,
    window: int,
    scale: float,
    softcap: float,
) -> None:
    """The tiles' rows, in place on their tokens of ``out``; 0: no window, no cap."""
    _, page_size, kv_heads, dim = cache_k.shape
    group = q_TX.shape[1] // dim // kv_heads
    sizes = prefill_sizes(group, dim, cache_k.element_size())
    blocks = head_blocks(group, sizes)
    attend_prefill_kernel[(tiles_N2.shape[0], kv_heads * blocks)](
        out_TX,
        q_TX,
        cache_k,
        cache_v,
        pages_BW,
        lengths_B,
        starts,
        tiles_N2,
        window,
        scale,
        softcap,
        out_TX.stride(0),
        q_TX.stride(0),
        pages_BW.stride(0),
        pages_BW.stride(1),
        kv_heads * dim,
        GROUP=group,
        HEAD_BLOCKS=blocks,
        HEAD_DIM=dim,
        PAGE_SIZE=page_size,
        WINDOW=window > 0,
        SOFTCAP=softcap > 0,
        BLOCK_M=sizes.block_rows,
        BLOCK_G=sizes.block_heads,
        BLOCK_N=sizes.block_keys,
        BLOCK_D=sizes.block_dim,
        WIDEN=widens(),
        num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
    )
