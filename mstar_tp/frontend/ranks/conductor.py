"""Routes requests to the ranks, and what the ranks report back to whoever waits for it.

One conductor an instance, on the event loop's thread. It turns a client that leaves into an Abort,
and the ranks' failures into clear errors. What it sends is one stream, the same to every rank (R1).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from mstar_tp.frontend.adapters.load_manager import AdapterLoads
from mstar_tp.frontend.adapters.served_models import ServedModels
from mstar_tp.frontend.adapters.state_file import StateFile
from mstar_tp.frontend.api.api_errors import ApiError
from mstar_tp.frontend.metrics.counters import RequestCounters
from mstar_tp.frontend.metrics.outcomes import Outcome
from mstar_tp.frontend.metrics.server_metrics import Snapshot, StatsPoller
from mstar_tp.frontend.ranks.drain import MOST_S
from mstar_tp.frontend.ranks.group_state import GroupState, Phase
from mstar_tp.frontend.ranks.live_requests import LiveRequests, Reservation
from mstar_tp.frontend.ranks.rank_group import RankGroup
from mstar_tp.frontend.ranks.rank_queries import RankQueries
from mstar_tp.frontend.ranks.request_handle import RequestHandle, Submission
from mstar_tp.wire.channels import Lost
from mstar_tp.wire.commands import Abort, ConductorMessage
from mstar_tp.wire.reports import (
    AdapterDigest,
    LoadDone,
    LoadResult,
    Progress,
    RankReport,
    RequestFailed,
    Tokens,
    Validated,
)
from mstar_tp.wire.states import Located, RankStats, StateReport
from mstar_tp.wire.values import AdapterKey

logger = logging.getLogger(__name__)


class Link(Protocol):
    """The part of ``FrontendLink`` that the conductor uses."""

    def send_all(self, message: ConductorMessage) -> None: ...

    async def receive(self) -> tuple[int, RankReport | Lost]: ...

    @property
    def outbox_full(self) -> bool: ...


class Conductor:
    """The router between requests and ranks, and the parts that keep what is known of both."""

    def __init__(
        self,
        link: Link,
        served: ServedModels,
        *,
        world_size: int,
        max_queue: int,
        on_progress: Callable[[int, str], None] = lambda rank, text: None,
        state: StateFile | None = None,
        request_counters: RequestCounters | None = None,
        fair: bool = False,
        leave_s: float = MOST_S,
    ) -> None:
        """``on_progress`` is told what each rank does while it starts.

        ``fair``: no adapter fills the whole queue. ``leave_s``: the seconds running requests get
        once a signal asks the ranks to stop.
        """
        self._link = link
        self._served = served
        self._world_size = world_size
        self._on_progress = on_progress
        self._state_file = state or StateFile(None)
        self.state = GroupState(world_size)
        self.requests = LiveRequests(
            max_queue,
            on_unnamed=self._no_longer_named,
            request_counters=request_counters,
            limits_of=served.limits_of,
            fair=fair,
        )
        self.loads = AdapterLoads(
            self._send,
            served,
            world_size=world_size,
            max_pending=max_queue,
            named=self.requests.names,
            up=lambda: self.state.up,
            state=self._state_file,
        )
        self.queries = RankQueries(self._send, world_size, self.state.check_serves)
        self.group = RankGroup(
            self._send,
            self.state,
            world_size=world_size,
            served=served,
            requests=self.requests,
            loads=self.loads,
            queries=self.queries,
            state_file=self._state_file,
            leave_s=leave_s,
        )
        self._stats = StatsPoller(self._send, world_size, self._labelled)

    # ------------------------------------------------------------------ requests

    @property
    def has_capacity(self) -> bool:
        """True unless a request would have to wait for the ranks' outbox to empty.

        While nobody is told of requests, there is room.
        """
        told = self.state.serves and not self.state.leaving
        return not (told and self._link.outbox_full)

    def check_capacity(self) -> None:
        """Raises ApiError: 503, no request is taken now, or none more."""
        self.state.check_open()
        self.requests.check_capacity()

    def reserve(self, count: int, key: AdapterKey | None) -> Reservation:
        """Reserve places for ``count`` requests on ``key``, which is retained until the end.

        Raises:
            ApiError: 503, there would be too many; 429, too many of their adapter.
        """
        reservation = self.requests.reserve(count, key)
        if key is not None:
            self.loads.retain(key)
            reservation.on_end = lambda: self.loads.release(key)
        return reservation

    def submit(self, submissions: Sequence[Submission]) -> RequestHandle:
        """Open one request a submission, in order, whose places were reserved until now.

        Raises:
            ApiError: 503, the ranks take no requests, or there are too many bytes of images.
        """
        self.state.check_open()
        handle = self.requests.add(submissions)
        if self.state.phase is Phase.READY:
            for rid in handle.rids.values():
                self._send(self.requests.message(rid))
        return handle

    def abort(self, handle: RequestHandle, index: int | None = None) -> None:
        """Stop the answer at ``index``, which came to a stop string, or all whose client left.

        No-op for answers that ended.
        """
        self._abort(self.requests.abort(handle, index))

    def drop_slow(self, handle: RequestHandle, why: str) -> None:
        """Stop all that still runs of ``handle``: its client does not read what there is.

        ``why`` says how little it reads. Idempotent.
        """
        if not handle.gone:
            rids = self.requests.abort(handle, why=Outcome.SLOW)
            numbers = ", ".join(map(str, rids)) or "none"
            logger.warning(
                "request %s was dropped (rids %s): its client %s", handle.name, numbers, why
            )
            self._abort(rids)
            handle.leave()

    def _abort(self, rids: Sequence[int]) -> None:
        for rid in rids:
            if self.state.serves and self.group.drain.knows(rid):
                self._send(Abort(rid=rid))
        self.group.drain.requests_ended()

    def _no_longer_named(self, key: AdapterKey) -> None:
        """Forget an unloaded adapter that no request names any more."""
        if not self.loads.in_use(key):
            self._served.forget(key)

    # ------------------------------------------------------------------ metrics

    async def measure(self) -> Snapshot:
        """Return all counts, of this process and of every rank that answers at once."""
        state, request_counters = self.state, self.requests.request_counters
        request_counters.by_adapter.keep(self._served.knows)
        ranks = await self._stats.ask() if state.serves else {}
        ready, live = state.refusal_code is None, len(self.requests)
        ends = state.causes.ends
        return Snapshot(request_counters, live, ready, state.epoch, self._world_size, ranks, ends)

    def _labelled(self) -> Iterator[AdapterKey]:
        """The served adapters that metrics name."""
        adapters = map(self._served.get, self.requests.request_counters.by_adapter.with_series())
        return (adapter.key for adapter in adapters if adapter is not None)

    # ------------------------------------------------------------------ reports

    async def run(self) -> None:
        """Route reports until cancelled. One task. A failure is noted as the group's fault."""
        try:
            while True:
                rank, report = await self._link.receive()
                self._take(rank, report)
        except Exception as error:
            logger.exception("the ranks' reports can be routed no more: the server ends")
            self.group.fail(
                f"the server failed on a rank's report: {type(error).__name__}: {error}"
            )

    def _take(self, rank: int, report: RankReport | Lost) -> None:
        match report:
            case Tokens() | RequestFailed():
                if self.state.up:
                    self._take_of_requests(report)
            case LoadResult():
                self.group.take_result(rank, report)
            case LoadDone(load_id=load_id, cause=cause):
                self.group.take_done(load_id, cause)
            case AdapterDigest(key=key, digest=digest):
                self._served.set_digest(key, digest)
                self._state_file.changed(self._served)
            case StateReport() | Located() | Validated():
                self.queries.take(rank, report)
            case RankStats():
                self._stats.take(rank, report)
            case Progress(text=text):
                self._on_progress(rank, text)
            case _:
                self.group.take(rank, report)

    def _take_of_requests(self, report: Tokens | RequestFailed) -> None:
        match report:
            case Tokens():
                for handle in self.requests.route(report):
                    handle.drop("reads more slowly than its answer is made")
            case RequestFailed(rid=rid, cause=cause, param=param):
                failure = ApiError(500, cause, code="request_failed")
                if param is not None:
                    failure = ApiError.bad_request(cause, param=param)
                self.requests.end(rid, failure)
        self.group.drain.requests_ended()

    def _send(self, message: ConductorMessage) -> None:
        self._link.send_all(message)
