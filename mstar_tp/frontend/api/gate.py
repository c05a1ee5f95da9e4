"""HTTP connections whose requests can be turned away before they cost anything.

A server that is asked for more than it can do spends its time on those it serves: a request for
tokens that finds no room is answered as soon as its headers are in, without a task, its body thrown
away as it comes; a connection past the most there may be is answered and closed, and so is one
whose headers are too large or whose request does not come to its end. Event loop's thread.

It extends uvicorn's protocol class and reads that class's attributes (``cycle``, ``pipeline``,
``parser``, ``timeout_keep_alive_task``). None of them is underscored, but uvicorn documents none of
them either. Its setting ``limit_concurrency`` refuses by a task of its own, and with the httptools
parser no setting bounds the time or the bytes of a request's head: none replaces this.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Literal, cast

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mstar_tp.frontend.api.api_errors import ApiError, unavailable
from mstar_tp.frontend.api.client_connection import Reader, put_reader, reader_of
from mstar_tp.frontend.api.request_ids import HEADER, request_id

GUARDED = frozenset((b"/v1/completions", b"/v1/chat/completions", b"/v1/responses"))
"""Routes that ask for tokens."""
MAX_CONNECTIONS = 16_384
KEPT_FILES = 256
"""The number of open files that are kept for what is no client's connection."""
LINGER_S = 1.0
"""The seconds for which a connection that was turned away may go on sending.

Closed under what it sends, it would be reset, and its client would see no answer.
"""
MAX_HEAD_BYTES = 64 << 10
"""The most bytes of a request's line and headers."""
HEAD_S = 30.0
"""The seconds within which a request's line and headers must come."""
BODY_S = 60.0
"""The seconds within which a body must come, whether it is read or thrown away."""
READ_S = 30.0
MIN_READ_BYTES = 1024
"""A client that is owed more than its connection holds must read so much in so long a time."""

Check = Callable[[], None]
"""Raises ApiError: no request for tokens is taken now."""


