"""What the conductor keeps of a request, and where its tokens arrive. The event loop owns both."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Literal, NamedTuple

from mstar_tp.frontend.errors import ApiError
from mstar_tp.wire.messages import AdapterKey, ImageInput, SamplingParams, Token


class Origin(NamedTuple):
    """The API request that an answer is for. ``arrived``: by ``time.monotonic``."""

    request_id: str
    arrived: float
    traceparent: str | None = None
    """Of W3C's trace context, as its client sent it."""


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
"""Nothing has come for any answer: the ranks are down, and others will go on."""


class Arrival(NamedTuple):
    """Something for the answer at ``place`` among a ticket's."""

    place: int
    item: Token | ApiError | Literal[_StillWaiting.TOKEN]


class ClientGoneError(Exception):
    """The client left: nobody reads the answer."""


@dataclass(slots=True)
class Ticket:
    """One API request's answers in the making, and the arrivals its handler has not taken yet."""

    rids: dict[int, int] = field(default_factory=dict)
    """place -> rid, of the answers that still run."""
    _arrivals: list[Arrival] = field(default_factory=list)
    _waiter: asyncio.Future[None] | None = None
    _gone: bool = False

    def push(self, arrival: Arrival) -> None:
        self._arrivals.append(arrival)
        self._wake()

    def leave(self) -> None:
        """The client is gone: whoever waits for the next arrivals is told."""
        self._gone = True
        self._wake()

    async def next(self) -> list[Arrival]:
        """All that arrived since the last call; waits for the first.

        Raises:
            ClientGoneError: the client left.
        """
        while not self._arrivals and not self._gone:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._gone:
            raise ClientGoneError
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
