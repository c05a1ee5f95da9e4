"""The requests that were taken and have not ended. The event loop's thread.

This module numbers requests, bounds how many are held, hands tokens to whoever waits for them, and
keeps all that new ranks need to go on with each. It sends nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mstar_tp.frontend.api.api_errors import (
    RETRY_AFTER_S,
    ApiError,
    bad_request,
    printable,
    unavailable,
)
from mstar_tp.frontend.metrics.counters import Ended, RequestCounters, Times
from mstar_tp.frontend.metrics.outcomes import Outcome
from mstar_tp.frontend.ranks.request_handle import STILL_WAITING, Arrival, RequestHandle, Submission
from mstar_tp.wire.adapter_limits import NO_LIMITS, AdapterLimits
from mstar_tp.wire.commands import NewRequest
from mstar_tp.wire.reports import Tokens
from mstar_tp.wire.values import AdapterKey

MAX_IMAGE_BYTES = 256 * 2**20
"""The most bytes of pixels of all live requests together; every rank holds them too."""


@dataclass(slots=True)
class _Live:
    handle: RequestHandle
    place: int
    submission: Submission
    times: Times
    tokens: list[int] = field(default_factory=list)
    """The tokens that its client has been given."""
    slot: int = 0


class Reservation:
    """The places in the queue of requests that are being prepared, until the end of a ``with``."""

    def __init__(self, requests: LiveRequests, name: str | None, count: int) -> None:
        self._requests = requests
        self._name = name
        self._count = count
        self.on_end: Callable[[], None] = lambda: None
        """Called at the end of the ``with``."""

    def give_back(self) -> None:
        """Give the places back, to requests that are live now. Idempotent."""
        self._requests.unreserve(self._name, self._count)
        self._count = 0

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.give_back()
        self.on_end()


class LiveRequests:
    """The table of live requests, in arrival order."""

    def __init__(
        self,
        max_queue: int,
        *,
        on_unnamed: Callable[[AdapterKey], None],
        request_counters: RequestCounters | None = None,
        limits_of: Callable[[AdapterKey | None], AdapterLimits] = lambda key: NO_LIMITS,
        fair: bool = False,
    ) -> None:
        """``on_unnamed`` is told when the last live request that names an adapter ends.

        ``limits_of`` gives an adapter's limits, None standing for the base model. ``fair``: an
        adapter that has no limit may hold as many requests as there are places left.
        """
        self._limits_of = limits_of
        self._fair = fair
        self._held: Counter[str | None] = Counter()
        """adapter's name, or None for the base model -> its requests, live or being prepared."""
        self._max_queue = max_queue
        self._rids = itertools.count()
        self._on_unnamed = on_unnamed
        self._live: dict[int, _Live] = {}
        self._image_bytes = 0
        """The bytes of the pixels of all live requests."""
        self._reserved = 0
        """The places of requests that are being prepared."""
        self._users: Counter[AdapterKey] = Counter()
        """adapter -> the number of live requests that name it."""
        self._carried: set[int] = set()
        """Requests that the present ranks took over from others and that have not ended."""
        self.carried_all = False
        """True once requests that the present ranks took over have all ended."""
        self.request_counters = request_counters or RequestCounters()
        self.on_ended: list[Callable[[Ended, Submission], None]] = []
        """The functions that are told of every request that is over."""
        self.idle = asyncio.Event()
        """Set while no request is live."""
        self.idle.set()

    def __len__(self) -> int:
        return len(self._live)

    def names(self, key: AdapterKey) -> bool:
        """Return whether a live request names ``key``."""
        return key in self._users

    def rids(self) -> set[int]:
        """Return the live requests' numbers."""
        return set(self._live)

    def count_of(self, key: AdapterKey) -> int:
        """Return the number of live requests that name ``key``."""
        return self._users[key]

    # ------------------------------------------------------------------ in

    def check_capacity(self, count: int = 1) -> None:
        """Raises ApiError: 503, with ``count`` requests more there would be too many."""
        held = len(self._live) + self._reserved
        if held + count > self._max_queue:
            raise unavailable(
                f"the server holds {held} of at most {self._max_queue} requests: try again later",
                code="queue_full",
            )

    def reserve(self, count: int, key: AdapterKey | None) -> Reservation:
        """Reserve places for ``count`` requests on one adapter that are being prepared.

        Raises:
            ApiError: 503, there would be too many; 429, too many of their adapter.
        """
        self.check_capacity(count)
        self._check_share(count, key)
        name = None if key is None else key.name
        self._reserved += count
        self._held[name] += count
        return Reservation(self, name, count)

    def unreserve(self, name: str | None, count: int) -> None:
        """Take ``count`` places back that were reserved."""
        self._reserved -= count
        self._release(name, count)

    def _release(self, name: str | None, count: int) -> None:
        self._held[name] -= count
        if not self._held[name]:
            del self._held[name]

    def add(self, submissions: Sequence[Submission]) -> RequestHandle:
        """Take one request a submission, in order, whose places were reserved until now.

        Raises:
            ApiError: 503, there would be too many bytes of images.
        """
        image_bytes = sum(submission.image_bytes for submission in submissions)
        if image_bytes and self._image_bytes + image_bytes > MAX_IMAGE_BYTES:
            raise unavailable(
                f"the server holds {self._image_bytes} of at most {MAX_IMAGE_BYTES} bytes of "
                "images: try again later",
                code="queue_full",
            )
        self._image_bytes += image_bytes
        origin = submissions[0].origin
        handle = RequestHandle("a request" if origin is None else origin.request_id)
        now = time.monotonic()
        for index, submission in enumerate(submissions):
            rid = next(self._rids)
            arrived = now if submission.origin is None else submission.origin.arrived
            live = self._live[rid] = _Live(handle, index, submission, Times(arrived, now))
            handle.rids[index] = rid
            self.request_counters.taken(_name(submission), len(submission.prompt), live.times)
            self._held[_adapter(submission)] += 1
            if submission.adapter is not None:
                self._users[submission.adapter] += 1
        self.idle.clear()
        return handle

    def _check_share(self, count: int, key: AdapterKey | None) -> None:
        """Raises ApiError: 429, the adapter has as many requests here as it may."""
        name = None if key is None else key.name
        limit, rule = self._limits_of(key).max_queued, ""
        if limit is not None:
            rule = f"of at most {limit}"
            if count > limit:
                raise bad_request(
                    f"n: asks for {count} answers, and at most {limit} are held at once on this "
                    "model",
                    param="n",
                )
        elif self._fair:
            limit = self._max_queue - len(self._live) - self._reserved
            rule = f"and has {limit} places left for all"
        if limit is not None and self._held[name] + count > limit:
            whose = "the base model" if name is None else f"adapter '{printable(name)}'"
            raise ApiError(
                429,
                f"the server holds {self._held[name]} requests on {whose} {rule}: try again later; "
                "those on others are taken",
                type="rate_limit_error",
                param="model",
                code="adapter_queue_full",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )

    def message(self, rid: int) -> NewRequest:
        """Return the message that opens a request, with the tokens it has from earlier ranks."""
        live = self._live[rid]
        return NewRequest(
            rid=rid,
            prompt=live.submission.prompt,
            params=live.submission.params,
            adapter=live.submission.adapter,
            images=live.submission.images,
            output=tuple(live.tokens),
            priority=live.submission.priority,
            request_id=_id(live.submission),
        )

    def carry_over(self) -> list[tuple[int, AdapterKey | None]]:
        """Return every request and its adapter, in their old order, for new ranks to take over."""
        self._carried, self.carried_all = set(self._live), False
        return [(rid, live.submission.adapter) for rid, live in self._live.items()]

    # ------------------------------------------------------------------ tokens

    def route(self, report: Tokens) -> list[RequestHandle]:
        """Hand each token to whoever waits for it; return those for whom too much waits now."""
        live_of, now = self._live, time.monotonic()
        overrun: list[RequestHandle] = []
        for token in report.tokens:
            live = live_of.get(token.rid)
            if live is None:
                continue  # aborted, and this token was on its way
            live.tokens.append(token.token)
            self.request_counters.token(live.times, now, token.queued_us)
            live.slot = token.slot
            if token.finish is not None:
                self._forget(token.rid, Outcome(token.finish))
                live.handle.rids.pop(live.place, None)
            if not live.handle.push(Arrival(live.place, token)):
                overrun.append(live.handle)
        return overrun

    def keep_open(self) -> None:
        """Give every waiting client a sign of life while the ranks are down."""
        for handle in {id(live.handle): live.handle for live in self._live.values()}.values():
            handle.push(Arrival(0, STILL_WAITING))

    # ------------------------------------------------------------------ out

    def abort(
        self, handle: RequestHandle, index: int | None = None, why: Outcome = Outcome.ABORTED
    ) -> list[int]:
        """Forget the answer at ``index``, or all that still run; return the numbers of these.

        One answer is forgotten because it came to a stop string, all because their client left.
        """
        outcome = why if index is None else Outcome.STOP
        aborted = []
        for one in list(handle.rids) if index is None else [index]:
            rid = handle.rids.pop(one, None)
            if rid is not None and self._forget(rid, outcome):
                aborted.append(rid)
        return aborted

    def end(self, rid: int, error: ApiError) -> None:
        """End a request with ``error``; no-op for one that ended."""
        live = self._live.get(rid)
        if live is not None:
            self._forget(rid, Outcome.FAILED)
            live.handle.rids.pop(live.place, None)
            live.handle.push(Arrival(live.place, error))

    def fail_all(self, message: str) -> None:
        """End every live request with a 503 that says ``message``."""
        for rid in list(self._live):
            self.end(rid, unavailable(message, code="server_stopped"))

    def _forget(self, rid: int, outcome: Outcome) -> bool:
        live = self._live.pop(rid, None)
        known = live is not None
        if rid in self._carried:
            self._carried.remove(rid)
            self.carried_all = not self._carried
        if live is not None:
            self._end(live, outcome)
            self._image_bytes -= live.submission.image_bytes
            self._release(_adapter(live.submission), 1)
            if live.submission.adapter is not None:
                self._no_longer_named(live.submission.adapter)
        if not self._live:
            self.idle.set()
        return known

    def _end(self, live: _Live, outcome: Outcome) -> None:
        live.times.ended = time.monotonic()
        submission = live.submission
        ended = Ended(
            request_id=_id(submission),
            place=live.place,
            adapter=_name(submission),
            outcome=outcome,
            prompt_tokens=len(submission.prompt),
            generated_tokens=len(live.tokens),
            slot=live.slot,
            times=live.times,
        )
        self.request_counters.ended(ended)
        for tell in self.on_ended:
            tell(ended, submission)

    def _no_longer_named(self, key: AdapterKey) -> None:
        """Note that one request fewer names ``key``."""
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self._on_unnamed(key)

    # ------------------------------------------------------------------ operators

    def table(self, limit: int) -> list[dict[str, object]]:
        """Return the oldest ``limit`` live requests as this process sees them."""
        return [
            {
                "rid": rid,
                "request_id": _id(live.submission),
                "adapter": None
                if live.submission.adapter is None
                else str(live.submission.adapter),
                "prompt_tokens": len(live.submission.prompt),
                "tokens": len(live.tokens),
                "slot": live.slot,
            }
            for rid, live in itertools.islice(self._live.items(), limit)
        ]


def _id(submission: Submission) -> str:
    return "" if submission.origin is None else submission.origin.request_id


def _name(submission: Submission) -> str | None:
    return None if submission.adapter is None else submission.adapter.name


def _adapter(submission: Submission) -> str | None:
    """Return the name that requests count under: generations together; None is the base model."""
    return None if submission.adapter is None else submission.adapter.name
