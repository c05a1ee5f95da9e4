"""Adapter weights in their slots on this rank's device, and the GEMMs that apply them.

Step thread. The plain storage of a target is A [layers, slots, slices * rank, in] and, a *group* of
output slices, B [layers, out, slices, slots, rank], zero where a row meets another slice's columns:
one layer's B with its last three dims flattened is one GEMM over every slot, and one slot of one
slice is a strided view of it. Where the device has a faster layout for a weight that does not
change, ``make_gemm`` lays each of those GEMMs out again after an install.

Slices share a group while the zeros between them cost less to read than another call: few rows of a
few hundred columns are dominated by the cost of calls.

Legend: T tokens of the step, R rows a delta touches, I input and O output features as this rank
holds them, S slices of the output, N layers, L slots, K max_rank, M = S * K.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from mstar_tp.lora.adapter import LoadedAdapter
from mstar_tp.lora.delta_plan import DeltaPlan, DeltaPlanner, DenseRows, Rows
from mstar_tp.lora.shards import slot_shapes
from mstar_tp.lora.spec import LoraSpec, LoraTarget

_CALL_BYTES = {torch.float32: 60_000}
_CALL_BYTES_ELSE = 400_000
"""What a GEMM call costs, in bytes of weights it could have read instead: about 4 us in float32,
where MKL takes it, and 14 us else, where oneDNN does.
"""

Gemm = Callable[[torch.Tensor], torch.Tensor]
"""x [R, I] -> x @ weight.T [R, O]"""
MakeGemm = Callable[[torch.Tensor], Gemm | None]
"""Lays out a weight [O, I] that will not change; None where the plain weight is as fast."""


class _Slice(NamedTuple):
    """One output slice: its number in the target and its rows of this rank's output."""

    number: int
    rows: range


class _Group:
    """One layer of adjacent output slices whose B is one GEMM."""

    def __init__(self, slices: Sequence[_Slice], b_OSLK: torch.Tensor) -> None:
        self.slices = slices
        self.rows = _span(slices)
        self.b_OSLK = b_OSLK
        self._b_CO = b_OSLK.flatten(1).t()
        self.gemm: Gemm | None = None

    def add(self, y_RO: torch.Tensor, h_RC: torch.Tensor) -> None:
        """``y += h @ B.T`` over every slot; both hold this group's columns alone, foreign ones of h
        zeroed.
        """
        if self.gemm is None:
            y_RO.addmm_(h_RC, self._b_CO)
        else:
            y_RO.add_(self.gemm(h_RC))

    def add_slot(self, y_RO: torch.Tensor, h_RM: torch.Tensor, slot: int) -> None:
        """``y += h @ B.T`` of one slot; h holds every slice's columns of that slot."""
        rank = self.b_OSLK.shape[3]
        for part, (index, rows) in enumerate(self.slices):
            h_RK = h_RM[:, index * rank : (index + 1) * rank]
            first = rows.start - self.rows.start
            b_OK = self.b_OSLK[first : first + len(rows), part, slot - 1]
            y_RO[:, rows.start : rows.stop].addmm_(h_RK, b_OK.t())


class LayerWeights:
    """One layer of one target, all slots."""

    def __init__(
        self, a_LMI: torch.Tensor, groups: Sequence[_Group], num_slices: int, make_gemm: MakeGemm
    ) -> None:
        self._a_LMI = a_LMI
        self._a_IC = a_LMI.flatten(0, 1).t()
        self._num_slices = num_slices
        self._groups = groups
        self._make_gemm = make_gemm
        self._a_gemm: Gemm | None = None
        self.lay_out()

    def lay_out(self) -> None:
        """Bring the GEMMs over every slot up to the plain storage."""
        num_slots, m, columns = self._a_LMI.shape
        # [slices, slots, rank] is the order of B's columns, and so of h's and the mask's.
        by_slice = self._a_LMI.view(num_slots, self._num_slices, -1, columns).transpose(0, 1)
        a_CI = by_slice.reshape(num_slots * m, columns)
        self._a_IC = a_CI.t()
        self._a_gemm = self._make_gemm(a_CI)
        for group in self._groups:
            group.gemm = self._make_gemm(group.b_OSLK.flatten(1))

    def add(self, y_TO: torch.Tensor, x_TI: torch.Tensor, plan: DeltaPlan) -> torch.Tensor:
        """``y`` plus the deltas of the step's adapter rows, in place."""
        for rows, slot in plan.segments:
            y_RO = _select(y_TO, rows)
            h_RM = _select(x_TI, rows) @ self._a_LMI[slot - 1].t()
            for group in self._groups:
                group.add_slot(y_RO, h_RM, slot)
            _put(y_TO, rows, y_RO)
        if plan.dense is not None:
            self._add_dense(y_TO, x_TI, plan.dense)
        return y_TO

    def _add_dense(self, y_TO: torch.Tensor, x_TI: torch.Tensor, dense: DenseRows) -> None:
        y_RO, x_RI = _select(y_TO, dense.rows), _select(x_TI, dense.rows)
        h_RC = x_RI @ self._a_IC if self._a_gemm is None else self._a_gemm(x_RI)
        # Filled, not multiplied: what overflowed in another slot's columns must not reach this row.
        h_RC.masked_fill_(dense.foreign[self._num_slices - 1], 0)
        if len(self._groups) == 1:
            self._groups[0].add(y_RO, h_RC)
        else:
            step = h_RC.shape[1] // self._num_slices
            for group in self._groups:
                first = group.slices[0].number * step
                part = y_RO[:, group.rows.start : group.rows.stop]
                group.add(part, h_RC[:, first : first + len(group.slices) * step])
        _put(y_TO, dense.rows, y_RO)


