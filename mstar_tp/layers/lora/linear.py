"""The parallel linears' LoRA twins.

They have the same weights, and add the step's adapter deltas before any collective.

Binding swaps a module's class (``module.__class__ = twin``) and sets ``lora_delta``; a module that
is not bound keeps its class and its forward.
"""

from __future__ import annotations

import torch
from torch import nn

from mstar_tp.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from mstar_tp.lora.device.deltas import LoraLayerDelta


class WithLoraDelta(ParallelLinear):
    """``local`` with the delta: [T, I] -> [T, O], this rank's part, no collective."""

    lora_delta: LoraLayerDelta

    def local(self, x_TI: torch.Tensor) -> torch.Tensor:
        return self.lora_delta.linear(self.loaded_weight(), self.bias, x_TI)


class ColumnParallelLinearWithLora(WithLoraDelta, ColumnParallelLinear):
    """B is split as the base weight's rows are."""


class MergedColumnParallelLinearWithLora(WithLoraDelta, MergedColumnParallelLinear):
    """Each slice has an A and a B of its own."""


class QKVParallelLinearWithLora(WithLoraDelta, QKVParallelLinear):
    """Replicated key/value heads copy B's rows."""


class RowParallelLinearWithLora(WithLoraDelta, RowParallelLinear):
    """A linear whose A is split as the base weight's columns are.

    The delta is a partial sum that the base's all-reduce completes.
    """


TWINS: dict[type[ParallelLinear], type[ParallelLinear]] = {
    ColumnParallelLinear: ColumnParallelLinearWithLora,
    MergedColumnParallelLinear: MergedColumnParallelLinearWithLora,
    QKVParallelLinear: QKVParallelLinearWithLora,
    RowParallelLinear: RowParallelLinearWithLora,
}
"""A parallel linear's class -> its twin."""


def is_bound(module: nn.Module) -> bool:
    """Tell whether adapters change the module.

    Then only its forward computes what it stands for, and whoever would read its weight (a fused
    helper) calls the module instead.
    """
    return hasattr(module, "lora_delta")
