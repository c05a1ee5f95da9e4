"""Adapter weights in their slots on this rank's device, and what applies them.

Step thread. A target's storage is A [layers, slots, slices * rank, in] and B [layers, slots, rank,
out]: a slot's part is contiguous and as an install copies it, B turned so that a row of it is read
in order. Only the rows of a slot's own rank are ever read.

Legend: T tokens of the step, R rows a delta touches, I input and O output features as this rank
holds them, S slices of the output, N layers, L slots, K max_rank, M = S * K.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import torch

from mstar_tp.kernels.cpu import CpuKernels, Factors, cpu_kernels
from mstar_tp.layers.gemm import LinearWeight
from mstar_tp.lora.device import expert_ops, ops, vocab_ops
from mstar_tp.lora.device.delta_plan import (
    DeltaPlan,
    DeltaPlanner,
    GroupedRows,
    VocabRows,
    put_rows,
    select_rows,
)
from mstar_tp.lora.device.device_copies import DeviceQueues, SlotCopies, queues_of
from mstar_tp.lora.device.expert_weights import ExpertWeights
from mstar_tp.lora.device.norm_weights import NormWeights
from mstar_tp.lora.device.tiles import TileBuffer, TiledRows, column_blocks
from mstar_tp.lora.device.vocab_weights import EmbeddingWeights, HeadWeights
from mstar_tp.lora.reading.loaded_adapter import LoadedAdapter
from mstar_tp.lora.reading.shards import slot_shapes
from mstar_tp.lora.spec import LoraParallel, LoraSpec, LoraTarget
from mstar_tp.lora.stage_rows import RowGrouping, RowKind

Backend = Literal["auto", "ops", "torch"]
"""The code that applies deltas.

``auto``: on CUDA the operators of ``lora.ops`` where Triton is there; on CPUs our C++ kernel where
it can be had; else torch alone. ``ops`` and ``torch`` are for tests and benchmarks: these on any
device.
"""


class LayerWeights:
    """One layer of one target, all slots."""

    def __init__(
        self,
        target: _TargetWeights,
        layer: int,
        kernels: CpuKernels | None,
    ) -> None:
        self._target = target
        self.grouping = target.grouping
        self._a_LMI = target.a_NLMI[layer]
        self._b_LKO = target.b_NLKO[layer]
        self._bias_LO = target.bias_NLO[layer]
        self._kernels = kernels
        self.factors = Factors(
            a=self._a_LMI.data_ptr(),
            a_slot=self._a_LMI.stride(0),
            b=self._b_LKO.data_ptr(),
            b_slot=self._b_LKO.stride(0),
            ranks=target.ranks_L.data_ptr(),
            ends=target.slice_ends.data_ptr(),
            slices=len(target.slices),
            rank=target.max_rank,
        )

    def linear(
        self,
        weight: LinearWeight,
        bias_O: torch.Tensor | None,
        x_TI: torch.Tensor,
        plan: DeltaPlan,
    ) -> torch.Tensor:
        """Return the base's product with the deltas of the step's adapter rows.

        It is one kernel where there is one, with the same bits as ``add``.
        """
        grouped, packed, kernels = plan.grouped, weight.packed, self._kernels
        if grouped is None or packed is None or kernels is None or plan.segments:
            return self.add(weight(x_TI, bias_O), x_TI, plan)
        x_TI = x_TI if x_TI.stride(-1) == 1 else x_TI.contiguous()
        y_TO = kernels.linear(x_TI, packed, bias_O, weight.shape[0], self.factors, grouped.at)
        return self._add_biases(y_TO, plan)

    def add(self, y_TO: torch.Tensor, x_TI: torch.Tensor, plan: DeltaPlan) -> torch.Tensor:
        """``y`` plus the deltas of the step's adapter rows, in place."""
        for rows, slot in plan.segments:
            if self._target.ranks_of[slot - 1]:
                y_RO = select_rows(y_TO, rows)
                self._add_slot(y_RO, select_rows(x_TI, rows), slot)
                put_rows(y_TO, rows, y_RO)
        if plan.grouped is not None:
            self._add_grouped(y_TO, x_TI, plan.grouped)
        if plan.tiled is not None:
            self._add_tiled(y_TO, x_TI, plan.tiled)
        return self._add_biases(y_TO, plan)

    def _add_biases(self, y_TO: torch.Tensor, plan: DeltaPlan) -> torch.Tensor:
        if isinstance(plan.biased, TiledRows):
            vocab_ops.add_biases(y_TO, self._bias_LO, plan.biased)
            return y_TO
        for rows, slot in plan.biased:
            y_RO = select_rows(y_TO, rows)
            y_RO.add_(self._bias_LO[slot - 1])
            put_rows(y_TO, rows, y_RO)
        return y_TO

    def _add_slot(self, y_RO: torch.Tensor, x_RI: torch.Tensor, slot: int) -> None:
        """``y += B(A x)`` of one slot's rows, slice by slice."""
        target, rank = self._target, self._target.ranks_of[slot - 1]
        h_RM = x_RI @ self._a_LMI[slot - 1].t()
        for index, columns in enumerate(target.slices):
            first = index * target.max_rank
            b_KO = self._b_LKO[slot - 1, :rank, columns]
            y_RO[:, columns].addmm_(h_RM[:, first : first + rank], b_KO)

    def _add_tiled(self, y_TO: torch.Tensor, x_TI: torch.Tensor, rows: TiledRows) -> None:
        target = self._target
        if not rows.captured and not any(target.ranks_of[slot - 1] for slot in rows.slots):
            return
        assert target.column_blocks is not None, "rows are tiled for the operators alone"
        torch.ops.mstar_lora.apply(
            y_TO,
            x_TI,
            self._a_LMI,
            self._b_LKO,
            rows.order_R,
            rows.tiles_N3,
            target.ranks_L,
            target.column_blocks,
            rows.block_rows,
            rows.invariant,
        )

    def _add_grouped(self, y_TO: torch.Tensor, x_TI: torch.Tensor, rows: GroupedRows) -> None:
        assert self._kernels is not None, "rows are grouped for the kernel alone"
        self._kernels.lora_delta(y_TO, x_TI, self.factors, rows.at)


