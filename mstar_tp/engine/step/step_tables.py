"""The tables of a rank as a step changes them: which rows run, what they take, what they leave.

Step thread. Every rank takes the same rows the same way, in a replay too; the runner puts the
forward in between. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from mstar_tp.engine.resources.base import Admitted, Resource, StepBatch, admit_in_turn
from mstar_tp.engine.scheduling.requests import RequestTable
from mstar_tp.engine.step.refusals import Refusals
from mstar_tp.wire.schedule import Step


class StepTables:
    """The requests and the resources of a rank, through which each step goes once.

    ``resources`` are admitted in their order. With ``deferred``, a step that was planned while the
    one before it ran takes no notice of that one's tokens, on any rank, whether they are known
    there already or not.
    """

    def __init__(
        self, requests: RequestTable, resources: Sequence[Resource], *, deferred: bool = False
    ) -> None:
        self._deferred = deferred
        self._requests = requests
        self._resources = tuple(resources)
        self._refusals = Refusals()

    def admit(self, entry: Step) -> Admitted:
        """Build the step and take what its rows need, unless it is void.

        Collective when an adapter is in no slot.
        """
        why_void = self._refusals.void(entry)
        if why_void is not None:
            return Admitted(StepBatch(tp_seq=entry.tp_seq, rows=()), {}, why_void)
        step = self._requests.build_step(
            entry.tp_seq, entry.rows, self._deferred_after(entry), entry.cached
        )
        admitted = admit_in_turn(self._resources, step)
        for rid, cause in admitted.failed.items():
            self._requests[rid].dead = cause
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
        """Commit a step that was launched; the next one's plan may be current."""
        return self._requests.commit(step, sampled)

    def clear(self, step: StepBatch) -> None:
        """The step is over: nothing of its plan is current any more."""
        for resource in self._resources:
            resource.commit(step)

    def commit(self, step: StepBatch, sampled: Sequence[int]) -> dict[int, str]:
        """Commit a step that ran: the rows that it ended, each with why.

        ``sampled`` holds one token for each row that samples, in row order.
        """
        ended = self._requests.commit(step, sampled)
        self.clear(step)
        return ended
