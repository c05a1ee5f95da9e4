"""Adapter weights in their slots, and the deltas a step adds with them.

Step thread. A delta touches the rows of adapters only: base rows stay bit-equal to the same step without
adapters, and a step without adapter rows does no work at all.

Legend: T tokens of the step, R adapter rows among them, I input and O output features as this rank holds them,
S slices of the output, L slots, K max_rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from mstar_tp.lora.adapter import LoadedAdapter
from mstar_tp.lora.shards import slot_shapes
from mstar_tp.lora.spec import LoraSpec, LoraTarget


@dataclass(frozen=True, slots=True, eq=False)
class DeltaPlan:
    """One step, laid out for its deltas. ``rows`` is None for a step without adapter rows."""

    rows_R: torch.Tensor | None
    mask_RM: torch.Tensor | None
    """False where a row meets its own slot's columns; M = widest S * L * K"""

    @classmethod
    def base_only(cls) -> DeltaPlan:
        return cls(None, None)


class LayerWeights:
    """One layer of one target over all slots: A [L * S * K, I] by slot, B [O, L * K]."""

    def __init__(self, a_LMI: torch.Tensor, b_OLK: torch.Tensor, splits: Sequence[int]) -> None:
        self.a_LMI = a_LMI
        self.b_OLK = b_OLK
        self._splits = tuple(splits)

    def add(self, y_TO: torch.Tensor, x_TI: torch.Tensor, plan: DeltaPlan) -> torch.Tensor:
        """``y`` plus the delta of the step's adapter rows, in place."""
        if plan.rows_R is None:
            return y_TO
        assert plan.mask_RM is not None
        num_slots, _, rank = self.b_OLK.shape[1], 0, self.b_OLK.shape[2]
        num_slices = len(self._splits)
        x_RI = x_TI.index_select(0, plan.rows_R)
        h = x_RI @ self.a_LMI.flatten(0, 1).t()
        h = h.view(-1, num_slots, num_slices, rank).transpose(1, 2).reshape(len(h), -1)
        h.masked_fill_(plan.mask_RM[:, : h.shape[1]], 0)
        delta = []
        first = 0
        for index, size in enumerate(self._splits):
            part = h[:, index * num_slots * rank : (index + 1) * num_slots * rank]
            delta.append(part @ self.b_OLK[first : first + size].flatten(1).t())
            first += size
        return y_TO.index_add_(0, plan.rows_R, torch.cat(delta, dim=1))


class SlotWeights:
    """Every target's A and B in this rank's slots, zero until installed."""

    def __init__(
        self,
        spec: LoraSpec,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._spec = spec
        self._device = device
        self._widest = max(len(target.out_slices) for target in spec.targets)
        self._layers: dict[tuple[str, int], LayerWeights] = {}
        for target in spec.targets:
            for layer in range(target.num_layers):
                self._layers[target.name, layer] = self._make(target, rank, world_size, dtype)

    def layer(self, target: str, layer: int) -> LayerWeights:
        return self._layers[target, layer]

    def install(self, slot: int, adapter: LoadedAdapter) -> None:
        """Make ``slot`` hold ``adapter`` and nothing else: targets it lacks become zeros."""
        for (target, layer), weights in self._layers.items():
            a, b = weights.a_LMI[slot - 1], weights.b_OLK[:, slot - 1]
            if target in adapter.a:
                a.copy_(adapter.a[target][layer], non_blocking=True)
                b.copy_(adapter.b[target][layer], non_blocking=True)
            else:
                a.zero_()
                b.zero_()

    def plan(self, slots: Sequence[int], counts: Sequence[int]) -> DeltaPlan:
        """Lay out a step from each row's slot and number of tokens."""
        rows: list[int] = []
        owners: list[int] = []
        first = 0
        for slot, num_tokens in zip(slots, counts, strict=True):
            if slot:
                rows += range(first, first + num_tokens)
                owners += [slot - 1] * num_tokens
            first += num_tokens
        if not rows:
            return DeltaPlan.base_only()
        owner_R = torch.tensor(owners, device=self._device)
        columns = torch.arange(self._spec.slots, device=self._device)
        foreign = owner_R[:, None] != columns.repeat_interleave(self._spec.max_rank)
        return DeltaPlan(torch.tensor(rows, device=self._device), foreign.repeat(1, self._widest))

    def _make(
        self, target: LoraTarget, rank: int, world_size: int, dtype: torch.dtype
    ) -> LayerWeights:
        (_, m, columns), (_, rows, k) = slot_shapes(self._spec, target, rank, world_size)
        a = torch.zeros(self._spec.slots, m, columns, dtype=dtype, device=self._device)
        b = torch.zeros(rows, self._spec.slots, k, dtype=dtype, device=self._device)
        return LayerWeights(a, b, [len(part) for part in target.out_ranges(rank, world_size)])


class DeltaSource(Protocol):
    """What a delta asks which step is current: the pool."""

    def current_plan(self) -> DeltaPlan:
        """Raises LockstepError with no plan, or on a thread that did not plan."""
        ...


class LoraLayerDelta:
    """Adds the current step's deltas of one layer of one target."""

    def __init__(self, source: DeltaSource, weights: LayerWeights) -> None:
        self._source = source
        self._weights = weights

    def __call__(self, y_TO: torch.Tensor, x_TI: torch.Tensor) -> torch.Tensor:
        """``y += delta(x)`` before anything reads ``y``; [T, O]. ``y`` untouched when no row has an adapter.

        Raises:
            LockstepError: no step is planned, or another thread planned it.
        """
        return self._weights.add(y_TO, x_TI, self._source.current_plan())
