"""The beginning of a block of a kernel over tiled rows. Tables as in ``lora.tiles``.

Legend: T rows, O output columns.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(tiles):
    """This block's tile: its storage, and its first and last-plus-one row in the order.

    Past the step's last tile no row is between them.
    """
    tile = tiles + 3 * tl.program_id(0)
    first = tl.load(tile + 1)
    stop = tl.load(tile + 2)
    return tl.load(tile).to(tl.int64), first, stop


@triton.jit
def load_columns(blocks, BLOCK_O: tl.constexpr):
    """This block's columns: their slice, their places, and a mask of those that there are."""
    block = tl.program_id(1)
    part = tl.load(blocks + 3 * block)
    column_O = tl.load(blocks + 3 * block + 1) + tl.arange(0, BLOCK_O)
    return part, column_O, column_O < tl.load(blocks + 3 * block + 2)
