"""Adapter weights in their slots on this rank's device, and the plans that apply them.

Step thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal, NamedTuple

import torch

from mstar_tp.kernels.cpu import CpuKernels, cpu_kernels
from mstar_tp.lora.device import ops
from mstar_tp.lora.device.delta_plan import DeltaPlan, DeltaPlanner, VocabRows
from mstar_tp.lora.device.device_copies import DeviceQueues, SlotCopies, queues_of
from mstar_tp.lora.device.expert_weights import ExpertWeights
from mstar_tp.lora.device.norm_weights import NormWeights
from mstar_tp.lora.device.target_weights import LayerWeights, TargetWeights
from mstar_tp.lora.device.tiles import TileBuffer
from mstar_tp.lora.device.vocab_weights import EmbeddingWeights, HeadWeights
from mstar_tp.lora.reading.loaded_adapter import LoadedAdapter
from mstar_tp.lora.reading.shards import slot_shapes
from mstar_tp.lora.spec import LoraParallel, LoraSpec, LoraTarget
from mstar_tp.lora.stage_rows import RowGrouping, RowKind

Backend = Literal["auto", "ops", "torch"]
"""The code that applies deltas.

``auto`` takes on CUDA the operators of ``lora.ops`` where Triton is there, on CPUs our C++ kernel
where it can be had, else torch alone. ``ops`` and ``torch`` name these for any device, for tests
and benchmarks.
"""


class _Place(NamedTuple):
    """The rank and device whose storage is made, one kind of target at a time."""

    spec: LoraSpec
    rank: int
    world_size: int
    like: torch.Tensor
    """An empty tensor of the slots' dtype and device."""
    tiles: bool
    kernels: CpuKernels | None

    def linears(self) -> dict[str, TargetWeights]:
        made: dict[str, TargetWeights] = {}
        for target in self.spec.targets:
            if target.parallel.is_linear:
                (_, _, columns), _ = slot_shapes(self.spec, target, self.rank, self.world_size)
                parts = target.out_ranges(self.rank, self.world_size)
                sizes = [len(part) for part in parts]
                made[target.name] = TargetWeights(
                    self.spec, target, sizes, columns, self.like, self.kernels, self.tiles
                )
        return made

    def embeddings(self) -> dict[str, EmbeddingWeights]:
        targets = self._of(LoraParallel.VOCAB_IN)
        return {t.name: EmbeddingWeights(self.spec, t, *self._vocab) for t in targets}

    def heads(self) -> dict[str, HeadWeights]:
        targets = self._of(LoraParallel.VOCAB_OUT)
        return {t.name: HeadWeights(self.spec, t, *self._vocab) for t in targets}

    def norms(self) -> dict[str, NormWeights]:
        return {t.name: NormWeights(self.spec, t, self.like) for t in self._of(LoraParallel.NORM)}

    def _of(self, parallel: LoraParallel) -> list[LoraTarget]:
        return [target for target in self.spec.targets if target.parallel is parallel]

    @property
    def _vocab(self) -> tuple[int, int, torch.Tensor, bool]:
        return self.rank, self.world_size, self.like, self.tiles


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
        like = torch.empty(0, dtype=dtype, device=device)
        place = _Place(spec, rank, world_size, like, tiles, kernels)
        self._embeddings, self._heads = place.embeddings(), place.heads()
        self._norms, self._targets = place.norms(), place.linears()
        self._experts = {
            name: ExpertWeights(weights, kernels)
            for name, weights in self._targets.items()
            if weights.routed
        }
        self._biased: set[int] = set()
        """Slots with a bias on some linear."""
        self._vocab: set[int] = set()
        """Slots that change the embedding or the head."""
        self._normed: set[int] = set()
        """Slots that replace some norm's weight."""
        self._routed: set[int] = set()
        """Slots that change some expert."""
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
        groupings = {weights.grouping for weights in self._targets.values()}
        self._groupings = sorted(groupings - {RowGrouping.TOKENS}, key=repr)

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
                changes_vocab = self._write(slot, adapter, queues)
            (self._vocab.add if changes_vocab else self._vocab.discard)(slot)
            biased = any(name in self._targets for name in adapter.bias)
            (self._biased.add if biased else self._biased.discard)(slot)
            routed = any(name in adapter.a for name in self._experts)
            (self._routed.add if routed else self._routed.discard)(slot)
            (self._normed.add if adapter.norms else self._normed.discard)(slot)

    def _write(self, slot: int, adapter: LoadedAdapter, queues: DeviceQueues) -> bool:
        """Queue every copy into the slot; whether the adapter changes the embedding or the head."""
        for name, weights in self._targets.items():
            a, b, bias = (part.get(name) for part in (adapter.a, adapter.b, adapter.bias))
            weights.write(slot, adapter.lora_rank, a, b, bias, queues)
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
        """Tables for a graph over steps of up to ``num_rows`` rows.

        None where no graph can hold deltas of these targets.
        """
        if self._groupings:
            return None
        return self._planner.buffer(num_rows, self._num_slots)

    def captured_plan(self, tables: TileBuffer, num_rows: int) -> DeltaPlan:
        """The plan to capture a graph over ``num_rows`` rows with: what stands in the tables."""
        return DeltaPlan(tiled=tables.any_rows, num_rows=num_rows)

    def can_capture(self, slots: Sequence[int]) -> bool:
        """Tell whether a graph launches all that the adapters in these slots change."""
        return all(
            changed.isdisjoint(slots)
            for changed in (self._biased, self._vocab, self._normed, self._routed)
        )

    @contextmanager
    def filled(self, seed: int) -> Iterator[None]:
        """Keep random weights in every slot of every linear meanwhile, and zeros afterwards.

        This is for a forward that is to be compared with another. No adapter is in any slot.
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

        ``sampled`` are the slots of the rows that the head sees, in its order; ``tables`` is where
        a graph reads the layout. What this thread launches from here on comes behind the copies
        into those slots.
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
