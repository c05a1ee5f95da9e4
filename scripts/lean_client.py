"""A load generator's client: one request, again and again, over connections that are kept open.

It knows just enough HTTP to tell one answer from the next, so that a machine's few cores are left
to the server that is measured.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple
from urllib.parse import urlsplit


class Answer(NamedTuple):
    status: int
    retry_after: int
    """0: the answer does not say."""
    body: bytes


class LeanClient:
    """Asks over a connection that is idle, or a new one. Event loop's thread."""

    def __init__(self, url: str, path: str, body: bytes) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        self._host, self._port = parts.hostname, parts.port
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._request = head.encode() + body
        self._idle: list[_Connection] = []

    def ask(self) -> asyncio.Future[Answer]:
        """Send the request; its answer, or a ConnectionError."""
        if self._idle:
            return self._idle.pop().send(self._request)
        return asyncio.ensure_future(self._connect_and_ask())

    def close(self) -> None:
        for connection in self._idle:
            connection.transport.close()

    async def _connect_and_ask(self) -> Answer:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: _Connection(self._idle), self._host, self._port
        )
        return await connection.send(self._request)


class _Connection(asyncio.Protocol):
    """Lies in ``idle`` while no answer is due on it."""

    transport: asyncio.Transport

    def __init__(self, idle: list[_Connection]) -> None:
        self._idle = idle
        self._data = b""
        self._answer: asyncio.Future[Answer] | None = None

    def send(self, request: bytes) -> asyncio.Future[Answer]:
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, rest = self._data.partition(b"\r\n\r\n")
        if not end:
            return
        headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        size = int(headers[b"content-length"])
        if len(rest) < size or self._answer is None:
            return
        retry_after = int(headers.get(b"retry-after", b"0"))
        answer, self._answer, self._data = self._answer, None, rest[size:]
        if headers.get(b"connection") != b"close":
            self._idle.append(self)
        answer.set_result(Answer(int(head[9:12]), retry_after, rest[:size]))

    def connection_lost(self, error: Exception | None) -> None:
        if self in self._idle:
            self._idle.remove(self)
        if self._answer is not None:
            self._answer.set_exception(error or ConnectionError("closed before the answer"))
