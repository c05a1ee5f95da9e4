"""The deltas of the step that runs now: laid out by its plan, gone with its end.

Step thread. A delta that finds no plan, or another thread's, refuses: one that was skipped, or
added to other rows, would be a wrong answer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from mstar_tp.common.errors import LockstepError
from mstar_tp.engine.resources.lora.context import PoolWeights

if TYPE_CHECKING:  # what needs torch is imported where it is used: a replay has no device
    from mstar_tp.lora.device.delta_plan import DeltaPlan
    from mstar_tp.lora.device.deltas import LoraLayerDelta
    from mstar_tp.lora.device.tiles import TileBuffer


class CurrentDeltas:
    """Holds one plan at most, with the thread that made it."""

    def __init__(self, rank: int, weights: PoolWeights) -> None:
        self._rank = rank
        self._weights = weights
        self._plan: DeltaPlan | None = None
        self._planner = 0

    def begin(
        self,
        slots: Sequence[int],
        counts: Sequence[int],
        sampled: Sequence[int],
        tables: TileBuffer | None = None,
    ) -> None:
        """Lay a step out by its rows' slots and numbers of tokens, and its head rows' slots.

        The plan is current until ``end``. ``tables`` is where a graph reads it.
        """
        self._plan = self._weights.plan(slots, counts, sampled, tables)
        self._planner = threading.get_ident()

    def end(self) -> None:
        """Nothing is current any more: the step has been launched, or never will be."""
        if self._plan is not None:
            self._weights.launched()
        self._plan = None

    def base_only(self) -> AbstractContextManager[None]:
        """A forward outside any step on this thread: deltas add nothing.

        The plan that stood before comes back.
        """
        from mstar_tp.lora.device.delta_plan import DeltaPlan

        return self.standing(DeltaPlan())

    @contextmanager
    def standing(self, plan: DeltaPlan) -> Iterator[None]:
        """A forward outside any step on this thread, under ``plan``.

        The plan that stood before comes back.
        """
        before = self._plan, self._planner
        self._plan, self._planner = plan, threading.get_ident()
        try:
            yield
        finally:
            self._plan, self._planner = before

    def layer_delta(self, target: str, layer: int) -> LoraLayerDelta:
        """The call of a bound module, which adds this step's deltas of one layer of one target."""
        from mstar_tp.lora.device.deltas import LoraLayerDelta

        return LoraLayerDelta(self, self._weights.layer(target, layer))

    def current_plan(self) -> DeltaPlan:
        """The plan of the step this thread runs.

        Raises:
            LockstepError: no step is planned, or another thread planned it.
        """
        if self._plan is None:
            raise LockstepError(
                f"rank {self._rank}: an adapter delta was called while no step is planned: call it "
                "between a step's plan and its commit, or under base_only()"
            )
        if self._planner != threading.get_ident():
            raise LockstepError(
                f"rank {self._rank}: an adapter delta was called on thread "
                f"{threading.current_thread().name}, which did not plan the current step"
            )
        return self._plan
