"""Names for requests: what a client sent as X-Request-Id, or one made here.

An ASGI layer around the whole application. Every answer carries the name, and so does every log
line that is written in the request's task. Event loop's thread.
"""

from __future__ import annotations

import re
import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mstar_tp import log
from mstar_tp.frontend.tickets import Origin

HEADER = b"x-request-id"
_KEY = "mstar_tp.origin"
_NAME = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:/+=@~-]{0,127}")
"""What is taken from a client: it stands in headers and logs."""
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def request_id(given: bytes | None) -> str:
    """The name that a client gave its request, or a new one where it gave none that can be used."""
    if given is not None and _NAME.fullmatch(given):
        return given.decode("ascii")
    return secrets.token_hex(16)


def origin_of(scope: Scope) -> Origin:
    """What is known of the request from outside of its body."""
    origin = scope.get(_KEY)
    return origin if isinstance(origin, Origin) else _read(scope)


def _read(scope: Scope) -> Origin:
    name = parent = None
    for key, value in scope["headers"]:
        if key == HEADER:
            name = value
        elif key == b"traceparent" and _TRACEPARENT.fullmatch(value):
            parent = value.decode("ascii")
    return Origin(request_id(name), time.monotonic(), parent)


class NamedRequests:
    """``app``, with a name for every request."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        origin = scope[_KEY] = _read(scope)
        log.request_id.set(origin.request_id)
        name = (HEADER, origin.request_id.encode("ascii"))

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), name]
            await send(message)

        await self.app(scope, receive, named)
