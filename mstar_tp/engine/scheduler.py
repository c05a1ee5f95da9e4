"""What the next step runs: the leader's decision, made on its main thread between two steps.

Decoding rows take one token each, then running prompts continue in chunks, then waiting requests
join, all inside one
token budget. Running rows never lose a step to a waiting one; when KV pages run out the youngest
running row gives its
pages back and computes them again later.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from mstar_tp.engine.admission import AdmissionQueue
from mstar_tp.engine.requests import RequestTable
from mstar_tp.engine.resources.base import Resource
from mstar_tp.engine.resources.kv.pool import KvPool


@dataclass(slots=True)
class Plan:
    """Rows of the next step, decode rows first; what must happen before it; requests that can never
    run.
    """

    rows: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    failed: list[tuple[int, str]] = field(default_factory=list)


class Scheduler:
    """Main thread of the leader, called only while no step is in flight."""

    def __init__(
        self,
        requests: RequestTable,
        kv: KvPool,
        others: tuple[Resource, ...],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._requests = requests
        self._kv = kv
        # Scarce resources first: a head that lacks a slot must not show as lacking pages.
        self._resources: tuple[Resource, ...] = (*others, kv)
        self._queue = AdmissionQueue(self._resources)
        self._running: list[int] = []
        self._joined: list[int] = []
        self._max_num_seqs = max_num_seqs
        self._max_tokens = max_num_batched_tokens
        self.preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def enqueue(self, rid: int) -> None:
        """The request may run as soon as its resources fit (its adapter's copies are in)."""
        self._queue.push(rid)

    def remove(self, rid: int) -> None:
        """The request left; its reservations end with its resources' own removal."""
        self._queue.discard(rid)
        if rid in self._running:
            self._running.remove(rid)
        for resource in self._resources:
            resource.unreserve(rid)

    def void_step(self) -> None:
        """The last admit was refused on every rank: the rows that joined with it wait again."""
        for rid in self._joined:
            if rid in self._running:
                self._running.remove(rid)
                self._wait_again(rid)
        self._joined = []

    def plan(self) -> Plan:
        """Choose the next step. Reserves for rows that join and gives up the pages of rows it
        preempts.
        """
        plan = Plan()
        decodes, prefills = self._grow_running(plan)
        plan.rows = [(rid, 1) for rid in decodes]
        budget = self._give_chunks(plan, prefills, self._max_tokens - len(decodes))
        self._joined = []
        if budget > 0:
            self._join_waiting(plan, budget)
        return plan

    def _give_chunks(self, plan: Plan, rids: list[int], budget: int) -> int:
        """Add prompt chunks to the step while tokens are left; how many are."""
        for rid in rids:
            count = min(self._requests[rid].pending, budget)
            if count:
                plan.rows.append((rid, count))
                budget -= count
        return budget

    def _join_waiting(self, plan: Plan, budget: int) -> None:
        """Let waiting requests join the step. One that gets no token in it goes on waiting and
        holds nothing: a claim that no admit follows would not keep its adapter's copy.
        """
        admitted = self._queue.admit(self._max_num_seqs - len(self._running))
        plan.failed = admitted.failed
        for rid in admitted.rows:
            if budget > 0:
                budget = self._give_chunks(plan, [rid], budget)
                insort(self._running, rid)
                self._joined.append(rid)
            else:
                self._wait_again(rid)

    def _wait_again(self, rid: int) -> None:
        for resource in self._resources:
            resource.unreserve(rid)
        self._queue.push(rid)

    def _grow_running(self, plan: Plan) -> tuple[list[int], list[int]]:
        """Split the running rows into decoding and prefilling, preempting while the decoding ones
        lack pages.
        """
        decodes: list[int] = []
        prefills: list[int] = []
        for rid in list(self._running):
            request = self._requests[rid]
            if rid in plan.preempted:
                continue
            if request.pending > 1:
                prefills.append(rid)
                continue
            while not self._kv.try_reserve_growth(rid, len(request.tokens)):
                victim = self._preempt_youngest(plan)
                if victim == rid:
                    break
            else:
                decodes.append(rid)
        return decodes, [rid for rid in prefills if rid not in plan.preempted]

    def _preempt_youngest(self, plan: Plan) -> int:
        """Take the pages of the youngest running row, which waits again at its arrival place.

        Decoding rows are visited in arrival order, so the youngest has not been given a place in
        this step yet, or is
        the very row that lacks pages; a prefilling one may have, and is taken out again by the
        caller.
        """
        victim = self._running.pop()
        self._kv.remove_request(victim)
        self._requests[victim].computed = 0
        # A row that was never admitted gives its claims back too; a seated one keeps its slot.
        self._wait_again(victim)
        plan.preempted.append(victim)
        self.preemptions += 1
        return victim
