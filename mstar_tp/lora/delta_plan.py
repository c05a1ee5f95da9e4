"""How a step's adapter rows are laid out for its deltas: chosen once a step, used by every layer.

Two shapes of work. A *segment* is the rows of one slot: two small GEMMs with that slot's own A and
B. The *dense* part is the rest, mixed over slots: one GEMM with every slot's A, a mask that keeps
each row's own columns, one GEMM with every slot's B. Long runs of one slot (prefill chunks) are
segments, short ones (decode rows) go dense unless they are all on few slots; docs/decisions.md has
the measurements. Step thread.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

SEGMENT_ROWS = 16
"""A run of at least this many rows of one slot is cheaper on that slot's own weights than through
every slot's.
"""
FEW_SLOTS = 1
"""Short rows on at most this many slots run as segments."""

Rows = slice | torch.Tensor | None
"""Rows of the step: None for all, a slice where they are contiguous, else int64 indices."""


class Segment(NamedTuple):
    """Rows of one slot."""

    rows: Rows
    slot: int


@dataclass(frozen=True, slots=True, eq=False)
class DenseRows:
    """Rows of several slots.

    ``foreign[s - 1]`` [rows, s * slots * rank], for a target of s slices, is True off a row's own
    slot's columns.
    """

    rows: Rows
    foreign: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class VocabRows:
    """Rows of slots that change the embedding or the head, one segment a slot: of the step's
    tokens, and of the ``num_samples`` rows that the head sees.
    """

    tokens: tuple[Segment, ...]
    samples: tuple[Segment, ...]
    num_samples: int


@dataclass(frozen=True, slots=True, eq=False)
class DeltaPlan:
    """One step. Without segments and dense rows it has no adapter row, and deltas do nothing.

    Every adapter row is in ``segments`` or ``dense``; ``biased`` and ``vocab`` name some of them
    again, for what few adapters have.
    """

    segments: tuple[Segment, ...] = ()
    dense: DenseRows | None = None
    biased: tuple[Segment, ...] = ()
    """Rows of slots that have a bias on some linear, one segment a slot."""
    vocab: VocabRows | None = None
    """For the embedding and the head; None where no row's adapter changes them."""

    @property
    def has_work(self) -> bool:
        return bool(self.segments) or self.dense is not None


class _Run(NamedTuple):
    slot: int
    first: int
    stop: int


class DeltaPlanner:
    """Makes plans for pools of ``num_slots`` slots of ``rank``; ``num_slices`` is the widest
    target's.
    """

    def __init__(self, num_slots: int, rank: int, num_slices: int, device: torch.device) -> None:
        self._device = device
        columns = torch.arange(1, num_slots + 1, device=device).repeat_interleave(rank)
        self._column_slots = columns
        self._num_slices = num_slices

    def plan(self, slots: Sequence[int], counts: Sequence[int]) -> DeltaPlan:
        """From each row's slot and number of tokens, in the step's order."""
        runs = _runs(slots, counts)
        if not runs:
            return _NOTHING
        long = [run for run in runs if run.stop - run.first >= SEGMENT_ROWS]
        short = [run for run in runs if run.stop - run.first < SEGMENT_ROWS]
        total = sum(counts)
        segments = [Segment(self._rows([run], total), run.slot) for run in long]
        by_slot: dict[int, list[_Run]] = {}
        for run in short:
            by_slot.setdefault(run.slot, []).append(run)
        if len(by_slot) > FEW_SLOTS:
            return DeltaPlan(tuple(segments), self._dense(short, total))
        segments += [Segment(self._rows(group, total), slot) for slot, group in by_slot.items()]
        return DeltaPlan(tuple(segments))

    def by_slot(
        self, slots: Sequence[int], counts: Sequence[int], wanted: Collection[int]
    ) -> tuple[Segment, ...]:
        """The rows of each slot of ``wanted``, in the order the step first names the slot."""
        grouped: dict[int, list[_Run]] = {}
        for run in _runs(slots, counts):
            if run.slot in wanted:
                grouped.setdefault(run.slot, []).append(run)
        total = sum(counts)
        return tuple(Segment(self._rows(runs, total), slot) for slot, runs in grouped.items())

    def _dense(self, runs: list[_Run], total: int) -> DenseRows:
        owners = [run.slot for run in runs for _ in range(run.first, run.stop)]
        owner_R = torch.tensor(owners, device=self._device)
        foreign_RC = owner_R[:, None] != self._column_slots
        repeats = range(1, self._num_slices + 1)
        return DenseRows(self._rows(runs, total), tuple(foreign_RC.repeat(1, n) for n in repeats))

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


def _runs(slots: Sequence[int], counts: Sequence[int]) -> list[_Run]:
    """Adjacent rows of one slot as one run; base rows are left out."""
    runs: list[_Run] = []
    first = 0
    for slot, num_tokens in zip(slots, counts, strict=True):
        stop = first + num_tokens
        if slot and runs and runs[-1].slot == slot and runs[-1].stop == first:
            runs[-1] = runs[-1]._replace(stop=stop)
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
