"""Promise: a request that finds no room costs the server nothing but its refusal: it is answered
before its body has come, and its connection is good for the next; connections are bounded too.
"""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path
from typing import cast

import pytest
from support.api_kit import GUARD_S, Api
from test_api_lifecycle import BODY, in_background, post

from mstar_tp.frontend.api import gate
from mstar_tp.frontend.api.generate_routes import GenerateEndpoint
from mstar_tp.wire.commands import NewRequest

ROUTE = "/v1/completions"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    api = Api(tmp_path_factory.mktemp("api"), max_queue=4)
    yield api
    api.close()


@pytest.fixture
def full(api: Api) -> Iterator[Api]:
    """Holds as many requests as it may."""
    before = len(api.ranks.messages(NewRequest))
    api.ranks.hold()
    held = [in_background(post, api) for _ in range(4)]
    api.ranks.wait_for(NewRequest, before + 4)
    yield api
    api.ranks.go()
    assert [future.result(GUARD_S).status_code for future in held] == [200] * 4


class Client:
    """A connection. Answers are read through one buffer: several may come at once."""

    def __init__(self, connection: socket.socket) -> None:
        self.sendall = connection.sendall
        self._file = _Unclosed(socket.SocketIO(connection, "r"))

    def makefile(self, mode: str) -> io.BufferedReader:
        return self._file

    def at_end(self) -> bool:
        return self._file.read(1) == b""

    def read_all(self) -> bytes:
        return self._file.read()

    def answer(self, method: str = "POST") -> tuple[HTTPResponse, str]:
        """The next answer, and the error's code in it."""
        response = HTTPResponse(cast(socket.socket, self), method=method)
        response.begin()
        return response, json.loads(response.read()).get("error", {}).get("code", "")


class _Unclosed(io.BufferedReader):
    def close(self) -> None:
        """An answer that was read closes what it was read from."""


@contextmanager
def connected(api: Api) -> Iterator[Client]:
    host, port = api.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), GUARD_S) as connection:
        yield Client(connection)


def head(length: int, *headers: str, method: str = "POST", version: str = "1.1") -> bytes:
    lines = (f"{method} {ROUTE} HTTP/{version}", "Host: x", f"Content-Length: {length}", *headers)
    return "\r\n".join((*lines, "", "")).encode()


def test_it_is_refused_before_its_body_comes_and_the_connection_goes_on(full: Api) -> None:
    body = b"x" * 300_000
    with connected(full) as client:
        for _ in range(2):
            client.sendall(head(len(body)))
            response, code = client.answer()
            assert (response.status, code) == (503, "queue_full")
            assert int(response.headers["retry-after"]) > 0
            client.sendall(body)
        client.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.answer("GET")[0].status == 200
        client.sendall(head(0, method="GET"))
        assert client.answer("GET")[0].status == 405


@pytest.mark.parametrize(
    "head",
    [
        head(3, "Connection: close") + b"abc",
        head(3, version="1.0") + b"abc",
        head(1_000_000, "Expect: 100-continue"),
    ],
    ids=["close", "1.0", "expects a go-ahead"],
)
def test_a_connection_that_cannot_go_on_is_closed_behind_the_refusal(
    full: Api, head: bytes
) -> None:
    with connected(full) as client:
        client.sendall(head)
        response, code = client.answer()
        assert (response.status, code) == (503, "queue_full")
        assert response.headers["connection"] == "close"
        assert client.at_end()


def test_every_route_that_asks_for_tokens_is_guarded(api: Api) -> None:
    routes = api._server._server.config.app.app.routes  # type: ignore[union-attr]
    ask = {route.path.encode() for route in routes if isinstance(route.endpoint, GenerateEndpoint)}
    assert ask == gate.GUARDED


def test_an_answer_in_the_making_is_not_overtaken_by_a_refusal(api: Api) -> None:
    before = len(api.ranks.messages(NewRequest))
    data = json.dumps(BODY | {"n": 4}).encode()
    api.ranks.hold()
    with connected(api) as client:
        client.sendall(head(len(data)) + data)
        api.ranks.wait_for(NewRequest, before + 4)
        client.sendall(head(len(data)) + data)
        with connected(api) as other:
            other.sendall(head(len(data)) + data)
            assert other.answer()[1] == "queue_full"
        api.ranks.go()
        assert [client.answer()[0].status for _ in range(2)] == [200, 200]


def test_past_the_most_connections_a_client_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "MAX_CONNECTIONS", 2)
    api = Api(tmp_path)
    try:
        with connected(api) as client, connected(api), connected(api) as late:
            # It may be in the midst of a large request: its answer must reach it all the same.
            late.sendall(head(100_000) + b"x" * 100_000)
            response, code = late.answer()
            assert (response.status, code) == (503, "too_many_connections")
            assert int(response.headers["retry-after"]) > 0 and late.at_end()
            data = json.dumps(BODY).encode()
            client.sendall(head(len(data)) + data)
            assert client.answer()[0].status == 200
    finally:
        api.close()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (head(0, "X: " + "a" * 100_000), 431),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000, 431),
        (head(0, *(f"X{at}: a" for at in range(20_000))), 431),
        (b"\x00\xff", 400),
        (b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (head(3) + b"abc" + b"?? ??\r\n\r\n", 400),
    ],
    ids=[
        "a large header",
        "one without an end",
        "many",
        "no HTTP",
        "no path",
        "no HTTP behind a request",
    ],
)
def test_what_is_no_request_is_answered_in_the_shape_of_errors(
    api: Api, sent: bytes, status: int
) -> None:
    with connected(api) as client:
        client.sendall(sent)
        if b"abc" not in sent:
            assert client.answer()[0].status == status
        client.read_all()


@pytest.mark.parametrize(
    ("sent", "status"),
    [(b"POST / HT", 408), (head(10) + b"{", 408), (b"\r\n", None), (b"", None)],
    ids=["headers", "body", "blank lines", "nothing"],
)
def test_a_request_that_does_not_come_to_its_end_holds_no_connection(
    api: Api, monkeypatch: pytest.MonkeyPatch, sent: bytes, status: int | None
) -> None:
    for bound in ("HEAD_S", "BODY_S"):
        monkeypatch.setattr(gate, bound, 0.01)
    monkeypatch.setattr(api._server._server.config, "timeout_keep_alive", 0.01)
    with connected(api) as client:
        client.sendall(sent)
        if status is not None:
            response, code = client.answer()
            assert (response.status, code) == (status, "request_timeout")
        assert client.at_end()
