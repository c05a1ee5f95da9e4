"""Registers requests with the ranks and routes what the ranks report back to whoever waits for it.

One conductor an instance, on the event loop's thread. It numbers requests, bounds how many are
held, turns a leaving client into an Abort, and turns the ranks' failures into clear errors. What it
sends is one stream, the same to every rank (R1).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from mstar_tp.frontend.errors import ApiError, unavailable
from mstar_tp.frontend.loads import AdapterLoads
from mstar_tp.frontend.metrics import FigureTaker, Outcome, Snapshot, Tally
from mstar_tp.frontend.served import ServedModels
from mstar_tp.frontend.tickets import Arrival, Submission, Ticket
from mstar_tp.wire.channels import Lost
from mstar_tp.wire.messages import (
    Abort,
    AdapterDigest,
    ConductorMessage,
    Fatal,
    Inspect,
    LoadDone,
    LoadResult,
    NewRequest,
    Progress,
    RankFigures,
    RankReport,
    Ready,
    RequestFailed,
    Shutdown,
    StartFailed,
    StateReport,
    Tokens,
)

logger = logging.getLogger(__name__)

MAX_IMAGE_BYTES = 256 * 2**20
"""Of the pixels of all live requests together: every rank holds them too."""


class Link(Protocol):
    """What the conductor needs of ``FrontendLink``."""

    def send_all(self, message: ConductorMessage) -> None: ...

    async def receive(self) -> tuple[int, RankReport | Lost]: ...


class Phase(Enum):
    STARTING = "the ranks are starting"
    READY = "ready"
    DRAINING = "the server is shutting down"
    DEAD = "the ranks are gone"


@dataclass(slots=True)
class _Live:
    ticket: Ticket
    place: int
    submission: Submission
    sent: int = 0
    slot: int = 0


class Conductor:
    """Owns the table of live requests."""

    def __init__(
        self,
        link: Link,
        served: ServedModels,
        *,
        world_size: int,
        max_queue: int,
        on_progress: Callable[[int, str], None] = lambda rank, text: None,
    ) -> None:
        """``on_progress``: told what each rank does while it starts."""
        self._link = link
        self._served = served
        self._world_size = world_size
        self._max_queue = max_queue
        self._on_progress = on_progress
        self._live: dict[int, _Live] = {}
        self._image_bytes = 0
        """Of the pixels of all live requests."""
        self._rids = itertools.count()
        self._queries: dict[int, dict[int, StateReport]] = {}
        self._answers: dict[int, asyncio.Future[list[StateReport]]] = {}
        self.idle = asyncio.Event()
        """Set while no request is live."""
        self.idle.set()
        self.phase = Phase.STARTING
        self.ready: dict[int, Ready] = {}
        self.causes: dict[int, str] = {}
        """rank -> why it stopped, in its own words."""
        self.losses: dict[int, str] = {}
        """rank -> how this process noticed that it is gone."""
        self.fault: str | None = None
        """Why this process itself cannot go on, whatever the ranks do."""
        self._shutdown_ordered = False
        self.became_ready = asyncio.Event()
        self.changed = asyncio.Event()
        """Set whenever a rank fails or is lost, and with ``fault``."""
        self.loads = AdapterLoads(self._send, served, world_size=world_size, max_pending=max_queue)
        self._figures = FigureTaker(self._send, world_size)
        self._tally = Tally()

    # ------------------------------------------------------------------ requests

    @property
    def num_live(self) -> int:
        return len(self._live)

    def check_open(self) -> None:
        """Raises ApiError: 503, no request is taken now."""
        if self.phase is not Phase.READY:
            raise unavailable(f"{self.reason()}: try again later", code="not_ready")

    def submit(self, submissions: Sequence[Submission]) -> Ticket:
        """Open one request a submission, in order.

        Raises:
            ApiError: 503, the queue is full or the ranks cannot take requests.
        """
        self.check_open()
        if len(self._live) + len(submissions) > self._max_queue:
            self._tally.ended(Outcome.REFUSED, len(submissions))
            raise unavailable(
                f"the server holds {len(self._live)} of at most {self._max_queue} requests: "
                "try again later",
                code="queue_full",
            )
        image_bytes = sum(submission.image_bytes for submission in submissions)
        if image_bytes and self._image_bytes + image_bytes > MAX_IMAGE_BYTES:
            self._tally.ended(Outcome.REFUSED, len(submissions))
            raise unavailable(
                f"the server holds {self._image_bytes} of at most {MAX_IMAGE_BYTES} bytes of "
                "images: try again later",
                code="queue_full",
            )
        self._image_bytes += image_bytes
        ticket = Ticket()
        for index, submission in enumerate(submissions):
            rid = next(self._rids)
            self._live[rid] = _Live(ticket, index, submission)
            ticket.rids[index] = rid
            self._tally.prompt_tokens += len(submission.prompt)
            self._send(
                NewRequest(
                    rid=rid,
                    prompt=submission.prompt,
                    params=submission.params,
                    adapter=submission.adapter,
                    images=submission.images,
                )
            )
        self.idle.clear()
        return ticket

    def abort(self, ticket: Ticket, index: int | None = None) -> None:
        """Stop one answer of ``ticket`` (it has come to a stop string), or all that still run
        (their client left). No-op for those that ended.
        """
        outcome = Outcome.ABORTED if index is None else Outcome.STOP
        indices = list(ticket.rids) if index is None else [index]
        for one in indices:
            rid = ticket.rids.pop(one, None)
            if rid is not None and self._forget(rid, outcome) and self.phase is not Phase.DEAD:
                self._send(Abort(rid=rid))

    def _forget(self, rid: int, outcome: Outcome) -> bool:
        live = self._live.pop(rid, None)
        known = live is not None
        if live is not None:
            self._image_bytes -= live.submission.image_bytes
        self._tally.ended(outcome, known)
        if not self._live:
            self.idle.set()
        return known

    def _end(self, rid: int, item: ApiError) -> None:
        live = self._live.get(rid)
        if live is not None:
            self._forget(rid, Outcome.FAILED)
            live.ticket.rids.pop(live.place, None)
            live.ticket.push(Arrival(live.place, item))

    # ------------------------------------------------------------------ operators

    async def inspect(self) -> list[StateReport]:
        """Every rank's tables, by rank, at one place in the order.

        Raises:
            ApiError: 503, the ranks do not serve, or were told to stop: they answer no more.
        """
        if self._shutdown_ordered or self.phase not in (Phase.READY, Phase.DRAINING):
            raise unavailable(self.reason(), code="not_ready")
        query_id = next(self._rids)
        future: asyncio.Future[list[StateReport]] = asyncio.get_running_loop().create_future()
        self._queries[query_id] = {}
        self._answers[query_id] = future
        self._send(Inspect(query_id=query_id))
        return await future

    async def measure(self) -> Snapshot:
        """What there is to count, of this process and of every rank that answers at once."""
        serves = self.phase in (Phase.READY, Phase.DRAINING) and not self._shutdown_ordered
        ranks = await self._figures.ask() if serves else {}
        return Snapshot(
            self._tally, len(self._live), self.phase is Phase.READY, self._world_size, ranks
        )

    def request_table(self) -> list[dict[str, object]]:
        """This process's own view of the live requests, for operators."""
        return [
            {
                "rid": rid,
                "adapter": None
                if live.submission.adapter is None
                else str(live.submission.adapter),
                "prompt_tokens": len(live.submission.prompt),
                "tokens": live.sent,
                "slot": live.slot,
            }
            for rid, live in self._live.items()
        ]

    def reason(self) -> str:
        """Why no request is taken now, in one sentence."""
        state: str = self.phase.value
        if self.phase is not Phase.DEAD:
            return state
        if self.fault is not None:
            return self.fault
        told = self.causes or self.losses
        causes = "; ".join(_once(f"rank {rank}: {cause}", rank) for rank, cause in told.items())
        return f"{state}: {causes}" if causes else state

    # ------------------------------------------------------------------ end

    def drain(self) -> None:
        """Take no new requests from now on."""
        if self.phase is Phase.READY:
            self.phase = Phase.DRAINING

    def fail_all(self, message: str) -> None:
        """End every live request, load and inspection with ``message``. Nothing is sent."""
        for rid in list(self._live):
            self._end(rid, unavailable(message, code="server_stopped"))
        self.loads.fail_all(message)
        answers, self._answers, self._queries = self._answers, {}, {}
        for future in answers.values():
            if not future.done():
                future.set_exception(unavailable(message))

    def order_shutdown(self) -> None:
        """Tell the ranks to stop; their going away is expected from now on."""
        serving = self.phase in (Phase.READY, Phase.DRAINING)
        self.phase = Phase.DRAINING
        self._shutdown_ordered = True
        if serving:
            self._send(Shutdown())

    def die(self) -> None:
        """The group is gone: every live request ends with an error that says why."""
        self.phase = Phase.DEAD
        self.fail_all(self.reason())

    def restart(self) -> None:
        """A new group will say hello: nothing of the old one counts."""
        self.phase = Phase.STARTING
        self.ready.clear()
        self.causes.clear()
        self.losses.clear()
        self.became_ready.clear()
        self.changed.clear()
        self._served.reset()

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
                self._route(report)
            case RequestFailed(rid=rid, cause=cause):
                self._end(rid, ApiError(500, cause, code="request_failed"))
            case LoadResult():
                self.loads.take_result(rank, report)
            case LoadDone(load_id=load_id, cause=cause):
                self.loads.take_done(load_id, cause)
            case AdapterDigest(key=key, digest=digest):
                self._served.set_digest(key, digest)
            case StateReport():
                self._take_state(rank, report)
            case RankFigures():
                self._figures.take(rank, report)
            case Ready():
                self._take_ready(rank, report)
            case Progress(text=text):
                self._on_progress(rank, text)
            case StartFailed(cause=cause) | Fatal(cause=cause):
                self.causes[rank] = cause
                self.changed.set()
            case Lost(cause=cause):
                self.losses[rank] = cause
                self.changed.set()

    def _route(self, report: Tokens) -> None:
        live_of = self._live
        for token in report.tokens:
            live = live_of.get(token.rid)
            if live is None:
                continue  # aborted, and this token was on its way
            live.sent += 1
            self._tally.generated_tokens += 1
            live.slot = token.slot
            if token.finish is not None:
                self._forget(token.rid, Outcome(token.finish))
                live.ticket.rids.pop(live.place, None)
            live.ticket.push(Arrival(live.place, token))

    def _take_ready(self, rank: int, report: Ready) -> None:
        self.ready[rank] = report
        if len(self.ready) == self._world_size and self.phase is Phase.STARTING:
            self.phase = Phase.READY
            self.became_ready.set()

    def _take_state(self, rank: int, report: StateReport) -> None:
        states = self._queries.get(report.query_id)
        if states is None:
            return
        states[rank] = report
        if len(states) == self._world_size:
            del self._queries[report.query_id]
            future = self._answers.pop(report.query_id)
            if not future.done():
                future.set_result([states[one] for one in sorted(states)])

    def _send(self, message: ConductorMessage) -> None:
        self._link.send_all(message)


def _once(text: str, rank: int) -> str:
    """``text`` with its rank named once: many causes begin with it already."""
    return text.removeprefix(f"rank {rank}: ") if text.startswith(f"rank {rank}: rank ") else text
