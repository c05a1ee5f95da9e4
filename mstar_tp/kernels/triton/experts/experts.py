"""Launches of the expert kernels over torch tensors. No host sync: every size is a shape's.

Legend: T tokens, K choices a token, P = T * K pairs, E experts, N tiles, O and I features, D hidden
size.
"""

from __future__ import annotations

import torch

from mstar_tp.kernels.triton.dot import widens
from mstar_tp.kernels.triton.experts.expert_group import (
    expert_count_kernel,
    expert_place_kernel,
    slot_count_kernel,
    slot_place_kernel,
)
from mstar_tp.kernels.triton.experts.expert_linear import expert_linear_kernel, expert_sum_kernel
from mstar_tp.kernels.triton.launch import GROUP_BLOCK, expert_sizes, next_power


def launch_group(
    order_P: torch.Tensor,
    tiles_N3: torch.Tensor,
    indptr: torch.Tensor,
    experts_TK: torch.Tensor,
    num_experts: int,
    block_rows: int,
) -> None:
    """``order`` and ``tiles`` of each expert's pairs, and ``indptr`` [E + 1] where they begin.
    Tiles past the last are left alone.
    """
    counts = experts_TK.new_empty(num_experts, dtype=torch.int32)
    num_pairs = experts_TK.numel()
    expert_count_kernel[(num_experts,)](experts_TK, counts, num_pairs, BLOCK=GROUP_BLOCK)
    expert_place_kernel[(num_experts,)](
        experts_TK,
        counts,
        order_P,
        tiles_N3,
        indptr,
        num_pairs,
        num_experts,
        ROWS=block_rows,
        BLOCK_E=next_power(num_experts),
        BLOCK=GROUP_BLOCK,
    )


def launch_group_slots(
    pairs_P: torch.Tensor,
    tokens_P: torch.Tensor,
    tiles_N3: torch.Tensor,
    slots_T: torch.Tensor,
    choices: int,
    order_P: torch.Tensor,
    indptr: torch.Tensor,
    num_slots: int,
    block_rows: int,
) -> None:
    """``pairs``, ``tokens`` and ``tiles`` of each expert's and slot's rows."""
    num_experts, block_s = len(indptr) - 1, max(2, next_power(num_slots + 1))
    counts = order_P.new_empty(num_experts * (block_s + 1))
    per_slot, per_expert = counts[: num_experts * block_s], counts[num_experts * block_s :]
    slot_count_kernel[(num_experts,)](
        order_P,
        indptr,
        slots_T,
        per_slot,
        per_expert,
        choices,
        ROWS=block_rows,
        BLOCK_S=block_s,
        BLOCK=GROUP_BLOCK,
    )
    slot_place_kernel[(num_experts,)](
        order_P,
        indptr,
        slots_T,
        per_slot,
        per_expert,
        pairs_P,
        tokens_P,
        tiles_N3,
        num_experts,
        num_slots,
        choices,
        ROWS=block_rows,
        BLOCK_E=next_power(num_experts),
        BLOCK_S=block_s,
        BLOCK=GROUP_BLOCK,
    )


def launch_linear(
    y_PO: torch.Tensor,
    x_RI: torch.Tensor,
    weight_EOI: torch.Tensor,
    order_P: torch.Tensor,
    tiles_N3: torch.Tensor,
    per: int,
    block_rows: int,
) -> None:
    """``y[pair] = weight[expert] x[pair // per]``."""
    width = y_PO.shape[1]
    sizes = expert_sizes(block_rows, weight_EOI.element_size())
    expert_linear_kernel[(tiles_N3.shape[0], -(-width // sizes.block_o))](
        y_PO,
        x_RI,
        weight_EOI,
        order_P,
        tiles_N3,
        x_RI.shape[1],
        width,
        per,
        y_PO.stride(0),
        x_RI.stride(0),
        weight_EOI.stride(0),
        weight_EOI.stride(1),
        BLOCK_T=block_rows,
        BLOCK_O=sizes.block_o,
        BLOCK_K=sizes.block_k,
        WIDEN=widens(),
        num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
    )


def launch_sum(out_TD: torch.Tensor, y_PD: torch.Tensor, weights_TK: torch.Tensor) -> None:
    """``out``: each token's rows times its ``weights``, float32, summed."""
    tokens, width = out_TD.shape
    block = min(1024, next_power(width))
    expert_sum_kernel[(tokens, -(-width // block))](
        out_TD,
        y_PD,
        weights_TK,
        width,
        weights_TK.shape[1],
        out_TD.stride(0),
        y_PD.stride(0),
        BLOCK_D=block,
        num_warps=4,
    )
