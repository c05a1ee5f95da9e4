"""The layout of a step's adapter rows for its deltas: chosen once a step, used by every layer.

On the CPU rows are *grouped*: one kernel call a layer takes them all, mixed over slots. Where there
is no such kernel they are *segments*: two GEMMs a slot, with its own A and B; where it is slower
than those, long runs of one slot (prefill chunks) are. docs/decisions.md has the measurements. On a
device with kernels of its own all rows are *tiled*. Step thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from mstar_tp.kernels.cpu import RowsAt
from mstar_tp.kernels.staging import to_device
from mstar_tp.lora.device.tiles import TileBuffer, TiledRows, TileSizes
from mstar_tp.lora.stage_rows import RowGrouping

SEGMENT_ROWS = 128
"""A run of at least this many rows of one slot is cheaper as GEMMs than in a slow kernel."""

Rows = slice | torch.Tensor | None
"""Rows of the step: None for all, a slice where they are contiguous, else int64 indices."""


class Segment(NamedTuple):
    """Rows of one slot."""

    rows: Rows
    slot: int


@dataclass(frozen=True, eq=False)
class GroupedRows:
    """Rows of several slots, a slot's side by side.

    int64 on the CPU: ``order`` [R] the rows' places in the step; ``storage`` [G] each group's slot
    less one; ``indptr`` [G + 1], group g's rows are order[indptr[g]:indptr[g + 1]]. ``hidden``
    is the kernel's scratch, float32.
    """

    order: torch.Tensor
    storage: torch.Tensor
    indptr: torch.Tensor
    hidden: torch.Tensor

    @cached_property
    def at(self) -> RowsAt:
        """The addresses that the kernel takes."""
        return RowsAt.of(self.order, self.storage, self.indptr, self.hidden)


RowsBySlot = tuple[Segment, ...] | TiledRows
"""Some of a step's rows, for what few adapters have.

Tiled, these are all adapter rows: a slot that has nothing of the kind says so on the device.
"""


@dataclass(frozen=True, slots=True, eq=False)
class VocabRows:
    """Rows of slots that change the embedding or the head, one segment a slot or tiled.

    ``tokens`` are some of the step's tokens, ``samples`` some of the ``num_samples`` rows that the
    head sees.
    """

    tokens: RowsBySlot
    samples: RowsBySlot
    num_samples: int


@dataclass(frozen=True, slots=True, eq=False)
class DeltaPlan:
    """The layout of one step's adapter rows.

    Without segments, grouped and tiled rows the step has no adapter row, and deltas do nothing.

    Every adapter row is in ``segments``, ``grouped`` or ``tiled``; the others name some of them
    again, for what few adapters have.
    """

    segments: tuple[Segment, ...] = ()
    grouped: GroupedRows | None = None
    tiled: TiledRows | None = None
    biased: RowsBySlot = ()
    """Rows of slots that have a bias on some linear."""
    normed: RowsBySlot = ()
    """Rows of slots that replace some norm's weight."""
    routed: torch.Tensor | None = None
    """int64 [T]: each token's slot, 0 where its adapter leaves experts alone; None if all are 0."""
    vocab: VocabRows | None = None
    """The rows for the embedding and the head; None where no row's adapter changes them."""
    num_rows: int = 0
    """Rows of the step, base rows included, where any has an adapter."""
    thinned: Mapping[RowGrouping, DeltaPlan] = field(default_factory=dict)
    """The plans for linears that see other rows than every token."""
    has_work: bool = field(init=False)
    """True where any row has an adapter. It is a field because every linear of every step asks."""

    def __post_init__(self) -> None:
        work = bool(self.segments) or self.grouped is not None or self.tiled is not None
        object.__setattr__(self, "has_work", work)

    def of(self, grouping: RowGrouping) -> DeltaPlan:
        """The plan over the rows that modules of ``grouping`` see."""
        if grouping is RowGrouping.TOKENS or not self.has_work:
            return self
        return self.thinned[grouping]


class _Run(NamedTuple):
    slot: int
    first: int
    stop: int

    def joins(self, first: int) -> bool:
        """Tell whether a row of several tokens that begins at ``first`` goes on with this run."""
        return self.stop == first and self.stop - self.first > 1


