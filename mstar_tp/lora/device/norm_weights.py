"""Norm weights that adapters replace, in their slots. Step thread."""

from __future__ import annotations

from typing import Protocol

import torch

from mstar_tp.lora.device.device_copies import DeviceQueues
from mstar_tp.lora.device.tiles import TiledRows
from mstar_tp.lora.reading.loaded_adapter import ReplacedNorms
from mstar_tp.lora.spec import LoraSpec, LoraTarget


class Norm(Protocol):
    """The base's norm."""

    eps: float
    unit_offset: bool

    def forward_with(self, x: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
        """The norm as it would be with another weight."""
        ...


class NormWeights:
    """One norm over its stack, all slots: weights [slots, layers, size]."""

    def __init__(self, spec: LoraSpec, target: LoraTarget, like: torch.Tensor) -> None:
        self._weights = like.new_zeros(spec.slots, target.num_layers, target.in_features)
        self._replaced: list[frozenset[int]] = [frozenset()] * spec.slots
        """The layers that each slot replaces; nothing reads the others,"""
        self._replaced_LN = torch.zeros(
            (spec.slots, target.num_layers), dtype=torch.int32, device=like.device
        )
        """and the same as kernels read it."""

    def write(self, slot: int, norms: ReplacedNorms | None, queues: DeviceQueues) -> None:
        """Make the slot replace these and no others."""
        if norms is not None:
            queues.copy((self._weights[slot - 1], norms.weight))
        before = self._replaced[slot - 1]
        now = self._replaced[slot - 1] = frozenset() if norms is None else frozenset(norms.layers)
        for layer in sorted(before ^ now):
            queues.fill(self._replaced_LN[slot - 1, layer], int(layer in now))

    def get(self, slot: int, layer: int) -> torch.Tensor | None:
        """The slot's weight [size] of one layer; None where the base's stands."""
        return self._weights[slot - 1, layer] if layer in self._replaced[slot - 1] else None

    def add_tiled(
        self, y: torch.Tensor, x: torch.Tensor, rows: TiledRows, layer: int, norm: Norm
    ) -> None:
        """Norm ``x`` into ``y`` [T, ..., D] under the weight of each row's slot that has one."""
        torch.ops.mstar_lora.norm(
            y,
            x,
            self._weights[:, layer],
            self._replaced_LN[:, layer],
            rows.order_R,
            rows.tiles_N3,
            norm.eps,
            norm.unit_offset,
            rows.block_rows,
        )
