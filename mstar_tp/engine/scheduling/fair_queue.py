"""The rows and tokens of each adapter's requests, and from them who runs next.

Leader's main thread. Plain data that follows from the order requests arrive and join in and from
the tokens they are given: no clock, no rate. The base model counts as one adapter.

Requests are ordered by start-time fair queueing over adapters. An adapter's *count* is the
tokens its requests were given, prompts and outputs, over its weight. When a request comes to be the
first of its adapter that waits, it takes its adapter's count as its turn, for good; the lowest turn
joins first. No turn is below the *floor*: the highest that has joined, or, once an adapter begins
to wait, the lowest that waits. So who was away has saved nothing up. When an adapter begins to wait
and nobody else waits who may join, all are level: what nobody wanted was taken from nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mstar_tp.config import EngineConfig
from mstar_tp.engine.resources.lora.pools import LoraPools
from mstar_tp.engine.scheduling.requests import Request, RequestTable
from mstar_tp.wire.adapter_limits import NO_LIMITS, AdapterLimits, AdapterShare, limits_by
from mstar_tp.wire.values import AdapterKey

UNITS = 1_000_000
"""The units in which tags are kept: so many for one token at weight 1.

Tags are whole numbers, and no token is too small to count.
"""
BASE = ""
"""Stands for the base model among the adapters' names."""
KEPT_LINES = 64


@dataclass(slots=True)
class _Line:
    """One adapter's: of all generations of its name together."""

    count: int = 0
    tokens: int = 0
    """Since it last had no request running and no count to keep."""
    running: dict[int, None] = field(default_factory=dict)


class FairQueue:
    """``limits_of`` says what an adapter may take, None standing for the base model; ``fair``:
    whether adapters take turns.
    """

    def __init__(
        self,
        requests: RequestTable,
        limits_of: Callable[[AdapterKey | None], AdapterLimits] = lambda key: NO_LIMITS,
        *,
        fair: bool = False,
    ) -> None:
        self._requests = requests
        self._limits_of = limits_of
        self._fair = fair
        self._lines: dict[str, _Line] = {}
        self._floor = 0
        self._sweep_at = KEPT_LINES

    # ------------------------------------------------------------------ for the queue

    def line(self, rid: int) -> str | None:
        """Behind whose others the request waits; None where each waits for itself."""
        request = self._requests[rid]
        if self._fair or self._limits_of(request.adapter).max_rows is not None:
            return _name(request)
        return None

    def came_first(self, rid: int) -> bool:
        """Return whether the request was the first of its line before: it has its turn for good."""
        return self._requests[rid].turn is not None

    def may_join(self, rid: int) -> bool:
        """Return whether its adapter may have one more row now."""
        request = self._requests[rid]
        limit = self._limits_of(request.adapter).max_rows
        if limit is None:
            return True
        line = self._lines.get(_name(request))
        return line is None or sum(not self._requests[r].will_end for r in line.running) < limit

    def raise_floor(self, waiting: Sequence[int]) -> None:
        """Raise the virtual time as a flow begins.

        It becomes no lower than the lowest start tag of those that ``waiting`` says and that may
        join; without any, all flows are level.
        """
        if not self._fair:
            return
        first = next((rid for rid in waiting if self.may_join(rid)), None)
        if first is not None:
            self._floor = max(self._floor, self._requests[first].turn or 0)
            return
        for line in self._lines.values():
            for rid in line.running:
                self._charge(self._requests[rid], line)
            self._floor = max(self._floor, line.count)
        self._sweep()

    def come_first(self, rid: int) -> None:
        """The request is the first of its line now, and takes its turn."""
        request = self._requests[rid]
        if not self._fair:
            request.turn = 0
            return
        line = self._line(request)
        for running in line.running:
            self._charge(self._requests[running], line)
        request.turn = line.count = max(line.count, self._floor)

    def change_places(self, rid: int, first: int) -> None:
        """``rid`` comes before ``first``, which was the first of their line and has never joined:
        it takes that one's turn.
        """
        self._requests[rid].turn, self._requests[first].turn = self._requests[first].turn, None

    def take(self, rid: int) -> None:
        """The request leaves the queue to join a step: its tokens so far count."""
        request = self._requests[rid]
        line = self._line(request)
        line.running[rid] = None
        self._charge(request, line)

    # ------------------------------------------------------------------ for the scheduler

    def joined(self, rid: int) -> None:
        """The request is in a step: whoever comes to wait now does not start before it."""
        self._floor = max(self._floor, self._requests[rid].turn or 0)

    def left(self, rid: int) -> None:
        """The request does not run any more: it ended, or waits again. No-op where it did not."""
        request = self._requests.get(rid)
        if request is None:
            return
        name = _name(request)
        line = self._lines.get(name)
        if line is None or rid not in line.running:
            return
        self._charge(request, line)
        del line.running[rid]
        if not line.running and line.count <= self._floor:
            del self._lines[name]

    # ------------------------------------------------------------------ operators

    def report(self) -> tuple[AdapterShare, ...]:
        """Adapters with requests, by name, the base model first. Between two admits."""
        waiting: dict[str, int] = {}
        limits: dict[str, AdapterLimits] = {}
        for request in self._requests:
            if request.ended is not None or request.dead is not None:
                continue
            name = _name(request)
            line = self._lines.get(name)
            runs = line is not None and request.rid in line.running
            waiting[name] = waiting.get(name, 0) + (not runs)
            limits[name] = self._limits_of(request.adapter)
        weights = sum(limit.weight for limit in limits.values())
        fair_queue = []
        for name in sorted(waiting):
            line = self._lines.get(name, _Line())
            for rid in line.running:
                self._charge(self._requests[rid], line)
            fair_queue.append(
                AdapterShare(
                    adapter=name or None,
                    running=len(line.running),
                    waiting=waiting[name],
                    share=limits[name].weight / weights,
                    tokens=line.tokens,
                    limits=limits[name],
                )
            )
        return tuple(fair_queue)

    # ------------------------------------------------------------------ inside

    def _line(self, request: Request) -> _Line:
        if len(self._lines) >= self._sweep_at:
            self._sweep()
        return self._lines.setdefault(_name(request), _Line())

    def _charge(self, request: Request, line: _Line) -> None:
        """Count what the request was given since it was last counted.

        What is computed anew, since it was preempted, is not counted again.
        """
        fresh = request.expected - request.charged
        if fresh > 0:
            request.charged = request.expected
            line.tokens += fresh
            weight = self._limits_of(request.adapter).weight
            line.count = max(line.count, request.turn or 0) + fresh * max(1, round(UNITS / weight))

    def _sweep(self) -> None:
        """Forget lines that say nothing: the floor stands for them."""
        self._lines = {
            name: line
            for name, line in self._lines.items()
            if line.running or line.count > self._floor
        }
        self._sweep_at = max(KEPT_LINES, 2 * len(self._lines))


def _name(request: Request) -> str:
    return BASE if request.adapter is None else request.adapter.name


def shares_of(config: EngineConfig, requests: RequestTable, lora: LoraPools | None) -> FairQueue:
    """Return the queue of an instance.

    Adapters may take what their loads say, the base model what ``config`` says.
    """
    base = limits_by(config)(None)

    def limits_of(key: AdapterKey | None) -> AdapterLimits:
        return base if key is None or lora is None else lora.loads.limits(key)

    return FairQueue(requests, limits_of, fair=config.scheduling_policy == "fair")
