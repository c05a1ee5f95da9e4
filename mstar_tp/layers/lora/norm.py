"""The norm's twin: adapters replace its weight for their rows. Bound as the linears are."""

from __future__ import annotations

import torch

from mstar_tp.layers.norm import RMSNorm
from mstar_tp.lora.device.deltas import LoraNormDelta


class RMSNormWithLora(RMSNorm):
    """Base rows are normed as without adapters."""

    lora_delta: LoraNormDelta

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lora_delta(super().forward(x), x)

    def forward_add(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, residual = super().forward_add(x, residual)
        return self.lora_delta(y, residual), residual
