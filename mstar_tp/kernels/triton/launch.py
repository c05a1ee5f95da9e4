"""Launch sizes of the LoRA kernels. Plain numbers.

Every one follows from shapes alone, so what a captured graph has baked in fits any mix of rows that
fits its buffers.

No Triton here: the plain path cuts tiles by the same rule.
"""

from __future__ import annotations

from dataclasses import dataclass

DECODE_ROWS = 16
"""Rows of a tile where slots have few rows each: the least that tensor cores take."""
PREFILL_ROWS = 64
BLOCK_COLUMNS = 128
"""Output columns of one block."""
EMBED_COLUMNS = 64
"""The ``BLOCK_COLUMNS`` of a block that looks rows up too."""
GROUP_BLOCK = 1024
"""Pairs of tokens and experts that a block looks at a time, as it sorts them."""
MAX_SPLITS = 16
ENOUGH_BLOCKS = 256
"""Blocks that keep a large GPU's memory busy: about two for each of its 132 to 148 processors."""
INVARIANT_SPLITS = 8
FUSED_BYTES = 32 << 10
"""The largest A of a slot's slice for which one launch is taken for a pair.

One processor reads so much in about the time that a launch takes.
"""


@dataclass(frozen=True, slots=True)
class ShrinkSizes:
    block_r: int
    block_k: int
    num_warps: int
    num_stages: int


def shrink_sizes(packed_rank: int, block_rows: int, itemsize: int) -> ShrinkSizes:
    """``packed_rank``: rows of A of the largest slot; ``itemsize``: bytes of an element of it."""
    block_r = min(64, max(16, next_power(packed_rank)))
    if block_rows == DECODE_ROWS:
        block_k = 256 if block_r == 16 and itemsize == 2 else 256 // itemsize
        return ShrinkSizes(block_r, block_k, num_warps=4, num_stages=3)
    warps = 8 if block_r == 64 and itemsize == 4 else 4
    return ShrinkSizes(block_r, 128 // itemsize, num_warps=warps, num_stages=3)


def fused_sizes(max_rank: int, itemsize: int) -> ShrinkSizes:
    """Sizes for decode tiles: the block of A is small, as B's shares the shared memory."""
    block_r = min(32, max(16, next_power(max_rank)))
    block_k = 128 if itemsize == 2 else 32
    return ShrinkSizes(block_r, block_k, num_warps=4, num_stages=3)


@dataclass(frozen=True, slots=True)
class ExpandSizes:
    block_r: int
    num_warps: int
    num_stages: int


def expand_sizes(max_rank: int, block_rows: int, itemsize: int) -> ExpandSizes:
    """``max_rank``: the largest slot's; ``itemsize``: bytes of an element of B."""
    prefill = block_rows == PREFILL_ROWS
    block_r = 16 if itemsize == 4 else min(32, max(16, next_power(max_rank)))
    return ExpandSizes(block_r, num_warps=8 if prefill else 4, num_stages=2)


def head_rows_sizes(most: int, block_rows: int, itemsize: int) -> ShrinkSizes:
    """``most``: the rows that a slot may put in the head's place, ``block_r`` of them a block."""
    block_r = min(64, max(16, next_power(most)))
    warps = 8 if block_rows == PREFILL_ROWS and itemsize == 4 else 4
    return ShrinkSizes(block_r, 128 // itemsize, num_warps=warps, num_stages=3)


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    block_o: int
    block_k: int
    num_warps: int
    num_stages: int


def expert_sizes(block_rows: int, itemsize: int) -> ExpertSizes:
    """Sizes of the experts' own GEMMs; ``itemsize``: bytes of an element of a weight."""
    if block_rows == DECODE_ROWS:
        return ExpertSizes(64, 256 // itemsize if itemsize == 2 else 32, 4, 3)
    return ExpertSizes(128, 128 // itemsize, 4 if itemsize == 2 else 8, 3)


def splits(
    num_tiles: int, packed_rank: int, in_features: int, sizes: ShrinkSizes, *, invariant: bool
) -> int:
    """Into how many parts of the input features shrink is cut: a power of two.

    So many that its blocks fill the device, none with less than two steps of its loop. With
    ``invariant`` the number of tiles has no say, so a row's bits do not depend on its batch.
    """
    most = max(1, in_features // (2 * sizes.block_k))
    if invariant:
        wanted = INVARIANT_SPLITS
    else:
        blocks = num_tiles * -(-packed_rank // sizes.block_r)
        wanted = min(MAX_SPLITS, -(-ENOUGH_BLOCKS // max(1, blocks)))
    return 1 << (max(1, min(most, wanted)).bit_length() - 1)


def is_fused(max_rank: int, in_features: int, itemsize: int, block_rows: int) -> bool:
    """Tell whether one launch shrinks and expands: for decode tiles whose slots have a small A."""
    return block_rows == DECODE_ROWS and max_rank * in_features * itemsize <= FUSED_BYTES


def next_power(value: int) -> int:
    """The least power of two that is not below ``value``."""
    return 1 << max(0, value - 1).bit_length()
