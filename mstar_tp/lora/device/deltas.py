"""The calls of bound modules, which add the current step's deltas of one layer of one target.

Step thread. A delta touches the rows of adapters only: base rows stay bit-equal to the same step
without adapters, and a step without adapter rows does no work at all.
"""

from __future__ import annotations

from typing import Protocol

import torch

from mstar_tp.common.errors import LockstepError
from mstar_tp.kernels.linear_weight import LinearWeight
from mstar_tp.lora.device.delta_plan import DeltaPlan, put_rows, select_rows
from mstar_tp.lora.device.norm_weights import Norm, NormWeights
from mstar_tp.lora.device.target_weights import LayerWeights
from mstar_tp.lora.device.tiles import TiledRows
from mstar_tp.lora.device.vocab_weights import EmbeddingWeights, HeadWeights
from mstar_tp.lora.stage_rows import RowGrouping


class DeltaSource(Protocol):
    """The holder of the current step's plan, which a delta asks directly."""

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
        self.weights = weights
        self._sees_tokens = weights.grouping is RowGrouping.TOKENS

    def __call__(self, y_TO: torch.Tensor, x_TI: torch.Tensor) -> torch.Tensor:
        """``y += delta(x)`` before anything reads ``y``: x [T, I], y [T, O] in the slots' dtype.
        ``y`` is untouched when no row of the step has an adapter.

        Raises:
            LockstepError: no step is planned, another thread planned it, or ``x`` has other rows
                than the plan says.
        """
        plan = self._source.current_plan()
        if not self._sees_tokens:
            plan = plan.of(self.weights.grouping)
        if not plan.has_work:
            return y_TO
        if len(x_TI) != plan.num_rows:
            raise _other_rows(x_TI, plan)
        return self.weights.add(y_TO, x_TI, plan)

    def linear(
        self, weight: LinearWeight, bias_O: torch.Tensor | None, x_TI: torch.Tensor
    ) -> torch.Tensor:
        """The base's linear with the current step's deltas: x [T, I] -> [T, O].

        Raises:
            LockstepError: as a call.
        """
        plan = self._source.current_plan()
        if not self._sees_tokens:
            plan = plan.of(self.weights.grouping)
        if not plan.has_work:
            return weight(x_TI, bias_O)
        if len(x_TI) != plan.num_rows:
            raise _other_rows(x_TI, plan)
        return self.weights.linear(weight, bias_O, x_TI, plan)

    @property
    def is_idle(self) -> bool:
        """True where no row that the module sees has an adapter, so that a call would do nothing.

        Raises:
            LockstepError: no step is planned, or another thread planned it.
        """
        return not self._source.current_plan().of(self.weights.grouping).has_work


def _other_rows(x_TI: torch.Tensor, plan: DeltaPlan) -> LockstepError:
    return LockstepError(
        f"a linear is called with {len(x_TI)} rows, but the step plans {plan.num_rows} for "
        "it: its adapters would be added to other rows"
    )


class LoraEmbeddingDelta:
    """Changes the step's embeddings."""

    def __init__(self, source: DeltaSource, weights: EmbeddingWeights) -> None:
        self._source = source
        self._weights = weights

    def __call__(self, y_TD: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
        """Add the deltas of the embeddings in place: ``y += delta(ids)``.

        ``ids`` is [T], and ``y`` [T, D] is this rank's part of their embeddings before the ranks'
        parts are summed.

        Raises:
            LockstepError: no step is planned, or another thread planned it.
        """
        vocab = self._source.current_plan().vocab
        if vocab is not None:
            self._weights.add(y_TD, ids_T, vocab.tokens)
        return y_TD


class LoraNormDelta:
    """Norms the rows of adapters that replace one norm's weight with theirs."""

    def __init__(
        self,
        source: DeltaSource,
        weights: NormWeights,
        layer: int,
        norm: Norm,
    ) -> None:
        self._source = source
        self._weights = weights
        self._layer = layer
        self._norm = norm

    def __call__(self, y_TD: torch.Tensor, x_TD: torch.Tensor) -> torch.Tensor:
        """``y``, the base's norm of ``x`` [T, ..., D]; in place where an adapter's weight applies.

        Raises:
            LockstepError: no step is planned, or another thread planned it.
        """
        normed = self._source.current_plan().normed
        if isinstance(normed, TiledRows):
            self._weights.add_tiled(y_TD, x_TD, normed, self._layer, self._norm)
            return y_TD
        for rows, slot in normed:
            weight = self._weights.get(slot, self._layer)
            if weight is not None:
                y_RD = select_rows(y_TD, rows)
                y_RD.copy_(self._norm.forward_with(select_rows(x_TD, rows), weight))
                put_rows(y_TD, rows, y_RD)
        return y_TD


class LoraHeadDelta:
    """Changes the logits of the step's sampled rows."""

    def __init__(self, source: DeltaSource, weights: HeadWeights) -> None:
        self._source = source
        self._weights = weights

    def __call__(self, y_NP: torch.Tensor, x_ND: torch.Tensor) -> torch.Tensor:
        """Add the deltas of the logits in place: ``y += delta(x)``.

        ``x`` [N, D] are the hidden states of the rows that sample, in the step's order, and ``y``
        [N, P] is this rank's part of their logits.

        Raises:
            LockstepError: no step is planned, another thread planned it, or ``x`` has other rows
                than the plan says.
        """
        vocab = self._source.current_plan().vocab
        if vocab is None:
            return y_NP
        if len(x_ND) != vocab.num_samples:
            raise LockstepError(
                f"the head is called with {len(x_ND)} rows, but the step samples "
                f"{vocab.num_samples}: its adapters would be added to other rows"
            )
        self._weights.add(y_NP, x_ND, vocab.samples)
        return y_NP
