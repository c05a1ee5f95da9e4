"""The shared parts of attention kernels: one block of keys, and the split of a row's keys.

Legend: M pairs of a query and a head, N keys, D head size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mstar_tp.kernels.triton.dot import dot_add

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def split_keys(span, num_splits, LEAST_KEYS: tl.constexpr, BLOCK_N: tl.constexpr):
    """(parts that ``span`` keys are cut into, keys of a part)."""
    wanted = tl.maximum(1, tl.minimum(num_splits, tl.cdiv(span, LEAST_KEYS)))
    chunk = tl.maximum(1, tl.cdiv(tl.cdiv(span, wanted), BLOCK_N)) * BLOCK_N
    return tl.maximum(1, tl.cdiv(span, chunk)), chunk


@triton.jit
def attend_block(
    q_MD,
    cache_k,
    cache_v,
    pages_row,
    stride_page,
    stride_slot,
    key_N,
    live_N,
    seen_MN,
    most_M,
    weight_M,
    sum_MD,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Go on with a softmax over the keys ``key_N`` of one row, of which ``live_N`` are read.

    ``most_M``: the highest score so far, in powers of two; ``weight_M``, ``sum_MD``: sums of
    weights and of weighted values, relative to it. A block of which a query sees nothing leaves its
    three as they are, bit for bit.
    """
    d_D = tl.arange(0, BLOCK_D)
    page_N = tl.load(pages_row + (key_N // PAGE_SIZE) * stride_page, mask=live_N, other=0)
    slot_N = page_N.to(tl.int64) * PAGE_SIZE + key_N % PAGE_SIZE
    at_N = slot_N * stride_slot
    live_DN = live_N[None, :] & (d_D < HEAD_DIM)[:, None]
    k_DN = tl.load(cache_k + at_N[None, :] + d_D[:, None], mask=live_DN, other=0.0)
    score_MN = dot_add(
        q_MD, k_DN, tl.zeros((q_MD.shape[0], key_N.shape[0]), dtype=tl.float32), WIDEN
    )
    score_MN = score_MN * scale
    if SOFTCAP:
        # tanh by exp: both ends come out right, since 2 / (inf + 1) is 0.
        score_MN = softcap * (1 - 2 / (tl.exp2(score_MN * (2 * LOG2E / softcap)) + 1))
    score_MN = tl.where(seen_MN, score_MN * LOG2E, float("-inf"))
    new_M = tl.maximum(most_M, tl.max(score_MN, 1))
    base_M = tl.where(new_M == float("-inf"), 0.0, new_M)
    old_M = tl.exp2(most_M - base_M)
    weight_MN = tl.exp2(score_MN - base_M[:, None])
    live_ND = live_N[:, None] & (d_D < HEAD_DIM)[None, :]
    v_ND = tl.load(cache_v + at_N[:, None] + d_D[None, :], mask=live_ND, other=0.0)
    sum_MD = dot_add(weight_MN.to(v_ND.dtype), v_ND, sum_MD * old_M[:, None], WIDEN)
    return new_M, weight_M * old_M + tl.sum(weight_MN, 1), sum_MD
