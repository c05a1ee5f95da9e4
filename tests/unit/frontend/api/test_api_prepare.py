"""Promise: over HTTP, requests reach the ranks in the order in which they came, however long each
is prepared; none that was abandoned does; and a client that stops reading is dropped, alone.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.api_kit import GUARD_S, Api
from test_api_lifecycle import BODY, in_background, post

from mstar_tp.frontend.api import gate
from mstar_tp.frontend.api.generate_routes import GenerateEndpoint
from mstar_tp.frontend.metrics.outcomes import Outcome
from mstar_tp.frontend.ranks import request_handle
from mstar_tp.frontend.text.prepare import INLINE_BYTES, PreparePool
from mstar_tp.frontend.text.tokenizer import TextTokenizer
from mstar_tp.wire import frontend_link
from mstar_tp.wire.commands import Abort, NewRequest

LONG = "x" * (2 * INLINE_BYTES)
CONTEXT = 8192


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    api = Api(tmp_path_factory.mktemp("api"), context=CONTEXT)
    yield api
    api.close()


@pytest.fixture(autouse=True)
def fresh(api: Api) -> Iterator[None]:
    yield
    api.ranks.go()
    api.run(api.conductor.requests.idle.wait())
    api.ranks.reset()


class Gates:
    """A text is tokenized once its gate is open; who has entered the line is known."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = {text: threading.Event() for text in "abcd"}
        self._entered = threading.Semaphore(0)
        encode, enter = TextTokenizer.encode, PreparePool.enter

        def held(tokenizer: TextTokenizer, text: str, *args: Any, **more: Any) -> tuple[int, ...]:
            if text.endswith(LONG):
                assert self.open[text[0]].wait(GUARD_S)
            return encode(tokenizer, text, *args, **more)

        def noted(*args: Any, **more: Any) -> Any:
            place = enter(*args, **more)
            self._entered.release()
            return place

        monkeypatch.setattr(TextTokenizer, "encode", held)
        monkeypatch.setattr(PreparePool, "enter", noted)

    def send(self, api: Api, prompt: str) -> Any:
        future = in_background(post, api, **{"prompt": prompt, "max_tokens": 1})
        assert self._entered.acquire(timeout=GUARD_S)
        return future

    def await_entry(self) -> None:
        assert self._entered.acquire(timeout=GUARD_S)


def test_requests_reach_the_ranks_as_they_came_without_those_that_left(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = Gates(monkeypatch)
    answers = [gates.send(api, "a" + LONG)]
    with api.leaver(BODY | {"prompt": "b" + LONG}):
        gates.await_entry()
        answers += [gates.send(api, "short"), gates.send(api, "c" + LONG)]
    gates.open["c"].set()
    too_long = gates.send(api, "d" + "x" * (CONTEXT + 1) + LONG)
    gates.open["d"].set()
    assert not api.ranks.messages(NewRequest)
    gates.open["a"].set()
    gates.open["b"].set()
    assert [answer.result(GUARD_S).status_code for answer in answers] == [200, 200, 200]
    assert too_long.result(GUARD_S).status_code == 400
    heads = [api.tokenizer.decode(m.prompt)[:1] for m in api.ranks.wait_for(NewRequest, 3)]
    assert heads == ["a", "s", "c"]
    assert not api.ranks.messages(Abort)


def test_a_full_outbox_is_waited_for(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    gates = Gates(monkeypatch)
    monkeypatch.setattr(frontend_link, "OUTBOX_FRAMES", 0)  # always full
    waits = gates.send(api, "short")
    assert not api.ranks.messages(NewRequest)
    monkeypatch.undo()
    api.loop.call_soon_threadsafe(api.conductor.group.on_capacity)
    assert waits.result(GUARD_S).status_code == 200


@pytest.mark.parametrize(
    ("bound", "value", "why"),
    [
        (
            (request_handle, "MAX_UNREAD_BYTES"),
            50 * request_handle.TOKEN_BYTES,
            "more slowly than its answer",
        ),
        ((gate, "READ_S"), 0.05, "has read 0 bytes in 0.05 s"),
    ],
    ids=["too much waits", "too long"],
)
def test_a_client_that_stops_reading_is_dropped_alone(
    api: Api,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    bound: tuple[Any, str],
    value: float,
    why: str,
) -> None:
    monkeypatch.setattr(*bound, value)
    listener: Any = api._server._listener
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    dropped = api.conductor.requests.request_counters.outcomes[Outcome.SLOW]
    api.ranks.script = lambda request: [65] * CONTEXT
    data = json.dumps(BODY | {"max_tokens": 8000, "n": 4, "stream": True}).encode()
    host, port = api.url.removeprefix("http://").split(":")
    with socket.socket() as client, caplog.at_level(logging.WARNING):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        client.sendall(head % len(data) + data)
        assert {m.rid for m in api.ranks.wait_for(Abort, 4)} == {
            m.rid for m in api.ranks.messages(NewRequest)
        }
        assert post(api, max_tokens=3).status_code == 200
    assert api.conductor.requests.request_counters.outcomes[Outcome.SLOW] == dropped + 4
    assert "was dropped (rids " in caplog.text and why in caplog.text


ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"model": "tiny", "prompt": "a" + LONG}),
    ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": LONG}]}),
    ("/v1/responses", {"model": "tiny", "input": LONG}),
    ("/tokenize", {"prompt": LONG}),
    ("/detokenize", {"tokens": [9] * len(LONG)}),
    ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": LONG}),
    ("/v1/unload_lora_adapter", {"lora_name": LONG}),
    ("/v1/validate_lora_adapter", {"lora_path": LONG}),
]