def max_connections() -> int:
    """Return how many clients may be connected: as many as there are files for, up to a bound."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(MAX_CONNECTIONS, files - KEPT_FILES))


def gated(
    check: Check, most: int, refused: Callable[[ApiError], None] = lambda error: None
) -> type[asyncio.Protocol]:
    """The protocol of a server's connections: ``most`` of them, their requests checked.
    ``refused`` is told of each that was turned away here.
    """

    class Gated(GatedProtocol):
        _check = staticmethod(check)
        _most = most
        _refused_with = staticmethod(refused)

    return Gated


class GatedProtocol(HttpToolsProtocol):
    """One connection."""

    _check: Check
    _most: int
    _refused_with: Callable[[ApiError], None]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._dropping = False
        """The rest of the request that is coming in is thrown away: it was answered."""
        self._keeps = False
        """Whether the connection stays open behind it."""
        self._turned_away = False
        self._part: Literal["", "head", "body"] = ""
        """What of a request is coming in."""
        self._head_bytes = 0
        self._num_messages = 0
        self._timed: tuple[int, str] | None = None
        """The message and its part that ``_timer`` is for."""
        self._timer: asyncio.TimerHandle | None = None
        self._unread = 0
        """Bytes that the client was owed when it was last looked at how it reads."""
        self._reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) < self._most:
            super().connection_made(transport)
            self._watch()
            return
        self._turned_away = True
        self.transport = transport
        error = unavailable(
            f"{self._most} clients are connected, the most there may be: try again later",
            code="too_many_connections",
        )
        self._refused_with(error)
        transport.write(_answer(error, keeps=False, name=request_id(None)))
        transport.write_eof()
        self.loop.call_later(LINGER_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_reading_timer()
        super().connection_lost(exc)

    # ------------------------------------------------------------------ what the client reads

    def pause_writing(self) -> None:
        """The client is owed so much that nothing more is written: see whether it reads."""
        super().pause_writing()
        self._look_at_reading_later()

    def resume_writing(self) -> None:
        self._stop_reading_timer()
        super().resume_writing()

    def _look_at_reading_later(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        self._reading = self.loop.call_later(READ_S, self._look_at_reading)

    def _look_at_reading(self) -> None:
        read = self._unread - self.transport.get_write_buffer_size()
        if read >= MIN_READ_BYTES:
            self._look_at_reading_later()
            return
        cut = self.transport.abort
        reader = Reader(cut) if self.cycle is None else reader_of(cast(Scope, self.cycle.scope))
        reader.drop(f"has read {read} bytes in {READ_S:g} s, with {self._unread} waiting for it")

    def _stop_reading_timer(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        self._reading = None

    # ------------------------------------------------------------------ what comes in

    def data_received(self, data: bytes) -> None:
        if self._turned_away or self.transport.is_closing():
            return
        super().data_received(data)
        if self._part == "head":
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._turn_away(_head_too_large())
        if not (self._turned_away or self.transport.is_closing()):
            self._watch()

    @property
    def _busy(self) -> bool:
        """Return whether a request that came in before, in part at least, is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def _watch(self) -> None:
        """Time what is awaited: a request, or the rest of one that has begun."""
        now = (self._num_messages, self._part)
        if now == self._timed:
            return
        self._stop_timer()
        if not self._part and self._busy:
            return
        seconds = {"head": HEAD_S, "body": BODY_S}.get(self._part, self.timeout_keep_alive)
        self._timed = now
        self._timer = self.loop.call_later(seconds, self._late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._timed = None

    def _late(self) -> None:
        self._stop_timer()
        if self.pipeline or (self._part != "body" and self._busy):
            self._watch()  # it is not read on while the request before it is answered
        elif self._part:
            bound_s = BODY_S if self._part == "body" else HEAD_S
            message = f"the request's {self._part} did not come to its end within {bound_s:g} s"
            self._turn_away(ApiError(408, message, code="request_timeout"))
        else:
            self.transport.close()

    def _turn_away(self, error: ApiError) -> None:
        """Answer the request that is coming in with ``error``, and close.

        Nothing is sent where its answer has begun or another's comes first.
        """
        self._stop_timer()
        if self._part == "body":
            open_ = not (self._dropping or self.pipeline or self.cycle.response_started)
        else:
            open_ = not self._busy
        if not open_:
            self.transport.close()
            return
        self._turned_away = True
        self._refused_with(error)
        self.transport.write(_answer(error, keeps=False, name=self._name()))
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        self._turn_away(ApiError.bad_request(f"{msg} It is not HTTP/1.1 as RFC 9112 has it."))

    def on_message_begin(self) -> None:
        self._dropping = False
        self._part = "head"
        self._head_bytes = 0
        self._num_messages += 1
        super().on_message_begin()
        put_reader(cast(Scope, self.scope), Reader(self.transport.abort))

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEAD_BYTES and not self._turned_away:
            self._turn_away(_head_too_large())
        if self._turned_away or self.transport.is_closing():
            self._dropping = True
            self._keeps = False
        elif not self._refused():
            super().on_headers_complete()  # raises where the request names no path
        self._part = "body"

    def _refused(self) -> bool:
        """Return whether the request finds no room, and was answered so."""
        # Answers leave in the order of their requests: none before one that is in the making.
        if not self._busy and self._asks_for_tokens():
            try:
                self._check()
            except ApiError as error:
                self._refuse(error)
                return True
        return False

    def _asks_for_tokens(self) -> bool:
        return self.url.partition(b"?")[0] in GUARDED and self.parser.get_method() == b"POST"

    def on_body(self, body: bytes) -> None:
        if not self._dropping:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._part = ""
        if not self._dropping:
            super().on_message_complete()
        elif self._turned_away:
            return
        elif self._keeps:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        else:
            self.transport.close()

    def _name(self) -> str:
        """Return what the request that is coming in is called."""
        given = [value for name, value in self.headers or () if name == HEADER]
        return request_id(given[0] if given else None)

    def _refuse(self, error: ApiError) -> None:
        self._dropping = True
        # Who waits for a go-ahead sends no body: where the next request begins would be a guess.
        self._keeps = (
            self.parser.get_http_version() != "1.0"
            and self.parser.should_keep_alive()
            and not self.expect_100_continue
        )
        self._refused_with(error)
        self.transport.write(_answer(error, keeps=self._keeps, name=self._name()))
        if self.expect_100_continue:
            self.transport.close()


def _head_too_large() -> ApiError:
    return ApiError(431, f"the request's line and headers have more than {MAX_HEAD_BYTES} bytes")


def _answer(error: ApiError, *, keeps: bool, name: str) -> bytes:
    body = error.body()
    headers = {
        **error.headers,
        "x-request-id": name,
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "keep-alive" if keeps else "close",
    }
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join((*lines, "", "")).encode("latin-1") + body
