"""The calls of bound expert linears, which add the current step's deltas. Step thread."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mstar_tp.common.errors import LockstepError
from mstar_tp.lora.device.deltas import DeltaSource
from mstar_tp.lora.device.expert_ops import GroupedPairs, TiledPairs, tiled_pairs
from mstar_tp.lora.device.expert_weights import AdapterPairs, ExpertWeights, adapter_pairs


@dataclass(frozen=True, slots=True)
class StepPairs:
    """One layer's adapter rows; None: no row of the step has an adapter for experts."""

    of: AdapterPairs | TiledPairs | None
    biased: bool = False
    """True where one of their adapters has a bias on some linear."""


class LoraExpertDelta:
    """Adds the current step's deltas of one linear of all experts of one layer."""

    def __init__(self, source: DeltaSource, weights: ExpertWeights) -> None:
        self._source = source
        self._weights = weights

    def pairs(
        self,
        experts_TK: torch.Tensor,
        places_TK: torch.Tensor | None,
        grouped: GroupedPairs | None = None,
    ) -> StepPairs:
        """The step's adapter rows among the layer's rows.

        They follow from each token's experts and its rows among the layer's, or from the layer's
        pairs by expert.

        Raises:
            LockstepError: no step is planned, another thread planned it, or it plans another number
                of tokens.
        """
        plan = self._source.current_plan()
        slots_T = plan.routed
        if slots_T is None:
            return StepPairs(None)
        if len(slots_T) != len(experts_TK):
            raise LockstepError(
                f"experts are called with {len(experts_TK)} tokens, but the step plans "
                f"{len(slots_T)}: its adapters would be added to other tokens"
            )
        if grouped is not None:
            tiled = tiled_pairs(slots_T, experts_TK.shape[1], grouped, self._weights.num_slots)
            return StepPairs(tiled, bool(plan.biased))
        assert places_TK is not None, "pairs that are not grouped have places"
        pairs = adapter_pairs(slots_T, experts_TK, places_TK, self._weights.num_slots)
        return StepPairs(pairs, bool(plan.biased))

    def __call__(self, y_RO: torch.Tensor, x_RI: torch.Tensor, pairs: StepPairs) -> torch.Tensor:
        """``y += delta(x)`` in place, on the pairs' rows alone."""
        if pairs.of is not None:
            self._weights.add(y_RO, x_RI, pairs.of)
            if pairs.biased:
                self._weights.add_bias(y_RO, pairs.of)
        return y_RO
