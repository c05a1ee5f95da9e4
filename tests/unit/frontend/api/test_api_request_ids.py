"""Pins what requests are called: as their clients say or by a name of ours, in every answer,
towards every rank and in the log, which says nothing that clients said.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from support.api_kit import Api

from mstar_tp.frontend.ranks.group_state import Stop
from mstar_tp.wire.commands import NewRequest

BODY: dict[str, Any] = {"model": "tiny", "prompt": "a secret", "max_tokens": 3, "temperature": 0}
KEY = {"Authorization": "Bearer KEY-123"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory):
    folder: Path = tmp_path_factory.mktemp("ids")
    api = Api(folder, max_queue=2, api_key=["KEY-123"], enable_log_requests=True)
    yield api
    api.ranks.go()
    api.close()


@pytest.fixture
def api(served: Api) -> Api:
    served.ranks.reset()
    return served


def test_a_given_name_is_kept_and_told_to_every_rank(api: Api) -> None:
    with api.http(headers=KEY) as http:
        for stream in (False, True):
            name = f"client-{stream}/1"
            body = BODY | {"stream": stream, "n": 2}
            answer = http.post("/v1/completions", json=body, headers={"X-Request-Id": name})
            assert answer.headers.get_list("x-request-id") == [name]
            for rank in (0, 1):
                sent = api.ranks.wait_for(NewRequest, 2, rank)[-2:]
                assert [request.request_id for request in sent] == [name, name]
            api.ranks.reset()


@pytest.mark.parametrize(
    "given", [None, "", "a" * 129, "two words", "x\ty", '{"a"}', "ünï".encode()]
)
def test_without_a_name_that_can_be_used_one_is_made(api: Api, given: Any) -> None:
    headers = {} if given is None else {"X-Request-Id": given}
    with api.http(headers=KEY) as http:
        names = {http.get("/v1/models", headers=headers).headers["x-request-id"] for _ in range(2)}
    assert len(names) == 2
    assert all(re.fullmatch("[0-9a-f]{32}", name) for name in names)


def test_every_refusal_carries_the_name(api: Api) -> None:
    name = {"X-Request-Id": "r1"}
    with api.http() as http:
        wanted = {
            401: http.post("/v1/completions", json=BODY, headers=name),
            400: http.post("/v1/completions", content=b"{", headers=name | KEY),
            404: http.get("/nowhere", headers=name),
            405: http.put("/v1/models", headers=name),
        }
        api.ranks.hold(0)
        with api.leaver(BODY), api.leaver(BODY):
            pass  # without a key: they take no room
        api.conductor.state.stop = Stop.DRAINING
        wanted[503] = http.post("/v1/completions", json=BODY, headers=name | KEY)
        api.conductor.state.stop = Stop.NONE
    for status, answer in wanted.items():
        assert answer.status_code == status
        assert answer.headers.get_list("x-request-id") == ["r1"], status


def test_the_log_tells_of_each_request_and_nothing_that_it_said(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    api.answer("its answer")
    with caplog.at_level(logging.DEBUG, "mstar_tp"), api.http() as http:
        headers = KEY | {"X-Request-Id": "r2"}
        body = BODY | {"model": "pirate", "max_tokens": 10}
        http.post("/v1/completions?api_key=KEY-123", json=body, headers=headers)
        http.get("/v1/models/%0aERROR%20forged", headers={"X-Request-Id": "r3", **KEY})
        http.get("/health")  # taken once the line of the answer before it has been logged
    lines = {record.getMessage(): record for record in caplog.records}
    ended = next(record for text, record in lines.items() if text.startswith("ended: "))
    assert ended.request_id == "r2"  # type: ignore[attr-defined]
    fields: dict[str, Any] = ended.fields  # type: ignore[attr-defined]
    assert fields["adapter"] == "pirate"
    assert fields["slot"] == 3
    assert fields["outcome"] == "length"
    assert (fields["prompt_tokens"], fields["generated_tokens"]) == (len(api.ids("a secret")), 10)
    assert 0 <= fields["first_token_seconds"] <= fields["seconds"]
    assert any(text.startswith("POST /v1/completions 200 in ") for text in lines)
    assert any(text.startswith("GET /v1/models/%0aERROR%20forged 404 in ") for text in lines)
    for text, record in lines.items():
        whole = f"{text} {record.__dict__}"
        assert "\n" not in text
        for said in ("secret", "KEY-123", "its answer"):
            assert said not in whole, text
