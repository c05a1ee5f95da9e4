"""Adapter weights in their slots on this rank's device, and the GEMMs that apply them.

Step thread. The plain storage of a target is A [layers, slices, slots, rank, in] and, a *group* of
output slices, B [layers, out, slices, slots, rank], zero where a row meets another slice's columns.
One layer of either, flattened, is the weight of one GEMM over every slot; one slot is a strided
view.

Where the device has a faster layout for a weight that does not change, ``make_gemm`` lays those
GEMMs out. That costs about as much as ten steps gain by it, so an install leaves them plain, and
layers are laid out a few at a time once some steps have passed without another install.

Slices share a group while the zeros between them cost less to read than another call: few rows of a
few hundred columns are dominated by the cost of calls.

Legend: T tokens of the step, R rows a delta touches, I input and O output features as this rank
holds them, S slices of the output, N layers, L slots, K max_rank, C = S * L * K.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from mstar_tp.lora.adapter import LoadedAdapter
from mstar_tp.lora.delta_plan import (
    DeltaPlan,
    DeltaPlanner,
    DenseRows,
    VocabRows,
    put_rows,
    select_rows,
)
from mstar_tp.lora.shards import slot_shapes
from mstar_tp.lora.spec import LoraParallel, LoraSpec, LoraTarget
from mstar_tp.lora.vocab_weights import EmbeddingWeights, HeadWeights

_CALL_BYTES = {torch.float32: 60_000}
_CALL_BYTES_ELSE = 400_000
"""What a GEMM call costs, in bytes of weights it could have read instead: about 4 us in float32,
where MKL takes it, and 14 us else, where oneDNN does.
"""

QUIET_STEPS = 4
"""Dense steps without an install after which GEMMs are laid out,"""
LAY_OUT_STEPS = 8
"""and over how many steps the work is spread."""

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
        self,
        a_SLKI: torch.Tensor,
        groups: Sequence[_Group],
        bias_LO: torch.Tensor,
        make_gemm: MakeGemm,
    ) -> None:
        self._a_SLKI = a_SLKI
        self._bias_LO = bias_LO
        self._a_IC = a_SLKI.flatten(0, 2).t()
        self._num_slices = len(a_SLKI)
        self._groups = groups
        self._make_gemm = make_gemm
        self._a_gemm: Gemm | None = None

    def lay_out(self) -> None:
        """Run the GEMMs over every slot from the device's fastest layout until the next install."""
        self._a_gemm = self._make_gemm(self._a_IC.t())
        for group in self._groups:
            group.gemm = self._make_gemm(group.b_OSLK.flatten(1))

    def run_plain(self) -> None:
        """The plain storage has changed: run from it."""
        self._a_gemm = None
        for group in self._groups:
            group.gemm = None

    def add(self, y_TO: torch.Tensor, x_TI: torch.Tensor, plan: DeltaPlan) -> torch.Tensor:
        """``y`` plus the deltas of the step's adapter rows, in place."""
        for rows, slot in plan.segments:
            y_RO = select_rows(y_TO, rows)
            a_MI = self._a_SLKI[:, slot - 1].reshape(-1, self._a_SLKI.shape[3])
            h_RM = select_rows(x_TI, rows) @ a_MI.t()
            for group in self._groups:
                group.add_slot(y_RO, h_RM, slot)
            put_rows(y_TO, rows, y_RO)
        if plan.dense is not None:
            self._add_dense(y_TO, x_TI, plan.dense)
        for rows, slot in plan.biased:
            y_RO = select_rows(y_TO, rows)
            y_RO.add_(self._bias_LO[slot - 1])
            put_rows(y_TO, rows, y_RO)
        return y_TO

    def _add_dense(self, y_TO: torch.Tensor, x_TI: torch.Tensor, dense: DenseRows) -> None:
        y_RO, x_RI = select_rows(y_TO, dense.rows), select_rows(x_TI, dense.rows)
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
        put_rows(y_TO, dense.rows, y_RO)


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
        self._filled: set[int] = set()
        """Slots whose weights here are not all zeros."""
        self._a_NSLKI = like.new_zeros(n, num_slices, spec.slots, spec.max_rank, num_columns)
        self._slices = _grouped(out_sizes, spec, like)
        self._b_NOSLK = [
            like.new_zeros(n, len(_span(part)), len(part), spec.slots, spec.max_rank)
            for part in self._slices
        ]
        self._bias_NLO = like.new_zeros(n, spec.slots, sum(out_sizes))
        self.layers = [
            LayerWeights(self._a_NSLKI[k], self._groups(k), self._bias_NLO[k], make_gemm)
            for k in range(n)
        ]

    def write(
        self,
        slot: int,
        a_NMI: torch.Tensor | None,
        b_NOK: torch.Tensor | None,
        bias_NO: torch.Tensor | None,
    ) -> bool:
        """One slot's weights (None: zeros), in the plain storage; whether anything changed."""
        if a_NMI is None and slot not in self._filled:
            return False
        _fill(self._bias_NLO[:, slot - 1], bias_NO)
        (self._filled.discard if a_NMI is None else self._filled.add)(slot)
        place = self._a_NSLKI[:, :, slot - 1]
        _fill(place, None if a_NMI is None else a_NMI.view(place.shape))
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
        linears = [target for target in spec.targets if not target.parallel.is_vocab]
        self._planner = DeltaPlanner(spec.slots, spec.max_rank, widest, device)
        self._targets: dict[str, _TargetWeights] = {}
        self._quiet_steps = 0
        like = torch.empty(0, dtype=dtype, device=device)
        self._biased: set[int] = set()
        """Slots with a bias on some linear."""
        self._vocab: set[int] = set()
        """Slots that change the embedding or the head."""
        ends = (rank, world_size, like)
        self._embeddings = {
            target.name: EmbeddingWeights(spec, target, *ends)
            for target in spec.targets
            if target.parallel is LoraParallel.VOCAB_IN
        }
        self._heads = {
            target.name: HeadWeights(spec, target, *ends)
            for target in spec.targets
            if target.parallel is LoraParallel.VOCAB_OUT
        }
        for target in linears:
            (_, _, columns), _ = slot_shapes(spec, target, rank, world_size)
            out_sizes = [len(part) for part in target.out_ranges(rank, world_size)]
            self._targets[target.name] = _TargetWeights(
                spec, target, out_sizes, columns, like, make_gemm
            )
        self._num_layers = sum(target.num_layers for target in linears)
        self._plain: dict[LayerWeights, None] = {}
        """Layers whose GEMMs are not laid out, oldest install first."""

    def layer(self, target: str, layer: int) -> LayerWeights:
        return self._targets[target].layers[layer]

    def embedding(self, target: str) -> EmbeddingWeights:
        return self._embeddings[target]

    def head(self, target: str) -> HeadWeights:
        return self._heads[target]

    def install(self, places: Sequence[tuple[int, LoadedAdapter]]) -> None:
        """Make each slot hold its adapter and nothing else: what an adapter lacks becomes zeros.

        Ordered behind every launched step on this thread's stream.
        """
        for name, weights in self._targets.items():
            changed = [
                weights.write(
                    slot, adapter.a.get(name), adapter.b.get(name), adapter.bias.get(name)
                )
                for slot, adapter in places
            ]
            if any(changed):
                for layer in weights.layers:
                    layer.run_plain()
                    self._plain[layer] = None
        for slot, adapter in places:
            biased = any(name in self._targets for name in adapter.bias)
            (self._biased.add if biased else self._biased.discard)(slot)
            ends = (*self._embeddings.values(), *self._heads.values())
            changed = [end.write(slot, adapter) for end in ends]
            (self._vocab.add if any(changed) else self._vocab.discard)(slot)
        self._quiet_steps = 0

    def plan(
        self, slots: Sequence[int], counts: Sequence[int], sampled: Sequence[int] = ()
    ) -> DeltaPlan:
        """Lay out a step from each row's slot and number of tokens; ``sampled`` are the slots of
        the rows that the head sees, in its order.
        """
        plan = self._planner.plan(slots, counts)
        if not self._biased.isdisjoint(slots):
            plan = replace(plan, biased=self._planner.by_slot(slots, counts, self._biased))
        if not self._vocab.isdisjoint(slots):
            vocab = VocabRows(
                tokens=self._planner.by_slot(slots, counts, self._vocab),
                samples=self._planner.by_slot(sampled, [1] * len(sampled), self._vocab),
                num_samples=len(sampled),
            )
            plan = replace(plan, vocab=vocab)
        if plan.dense is not None and self._plain:
            self._quiet_steps += 1
            if self._quiet_steps > QUIET_STEPS:
                self._lay_out(-(-self._num_layers // LAY_OUT_STEPS))
        return plan

    def lay_out_all(self) -> None:
        """Lay every GEMM out now."""
        self._lay_out(len(self._plain))

    def _lay_out(self, num_layers: int) -> None:
        for layer in list(self._plain)[:num_layers]:
            layer.lay_out()
            del self._plain[layer]


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
