"""Pins judging an adapter without loading it, and the pages that say where every adapter is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.api_kit import Api

from mstar_tp.frontend.api.adapter_routes import MAX_PAGE
from mstar_tp.wire.commands import Load, Locate, Validate


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    api = Api(tmp_path, on_demand=20)
    on_demand = api.frontend.on_demand
    assert on_demand is not None
    on_demand._look_s = 0.0
    for number in range(5):
        folder = api.roots / f"n{number}"
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
    api.run(on_demand.scan())
    yield api
    api.close()


@pytest.fixture
def http(api: Api) -> Iterator[httpx.Client]:
    with api.http() as client:
        yield client


def validate(http: httpx.Client, **body: Any) -> httpx.Response:
    return http.post("/v1/validate_lora_adapter", json=body)


def adapters(http: httpx.Client, **query: Any) -> Any:
    answer = http.get("/v1/adapters", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_good_adapter_is_judged_and_not_kept(api: Api, http: httpx.Client) -> None:
    folder = str(api.roots / "extra")
    answer = validate(http, lora_path=folder)
    assert answer.status_code == 200
    assert answer.json() == {
        "object": "lora_validation",
        "valid": True,
        "lora_name": None,
        "lora_path": folder,
        "problems": [],
        "warnings": [{"message": "a bias has no effect", "ranks": [0, 1]}],
        "rank": 8,
        "targets": ["q_proj"],
        "bytes_per_rank": [100, 101],
    }
    assert [m.name for m in api.ranks.messages(Validate)] == ["extra"]
    assert api.ranks.messages(Load) == [] and api.served.get("extra") is None


def test_every_problem_is_listed_with_the_ranks_that_have_it(api: Api, http: httpx.Client) -> None:
    api.ranks.refusals = {1: "adapter 'x': too big"}
    answer = validate(http, lora_name="x", lora_path=str(api.roots / "extra")).json()
    assert not answer["valid"] and answer["problems"] == [{"message": "too big", "ranks": [1]}]
    api.ranks.refusals, api.ranks.lora_ranks = {}, {0: 4, 1: 8}
    answer = validate(http, lora_name="x", lora_path=str(api.roots / "extra")).json()
    assert not answer["valid"] and "not the same on every rank" in answer["problems"][0]["message"]
    api.ranks.lora_ranks = {}
    (api.roots / "extra" / "tokenizer.json").write_text("no JSON")
    answer = validate(http, lora_name="x", lora_path=str(api.roots / "extra")).json()
    assert [problem["ranks"] for problem in answer["problems"]] == [[]]
    assert "tokenizer.json" in answer["problems"][0]["message"]


def test_a_served_name_is_a_warning_unless_it_is_meant(api: Api, http: httpx.Client) -> None:
    body = {"lora_name": "pirate", "lora_path": str(api.roots / "extra")}
    warnings = validate(http, **body).json()["warnings"]
    assert ["load_inplace" in warning["message"] for warning in warnings] == [False, True]
    assert len(validate(http, **body, load_inplace=True).json()["warnings"]) == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "lora_path"),
        ({"lora_path": 3}, "lora_path"),
        ({"lora_path": "/etc"}, "lora_path"),
        ({"lora_path": "\0"}, "lora_path"),
        ({"lora_path": "extra", "lora_name": "../x"}, "lora_name"),
        ({"lora_path": "extra", "lora_name": "tiny"}, "lora_name"),
    ],
)
def test_what_cannot_be_judged_is_a_bad_request(
    api: Api, http: httpx.Client, body: dict[str, Any], param: str
) -> None:
    answer = validate(http, **body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert api.ranks.messages(Validate) == []


def test_pages_hold_every_adapter_once_in_order(api: Api, http: httpx.Client) -> None:
    for name in ("n1", "n3"):
        assert http.post("/tokenize", json={"model": name, "prompt": "x"}).status_code == 200
    api.ranks.refusals = {0: "no good", 1: "no good"}
    assert http.post("/tokenize", json={"model": "n2", "prompt": "x"}).status_code == 400
    api.ranks.refusals = {}
    names, pages, query = [], 0, {"limit": 2}
    while True:
        page = adapters(http, **query)
        names += [card["id"] for card in page["data"]]
        pages += 1
        assert page["total"] == 6 and page["last_id"] == names[-1]
        if not page["has_more"]:
            break
        query["after"] = page["last_id"]
    assert names == ["n0", "n1", "n2", "n3", "n4", "pirate"] and pages == 3
    states = {card["id"]: card["state"] for card in adapters(http)["data"]}
    assert states == {
        "n0": "available",
        "n1": "loaded",
        "n2": "refused",
        "n3": "loaded",
        "n4": "available",
        "pirate": "loaded",
    }
    for state in set(states.values()):
        wanted = [name for name in states if states[name] == state]
        assert [card["id"] for card in adapters(http, state=state)["data"]] == wanted
    (refused,) = adapters(http, state="refused")["data"]
    assert "no good" in refused["cause"]
    assert max(len(message.adapters) for message in api.ranks.messages(Locate)) <= 3


def test_one_adapter_says_where_it_is_on_every_rank(api: Api, http: httpx.Client) -> None:
    assert http.post("/tokenize", json={"model": "n1", "prompt": "x"}).status_code == 200
    card = http.get("/v1/adapters/n1").json()
    assert {key: card[key] for key in ("id", "state", "origin", "generation", "requests")} == {
        "id": "n1",
        "state": "loaded",
        "origin": "on_demand",
        "generation": 1,
        "requests": 0,
    }
    assert [(place["rank"], place["tier"]) for place in card["residency"]] == [
        (0, "device"),
        (1, "device"),
    ]
    assert http.get("/v1/adapters/pirate").json()["residency"][0]["tier"] == "disk"
    assert http.get("/v1/adapters/n4").json()["state"] == "available"
    assert http.get("/v1/adapters/nobody").status_code == 404
    api.lose_ranks()
    assert http.get("/v1/adapters/n1").json()["residency"] == [], "nobody can say it now"
    assert validate(http, lora_path=str(api.roots / "extra")).status_code == 503
    api.start_ranks()


@pytest.mark.parametrize("limit", ["0", "-1", "x", "", "1.5", str(MAX_PAGE + 1), "9" * 40, "٣"])
def test_a_page_is_bounded(http: httpx.Client, limit: str) -> None:
    answer = http.get("/v1/adapters", params={"limit": limit})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "limit"
    assert http.get("/v1/adapters", params={"state": "x"}).status_code == 400


def test_the_debug_view_cuts_its_lists(http: httpx.Client) -> None:
    answer = http.get("/debug/state", params={"limit": 0}).json()
    assert answer["frontend"]["adapters"] == {"served": 1, "on_demand": 0, "listed": 5}
    assert http.get("/debug/state", params={"limit": "x"}).status_code == 400
