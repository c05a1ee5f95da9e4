"""The leader's one queue over every resource: who may start to run, by priority, turn and arrival.

A request is in the queue once its adapter's copies are in on every rank (R7), and its grammar, if
it has one, is ready. The head reserves
all it needs from every resource at once, or waits and holds nothing. A later row may pass only when
it asks for none of what those before it lack, so what the head lacks drains towards it. Plain data,
main thread, and only on the rank that decides.

Where adapters take turns or have a limit on rows, the requests of one wait in a line: only its
first is in the queue, and the next when that one has left it. One whose adapter runs as many rows
as it may is passed over: it keeps nobody waiting.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mstar_tp.engine.resources.base import Ask, AskFailed, Resource


@dataclass(slots=True)
class Admitted:
    """The decisions of one pass over the queue, in the queue's order."""

    rows: list[int] = field(default_factory=list)
    failed: list[tuple[int, str]] = field(default_factory=list)


class Flows(Protocol):
    """The order of waiting requests, and the adapters that may run one more row.

    ``FairQueue`` implements it.
    """

    def flow(self, rid: int) -> str | None:
        """Behind whose others the request waits; None where each waits for itself."""
        ...

    def was_head(self, rid: int) -> bool:
        """Return whether the request was the first of its flow before.

        Then it waits for itself now.
        """
        ...

    def may_join(self, rid: int) -> bool:
        """Return whether its adapter may have one more row now."""
        ...

    def advance_virtual_time(self, waiting: Sequence[int]) -> None:
        """Raise the virtual time, since a flow is about to begin.

        ``waiting``, in order: those that wait for themselves, and the first of each other flow.
        """
        ...

    def become_head(self, rid: int) -> None:
        """The request is the first of its line now; its place holds from here on."""
        ...

    def replace_head(self, rid: int, first: int) -> None:
        """``rid`` is the first of its line now, in the place of ``first``."""
        ...

    def take(self, rid: int) -> None:
        """The request leaves the queue to join a step."""
        ...


Place = tuple[int, int, int]
"""Priority, turn, arrival: what the queue is ordered by."""


