"""The client's end of an answer, as its connection and its request's handler both see it.

The event loop's thread.

A client that stops reading is dropped, so that what it does not read lies nowhere. The connection
bounds the time (``gate``), the request's handle bounds what waits (``handles``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from starlette.types import Receive, Scope

from mstar_tp.frontend.ranks.conductor import Conductor
from mstar_tp.frontend.ranks.request_handle import Origin, RequestHandle
from mstar_tp.frontend.text.prepare import Place

logger = logging.getLogger(__name__)

_KEY = "mstar_tp.reader"


class Reader:
    """Whoever reads the answer to one request."""

    def __init__(self, cut: Callable[[], None]) -> None:
        """``cut``: closes the connection at once, whatever has not left yet."""
        self._cut = cut
        self.on_slow: Callable[[str], None] = _log

    def drop(self, why: str) -> None:
        """It reads too slowly: its request's handler is told so, and the connection ends."""
        self.on_slow(why)
        self._cut()


def put_reader(scope: Scope, reader: Reader) -> None:
    scope[_KEY] = reader


def reader_of(scope: Scope) -> Reader:
    """Return the reader of a request.

    It can cut nothing where another server than ours runs the app.
    """
    reader = scope.get(_KEY)
    return reader if isinstance(reader, Reader) else Reader(lambda: None)


def _log(why: str) -> None:
    logger.warning("a connection was dropped: its client %s", why)


class Client:
    """The waiting client of one request, from its body's first byte to its answer's last event."""

    def __init__(self, origin: Origin, reader: Reader) -> None:
        self.origin = origin
        self.sent_little = False
        """Nothing of its request is worth a thread."""
        self._reader = reader
        self._watcher: asyncio.Task[None] | None = None
        self._handle: RequestHandle | None = None
        self._place: Place[Any, Any] | None = None
        self._gone = False

    def watch(self, receive: Receive) -> None:
        """Notice from now on when it leaves."""
        self._watcher = asyncio.ensure_future(self._watch(receive))

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        if self._place is not None:
            self._place.abandon()
        if self._handle is not None:
            self._handle.leave()

    def wait_at(self, place: Place[Any, Any]) -> None:
        self._place = place
        if self._gone:
            place.abandon()

    def take(self, handle: RequestHandle, conductor: Conductor) -> None:
        """Its answers are in the making, and end with it, also when it does not read them."""
        self._handle = handle
        handle.drop = self._reader.drop
        self._reader.on_slow = lambda why: conductor.drop_slow(handle, why)

    def end(self, conductor: Conductor) -> None:
        """It is answered, or gone."""
        if self._watcher is not None:
            self._watcher.cancel()
        if self._handle is not None:
            conductor.abort(self._handle)
