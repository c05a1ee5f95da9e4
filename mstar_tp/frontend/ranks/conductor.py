"""Registers requests with the ranks and routes what the ranks report back to whoever waits for it.

One conductor an instance, on the event loop's thread. It turns a leaving client into an Abort, and
the ranks' failures into clear errors. What it sends is one stream, the same to every rank (R1).

When ranks come after others, they are told of every live request in its old place, with the tokens
it has (R9). Meanwhile requests are taken, and wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Protocol

from mstar_tp.common.units import counted
from mstar_tp.frontend.adapters.load_manager import AdapterLoads
from mstar_tp.frontend.adapters.rank_validations import by_text
from mstar_tp.frontend.adapters.served_models import ServedModels
from mstar_tp.frontend.adapters.state_file import StateFile
from mstar_tp.frontend.api.api_errors import ApiError, unavailable
from mstar_tp.frontend.metrics.counters import RequestCounters
from mstar_tp.frontend.metrics.outcomes import GroupEnd, Outcome, group_end
from mstar_tp.frontend.metrics.server_metrics import Snapshot, StatsPoller
from mstar_tp.frontend.ranks.drain import MOST_S, Drain
from mstar_tp.frontend.ranks.live_requests import LiveRequests
from mstar_tp.frontend.ranks.rank_queries import RankQueries
from mstar_tp.frontend.ranks.request_handle import RequestHandle, Submission
from mstar_tp.frontend.ranks.restore import Restore
from mstar_tp.wire.channels import Lost
from mstar_tp.wire.commands import Abort, ConductorMessage, Shutdown
from mstar_tp.wire.reports import (
    AdapterDigest,
    Fatal,
    Leaving,
    LoadDone,
    LoadResult,
    Progress,
    RankReport,
    Ready,
    RequestFailed,
    StartFailed,
    Tokens,
    Validated,
)
from mstar_tp.wire.states import Located, RankStats, StateReport
from mstar_tp.wire.values import AdapterKey

logger = logging.getLogger(__name__)


class Link(Protocol):
    """What the conductor needs of ``FrontendLink``."""

    def send_all(self, message: ConductorMessage) -> None: ...

    async def receive(self) -> tuple[int, RankReport | Lost]: ...

    @property
    def epoch(self) -> int: ...

    @property
    def outbox_full(self) -> bool: ...


class Phase(Enum):
    """Of the ranks: requests are taken while they are READY or DOWN."""

    STARTING = "the ranks are starting"
    READY = "ready"
    DOWN = "the ranks are gone and are being started again"
    DEAD = "the ranks are gone"


SHUTTING_DOWN = "the server is shutting down"
LEAVING = "the ranks were asked to stop and leave: new requests wait for others"
ASKED_TO_STOP = "the ranks were asked to stop"


class Conductor:
    """Owns what is known of the present ranks; the table of live requests is ``requests``."""

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
        """``on_progress``: told what each rank does while it starts. ``fair``: no adapter fills the
        whole queue. ``leave_s``: what running requests get once a signal asks ranks to stop.
        """
        self._link = link
        self._served = served
        self._world_size = world_size
        self._on_progress = on_progress
        self._state = state or StateFile(None)
        self.requests = LiveRequests(
            max_queue,
            on_unnamed=self._no_longer_named,
            request_counters=request_counters,
            limits_of=served.limits_of,
            fair=fair,
        )
        self._drain = Drain(self.requests, leave_s, self._dismiss)
        self.dismissed = False
        """Whether the present ranks were asked to stop, and told to leave."""
        self.queries = RankQueries(self._send, world_size, self._check_serves)
        self.phase = Phase.STARTING
        self.draining = False
        """Nothing new is taken: the server is about to stop."""
        self.on_capacity: Callable[[], None] = lambda: None
        """Called when ``has_capacity`` may have become true."""
        self.ready: dict[int, Ready] = {}
        """What each rank serves with; that of ranks that are gone stays until others say it."""
        self._came: set[int] = set()
        self._restore: Restore | None = None
        self.causes: dict[int, str] = {}
        """rank -> why it stopped, in its own words."""
        self.losses: dict[int, str] = {}
        """rank -> how this process noticed that it is gone."""
        self._said: list[Fatal | StartFailed] = []
        self.ends = dict.fromkeys(GroupEnd, 0)
        """How often a group of ranks ended, and others were to follow, by why."""
        self._before: dict[int, str] = {}
        """Why the last group ended, while the next has not come."""
        self.fault: str | None = None
        """Why this process itself cannot go on, whatever the ranks do."""
        self._shutdown_ordered = False
        self.became_ready = asyncio.Event()
        self.changed = asyncio.Event()
        """Set whenever a rank fails or is lost, and with ``fault``."""
        self.loads = AdapterLoads(
            self._send,
            served,
            world_size=world_size,
            max_pending=max_queue,
            named=self.requests.names,
            state=self._state,
        )
        self._stats = StatsPoller(self._send, world_size, self._seated)

    # ------------------------------------------------------------------ requests

    @property
    def epoch(self) -> int:
        """How often the ranks were started again."""
        return self._link.epoch

    @property
    def serves(self) -> bool:
        """Whether the ranks take messages now."""
        return self.phase is Phase.READY and not self._shutdown_ordered

    @property
    def leaving(self) -> bool:
        """Whether the ranks were asked to stop, and get no more requests."""
        return self._drain.begun

    @property
    def has_capacity(self) -> bool:
        """Whether a request would find its end now: the ranks' outbox is not full, or nobody is
        told of it yet.
        """
        return not (self.serves and not self.leaving and self._link.outbox_full)

    def check_open(self) -> None:
        """Raises ApiError: 503, no request is taken now."""
        if self.draining or self.phase not in (Phase.READY, Phase.DOWN):
            raise unavailable(f"{self.reason()}: try again later", code="not_ready")

    def check_capacity(self) -> None:
        """Raises ApiError: 503, no request is taken now, or none more."""
        self.check_open()
        self.requests.check_capacity()

    def submit(self, submissions: Sequence[Submission]) -> RequestHandle:
        """Open one request a submission, in order.

        Raises:
            ApiError: 503, the queue is full or the ranks cannot take requests.
        """
        self.check_open()
        handle = self.requests.add(submissions)
        if self.phase is Phase.READY and not self.leaving:
            for rid in handle.rids.values():
                self._open(rid)
        return handle

    def _open(self, rid: int) -> None:
        """Tell the ranks of a request, and of the tokens it has from ranks before them."""
        self._send(self.requests.message(rid))

    def abort(self, handle: RequestHandle, index: int | None = None) -> None:
        """Stop one answer of ``handle`` (it has come to a stop string), or all that still run
        (their client left). No-op for those that ended.
        """
        self._abort(self.requests.abort(handle, index))

    def drop_slow(self, handle: RequestHandle, why: str) -> None:
        """Stop what still runs of ``handle``: its client does not read what there is. ``why``
        says how little. Idempotent.
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
            if self.serves and self._drain.knows(rid):
                self._send(Abort(rid=rid))
        self._drain.look()

    def _no_longer_named(self, key: AdapterKey) -> None:
        """No live request names ``key`` any more."""
        if not self.loads.in_use(key):
            self._served.forget(key)

    # ------------------------------------------------------------------ operators

    def _check_serves(self) -> None:
        if not self.serves:
            raise unavailable(self.reason(), code="not_ready")

    async def measure(self) -> Snapshot:
        """What there is to count, of this process and of every rank that answers at once."""
        request_counters = self.requests.request_counters
        request_counters.by_adapter.keep(self._served.knows)
        ranks = await self._stats.ask() if self.serves else {}
        ready = self.phase is Phase.READY and not (self.draining or self.leaving)
        live = len(self.requests)
        return Snapshot(
            request_counters, live, ready, self._link.epoch, self._world_size, ranks, self.ends
        )

    def _seated(self) -> Iterator[AdapterKey]:
        """The served adapters that metrics name."""
        adapters = map(self._served.get, self.requests.request_counters.by_adapter.with_series())
        return (adapter.key for adapter in adapters if adapter is not None)

    def reason(self) -> str:
        """Why no request is taken now, in one sentence."""
        state: str = SHUTTING_DOWN if self.draining else self.phase.value
        if self.leaving:
            return LEAVING
        if self.phase not in (Phase.DEAD, Phase.DOWN):
            return state
        if self.fault is not None:
            return self.fault
        told = self.told() or self._before
        causes = "; ".join(by_text(told.items(), self._world_size, named=True))
        return f"{state}: {causes}" if causes else state

    def told(self) -> dict[int, str]:
        """rank -> why it is gone: in its own words, else how its process ended. That a rank is
        silent is said only where no rank's end says more.
        """
        ended = {rank: how for rank, how in self.losses.items() if how.startswith("its process")}
        return dict(sorted((ended | self.causes or self.losses).items()))

    # ------------------------------------------------------------------ end

    def drain(self) -> None:
        """Take no new requests from now on."""
        self.draining = True
        self._drain.cancel()  # who drains ends the ranks
        self.on_capacity()

    def fail_all(self, message: str) -> None:
        """End every live request, load and inspection with ``message``. Nothing is sent."""
        self.requests.fail_all(message)
        self.loads.fail_all(message)
        self.queries.fail_all(message)

    def send_shutdown(self) -> None:
        """Tell the ranks to stop; their going away is expected from now on."""
        serving, self._shutdown_ordered = self.serves, True
        if serving:
            self._send(Shutdown())
        self.drain()

    def die(self) -> None:
        """The ranks are gone for good: every live request ends with an error that says why."""
        self.phase = Phase.DEAD
        self._drain.cancel()
        self.fail_all(self.reason())
        self.on_capacity()

    def go_down(self) -> None:
        """The ranks are gone, others will come: requests and loads wait for those. What the old
        ones still say is not listened to. Idempotent.
        """
        if self.phase is Phase.READY:
            self.phase = Phase.DOWN
            who = "the ranks leave" if self.dismissed else "a rank is gone"
            live = counted(len(self.requests), "live request")
            logger.info("%s: what waits for the next ranks: %s", who, live)
        self._drain.cancel()
        self._restore = None
        self.loads.ranks_left()
        self.queries.fail_all(self.reason())
        self.on_capacity()

    def _leave(self) -> None:
        """A signal has asked a rank to stop, and it serves on."""
        if self.draining or self.dismissed or self.causes or self.losses:
            return  # it ends, or is told to, in any case
        if self.phase is Phase.READY:
            self._drain.begin()
            self.on_capacity()
        else:
            self._dismiss()

    def _dismiss(self) -> None:
        """Tell ranks that were asked to stop to do so: others are to come."""
        self.dismissed = True
        self._send(Shutdown())
        self.go_down()
        self.changed.set()

    def lose(self, rank: int, how: str) -> None:
        """A rank was seen to be gone; how its process ended says more than that it is silent."""
        self.losses[rank] = how
        self._lose()

    def _lose(self) -> None:
        if not self._shutdown_ordered:
            self.go_down()
        self.changed.set()

    def await_ranks(self) -> None:
        """Those that will say hello next are others: nothing that was noted of the old ones
        counts.
        """
        self.go_down()
        if self.dismissed:
            self._before = {0: ASKED_TO_STOP}
            self.ends[GroupEnd.ASKED_TO_STOP] += 1
        else:
            self._before = self.told() or self._before
            self.ends[group_end(self._said, self.losses.values())] += 1
        self.dismissed = False
        self._said.clear()
        self._came.clear()
        self.causes.clear()
        self.losses.clear()
        self.became_ready.clear()
        self.changed.clear()

    # ------------------------------------------------------------------ reports

    async def run(self) -> None:
        """Route reports for ever. One task. Should that fail, ``fault`` says so and it ends."""
        try:
            while True:
                rank, report = await self._link.receive()
                self._take(rank, report)
        except Exception as error:
            logger.exception("the ranks' reports can be routed no more: the server ends")
            self.fault = f"the server failed on a rank's report: {type(error).__name__}: {error}"
            self.changed.set()

    def _take(self, rank: int, report: RankReport | Lost) -> None:
        match report:
            case Tokens():
                if self.phase is Phase.READY:
                    for handle in self.requests.route(report):
                        handle.drop("reads more slowly than its answer is made")
                    if self.leaving:
                        self._drain.look()
            case RequestFailed(rid=rid, cause=cause, param=param):
                if self.phase is Phase.READY:
                    failure = ApiError(500, cause, code="request_failed")
                    if param is not None:
                        failure = ApiError.bad_request(cause, param=param)
                    self.requests.end(rid, failure)
                    self._drain.look()
            case LoadResult() | LoadDone() | AdapterDigest():
                self._take_of_adapters(rank, report)
            case StateReport() | Located() | Validated():
                self.queries.take(rank, report)
            case RankStats():
                self._stats.take(rank, report)
            case _:
                self._take_of_ranks(rank, report)

    def _take_of_ranks(self, rank: int, report: RankReport | Lost) -> None:
        match report:
            case Ready():
                self._take_ready(rank, report)
            case Progress(text=text):
                self._on_progress(rank, text)
            case Leaving():
                self._leave()
            case StartFailed(cause=cause) | Fatal(cause=cause):
                self.causes[rank] = cause
                self._said.append(report)
                self._lose()
            case Lost(cause=cause):
                self.lose(rank, self.losses.get(rank, cause))

    def _take_of_adapters(self, rank: int, report: LoadResult | LoadDone | AdapterDigest) -> None:
        match report:
            case LoadResult():
                if self._restore is None or not self._restore.take_result(rank, report):
                    self.loads.take_result(rank, report)
                self._settle_restore()
            case LoadDone(load_id=load_id, cause=cause):
                self._take_done(load_id, cause)
            case AdapterDigest(key=key, digest=digest):
                self._served.set_digest(key, digest)
                self._state.changed(self._served)

    def _take_ready(self, rank: int, report: Ready) -> None:
        self.ready[rank] = report
        self._came.add(rank)
        if len(self._came) < self._world_size or self.changed.is_set():
            return
        logger.info("every rank is ready")
        # Ranks that are started again begin with no adapter: one may be gone or changed by now.
        begins_with = self._served.configured if self._link.epoch == 0 else ()
        self._restore = Restore(self._send, self.loads.ids, self._world_size, begins_with)
        wanted = set(self.loads.wanted())
        self._restore.announce(
            adapter
            for adapter in self._served.known()
            if adapter.key in wanted or self.loads.in_use(adapter.key)
        )
        self._settle_restore()

    def _settle_restore(self) -> None:
        """Once the new ranks have checked every adapter: tell them all that there was."""
        restore = self._restore
        if restore is None or not restore.settled or self.phase is Phase.READY:
            return
        for rid, key in self.requests.carry_over():
            if key is None or restore.serve(key):
                self._open(rid)
            else:
                why = restore.refused.get(key, "it is gone")
                message = f"the ranks were started again and cannot go on with this request: {why}"
                self.requests.end(rid, ApiError(500, message, code="request_failed"))
        restore.end(self.loads.wanted())
        for key, why in restore.refused.items():
            self._drop(key, why)
        self._before = {}
        self.phase = Phase.READY
        self.loads.ranks_came()
        self.became_ready.set()

    def _drop(self, key: AdapterKey, why: str) -> None:
        """The ranks cannot serve ``key`` again."""
        logger.error("adapter %s is served no more: %s", key, why)
        adapter = self._served.get(key.name)
        if adapter is not None and adapter.key == key:
            self._served.remove(key.name)
            self._state.changed(self._served)
        if not self.loads.in_use(key):
            self._served.forget(key)

    def _take_done(self, load_id: int, cause: str | None) -> None:
        key = None if self._restore is None else self._restore.take_done(load_id)
        if key is None:
            self.loads.take_done(load_id, cause)
        elif cause is not None:
            self._drop(key, cause)

    def _send(self, message: ConductorMessage) -> None:
        self._link.send_all(message)
