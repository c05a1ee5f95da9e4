"""The leader's one queue over every resource: who may start to run, by priority and arrival.

A request is in the queue once its adapter's copies are in on every rank (R7), and its grammar, if
it has one, is ready. The head reserves
all it needs from every resource at once, or waits and holds nothing. A later row may pass only when
it asks for none of what those before it lack, so what the head lacks drains towards it. Plain data,
main thread, and only on the rank that decides.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mstar_tp.engine.resources.base import Ask, AskFailed, Resource


@dataclass(slots=True)
class Admitted:
    """What one pass over the queue decided, in the queue's order."""

    rows: list[int] = field(default_factory=list)
    failed: list[tuple[int, str]] = field(default_factory=list)


class AdmissionQueue:
    """Arrival order is rid order: the conductor numbers requests as they arrive."""

    def __init__(
        self,
        resources: Sequence[Resource],
        place: Callable[[int], tuple[int, int]] = lambda rid: (0, rid),
    ) -> None:
        """``place``: what orders the waiting requests; arrival order unless given."""
        self._resources = tuple(resources)
        self._place = place
        self._waiting: list[int] = []
        self._tried: dict[int, int | None] = {}
        """Waiting rows that were tried since anything grew -> the resource each was the first to
        lack; None for one that those before it, or its copies, keep out."""
        self._marks = [resource.growth_mark() for resource in self._resources]

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, rid: int) -> None:
        """Enter at the request's own place (a preempted row re-enters where it was)."""
        insort(self._waiting, rid, key=self._place)

    def discard(self, rid: int) -> None:
        """Leave the queue; those behind it may be next."""
        if rid in self._waiting:
            self._waiting.remove(rid)
            self._tried.clear()

    def admit(self, max_rows: int) -> Admitted:
        """Reserve for up to ``max_rows`` waiting requests and take them out of the queue.

        A row is tried when it enters, and again only when some resource grew or a row before it
        left.
        """
        admitted = Admitted()
        self._note_growth()
        if max_rows <= 0 or len(self._tried) == len(self._waiting):
            return admitted
        lacking: set[int] = set()
        for rid in self._waiting:
            if len(admitted.rows) == max_rows or len(lacking) == len(self._resources):
                break
            if rid not in self._tried:
                self._try(rid, lacking, admitted)
            elif (lacked := self._tried[rid]) is not None:
                lacking.add(lacked)
        gone = {*admitted.rows, *(rid for rid, _ in admitted.failed)}
        self._waiting = [rid for rid in self._waiting if rid not in gone]
        return admitted

    def _note_growth(self) -> None:
        """Everybody is tried anew when a resource grew since the pass before."""
        marks = zip(self._resources, self._marks, strict=True)
        if any(resource.grew_since(mark) for resource, mark in marks):
            self._tried.clear()
        self._marks = [resource.growth_mark() for resource in self._resources]

    def _try(self, rid: int, lacking: set[int], admitted: Admitted) -> None:
        asks = []
        for index, resource in enumerate(self._resources):
            answer = resource.ask(rid)
            if isinstance(answer, AskFailed):
                admitted.failed.append((rid, answer.cause))
                return
            if answer is Ask.NOT_IN:
                self._tried[rid] = None
                return
            if answer is Ask.ASKS:
                asks.append(index)
        if lacking.intersection(asks):
            self._tried[rid] = None
            return
        for place, index in enumerate(asks):
            if self._resources[index].reserve(rid) is None:
                for earlier in asks[:place]:
                    self._give_back(rid, earlier)
                lacking.add(index)
                self._tried[rid] = index
                return
        admitted.rows.append(rid)

    def _give_back(self, rid: int, index: int) -> None:
        """Undo a reservation of this pass. No growth: it was free when the pass began."""
        resource = self._resources[index]
        before = resource.growth_mark()
        resource.unreserve(rid)
        self._marks[index] += resource.growth_mark() - before
