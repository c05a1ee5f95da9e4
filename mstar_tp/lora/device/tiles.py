"""Tiles of a step's adapter rows for the device's kernels.

A tile holds rows of one slot, and a slot's tiles are side by side, so that a kernel block reads one
slot's weights.

The tables are int32 on the device, and reach it by one copy a step. Tiles past the last are empty:
a captured graph launches them all, and those return at once. Step thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from mstar_tp.common.errors import LockstepError
from mstar_tp.kernels.staging import ALIGNED, StagedTable
from mstar_tp.kernels.triton.launch import BLOCK_COLUMNS, DECODE_ROWS, PREFILL_ROWS


@dataclass(frozen=True, slots=True, eq=False)
class TiledRows:
    """A step's adapter rows in tiles.

    ``order_R`` [R] are the rows' places in the step; ``tiles_N3`` [N, 3] each tile's storage (its
    slot less one), first and last-plus-one row in the order; ``slots`` those that have rows.
    ``invariant``: a row's bits must not depend on its batch. ``captured``: a graph is captured with
    the tables, in which any slot may have rows later.
    """

    order_R: torch.Tensor  # noqa: N815
    tiles_N3: torch.Tensor  # noqa: N815
    block_rows: int
    slots: tuple[int, ...]
    invariant: bool = False
    captured: bool = False


class TileSizes(NamedTuple):
    """The sizes that a captured graph is built for."""

    rows: int
    tiles: int
    block_rows: int

    @classmethod
    def of(cls, rows: int, slots: int, *, invariant: bool = False) -> TileSizes:
        """Enough for ``rows`` adapter rows over up to ``slots`` slots, however they are mixed."""
        slots = min(rows, slots)
        few = invariant or rows <= slots * DECODE_ROWS
        block_rows = DECODE_ROWS if few else PREFILL_ROWS
        # Each slot's last tile may be short; the others are full.
        return cls(rows, slots + (rows - slots) // block_rows, block_rows)


class TileBuffer:
    """The tables at one place on the device, written anew each step."""

    def __init__(self, sizes: TileSizes, device: torch.device, *, invariant: bool = False) -> None:
        self.sizes = sizes
        self._invariant = invariant
        self._tiles_at = -(-sizes.rows // ALIGNED) * ALIGNED
        length = self._tiles_at + 3 * sizes.tiles
        self._table = torch.zeros(length, dtype=torch.int32, device=device)
        self._staged = StagedTable(self._table)

    @property
    def any_rows(self) -> TiledRows:
        """The tables whatever stands in them: what a graph is captured with."""
        return replace(self._rows(()), captured=True)

    def fill(self, rows_of: Mapping[int, Sequence[int]]) -> TiledRows:
        """Lay out the rows of each slot.

        The writes are ordered behind every launched step on this thread's stream; the host does not
        wait.

        Raises:
            LockstepError: more rows or tiles than the buffer has.
        """
        sizes = self.sizes
        order: list[int] = []
        tiles: list[int] = []
        for slot, rows in rows_of.items():
            first, stop = len(order), len(order) + len(rows)
            order += rows
            for start in range(first, stop, sizes.block_rows):
                tiles += (slot - 1, start, min(stop, start + sizes.block_rows))
        if len(order) > sizes.rows or len(tiles) > 3 * sizes.tiles:
            raise LockstepError(
                f"a step has {len(order)} adapter rows in {len(tiles) // 3} tiles, but its tables "
                f"hold {sizes.rows} and {sizes.tiles}: it needs a larger bucket"
            )
        order += [0] * (self._tiles_at - len(order))
        tiles += [0] * (3 * sizes.tiles - len(tiles))
        self._staged.write(torch.tensor(order + tiles, dtype=torch.int32))
        return self._rows(tuple(rows_of))

    def _rows(self, slots: tuple[int, ...]) -> TiledRows:
        sizes = self.sizes
        return TiledRows(
            self._table[: sizes.rows],
            self._table[self._tiles_at :].view(sizes.tiles, 3),
            sizes.block_rows,
            slots,
            self._invariant,
        )


def column_blocks(out_sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    """int32 [C, 3]: each block's slice of the output, first and last-plus-one column."""
    blocks: list[tuple[int, int, int]] = []
    first = 0
    for part, size in enumerate(out_sizes):
        stop = first + size
        blocks += [
            (part, start, min(stop, start + BLOCK_COLUMNS))
            for start in range(first, stop, BLOCK_COLUMNS)
        ]
        first = stop
    return torch.tensor(blocks, dtype=torch.int32, device=device).view(-1, 3)
