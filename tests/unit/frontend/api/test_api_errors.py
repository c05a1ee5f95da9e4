"""Pins what clients are told when a request is refused: OpenAI's error shape, always, naming the
field and never repeating what was sent; one bad request hurts no other.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.api_kit import CONTEXT, Api

from mstar_tp.wire.commands import NewRequest

KEY = {"Authorization": "Bearer secret"}
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    api = Api(tmp_path_factory.mktemp("errors"), api_key=["other", "secret"], admin_key="root")
    yield api
    api.close()


@pytest.fixture
def api(served: Api) -> Iterator[Api]:
    served.ranks.reset()
    yield served
    served.ranks.go()


@pytest.fixture
def http(api: Api) -> Iterator[httpx.Client]:
    with api.http(headers=KEY) as client:
        yield client


def refused(answer: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    """The error of an answer that has OpenAI's shape."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str)
    assert error["param"] == param
    assert "Traceback" not in answer.text and "<class" not in answer.text
    return error


def test_every_kind_of_failure_has_one_shape(http: httpx.Client, api: Api) -> None:
    route = "/v1/chat/completions"
    ok = {"model": "tiny", "messages": CHAT}
    refused(http.post(route, content=b'{"model": "tiny", '), 400)
    refused(http.post(route, content=b"[1, 2]"), 400)
    refused(http.post(route, json=ok | {"messages": {"role": "user"}}), 400, "messages")
    refused(http.post(route, json={"model": "tiny"}), 400, "messages")
    refused(http.post(route, json={"messages": CHAT}), 400, "model")
    error = refused(http.post(route, json=ok | {"model": "nope"}), 404, "model")
    assert error["code"] == "model_not_found" and "nope" in error["message"]
    refused(http.get("/v1/nothing"), 404)
    answer = http.get(route)
    refused(answer, 405)
    assert answer.headers["allow"] == "POST"
    with api.http() as stranger:
        error = refused(stranger.post(route, json=ok), 401)
        assert error["code"] == "invalid_api_key"
        refused(stranger.get("/v1/models"), 401)
        refused(stranger.get("/v1/models", headers={"Authorization": "Bearer wröng".encode()}), 401)
        assert stranger.get("/health").status_code == 200


def test_the_official_client_shows_the_message(api: Api) -> None:
    client = api.client(api_key="secret")
    with pytest.raises(openai.NotFoundError, match="'nope' does not exist") as missing:
        client.completions.create(model="nope", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        client.completions.create(model="tiny", prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        api.client(api_key="wrong").models.list()


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_an_unknown_model_is_a_plain_404_for_streams_too(http: httpx.Client, route: str) -> None:
    ask = {"prompt": "x"} if route == "/v1/completions" else {"messages": CHAT}
    for body in ({"model": "nope"}, {"model": "nope", "stream": True}):
        error = refused(http.post(route, json=ask | body), 404, "model")
        assert error["code"] == "model_not_found"
    body = {"model": "tiny", "lora_adapter": "nope"}
    refused(http.post(route, json=ask | body), 404, "lora_adapter")


@pytest.mark.parametrize("n", [0, 1000])
def test_n_outside_its_bounds_is_refused_by_name(http: httpx.Client, n: int) -> None:
    body = {"model": "tiny", "prompt": "x", "n": n}
    refused(http.post("/v1/completions", json=body), 400, "n")


def test_more_than_the_context_is_refused_with_all_lengths(http: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": [9] * 60, "max_tokens": 100}
    error = refused(http.post("/v1/completions", json=body), 400, "max_tokens")
    assert error["code"] == "context_length_exceeded"
    assert all(number in error["message"] for number in ("60", "100", str(CONTEXT)))
    for options in ({}, {"max_tokens": 1}, {"stream": True}):
        body = {"model": "tiny", "prompt": [9] * 70, **options}
        error = refused(http.post("/v1/completions", json=body), 400, "prompt")
        assert error["code"] == "context_length_exceeded"
        assert "70" in error["message"] and str(CONTEXT) in error["message"]


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""]])
def test_an_empty_prompt_is_refused_where_there_is_no_start_token(
    http: httpx.Client, api: Api, prompt: Any
) -> None:
    body = {"model": "tiny", "prompt": prompt}
    refused(http.post("/v1/completions", json=body), 400, "prompt")
    refused(
        http.post("/v1/chat/completions", json={"model": "tiny", "messages": []}), 400, "messages"
    )
    assert api.ranks.messages(NewRequest) == []
    good = http.post("/v1/completions", json=body | {"prompt": "ok", "max_tokens": 2})
    assert good.status_code == 200