class _TargetWeights:
    """The storage of one target over all its layers."""

    def __init__(
        self,
        spec: LoraSpec,
        target: LoraTarget,
        out_sizes: Sequence[int],
        num_columns: int,
        like: torch.Tensor,
        kernels: CpuKernels | None,
        tiles: bool,
    ) -> None:
        n, slots, rank = target.num_layers, spec.slots, spec.max_rank
        self.max_rank = rank
        tokens = target.row_grouping == RowGrouping.TOKENS
        self.grouping = RowGrouping.TOKENS if tokens else target.row_grouping
        ends = torch.tensor(out_sizes).cumsum(0)
        self.slice_ends = ends
        """int64 [S]: where each slice's columns end."""
        self.slices = [
            slice(end - size, end) for end, size in zip(ends.tolist(), out_sizes, strict=True)
        ]
        self.a_NLMI = like.new_zeros(n, slots, len(out_sizes) * rank, num_columns)
        self.b_NLKO = like.new_zeros(n, slots, rank, sum(out_sizes))
        self.bias_NLO = like.new_zeros(n, slots, sum(out_sizes))
        self.ranks_of = [0] * slots
        """Each slot's rank here, 0 where its adapter leaves the target alone,"""
        self.ranks_NL = torch.zeros(
            (n if target.routed else 1, slots), dtype=torch.int64, device=like.device
        )
        self.ranks_L = self.ranks_NL[0]
        """and the same as kernels read it; of experts, once for each."""
        self._biased: set[int] = set()
        """Slots whose bias is not zeros."""
        tiles = tiles or (target.routed and expert_ops.are_taken(like.device))
        self.column_blocks = column_blocks(out_sizes, like.device) if tiles else None
        # Experts are run all at once.
        self.layers = [] if target.routed else [LayerWeights(self, k, kernels) for k in range(n)]

    def write(
        self,
        slot: int,
        rank: int,
        a_NMI: torch.Tensor | None,
        b_NOK: torch.Tensor | None,
        bias_NO: torch.Tensor | None,
        queues: DeviceQueues,
    ) -> None:
        """Make the slot hold these weights (None: nothing) and no others."""
        index = slot - 1
        if bias_NO is not None:
            queues.copy((self.bias_NLO[:, index], bias_NO))
            self._biased.add(slot)
        elif slot in self._biased:
            queues.fill(self.bias_NLO[:, index], 0)
            self._biased.discard(slot)
        before = self.ranks_of[index]
        now = self.ranks_of[index] = 0 if a_NMI is None else rank
        if now != before:
            queues.fill(self.ranks_NL[:, index], now)
        if a_NMI is not None and b_NOK is not None:
            # What lies past the rank is zeros in the copy, and nobody reads it.
            queues.copy(
                (self.a_NLMI[:, index], a_NMI),
                (self.b_NLKO[:, index], b_NOK.transpose(1, 2)),
            )

    def fill(self, seed: int) -> None:
        """Small random weights of the largest rank in every slot."""
        generator = torch.Generator(self.a_NLMI.device).manual_seed(seed)
        for weights in (self.a_NLMI, self.b_NLKO):
            weights.normal_(std=0.05, generator=generator)
        self.ranks_of = [self.max_rank] * len(self.ranks_of)
        self.ranks_L.fill_(self.max_rank)

    def empty(self) -> None:
        """Set every slot to what it was before any install."""
        for weights in (self.a_NLMI, self.b_NLKO, self.ranks_L):
            weights.zero_()
        self.ranks_of = [0] * len(self.ranks_of)


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
        backend: Backend = "auto",
        invariant: bool = False,
        queues: DeviceQueues | None = None,
    ) -> None:
        """``invariant``: on the operators, a row's bits do not depend on the rows beside it.
        ``queues``: the device's, unless a test has others.
        """
        self._copies = SlotCopies(queues or queues_of(device))
        tiles = backend == "ops" or (
            backend == "auto" and device.type == "cuda" and ops.triton_is_here()
        )
        kernels = cpu_kernels(device, dtype) if backend == "auto" else None
        linears = [target for target in spec.targets if target.parallel.is_linear]
        self._targets: dict[str, _TargetWeights] = {}
        like = torch.empty(0, dtype=dtype, device=device)
        self._biased: set[int] = set()
        """Slots with a bias on some linear."""
        self._vocab: set[int] = set()
        """Slots that change the embedding or the head."""
        ends = (rank, world_size, like, tiles)
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
        self._normed: set[int] = set()
        """Slots that replace some norm's weight."""
        self._norms = {
            target.name: NormWeights(spec, target, like)
            for target in spec.targets
            if target.parallel is LoraParallel.NORM
        }
        self._routed: set[int] = set()
        """Slots that change some expert."""
        self._experts: dict[str, ExpertWeights] = {}
        for target in linears:
            (_, _, columns), _ = slot_shapes(spec, target, rank, world_size)
            out_sizes = [len(part) for part in target.out_ranges(rank, world_size)]
            self._targets[target.name] = _TargetWeights(
                spec, target, out_sizes, columns, like, kernels, tiles
            )
            if target.routed:
                weights = self._targets[target.name]
                self._experts[target.name] = ExpertWeights(weights, kernels)
        hidden = max((target.a_NLMI.shape[2] for target in self._targets.values()), default=0)
        self._planner = DeltaPlanner(
            device,
            None if kernels is None else hidden,
            long_segments=kernels is not None and not kernels.takes_long_runs,
            tiles=tiles,
            invariant=invariant,
        )
        self._copies.begin()
        self._asked: tuple[tuple[int, ...], ...] | None = None
        """What ``_planned`` was made for, if no slot has changed since."""
        self._planned = DeltaPlan()
        self._num_slots = spec.slots
        self._groupings = sorted(
            {target.row_grouping for target in linears} - {RowGrouping.TOKENS}, key=repr
        )

    def layer(self, target: str, layer: int) -> LayerWeights:
        return self._targets[target].layers[layer]

    def experts(self, target: str) -> ExpertWeights:
        return self._experts[target]

    def embedding(self, target: str) -> EmbeddingWeights:
        return self._embeddings[target]

    def head(self, target: str) -> HeadWeights:
        return self._heads[target]

    def norm(self, target: str) -> NormWeights:
        return self._norms[target]

    def install(self, places: Sequence[tuple[int, LoadedAdapter]]) -> None:
        """Make each slot hold its adapter and nothing else: what an adapter lacks becomes zeros.

        Ordered behind every launched step that reads the slot, and before the next that does; runs
        beside all others.
        """
        self._asked = None
        for slot, adapter in places:
            with self._copies.into(slot, adapter) as queues:
                changes_an_end = self._write(slot, adapter, queues)
            (self._vocab.add if changes_an_end else self._vocab.discard)(slot)
            biased = any(name in self._targets for name in adapter.bias)
            (self._biased.add if biased else self._biased.discard)(slot)
            routed = any(name in adapter.a for name in self._experts)
            (self._routed.add if routed else self._routed.discard)(slot)
            (self._normed.add if adapter.norms else self._normed.discard)(slot)

    def _write(self, slot: int, adapter: LoadedAdapter, queues: DeviceQueues) -> bool:
        """Queue every copy into the slot; whether the adapter changes the embedding or the head."""
        for name, weights in self._targets.items():
            a, b, bias = (part.get(name) for part in (adapter.a, adapter.b, adapter.bias))
            weights.write(slot, adapter.rank, a, b, bias, queues)
        for name, norm in self._norms.items():
            norm.write(slot, adapter.norms.get(name), queues)
        ends = (*self._embeddings.values(), *self._heads.values())
        changed = [end.write(slot, adapter, queues) for end in ends]
        return any(changed)

    def launched(self) -> None:
        """All of the step that was planned last has been launched, or never will be."""
        self._copies.launched()

    def reap(self) -> None:
        """Let go of adapters that no copy reads any more. Any thread."""
        self._copies.reap()

    def graph_tables(self, num_rows: int) -> TileBuffer | None:
        """Return the tables that a graph of up to ``num_rows`` rows reads, or None.

        None means that no graph can hold deltas of these targets.
        """
        if self._groupings:
            return None
        return self._planner.buffer(num_rows, self._num_slots)

    def captured_plan(self, tables: TileBuffer, num_rows: int) -> DeltaPlan:
        """Return the plan that a graph over ``num_rows`` rows is captured with.

        It holds for whatever stands in the tables later.
        """
        return DeltaPlan(tiled=tables.any_rows, num_rows=num_rows)

    def can_capture(self, slots: Sequence[int]) -> bool:
        """Return whether a graph launches all that the adapters in these slots change."""
        return all(
            changed.isdisjoint(slots)
            for changed in (self._biased, self._vocab, self._normed, self._routed)
        )

    @contextmanager
    def filled(self, seed: int) -> Iterator[None]:
        """Fill every slot of every linear with random weights for the block, and zeros afterwards.

        A forward within it can be compared with another. No adapter may be in any slot.
        """
        for target in self._targets.values():
            target.fill(seed)
        try:
            yield
        finally:
            for target in self._targets.values():
                target.empty()
            self._copies.begin()

    def plan(
        self,
        slots: Sequence[int],
        counts: Sequence[int],
        sampled: Sequence[int] = (),
        tables: TileBuffer | None = None,
    ) -> DeltaPlan:
        """Lay out a step from each row's slot and number of tokens.

        ``sampled`` are the slots of the rows that the head sees, in its order. ``tables``: where a
        graph reads it. All that this thread launches from here on comes behind the copies into
        those slots.
        """
        self._copies.reads(set(slots) - {0})
        asked = (tuple(slots), tuple(counts), tuple(sampled))
        if asked == self._asked:
            return self._planned
        plan = self._plan(slots, counts, sampled, tables)
        # Decoding rows stay alike for many steps. Tiles live in buffers that the next step fills.
        if plan.tiled is None:
            self._asked, self._planned = asked, plan
        return plan

    def _plan(
        self,
        slots: Sequence[int],
        counts: Sequence[int],
        sampled: Sequence[int],
        tables: TileBuffer | None,
    ) -> DeltaPlan:
        plan = self._linear_plan(slots, counts, tables)
        if self._groupings and plan.has_work:
            thinned = {
                grouping: self._linear_plan(*_seen(grouping, slots, counts, sampled))
                for grouping in self._groupings
            }
            plan = replace(plan, thinned=thinned)
        if not self._normed.isdisjoint(slots):
            plan = replace(plan, normed=self._planner.by_slot(slots, counts, self._normed))
        if not self._routed.isdisjoint(slots):
            plan = replace(plan, routed=self._planner.slots(slots, counts, self._routed))
        if not self._vocab.isdisjoint(slots):
            vocab = VocabRows(
                tokens=self._planner.by_slot(slots, counts, self._vocab),
                samples=self._planner.by_slot(sampled, [1] * len(sampled), self._vocab),
                num_samples=len(sampled),
            )
            plan = replace(plan, vocab=vocab)
        return plan

    def _linear_plan(
        self, slots: Sequence[int], counts: Sequence[int], tables: TileBuffer | None = None
    ) -> DeltaPlan:
        plan = self._planner.plan(slots, counts, tables)
        if self._biased.isdisjoint(slots):
            return plan
        return replace(plan, biased=self._planner.by_slot(slots, counts, self._biased))


def _seen(
    grouping: RowGrouping, slots: Sequence[int], counts: Sequence[int], sampled: Sequence[int]
) -> tuple[Sequence[int], Sequence[int]]:
    """Slots and numbers of rows, as a module of ``grouping`` sees the step."""
    if grouping.kind is RowKind.SAMPLED:
        return sampled, [1] * len(sampled)
    return slots, [grouping.rows_of(count) for count in counts]
