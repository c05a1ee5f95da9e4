"""The expert linears' twin, which adds the deltas of all experts of a layer.

It adds them between GEMM and activation, or before the sum. Bound as the linears are.
"""

from __future__ import annotations

import torch

from mstar_tp.layers.moe import ExpertLinear, ExpertRows
from mstar_tp.lora.device.expert_deltas import LoraExpertDelta


class ExpertLinearWithLora(ExpertLinear):
    """Every expert of a layer is bound, to one delta for all of them."""

    lora_delta: LoraExpertDelta

    def adapted(self, y_RO: torch.Tensor, x_RI: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
        """``y`` plus the step's deltas, each row by its own slot and expert; in place."""
        pairs = rows.pairs
        if pairs is None:
            # The layer's other linear has the same rows.
            pairs = rows.pairs = self.lora_delta.pairs(
                rows.routing.experts, rows.places, rows.grouped
            )
        return self.lora_delta(y_RO, x_RI, pairs)