class _TargetWeights:
    """The plain storage of one target over all its layers, and each layer's GEMMs."""

    def __init__(
        self,
        spec: LoraSpec,
        target: LoraTarget,
        out_sizes: Sequence[int],
        num_columns: int,
        like: torch.Tensor,
        make_gemm: MakeGemm,
    ) -> None:
        num_slices, n = len(out_sizes), target.num_layers
        m = num_slices * spec.max_rank
        self._filled: set[int] = set()
        """Slots whose weights here are not all zeros."""
        self._a_NLMI = like.new_zeros(n, spec.slots, m, num_columns)
        self._slices = _grouped(out_sizes, spec, like)
        self._b_NOSLK = [
            like.new_zeros(n, len(_span(part)), len(part), spec.slots, spec.max_rank)
            for part in self._slices
        ]
        self.layers = [
            LayerWeights(self._a_NLMI[layer], self._groups(layer), num_slices, make_gemm)
            for layer in range(n)
        ]

    def write(self, slot: int, a_NMI: torch.Tensor | None, b_NOK: torch.Tensor | None) -> bool:
        """One slot's weights (None: zeros), in the plain storage; whether anything changed."""
        if a_NMI is None and slot not in self._filled:
            return False
        (self._filled.discard if a_NMI is None else self._filled.add)(slot)
        _fill(self._a_NLMI[:, slot - 1], a_NMI)
        for slices, b_NOSLK in zip(self._slices, self._b_NOSLK, strict=True):
            start = slices[0].rows.start
            for part, (_, rows) in enumerate(slices):
                place = b_NOSLK[:, rows.start - start : rows.stop - start, part, slot - 1]
                _fill(place, None if b_NOK is None else b_NOK[:, rows.start : rows.stop])
        return True

    def _groups(self, layer: int) -> list[_Group]:
        storage = zip(self._slices, self._b_NOSLK, strict=True)
        return [_Group(slices, b_NOSLK[layer]) for slices, b_NOSLK in storage]


class SlotWeights:
    """Every target's A and B in this rank's slots, zeros until installed.

    Slot 0 has no storage: base rows are left out of every plan, so nothing would read it.
    """

    def __init__(
        self,
        spec: LoraSpec,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        dtype: torch.dtype,
        make_gemm: MakeGemm,
    ) -> None:
        widest = max(len(target.out_slices) for target in spec.targets)
        self._planner = DeltaPlanner(spec.slots, spec.max_rank, widest, device)
        self._targets: dict[str, _TargetWeights] = {}
        like = torch.empty(0, dtype=dtype, device=device)
        for target in spec.targets:
            (_, _, columns), _ = slot_shapes(spec, target, rank, world_size)
            out_sizes = [len(part) for part in target.out_ranges(rank, world_size)]
            self._targets[target.name] = _TargetWeights(
                spec, target, out_sizes, columns, like, make_gemm
            )

    def layer(self, target: str, layer: int) -> LayerWeights:
        return self._targets[target].layers[layer]

    def install(self, places: Sequence[tuple[int, LoadedAdapter]]) -> None:
        """Make each slot hold its adapter and nothing else: what an adapter lacks becomes zeros.

        Ordered behind every launched step on this thread's stream. One call an admit: the GEMMs
        over all slots are laid out again once, however many slots changed.
        """
        for name, weights in self._targets.items():
            changed = [
                weights.write(slot, adapter.a.get(name), adapter.b.get(name))
                for slot, adapter in places
            ]
            for layer in weights.layers if any(changed) else ():
                layer.lay_out()

    def plan(self, slots: Sequence[int], counts: Sequence[int]) -> DeltaPlan:
        """Lay out a step from each row's slot and number of tokens."""
        return self._planner.plan(slots, counts)


def _grouped(out_sizes: Sequence[int], spec: LoraSpec, like: torch.Tensor) -> list[list[_Slice]]:
    """Slices in groups: one joins its neighbours while the zeros cost less than the call it
    saves.
    """
    groups: list[list[_Slice]] = []
    width_bytes = spec.slots * spec.max_rank * like.element_size()
    call_bytes = _CALL_BYTES.get(like.dtype, _CALL_BYTES_ELSE)
    first = 0
    for index, size in enumerate(out_sizes):
        part = _Slice(index, range(first, first + size))
        first += size
        if groups and len(_span([*groups[-1], part])) * width_bytes <= call_bytes:
            groups[-1].append(part)
        else:
            groups.append([part])
    return groups


def _span(slices: Sequence[_Slice]) -> range:
    return range(slices[0].rows.start, slices[-1].rows.stop)


def _fill(target: torch.Tensor, source: torch.Tensor | None) -> None:
    if source is None:
        target.zero_()
    else:
        target.copy_(source, non_blocking=True)


def _select(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The rows: themselves or a view where they are contiguous, else a copy."""
    if rows is None:
        return x
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def _put(y: torch.Tensor, rows: Rows, changed: torch.Tensor) -> None:
    """Write a copy that ``_select`` made back."""
    if isinstance(rows, torch.Tensor):
        y.index_copy_(0, rows, changed)