class DeltaPlanner:
    """Makes the plans of steps.

    With ``scratch``, the float32 that the CPU's kernel needs for a row, rows are grouped for that
    kernel, but only short runs with ``long_segments``. With ``tiles`` all rows are tiled for the
    device's kernels; ``invariant`` makes a row's bits independent of the rows beside it.
    """

    def __init__(
        self,
        device: torch.device,
        scratch: int | None = None,
        *,
        long_segments: bool = False,
        tiles: bool = False,
        invariant: bool = False,
    ) -> None:
        self._device = device
        self._scratch = scratch
        self._long_segments = long_segments
        self._tiles = tiles
        self._invariant = invariant

    def buffer(self, rows: int, slots: int) -> TileBuffer | None:
        """Tables for a graph over ``rows`` rows to capture; None where none reads such."""
        if not self._tiles:
            return None
        sizes = TileSizes.of(rows, slots, invariant=self._invariant)
        return TileBuffer(sizes, self._device, invariant=self._invariant)

    def plan(
        self, slots: Sequence[int], counts: Sequence[int], tables: TileBuffer | None = None
    ) -> DeltaPlan:
        """Lay out the rows from each row's slot and number of tokens, in the step's order.

        ``tables`` is where a graph reads the layout, if one does.
        """
        runs = _runs(slots, counts)
        if not runs:
            return _NOTHING
        total = sum(counts)
        if self._tiles:
            return DeltaPlan(tiled=self._tiled(runs, tables), num_rows=total)
        if self._scratch is None:
            by_slot = _by_slot(runs)
            segments = tuple(Segment(self._rows(g, total), s) for s, g in by_slot.items())
            return DeltaPlan(segments, num_rows=total)
        long = [run for run in runs if self._is_segment(run)]
        short = [run for run in runs if not self._is_segment(run)]
        segments = tuple(Segment(self._rows([run], total), run.slot) for run in long)
        grouped = self._grouped(short, self._scratch) if short else None
        return DeltaPlan(segments, grouped, num_rows=total)

    def by_slot(
        self, slots: Sequence[int], counts: Sequence[int], wanted: Collection[int]
    ) -> RowsBySlot:
        """The rows of each slot of ``wanted``, in the order the step first names the slot.

        Tiled, these are the rows of every slot.
        """
        if self._tiles:
            return self.plan(slots, counts).tiled or ()
        runs = [run for run in _runs(slots, counts) if run.slot in wanted]
        total = sum(counts)
        return tuple(Segment(self._rows(g, total), slot) for slot, g in _by_slot(runs).items())

    def slots(
        self, slots: Sequence[int], counts: Sequence[int], wanted: Collection[int]
    ) -> torch.Tensor:
        """Each token's slot, if it is one of ``wanted``, else 0: int64 [T]."""
        kept = torch.tensor([slot if slot in wanted else 0 for slot in slots])
        slots_T = kept.repeat_interleave(torch.tensor(counts))
        return to_device(slots_T, torch.int64, self._device)

    def _tiled(self, runs: list[_Run], tables: TileBuffer | None) -> TiledRows:
        rows_of = {
            slot: [row for run in group for row in range(run.first, run.stop)]
            for slot, group in _by_slot(runs).items()
        }
        if tables is not None:
            return tables.fill(rows_of)
        num_rows = sum(map(len, rows_of.values()))
        sizes = TileSizes.of(num_rows, len(rows_of), invariant=self._invariant)
        return TileBuffer(sizes, self._device, invariant=self._invariant).fill(rows_of)

    def _is_segment(self, run: _Run) -> bool:
        return self._long_segments and run.stop - run.first >= SEGMENT_ROWS

    def _grouped(self, runs: list[_Run], scratch: int) -> GroupedRows:
        order: list[int] = []
        indptr = [0]
        by_slot = _by_slot(runs)
        for group in by_slot.values():
            order += [row for run in group for row in range(run.first, run.stop)]
            indptr.append(len(order))
        return GroupedRows(
            torch.tensor(order),
            torch.tensor([slot - 1 for slot in by_slot]),
            torch.tensor(indptr),
            torch.empty(len(order) * scratch),
        )

    def _rows(self, runs: list[_Run], total: int) -> Rows:
        """The runs' rows, of ``total`` in the step."""
        first, stop = runs[0].first, runs[-1].stop
        count = sum(run.stop - run.first for run in runs)
        if count == total:
            return None
        if count == stop - first:
            return slice(first, stop)
        rows = [row for run in runs for row in range(run.first, run.stop)]
        return torch.tensor(rows, device=self._device)


_NOTHING = DeltaPlan()


def _by_slot(runs: list[_Run]) -> dict[int, list[_Run]]:
    """Runs by slot, in the order the step first names each slot."""
    groups: dict[int, list[_Run]] = {}
    for run in runs:
        groups.setdefault(run.slot, []).append(run)
    return groups


def _runs(slots: Sequence[int], counts: Sequence[int]) -> list[_Run]:
    """Adjacent rows of one slot as one run; base rows are left out.

    A row of one token stands alone: it takes the kernel's way whatever its neighbours are, so its
    bits do not depend on them.
    """
    runs: list[_Run] = []
    first = 0
    for slot, num_tokens in zip(slots, counts, strict=True):
        stop = first + num_tokens
        last = runs[-1] if runs else None
        if last is not None and num_tokens > 1 and last.slot == slot and last.joins(first):
            runs[-1] = last._replace(stop=stop)
        elif slot:
            runs.append(_Run(slot, first, stop))
        first = stop
    return runs


def select_rows(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The rows: themselves or a view where they are contiguous, else a copy."""
    if rows is None:
        return x
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def put_rows(y: torch.Tensor, rows: Rows, changed: torch.Tensor) -> None:
    """Write a copy that ``select_rows`` made back."""
    if isinstance(rows, torch.Tensor):
        y.index_copy_(0, rows, changed)
