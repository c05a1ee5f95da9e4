"""Norm weights that adapters replace, in their slots. Step thread."""

from __future__ import annotations

import torch

from mstar_tp.lora.adapter import ReplacedNorms
from mstar_tp.lora.spec import LoraSpec, LoraTarget


class NormWeights:
    """One norm over its stack, all slots: weights [slots, layers, size]."""

    def __init__(self, spec: LoraSpec, target: LoraTarget, like: torch.Tensor) -> None:
        self._weights = like.new_zeros(spec.slots, target.num_layers, target.in_features)
        self._replaced: list[frozenset[int]] = [frozenset()] * spec.slots
        """The layers that each slot replaces; nothing reads the others."""

    def write(self, slot: int, norms: ReplacedNorms | None) -> None:
        """Make the slot replace these and no others."""
        if norms is not None:
            self._weights[slot - 1].copy_(norms.weight, non_blocking=True)
        self._replaced[slot - 1] = frozenset() if norms is None else frozenset(norms.layers)

    def get(self, slot: int, layer: int) -> torch.Tensor | None:
        """The slot's weight [size] of one layer; None where the base's stands."""
        return self._weights[slot - 1, layer] if layer in self._replaced[slot - 1] else None
