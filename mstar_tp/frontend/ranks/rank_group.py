"""The life of the rank group: each event moves ``GroupState``, and is told to whom it concerns.

When ranks come after others, they are told of every adapter and live request in its old place, with
the tokens it has (R9). Meanwhile requests are taken, and wait. The event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from mstar_tp.common.units import counted
from mstar_tp.frontend.adapters.load_manager import AdapterLoads
from mstar_tp.frontend.adapters.served_models import ServedModels
from mstar_tp.frontend.adapters.state_file import StateFile
from mstar_tp.frontend.api.api_errors import ApiError
from mstar_tp.frontend.ranks.drain import GroupDrain
from mstar_tp.frontend.ranks.group_state import GroupEvent, GroupState, Phase
from mstar_tp.frontend.ranks.live_requests import LiveRequests
from mstar_tp.frontend.ranks.rank_queries import RankQueries
from mstar_tp.frontend.ranks.restore import Restore
from mstar_tp.wire.channels import Lost
from mstar_tp.wire.commands import ConductorMessage, Shutdown
from mstar_tp.wire.reports import Fatal, Leaving, LoadResult, Ready, StartFailed
from mstar_tp.wire.values import AdapterKey

logger = logging.getLogger(__name__)

LifeReport = Ready | Leaving | StartFailed | Fatal | Lost


class RankGroup:
    """The present group of ranks: what it reported of itself, and what is restored to it."""

    def __init__(
        self,
        send: Callable[[ConductorMessage], None],
        state: GroupState,
        *,
        world_size: int,
        served: ServedModels,
        requests: LiveRequests,
        loads: AdapterLoads,
        queries: RankQueries,
        state_file: StateFile,
        leave_s: float,
    ) -> None:
        """``leave_s``: the seconds running requests get once a signal asks the ranks to stop."""
        self._send = send
        self._state = state
        self._world_size = world_size
        self._served = served
        self._requests = requests
        self._loads = loads
        self._questions = queries
        self._state_file = state_file
        self.drain = GroupDrain(requests, leave_s, self._drained)
        self.ready: dict[int, Ready] = {}
        """rank -> what it serves with; that of ranks that are gone stays until others say it."""
        self.on_capacity: Callable[[], None] = lambda: None
        """Called when ``Conductor.has_capacity`` may have become true."""
        self.became_ready = asyncio.Event()
        self.changed = asyncio.Event()
        """Set whenever a rank fails or is lost, and when reports can be routed no more."""
        self._came: set[int] = set()
        self._restore: Restore | None = None

    # ------------------------------------------------------------------ the ranks' reports

    def take(self, rank: int, report: LifeReport) -> None:
        """Take what a rank reports of its own life."""
        match report:
            case Ready():
                self._take_ready(rank, report)
            case Leaving():
                self._asked_to_stop()
            case StartFailed() | Fatal():
                self._state.causes.take(rank, report)
                self._rank_lost()
            case Lost(cause=cause):
                self.lose(rank, self._state.causes.losses.get(rank, cause))

    def lose(self, rank: int, how: str) -> None:
        """Note that a rank is gone; how its process ended says more than that it is silent."""
        self._state.causes.losses[rank] = how
        self._rank_lost()

    def _rank_lost(self) -> None:
        was_up = self._state.up
        if self._state.apply(GroupEvent.RANK_LOST):
            self._ended("a rank is gone" if was_up else None)
        self.changed.set()

    def _asked_to_stop(self) -> None:
        """Begin the drain of ranks that serve; others are told to stop at once."""
        before = self._state.phase
        if not self._state.apply(GroupEvent.ASKED_TO_STOP):
            return
        if self._state.leaving:
            self.drain.begin()
            self.on_capacity()
        elif before is Phase.STARTING:
            self._dismiss(None)

    def _drained(self) -> None:
        self._state.apply(GroupEvent.DRAINED)
        self._dismiss("the ranks leave")

    def _dismiss(self, who: str | None) -> None:
        """Tell ranks that were asked to stop to do so: others are to come."""
        self._send(Shutdown())
        self._ended(who)
        self.changed.set()

    def _ended(self, who: str | None) -> None:
        """Have requests and loads wait for the next ranks. Idempotent.

        ``who``: what ended a group that was up, for the log.
        """
        if who is not None:
            live = counted(len(self._requests), "live request")
            logger.info("%s: what waits for the next ranks: %s", who, live)
        self.drain.cancel()
        self._restore = None
        self._loads.ranks_left()
        self._questions.fail_all(self._state.reason())
        self.on_capacity()

    # ------------------------------------------------------------------ ranks come

    def _take_ready(self, rank: int, report: Ready) -> None:
        self.ready[rank] = report
        self._came.add(rank)
        if len(self._came) < self._world_size or self._state.phase is not Phase.STARTING:
            return
        logger.info("every rank is ready")
        # Ranks that are started again begin with no adapter: one may be gone or changed by now.
        begins_with = self._served.configured if self._state.epoch == 0 else ()
        self._restore = Restore(self._send, self._loads.ids, self._world_size, begins_with)
        wanted = set(self._loads.wanted())
        self._restore.announce(
            adapter
            for adapter in self._served.known()
            if adapter.key in wanted or self._loads.in_use(adapter.key)
        )
        self._settle_restore()

    def take_result(self, rank: int, result: LoadResult) -> None:
        """Take one rank's validation of an adapter that is loaded, or restored."""
        if self._restore is not None and self._restore.take_result(rank, result):
            self._settle_restore()
        else:
            self._loads.take_result(rank, result)

    def take_done(self, load_id: int, cause: str | None) -> None:
        """Take the leader's word that it applied a commit, or why it could not."""
        key = None if self._restore is None else self._restore.take_done(load_id)
        if key is None:
            self._loads.take_done(load_id, cause)
        elif cause is not None:
            self._drop(key, cause)

    def _settle_restore(self) -> None:
        """Tell the new ranks all that there was, once they have validated every adapter."""
        restore = self._restore
        if restore is None or not restore.settled or self._state.phase is not Phase.STARTING:
            return
        for rid, key in self._requests.carry_over():
            if key is None or restore.serve(key):
                self._send(self._requests.message(rid))
            else:
                why = restore.refused.get(key, "it is gone")
                message = f"the ranks were started again and cannot go on with this request: {why}"
                self._requests.end(rid, ApiError(500, message, code="request_failed"))
        restore.end(self._loads.wanted())
        for key, why in restore.refused.items():
            self._drop(key, why)
        self._state.apply(GroupEvent.RESTORED)
        self._state.causes.serves()
        self._loads.ranks_came()
        self.became_ready.set()

    def _drop(self, key: AdapterKey, why: str) -> None:
        """Serve ``key`` no more: the ranks cannot restore it."""
        logger.error("adapter %s is served no more: %s", key, why)
        adapter = self._served.get(key.name)
        if adapter is not None and adapter.key == key:
            self._served.remove(key.name)
            self._state_file.changed(self._served)
        if not self._loads.in_use(key):
            self._served.forget(key)

    # ------------------------------------------------------------------ the restart loop's side

    def await_next(self) -> None:
        """Forget the ranks that are gone: those that say hello next are others."""
        dismissed = self._state.phase is Phase.DISMISSED
        self._ended(None)
        self._state.causes.next_group(dismissed=dismissed)
        self._state.apply(GroupEvent.AWAITED)
        self._came.clear()
        self.became_ready.clear()
        self.changed.clear()

    def time_out(self, message: str) -> None:
        """End what waits for ranks that do not come, with ``message``."""
        self._state.apply(GroupEvent.TIMED_OUT)
        self.fail_all(message)

    def die(self) -> None:
        """End every live request with the reason why there will be no more ranks."""
        self._state.apply(GroupEvent.GIVEN_UP)
        self.drain.cancel()
        self.fail_all(self._state.reason())
        self.on_capacity()

    # ------------------------------------------------------------------ the server's stop

    def begin_draining(self) -> None:
        """Take no new requests from now on."""
        self._state.apply(GroupEvent.SERVER_DRAINS)
        self.drain.cancel()
        self.on_capacity()

    def send_shutdown(self) -> None:
        """Tell the ranks to stop; their going away is expected from now on."""
        serving = self._state.serves
        self._state.apply(GroupEvent.SERVER_STOPS)
        if serving:
            self._send(Shutdown())
        self.drain.cancel()
        self.on_capacity()

    def fail(self, fault: str) -> None:
        """Note that this process itself cannot go on: the restart loop ends the server."""
        self._state.causes.fault = fault
        self.changed.set()

    def fail_all(self, message: str) -> None:
        """End every live request, load and query with ``message``. Nothing is sent."""
        self._requests.fail_all(message)
        self._loads.fail_all(message)
        self._questions.fail_all(message)
