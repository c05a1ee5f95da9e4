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
KEPT_FLOWS = 64


@dataclass(slots=True)
class _Flow:
    """One adapter's: of all generations of its name together."""

    finish_tag: int = 0
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
        self._flows: dict[str, _Flow] = {}
        self._virtual_time = 0
        self._sweep_at = KEPT_FLOWS

    # ------------------------------------------------------------------ for the queue

    def flow(self, rid: int) -> str | None:
        """Behind whose others the request waits; None where each waits for itself."""
        request = self._requests[rid]
        if self._fair or self._limits_of(request.adapter).max_rows is not None:
            return _name(request)
        return None

    def was_head(self, rid: int) -> bool:
        """Return whether the request was the first of its line before: it has its turn for good."""
        return self._requests[rid].start_tag is not None

    def may_join(self, rid: int) -> bool:
        """Return whether its adapter may have one more row now."""
        request = self._requests[rid]
        limit = self._limits_of(request.adapter).max_rows
        if limit is None:
            return True
        flow = self._flows.get(_name(request))
        return flow is None or sum(not self._requests[r].will_end for r in flow.running) < limit

    def advance_virtual_time(self, waiting: Sequence[int]) -> None:
        """Raise the virtual time as a flow begins.

        It becomes no lower than the lowest start tag of those that ``waiting`` says and that may
        join; without any, all flows are level.
        """
        if not self._fair:
            return
        first = next((rid for rid in waiting if self.may_join(rid)), None)
        if first is not None:
            self._virtual_time = max(self._virtual_time, self._requests[first].start_tag or 0)
            return
        for flow in self._flows.values():
            for rid in flow.running:
                self._charge(self._requests[rid], flow)
            self._virtual_time = max(self._virtual_time, flow.finish_tag)
        self._sweep()

    def become_head(self, rid: int) -> None:
        """The request is the first of its line now, and takes its turn."""
        request = self._requests[rid]
        if not self._fair:
            request.start_tag = 0
            return
        flow = self._flow(request)
        for running in flow.running:
            self._charge(self._requests[running], flow)
        request.start_tag = flow.finish_tag = max(flow.finish_tag, self._virtual_time)

    def replace_head(self, rid: int, first: int) -> None:
        """``rid`` comes before ``first``, which was the first of their line and has never joined:
        it takes that one's turn.
        """
        self._requests[rid].start_tag, self._requests[first].start_tag = (
            self._requests[first].start_tag,
            None,
        )

    def take(self, rid: int) -> None:
        """The request leaves the queue to join a step: its tokens so far count."""
        request = self._requests[rid]
        flow = self._flow(request)
        flow.running[rid] = None
        self._charge(request, flow)

    # ------------------------------------------------------------------ for the scheduler

    def joined(self, rid: int) -> None:
        """The request is in a step: whoever comes to wait now does not start before it."""
        self._virtual_time = max(self._virtual_time, self._requests[rid].start_tag or 0)

    def left(self, rid: int) -> None:
        """The request does not run any more: it ended, or waits again. No-op where it did not."""
        request = self._requests.get(rid)
        if request is None:
            return
        name = _name(request)
        flow = self._flows.get(name)
        if flow is None or rid not in flow.running:
            return
        self._charge(request, flow)
        del flow.running[rid]
        if not flow.running and flow.finish_tag <= self._virtual_time:
            del self._flows[name]

    # ------------------------------------------------------------------ operators

    def report(self) -> tuple[AdapterShare, ...]:
        """Adapters with requests, by name, the base model first. Between two admits."""
        waiting: dict[str, int] = {}
        limits: dict[str, AdapterLimits] = {}
        for request in self._requests:
            if request.ended is not None or request.dead is not None:
                continue
            name = _name(request)
            flow = self._flows.get(name)
            runs = flow is not None and request.rid in flow.running
            waiting[name] = waiting.get(name, 0) + (not runs)
            limits[name] = self._limits_of(request.adapter)
        weights = sum(limit.weight for limit in limits.values())
        fair_queue = []
        for name in sorted(waiting):
            flow = self._flows.get(name, _Flow())
            for rid in flow.running:
                self._charge(self._requests[rid], flow)
            fair_queue.append(
                AdapterShare(
                    adapter=name or None,
                    running=len(flow.running),
                    waiting=waiting[name],
                    share=limits[name].weight / weights,
                    tokens=flow.tokens,
                    limits=limits[name],
                )
            )
        return tuple(fair_queue)

    # ------------------------------------------------------------------ inside

    def _flow(self, request: Request) -> _Flow:
        if len(self._flows) >= self._sweep_at:
            self._sweep()
        return self._flows.setdefault(_name(request), _Flow())

    def _charge(self, request: Request, flow: _Flow) -> None:
        """Count what the request was given since it was last counted.

        What is computed anew, since it was preempted, is not counted again.
        """
        fresh = request.expected - request.charged
        if fresh > 0:
            request.charged = request.expected
            flow.tokens += fresh
            weight = self._limits_of(request.adapter).weight
            flow.finish_tag = max(flow.finish_tag, request.start_tag or 0) + fresh * max(
                1, round(UNITS / weight)
            )

    def _sweep(self) -> None:
        """Forget lines that say nothing: the floor stands for them."""
        self._flows = {
            name: flow
            for name, flow in self._flows.items()
            if flow.running or flow.finish_tag > self._virtual_time
        }
        self._sweep_at = max(KEPT_FLOWS, 2 * len(self._flows))


def _name(request: Request) -> str:
    return BASE if request.adapter is None else request.adapter.name


def fair_queue_of(
    config: EngineConfig, requests: RequestTable, lora: LoraPools | None
) -> FairQueue:
    """Return the queue of an instance.

    Adapters may take what their loads say, the base model what ``config`` says.
    """
    base = limits_by(config)(None)

    def limits_of(key: AdapterKey | None) -> AdapterLimits:
        return base if key is None or lora is None else lora.loads.limits(key)

    return FairQueue(requests, limits_of, fair=config.scheduling_policy == "fair")