class AdmissionQueue:
    """Arrival order is rid order: the conductor numbers requests as they arrive."""

    def __init__(
        self,
        resources: Sequence[Resource],
        place: Callable[[int], Place] = lambda rid: (0, 0, rid),
        flows: Flows | None = None,
    ) -> None:
        """``place``: what orders the waiting requests; arrival order unless given."""
        self._resources = tuple(resources)
        self._place = place
        self._flows = flows
        self._waiting: list[int] = []
        """In order: those that wait for themselves, and the first of each line."""
        self._flow_of: dict[int, str] = {}
        """First of a line -> that line; it has not joined before."""
        self._first: dict[str, int] = {}
        self._behind: dict[str, list[int]] = {}
        """Line -> those behind its first, in order."""
        self._flow_behind: dict[int, str] = {}
        self._in_flows: set[int] = set()
        """Waiting rows whose adapter has lines, those included that wait for themselves again."""
        self._held_back: set[int] = set()
        """Waiting rows whose adapter ran as many rows as it may when they were looked at."""
        self._tried: dict[int, int | None] = {}
        """Waiting rows that were tried since anything grew -> the resource each was the first to
        lack; None for one that those before it, or its copies, keep out."""
        self._marks = [resource.growth_mark() for resource in self._resources]

    def __len__(self) -> int:
        return len(self._waiting) + len(self._flow_behind)

    def push(self, rid: int) -> None:
        """Enter at the request's own place (a preempted row re-enters where it was)."""
        flow = None if self._flows is None else self._flows.flow(rid)
        if flow is None or self._flows is None:
            insort(self._waiting, rid, key=self._place)
            return
        if self._flows.was_head(rid):
            self._enter(rid)
            return
        first = self._first.get(flow)
        if first is None:
            self._flows.advance_virtual_time(self._waiting)
            self._become_head(rid, flow)
        elif self._order_in_flow(rid) < self._order_in_flow(first):
            self._leave(first)
            self._flows.replace_head(rid, first)
            self._first[flow], self._flow_of[rid] = rid, flow
            self._enter(rid)
            self._wait_behind(first, flow)
        else:
            self._wait_behind(rid, flow)

    def discard(self, rid: int) -> None:
        """Leave the queue; those behind it may be next."""
        flow = self._flow_behind.get(rid)
        if flow is not None:
            self._step_out(rid, flow)
        elif rid in self._waiting:
            self._next_in_flow(self._leave(rid))
            self._tried.clear()

    def admit(self, max_rows: int) -> Admitted:
        """Reserve for up to ``max_rows`` waiting requests and take them out of the queue.

        A row is tried when it enters, and again only when some resource grew, a row before it
        left, or its adapter may run one more.
        """
        admitted = Admitted()
        self._note_growth()
        if max_rows <= 0 or not self._anyone_to_try():
            return admitted
        waiting, tried, in_flows = self._waiting, self._tried, self._in_flows
        lacking: set[int] = set()
        at = 0
        while at < len(waiting):
            if len(admitted.rows) == max_rows or len(lacking) == len(self._resources):
                break
            rid = waiting[at]
            if in_flows and rid in in_flows and self._is_held_back(rid):
                at += 1
            elif rid in tried:
                if (lacked := tried[rid]) is not None:
                    lacking.add(lacked)
                at += 1
            elif self._try(rid, lacking, admitted):
                # Whoever comes first in its line now stands behind it.
                flow = self._leave(rid)
                if self._flows is not None and admitted.rows[-1:] == [rid]:
                    self._flows.take(rid)
                self._next_in_flow(flow)
            else:
                at += 1
        return admitted

    # ------------------------------------------------------------------ lines

    def _order_in_flow(self, rid: int) -> tuple[int, int]:
        priority, _, arrival = self._place(rid)
        return priority, arrival

    def _become_head(self, rid: int, flow: str) -> None:
        assert self._flows is not None
        self._flows.become_head(rid)
        self._first[flow], self._flow_of[rid] = rid, flow
        self._enter(rid)

    def _enter(self, rid: int) -> None:
        self._in_flows.add(rid)
        insort(self._waiting, rid, key=self._place)

    def _leave(self, rid: int) -> str | None:
        """Take a row out; the line that it was the first of."""
        at = bisect_left(self._waiting, self._place(rid), key=self._place)
        assert self._waiting[at] == rid, f"request {rid} does not wait in its place"
        del self._waiting[at]
        self._tried.pop(rid, None)
        self._in_flows.discard(rid)
        self._held_back.discard(rid)
        flow = self._flow_of.pop(rid, None)
        if flow is not None:
            del self._first[flow]
        return flow

    def _next_in_flow(self, flow: str | None) -> None:
        behind = None if flow is None else self._behind.get(flow)
        if flow is None or not behind:
            return
        rid = behind[0]
        self._step_out(rid, flow)
        self._become_head(rid, flow)

    def _wait_behind(self, rid: int, flow: str) -> None:
        insort(self._behind.setdefault(flow, []), rid, key=self._order_in_flow)
        self._flow_behind[rid] = flow

    def _step_out(self, rid: int, flow: str) -> None:
        behind = self._behind[flow]
        behind.remove(rid)
        if not behind:
            del self._behind[flow]
        del self._flow_behind[rid]

    def _anyone_to_try(self) -> bool:
        held_back = self._held_back
        if len(self._tried) + len(held_back) < len(self._waiting):
            return True
        return self._flows is not None and any(self._flows.may_join(rid) for rid in held_back)

    def _is_held_back(self, rid: int) -> bool:
        """Return whether the row's adapter runs as many rows as it may; it then lacks nothing."""
        assert self._flows is not None
        if self._flows.may_join(rid):
            self._held_back.discard(rid)
            return False
        if self._tried.pop(rid, None) is not None:
            self._tried.clear()  # it kept others waiting
        self._held_back.add(rid)
        return True

    # ------------------------------------------------------------------ resources

    def _note_growth(self) -> None:
        """Everybody is tried anew when a resource grew since the pass before."""
        marks = zip(self._resources, self._marks, strict=True)
        if any(resource.grew_since(mark) for resource, mark in marks):
            self._tried.clear()
        self._marks = [resource.growth_mark() for resource in self._resources]

    def _try(self, rid: int, lacking: set[int], admitted: Admitted) -> bool:
        """Return whether the row leaves the queue: with all it asks for, or failed."""
        asks = []
        for index, resource in enumerate(self._resources):
            answer = resource.ask(rid)
            if isinstance(answer, AskFailed):
                admitted.failed.append((rid, answer.cause))
                return True
            if answer is Ask.NOT_IN:
                self._tried[rid] = None
                return False
            if answer is Ask.ASKS:
                asks.append(index)
        if lacking.intersection(asks):
            self._tried[rid] = None
            return False
        for place, index in enumerate(asks):
            if self._resources[index].reserve(rid) is None:
                for earlier in asks[:place]:
                    self._give_back(rid, earlier)
                lacking.add(index)
                self._tried[rid] = index
                return False
        admitted.rows.append(rid)
        return True

    def _give_back(self, rid: int, index: int) -> None:
        """Undo a reservation of this pass. No growth: it was free when the pass began."""
        resource = self._resources[index]
        before = resource.growth_mark()
        resource.unreserve(rid)
        self._marks[index] += resource.growth_mark() - before
