"""What a bound module calls: the current step's deltas of one layer of one target.

Step thread. A delta touches the rows of adapters only: base rows stay bit-equal to the same step
without adapters, and a step without adapter rows does no work at all.
"""

from __future__ import annotations

from typing import Protocol

import torch

from mstar_tp.lora.delta_plan import DeltaPlan
from mstar_tp.lora.slot_weights import LayerWeights


class DeltaSource(Protocol):
    """What a delta asks which step is current: the pool."""

    def current_plan(self) -> DeltaPlan:
        """The plan of the step this thread runs.

        Raises:
            LockstepError: no step is planned, or another thread planned it.
        """
        ...


class LoraLayerDelta:
    """Adds the current step's deltas of one layer of one target."""

    def __init__(self, source: DeltaSource, weights: LayerWeights) -> None:
        self._source = source
        self._weights = weights

    def __call__(self, y_TO: torch.Tensor, x_TI: torch.Tensor) -> torch.Tensor:
        """``y += delta(x)`` before anything reads ``y``: x [T, I], y [T, O] in the slots' dtype.
        ``y`` is untouched when no row of the step has an adapter.

        Raises:
            LockstepError: no step is planned, or another thread planned it.
        """
        plan = self._source.current_plan()
        return self._weights.add(y_TO, x_TI, plan) if plan.has_work else y_TO
