"""A step's way through a rank's tables: which rows run, what they take, what they leave. No torch.

Step thread. Every rank takes the same rows the same way, in a replay too; the runner puts the
forward in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mstar_tp.engine.resources.base import StepBatch
from mstar_tp.engine.resources.kv.pool import KvPool
from mstar_tp.engine.resources.lora.pools import LoraPools
from mstar_tp.engine.scheduling.requests import RequestTable
from mstar_tp.engine.step.refusals import Refusals
from mstar_tp.wire.schedule import Step


class Admitted(NamedTuple):
    """The rows that go on, those that failed on every rank and why, or why all is void."""

    step: StepBatch
    failed: dict[int, str]
    refused: str | None


class StepTables:
    """Requests, pages and slots, as a step changes them."""

    def __init__(
        self,
        requests: RequestTable,
        kv: KvPool,
        lora: LoraPools | None,
        *,
        deferred: bool = False,
    ) -> None:
        """``deferred``: a step that was planned while the one before it ran takes no notice of that
        one's tokens, on any rank, whether they are known there already or not.
        """
        self._deferred = deferred
        self._requests = requests
        self._kv = kv
        self._lora = lora
        self._refusals = Refusals()

    def admit(self, entry: Step) -> Admitted:
        """Build the step and take what its rows need, unless it is void.

        Collective when an adapter is in no slot.
        """
        cause = self._refusals.void(entry)
        if cause is not None:
            return Admitted(StepBatch(tp_seq=entry.tp_seq, rows=()), {}, cause)
        step = self._requests.build_step(
            entry.tp_seq, entry.rows, self._deferred_after(entry), entry.cached
        )
        admitted = self._take(step)
        if admitted.refused is not None:
            self._refusals.refuse(entry)
        return admitted

    def settle(self, entry: Step) -> None:
        """The step's admit and plan are over."""
        self._requests.settle(self._deferred_after(entry))

    def _deferred_after(self, entry: Step) -> int | None:
        return entry.planned_after if self._deferred else None

    def launch(self, step: StepBatch) -> None:
        """The step runs, and ``commit_launched`` comes later: nothing of its plan is current."""
        self._requests.launch(step)
        self.clear(step)

    def commit_launched(self, step: StepBatch, sampled: Sequence[int]) -> dict[int, str]:
        """As ``commit``, of a step that was launched: the next one's plan may be current."""
        return self._requests.commit(step, sampled)

    def clear(self, step: StepBatch) -> None:
        """The step is over: nothing of its plan is current any more."""
        self._kv.commit(step)
        if self._lora is not None:
            self._lora.commit(step)

    def commit(self, step: StepBatch, sampled: Sequence[int]) -> dict[int, str]:
        """The step ran; ``sampled`` holds one token for each row that samples, in row order.

        The rows that it ended, each with why.
        """
        ended = self._requests.commit(step, sampled)
        self.clear(step)
        return ended

    def _take(self, step: StepBatch) -> Admitted:
        failed: dict[int, str] = {}
        survivors = step
        if self._lora is not None:
            outcome = self._lora.admit(step)
            if outcome.refused is not None:
                return Admitted(step, failed, outcome.refused)
            failed = outcome.failed
            for rid, cause in failed.items():
                self._requests[rid].dead = cause
            if failed:
                rows = tuple(row for row in step.rows if row.rid not in failed)
                survivors = StepBatch(tp_seq=step.tp_seq, rows=rows)
        outcome = self._kv.admit(survivors)
        if outcome.refused is not None:
            self._kv.rollback_admit(survivors)
            if self._lora is not None:
                self._lora.rollback_admit(step)
        return Admitted(survivors, failed, outcome.refused)
