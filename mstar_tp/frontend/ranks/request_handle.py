"""The handle of an API request, at which its tokens arrive. The event loop's thread owns it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Literal, NamedTuple

from mstar_tp.frontend.api.api_errors import ApiError
from mstar_tp.wire.reports import Token
from mstar_tp.wire.values import AdapterKey, ImageInput, SamplingParams


class Origin(NamedTuple):
    """The API request that an answer is for. ``arrived`` is in seconds by ``time.monotonic``."""

    request_id: str
    arrived: float
    traceparent: str | None = None
    """The header of W3C's trace context, as its client sent it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One answer to be made: one request of the ranks."""

    prompt: tuple[int, ...]
    images: tuple[ImageInput, ...] = ()
    params: SamplingParams
    adapter: AdapterKey | None
    priority: int = 0
    origin: Origin | None = None

    @property
    def image_bytes(self) -> int:
        return sum(len(image.pixels) for image in self.images)


class _StillWaiting(Enum):
    TOKEN = 0


STILL_WAITING: Final = _StillWaiting.TOKEN
"""The sign that nothing has come: the ranks are down, and others will go on."""


class Arrival(NamedTuple):
    """An item for the answer at ``place`` of a request handle."""

    place: int
    item: Token | ApiError | Literal[_StillWaiting.TOKEN]


MAX_UNREAD_BYTES = 1 << 20
"""About the most bytes that wait for a slow client, beside what its connection holds."""
MORE_UNREAD_BYTES = 64 << 10
"""The bytes that may wait besides for each further answer to the same request."""
TOKEN_BYTES = 256
"""About the bytes that a token which waits takes, with its arrival."""
LOGPROB_BYTES = 64
"""About the bytes that each alternative to a token takes."""


class ClientGoneError(Exception):
    """The client left: nobody reads the answer."""


@dataclass(slots=True)
class RequestHandle:
    """The running answers of one API request, and the arrivals its handler has not taken yet."""

    name: str = ""
    """The request's id."""
    rids: dict[int, int] = field(default_factory=dict)
    """place -> rid, for the answers that still run."""
    drop: Callable[[str], None] = lambda why: None
    """Ends the connection of a client that reads too slowly; called where ``push`` says no."""
    gone: bool = False
    """True once its client left, or was dropped."""
    _arrivals: list[Arrival] = field(default_factory=list)
    _unread: int = 0
    """About the bytes of the arrivals."""
    _waiter: asyncio.Future[None] | None = None

    def push(self, arrival: Arrival) -> bool:
        """Add an arrival; return whether no more waits than may."""
        self._arrivals.append(arrival)
        self._unread += _size(arrival)
        self._wake()
        more = MORE_UNREAD_BYTES * max(0, len(self.rids) - 1)
        return self._unread <= MAX_UNREAD_BYTES + more

    def leave(self) -> None:
        """Tell whoever waits for the next arrivals that the client is gone."""
        self.gone = True
        self._wake()

    async def next(self) -> list[Arrival]:
        """Return all that arrived since the last call, and wait for the first.

        Raises:
            ClientGoneError: the client left.
        """
        while not self._arrivals and not self.gone:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self.gone:
            raise ClientGoneError
        arrivals, self._arrivals, self._unread = self._arrivals, [], 0
        return arrivals

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _size(arrival: Arrival) -> int:
    token = arrival.item
    if not isinstance(token, Token) or token.logprobs is None:
        return TOKEN_BYTES
    scored = (token.logprobs, *token.prompt_logprobs)
    return TOKEN_BYTES + LOGPROB_BYTES * sum(len(one.top_ids) + 1 for one in scored)
