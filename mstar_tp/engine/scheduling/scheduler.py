"""The rows of the next step: the leader's decision, made on its main thread.

Decoding rows take one token each, then running prompts continue in chunks, then waiting requests
join, all inside one
token budget. Running rows never lose a step to a waiting one; when KV pages run out the last of the
running rows, the youngest of those of the highest priority number, gives its pages back. What they
hold moves to host memory where it has room; else it is computed again.

A step may be planned while the one before it runs, once that one's admit has settled. The plan goes
by what requests will have when it has run (``Request.planned`` and ``expected``): each row that
samples is expected to go on, and a row at its last token by count is left out.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from mstar_tp.engine.resources.base import Resource
from mstar_tp.engine.resources.kv.pool import KvPool
from mstar_tp.engine.scheduling.admission import AdmissionQueue, Place
from mstar_tp.engine.scheduling.fair_queue import FairQueue
from mstar_tp.engine.scheduling.requests import RequestTable
from mstar_tp.wire.adapter_limits import AdapterShare


@dataclass(slots=True)
class Plan:
    """The next step, decode rows first.

    With it stand what must happen before it, and requests that can never run.

    ``joined`` are the rows that take what they reserved with this step, ``cached`` those of them
    that begin behind so many tokens, whose pages they lease. ``offloaded``: those of the preempted
    whose KV is kept in host memory. ``blocked``: pages ran out,
    and no row may be preempted now; nothing was planned.
    """

    rows: list[tuple[int, int]] = field(default_factory=list)
    cached: list[tuple[int, int]] = field(default_factory=list)
    joined: list[int] = field(default_factory=list)
    blocked: bool = False
    preempted: list[int] = field(default_factory=list)
    offloaded: list[int] = field(default_factory=list)
    failed: list[tuple[int, str]] = field(default_factory=list)


class Scheduler:
    """Main thread of the leader, called only while every step sent has settled its admit."""

    def __init__(
        self,
        requests: RequestTable,
        kv: KvPool,
        others: tuple[Resource, ...],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        fair_queue: FairQueue | None = None,
    ) -> None:
        """``fair_queue``: what adapters may take; without it they take what they ask for."""
        self._requests = requests
        self._kv = kv
        # Scarce resources first: a head that lacks a slot must not show as lacking pages.
        self._resources: tuple[Resource, ...] = (*others, kv)
        self._fair_queue = fair_queue or FairQueue(requests)
        self._queue = AdmissionQueue(self._resources, self._place, self._fair_queue)
        self._running: list[int] = []
        self._max_num_seqs = max_num_seqs
        self._max_tokens = max_num_batched_tokens
        self.preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def flow_shares(self) -> tuple[AdapterShare, ...]:
        """Return what adapters with requests run and were given."""
        return self._fair_queue.report()

    def _place(self, rid: int) -> Place:
        return self._requests[rid].place

    def enqueue(self, rid: int) -> None:
        """The request may run as soon as its resources fit (its adapter's copies are in)."""
        self._queue.push(rid)

    def remove(self, rid: int) -> None:
        """The request left; its reservations end with its resources' own removal."""
        self._queue.discard(rid)
        self._fair_queue.left(rid)
        if rid in self._running:
            self._running.remove(rid)
        for resource in self._resources:
            resource.unreserve(rid)

    def void_step(self, joined: Sequence[int]) -> None:
        """Take back a step whose admit was refused on every rank, with no step in flight.

        The rows that ``joined`` with it wait again, and what running rows have is as before it.
        """
        for rid in self._running:
            self._requests[rid].replan()
        for rid in joined:
            if rid in self._running:
                self._running.remove(rid)
                self._wait_again(rid)

    def plan(self, *, may_preempt: bool = True) -> Plan:
        """Choose the next step.

        Reserves for rows that join and gives up the pages of rows it preempts, which it may only
        while no step is in flight.
        """
        plan = Plan()
        decodes, prefills = self._grow_running(plan, may_preempt)
        if plan.blocked:
            return plan
        plan.rows = [(rid, 1) for rid in decodes]
        budget = self._give_chunks(plan, prefills, self._max_tokens - len(decodes))
        if budget > 0:
            self._join_waiting(plan, budget)
        for rid, num_tokens in plan.rows:
            self._requests[rid].plan(num_tokens)
        return plan

    def _give_chunks(self, plan: Plan, rids: list[int], budget: int) -> int:
        """Add prompt chunks to the step while tokens are left; how many are."""
        for rid in rids:
            count = min(self._requests[rid].unplanned, budget)
            if count:
                plan.rows.append((rid, count))
                budget -= count
        return budget

    def _join_waiting(self, plan: Plan, budget: int) -> None:
        """Let waiting requests join the step.

        One that gets no token in it goes on waiting and holds nothing: a claim that no admit
        follows would not keep its adapter's copy.
        """
        ending = sum(self._requests[rid].will_end for rid in self._running)
        admitted = self._queue.admit(self._max_num_seqs - len(self._running) + ending)
        plan.failed = admitted.failed
        for rid in admitted.rows:
            if budget > 0:
                self._skip_cached(plan, rid)
                budget = self._give_chunks(plan, [rid], budget)
                insort(self._running, rid, key=self._place)
                plan.joined.append(rid)
                self._fair_queue.joined(rid)
            else:
                self._wait_again(rid)

    def _skip_cached(self, plan: Plan, rid: int) -> None:
        """Skip the tokens of a joining row that kept pages hold."""
        request, count = self._requests[rid], self._kv.cached_prefix(rid)
        if count:
            request.skip(count)
            plan.cached.append((rid, count))
        if request.cached is None:
            request.cached = count

    def _wait_again(self, rid: int) -> None:
        for resource in self._resources:
            resource.unreserve(rid)
        self._fair_queue.left(rid)
        self._queue.push(rid)

    def _grow_running(self, plan: Plan, may_preempt: bool) -> tuple[list[int], list[int]]:
        """Split the running rows into decoding and prefilling ones.

        Rows are preempted while the decoding ones lack pages. Pages of a row that turns out to have
        ended are counted and never taken.
        """
        decodes: list[int] = []
        prefills: list[int] = []
        for rid in list(self._running):
            request = self._requests[rid]
            if rid in plan.preempted or request.will_end:
                continue
            if request.unplanned > 1:
                prefills.append(rid)
                continue
            while not self._kv.try_reserve_growth(rid, request.expected):
                if not may_preempt:
                    plan.blocked = True
                    return [], []
                victim = self._preempt_last(plan)
                if victim == rid:
                    break
            else:
                decodes.append(rid)
        return decodes, [rid for rid in prefills if rid not in plan.preempted]

    def _preempt_last(self, plan: Plan) -> int:
        """Take the pages of the last running row, which waits again at its own place.

        Decoding rows are visited in order, so the last has not been given a place in this step yet,
        or is the very row that lacks pages; a prefilling one may have, and is taken out again by
        the caller.
        """
        victim = self._running.pop()
        request = self._requests[victim]
        offload = self._kv.can_offload(victim, request.computed)
        if offload:
            plan.offloaded.append(victim)
        self._kv.preempt(victim, request.computed, offload=offload)
        request.preempt(offload=offload)
        # A row that was never admitted gives its claims back too; one with a slot keeps its slot.
        self._wait_again(victim)
        plan.preempted.append(victim)
        self.preemptions += 1
        return victim
