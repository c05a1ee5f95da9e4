"""Rows sorted by expert, and an expert's rows by slot: a stable counting sort, a block an expert.

Tables of whatever mix have one size: order has a place a pair, and tiles past the last stay empty.
A pair is one of a token's choices: token * choices + choice.

Legend: P pairs, E experts, S slots (0: none), N tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _store_tiles(tiles, tile, group, first, count, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Tiles of one group's ``count`` rows from ``first``; how many."""
    num_tiles = tl.cdiv(count, ROWS)
    for start in range(0, num_tiles, BLOCK):
        t_N = start + tl.arange(0, BLOCK)
        live_N = t_N < num_tiles
        to_N = tiles + 3 * (tile + t_N)
        begin_N = first + t_N * ROWS
        tl.store(to_N, tl.zeros((BLOCK,), dtype=tl.int32) + group, mask=live_N)
        tl.store(to_N + 1, begin_N, mask=live_N)
        tl.store(to_N + 2, tl.minimum(begin_N + ROWS, first + count), mask=live_N)
    return num_tiles


@triton.jit
def expert_count_kernel(experts, counts, num_pairs, BLOCK: tl.constexpr):
    """Count each expert's pairs."""
    expert = tl.program_id(0)
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, num_pairs, BLOCK):
        p_P = start + tl.arange(0, BLOCK)
        expert_P = tl.load(experts + p_P, mask=p_P < num_pairs, other=-1)
        total += (expert_P == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(total, axis=0))


@triton.jit
def expert_place_kernel(
    experts,
    counts,
    order,
    tiles,
    indptr,
    num_pairs,
    num_experts,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``order``: each expert's pairs side by side, as they come; its tiles; where it begins."""
    expert = tl.program_id(0)
    e_E = tl.arange(0, BLOCK_E)
    count_E = tl.load(counts + e_E, mask=e_E < num_experts, other=0)
    earlier_E = e_E < expert
    first = tl.sum(tl.where(earlier_E, count_E, 0), axis=0)
    count = tl.sum(tl.where(e_E == expert, count_E, 0), axis=0)
    tile = tl.sum(tl.where(earlier_E, tl.cdiv(count_E, ROWS), 0), axis=0)
    tl.store(indptr + expert, first)
    tl.store(indptr + expert + 1, first + count, mask=expert == num_experts - 1)
    _store_tiles(tiles, tile, expert, first, count, ROWS, BLOCK)
    if count == 0:
        return
    place = first
    for start in range(0, num_pairs, BLOCK):
        p_P = start + tl.arange(0, BLOCK)
        hit_P = tl.load(experts + p_P, mask=p_P < num_pairs, other=-1) == expert
        found_P = hit_P.to(tl.int32)
        tl.store(order + place + tl.cumsum(found_P, axis=0) - 1, p_P, mask=hit_P)
        place += tl.sum(found_P, axis=0)


@triton.jit
def slot_count_kernel(
    order,
    indptr,
    slots,
    counts,
    num_tiles,
    choices,
    ROWS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count each slot's rows among an expert's, and the tiles those come to."""
    expert = tl.program_id(0)
    first = tl.load(indptr + expert)
    stop = tl.load(indptr + expert + 1)
    s_S = tl.arange(0, BLOCK_S)
    count_S = tl.zeros((BLOCK_S,), dtype=tl.int32)
    for start in range(first, stop, BLOCK):
        at_P = start + tl.arange(0, BLOCK)
        token_P = tl.load(order + at_P, mask=at_P < stop, other=0) // choices
        slot_P = tl.load(slots + token_P, mask=at_P < stop, other=0).to(tl.int32)
        count_S += tl.histogram(slot_P, BLOCK_S)
    count_S = tl.where(s_S == 0, 0, count_S)
    tl.store(counts + expert * BLOCK_S + s_S, count_S)
    tl.store(num_tiles + expert, tl.sum(tl.cdiv(count_S, ROWS), axis=0))


@triton.jit
def slot_place_kernel(
    order,
    indptr,
    slots,
    counts,
    num_tiles,
    pairs,
    tokens,
    tiles,
    num_experts,
    num_slots,
    choices,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Place an expert's ``pairs`` and their ``tokens`` from where it begins, a slot's together.

    Their tiles are of storage expert * slots + slot - 1.
    """
    expert = tl.program_id(0)
    first = tl.load(indptr + expert)
    stop = tl.load(indptr + expert + 1)
    e_E = tl.arange(0, BLOCK_E)
    tiles_E = tl.load(num_tiles + e_E, mask=e_E < num_experts, other=0)
    tile = tl.sum(tl.where(e_E < expert, tiles_E, 0), axis=0)
    begin = first
    for slot in range(1, num_slots + 1):
        count = tl.load(counts + expert * BLOCK_S + slot)
        if count > 0:
            place = begin
            for start in range(first, stop, BLOCK):
                at_P = start + tl.arange(0, BLOCK)
                live_P = at_P < stop
                pair_P = tl.load(order + at_P, mask=live_P, other=0)
                token_P = pair_P // choices
                hit_P = live_P & (tl.load(slots + token_P, mask=live_P, other=0) == slot)
                found_P = hit_P.to(tl.int32)
                to_P = place + tl.cumsum(found_P, axis=0) - 1
                tl.store(pairs + to_P, pair_P, mask=hit_P)
                tl.store(tokens + to_P, token_P, mask=hit_P)
                place += tl.sum(found_P, axis=0)
            storage = expert * num_slots + slot - 1
            tile += _store_tiles(tiles, tile, storage, begin, count, ROWS, BLOCK)
            begin += count
