"""Names for requests: what a client sent as X-Request-Id, or one made here; and their log.

An ASGI layer around the whole application. Every answer carries the name, and so does every log
line that is written in the request's task. Event loop's thread.
"""

from __future__ import annotations

import logging
import re
import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mstar_tp.common import log
from mstar_tp.frontend.metrics.counters import Ended
from mstar_tp.frontend.ranks.request_handle import Origin

logger = logging.getLogger(__name__)

HEADER = b"x-request-id"
_KEY = "mstar_tp.origin"
_NAME = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:/+=@~-]{0,127}")
"""The names that are taken from a client: they stand in headers and logs."""
SHOWN_BYTES = 200
"""The most bytes of a path that the log shows."""
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def request_id(given: bytes | None) -> str:
    """The name that a client gave its request, or a new one where it gave none that can be used."""
    if given is not None and _NAME.fullmatch(given):
        return given.decode("ascii")
    return secrets.token_hex(16)


def origin_of(scope: Scope) -> Origin:
    """Return what is known of the request from outside of its body."""
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
    """``app``, with a name for every request, and with ``logs`` a line in the log."""

    def __init__(self, app: ASGIApp, *, logs: bool = False) -> None:
        self.app = app
        self._logs = logs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        origin = scope[_KEY] = _read(scope)
        log.request_id.set(origin.request_id)
        name = (HEADER, origin.request_id.encode("ascii"))
        status = 0

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), name]
            await send(message)

        try:
            await self.app(scope, receive, named)
        finally:
            if self._logs:
                _log_answer(scope, status, time.monotonic() - origin.arrived)


def _log_answer(scope: Scope, status: int, took_s: float) -> None:
    # As it was sent, so percent-encoded: no control characters. The query may hold a key.
    path = scope.get("raw_path", b"").partition(b"?")[0][:SHOWN_BYTES].decode("latin-1")
    fields = {
        "method": scope["method"],
        "path": path,
        "status": status,
        "seconds": round(took_s, 6),
    }
    if not status:
        logger.info("%s %s: the client left", scope["method"], path, extra={"fields": fields})
        return
    logger.info(
        "%s %s %d in %.3f s", scope["method"], path, status, took_s, extra={"fields": fields}
    )


def log_ended(request: Ended) -> None:
    """One line about an answer that is over."""
    times = request.times
    first = round(times.first_token - times.arrived, 6) if times.first_token else None
    fields = {
        "answer": request.place,
        "adapter": request.adapter,
        "slot": request.slot,
        "outcome": request.outcome.value,
        "prompt_tokens": request.prompt_tokens,
        "generated_tokens": request.generated_tokens,
        "queue_seconds": times.queued_s,
        "first_token_seconds": first,
        "seconds": round(times.ended - times.arrived, 6),
    }
    text = ", ".join(
        f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}"
        for key, value in fields.items()
        if value is not None
    )
    extra = {"request_id": request.request_id, "fields": fields}
    logger.info("ended: %s", text, extra=extra)