SURROGATES = [
    (b'{"model":"tiny","prompt":"a\\ud800b"}', "prompt"),
    (b'{"model":"ti\\udc00ny","prompt":"a"}', "model"),
    (b'{"model":"tiny","prompt":"a","stop":["x","\\ud83d"]}', "stop"),
    (b'{"model":"tiny","prompt":"a\xff\xfeb"}', "prompt"),
]


@pytest.mark.parametrize(("body", "param"), SURROGATES)
def test_text_that_is_no_unicode_is_refused_before_any_event(
    http: httpx.Client, body: bytes, param: str
) -> None:
    refused(http.post("/v1/completions", content=body), 400, param)
    streamed = body[:-1] + b',"stream":true}'
    refused(http.post("/v1/completions", content=streamed), 400, param)


def test_emoji_and_nul_are_text(http: httpx.Client) -> None:
    body = b'{"model":"tiny","prompt":"\\ud83c\\udf0d \\u0000","max_tokens":1}'
    assert http.post("/v1/completions", content=body).status_code == 200


def test_values_are_never_repeated(http: httpx.Client) -> None:
    huge = "y" * 100_000
    for body in ({"max_tokens": huge}, {"stop": [huge, 1]}, {"temperature": [huge]}):
        answer = http.post("/v1/completions", json={"model": "tiny", "prompt": "x", **body})
        refused(answer, 400, next(iter(body)))
        assert len(answer.content) < 500
    answer = http.post("/v1/completions", json={"model": huge, "prompt": "x"})
    refused(answer, 404, "model")
    assert len(answer.content) < 500


def test_a_body_beyond_the_bound_is_refused(http: httpx.Client) -> None:
    pieces = (b" " * 2**20 for _ in range(33))
    refused(http.post("/v1/completions", content=pieces), 413)


def test_more_answers_than_the_server_holds_are_refused_for_good(http: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": ["x"] * 33, "n": 128}
    refused(http.post("/v1/completions", json=body), 400, "prompt")


def test_a_model_without_a_template_takes_completions_only(tmp_path: Path) -> None:
    api = Api(tmp_path, chat=None)
    try:
        with api.http() as http:
            body = {"model": "tiny", "messages": CHAT}
            error = refused(http.post("/v1/chat/completions", json=body), 400, "messages")
            assert "chat_template" in error["message"]
    finally:
        api.close()


def test_what_fails_before_the_first_token_is_a_plain_error_for_streams_too(
    http: httpx.Client, api: Api
) -> None:
    api.ranks.fail = lambda request: "rank 1 could not read adapter pirate#0: no such file"
    for stream in (False, True):
        body = {"model": "pirate", "prompt": "x", "stream": stream}
        error = refused(http.post("/v1/completions", json=body), 500)
        assert "rank 1 could not read" in error["message"]
        assert error["code"] == "request_failed"


def test_operators_routes_need_the_admin_key(http: httpx.Client, api: Api) -> None:
    load = {"lora_name": "x", "lora_path": str(api.roots / "extra")}
    refused(http.post("/v1/load_lora_adapter", json=load), 403)
    refused(http.post("/v1/unload_lora_adapter", json={"lora_name": "x"}), 403)
    refused(http.get("/debug/state"), 403)
    with api.http() as stranger:
        refused(stranger.get("/debug/state"), 401)
    with api.http(headers={"Authorization": "Bearer root"}) as admin:
        assert admin.get("/debug/state").status_code == 200
        refused(admin.get("/v1/models"), 401)
