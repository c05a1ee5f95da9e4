"""The leader's one queue over every resource: who may start to run, in arrival order.

A request is here once its adapter's copies are in on every rank (R7). The head reserves all it
needs at once or waits and
holds nothing; a later row may pass only when it asks for none of what those before it lack. Plain
data, main thread.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from mstar_tp.engine.resources.base import Ask, AskFailed, Resource


@dataclass(slots=True)
class Admitted:
    """What one pass over the queue decided, in arrival order."""

    rows: list[int] = field(default_factory=list)
    failed: list[tuple[int, str]] = field(default_factory=list)


class AdmissionQueue:
    """Arrival order is rid order: the conductor numbers requests as they arrive."""

    def __init__(self, resources: Sequence[Resource]) -> None:
        self._resources = tuple(resources)
        self._waiting: list[int] = []
        self._stale = True
        self._marks: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, rid: int) -> None:
        """Enter at the request's arrival place (a preempted row re-enters where it was)."""
        insort(self._waiting, rid)
        self._stale = True

    def discard(self, rid: int) -> None:
        if rid in self._waiting:
            self._waiting.remove(rid)
            self._stale = True

    def admit(self, max_rows: int) -> Admitted:
        """Reserve for up to ``max_rows`` waiting requests and take them out of the queue.

        Without a change since the last pass (a new entry, or something that grew) nothing is tried.
        """
        admitted = Admitted()
        if max_rows <= 0 or not (self._stale or self._marks != self._growth()):
            return admitted
        lacking: set[int] = set()
        for rid in self._waiting:
            if len(admitted.rows) == max_rows or len(lacking) == len(self._resources):
                break
            self._try(rid, lacking, admitted)
        gone = {*admitted.rows, *(rid for rid, _ in admitted.failed)}
        self._waiting = [rid for rid in self._waiting if rid not in gone]
        # Marks are read after the pass: what it gave back itself is no growth.
        self._stale = len(admitted.rows) == max_rows
        self._marks = self._growth()
        return admitted

    def _try(self, rid: int, lacking: set[int], admitted: Admitted) -> None:
        asks = []
        for index, resource in enumerate(self._resources):
            answer = resource.ask(rid)
            if isinstance(answer, AskFailed):
                admitted.failed.append((rid, answer.cause))
                return
            if answer is Ask.ASKS:
                asks.append(index)
        if lacking.intersection(asks):
            return
        for place, index in enumerate(asks):
            if not self._resources[index].try_reserve(rid):
                for earlier in asks[:place]:
                    self._resources[earlier].unreserve(rid)
                lacking.add(index)
                return
        admitted.rows.append(rid)

    def _growth(self) -> tuple[int, ...]:
        return tuple(resource.growth_mark() for resource in self._resources)
