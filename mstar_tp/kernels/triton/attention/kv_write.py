"""Keys and values of a step's tokens into their cache slots, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def kv_write_kernel(
    cache_k,
    cache_v,
    k,
    v,
    slots,
    stride_k,
    stride_v,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block copies some of one token's ``WIDTH`` elements; a slot below 0 (padding) is none."""
    token = tl.program_id(0)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < WIDTH
    place = token.to(tl.int64)
    tl.store(cache_k + slot * WIDTH + at, tl.load(k + place * stride_k + at, mask=live), mask=live)
    tl.store(cache_v + slot * WIDTH + at, tl.load(v + place * stride_v + at, mask=live), mask=live)
