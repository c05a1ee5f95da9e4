"""Launch sizes of the attention kernels. Plain numbers; no Triton here.

Every one follows from shapes alone, so what a captured graph has baked in fits any rows that fit
its buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

from mstar_tp.kernels.triton.launch import ENOUGH_BLOCKS, next_power

LEAST_SPLIT_KEYS = 128
"""A row with fewer keys is not split."""
MAX_SPLITS = 32
INVARIANT_SPLITS = 16
WRITE_COLUMNS = 1024
"""Elements of a token's keys that one block writes."""


@dataclass(frozen=True, slots=True)
class AttendSizes:
    """``block_rows`` are pairs of a query and one of ``block_heads`` query heads."""

    block_rows: int
    block_heads: int
    block_keys: int
    block_dim: int
    num_warps: int
    num_stages: int

    @property
    def tile_queries(self) -> int:
        return self.block_rows // self.block_heads


def decode_sizes(group: int, head_dim: int, itemsize: int) -> AttendSizes:
    """Rows of one query. ``group``: query heads a key head; ``itemsize``: bytes of an element."""
    block_dim = max(16, next_power(head_dim))
    # 16 rows are the least that tensor cores take.
    heads = min(64, max(16, next_power(group)))
    keys = {512: 32, 1024: 16}.get(block_dim * itemsize, 64)
    return AttendSizes(heads, heads, keys, block_dim, num_warps=4, num_stages=2)


def prefill_sizes(group: int, head_dim: int, itemsize: int) -> AttendSizes:
    """Rows of several queries: a tile is so many of them, times the heads that share keys.

    As many rows and keys as spill no register on any architecture that is compiled for.
    """
    block_dim = max(16, next_power(head_dim))
    rows = {512: 64 if itemsize == 2 else 32, 1024: 16}.get(block_dim * itemsize, 128)
    heads = min(16, next_power(group))
    # Head sizes that are no power of two need masks, and so more registers a key.
    keys = 64 if itemsize == 2 and block_dim <= 128 and block_dim == head_dim else 32
    return AttendSizes(rows, heads, keys, block_dim, num_warps=8, num_stages=2)


def head_blocks(group: int, sizes: AttendSizes) -> int:
    """Blocks of query heads that share a key head."""
    return -(-group // sizes.block_heads)


def decode_splits(rows: int, head_blocks: int, max_keys: int, *, invariant: bool) -> int:
    """Into how many parts the keys of a row are cut at most.

    So many that ``rows`` times ``head_blocks`` (of all key heads) fill the device. With
    ``invariant`` they have no say, so a row's bits depend on its own length alone.
    """
    most = max(1, -(-max_keys // LEAST_SPLIT_KEYS))
    if invariant:
        return min(most, INVARIANT_SPLITS)
    return min(most, MAX_SPLITS, -(-ENOUGH_BLOCKS // max(1, rows * head_blocks)))