def test_bodies_that_wait_are_bounded_together(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mstar_tp.frontend.api.body.MAX_HELD_BYTES", len(LONG))
    with api.http() as http:
        for route, body in ROUTES:
            answer = http.post(route, json=body)
            assert answer.status_code == 503, route
            assert int(answer.headers["retry-after"]) > 0
    assert post(api).status_code == 200


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("route", "body", "status", "param"),
    [
        ("completions", BODY | {"prompt": [9] * 100_000}, 400, "prompt"),
        ("completions", BODY | {"prompt": [[9]] * 100_000}, 400, "prompt"),
        ("completions", BODY | {"stop_token_ids": [9] * 100_000}, 400, "stop_token_ids"),
        ("chat/completions", {**CHAT, "messages": CHAT["messages"] * 10**5}, 400, "messages"),
        ("chat/completions", {**CHAT, "tools": [{}] * 100_000}, 400, "tools"),
        ("responses", {"model": "tiny", "input": CHAT["messages"] * 10**5}, 400, "input"),
        ("responses", {"model": "tiny", "input": "x", "tools": [{}] * 100_000}, 400, "tools"),
    ],
)
def test_large_lists_are_refused_by_name_and_read_on_a_thread(
    api: Api,
    monkeypatch: pytest.MonkeyPatch,
    route: str,
    body: dict[str, Any],
    status: int,
    param: str,
) -> None:
    threads = []
    read = GenerateEndpoint._parse

    def noted(endpoint: GenerateEndpoint, data: bytes) -> Any:
        threads.append(threading.current_thread().name)
        return read(endpoint, data)

    monkeypatch.setattr(GenerateEndpoint, "_parse", noted)
    with api.http() as http:
        answer = http.post(f"/v1/{route}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert [name.startswith("prepare") for name in threads] == [True]


def test_too_many_values_and_too_long_texts_are_refused_whole(api: Api) -> None:
    values = b'{"tokens": [' + b"1," * 1_100_000 + b"1]}"
    with api.http() as http:
        for route in ("/detokenize", "/tokenize", "/v1/completions", "/v1/responses"):
            answer = http.post(route, content=values)
            assert answer.status_code == 413 and "1048576 commas" in answer.text, route
        answer = http.post("/tokenize", json={"prompt": "x" * 4_000_001})
        assert answer.status_code == 400 and "4000001 characters" in answer.text
        answer = http.post("/v1/unload_lora_adapter", json={"lora_name": "x" * 70_000})
        assert answer.status_code == 413 and "65536 bytes" in answer.text
