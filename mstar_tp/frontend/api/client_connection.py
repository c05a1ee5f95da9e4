"""The client's end of an answer, as its connection and its request's handler both see it.

The event loop's thread.

A client that stops reading is dropped, so that what it does not read lies nowhere. The connection
bounds the time (``gate``), the request's ticket bounds what waits (``handles``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from starlette.types import Scope

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
