"""Pins what an adapter may take, as far as the frontend answers for it: loads carry limits to the
ranks, also to those that come after others; a hot adapter is answered 429 while others are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.api_kit import WORLD_SIZE, Api

from mstar_tp.frontend.api.api_errors import ApiError
from mstar_tp.frontend.ranks.live_requests import LiveRequests
from mstar_tp.wire.adapter_limits import AdapterLimits
from mstar_tp.wire.commands import Load, NewRequest
from mstar_tp.wire.values import AdapterKey

LIMITS = {
    "limits": {"pirate": {"max_queued": 2}, "quiet": {"weight": 3}},
    "default_limits": {"max_rows": 7},
}


def load(http: httpx.Client, api: Api, name: str, **fields: Any) -> httpx.Response:
    path = str(api.roots / "extra")
    return http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **fields})


def last_limits(api: Api, count: int) -> AdapterLimits:
    """Of the last of ``count`` loads, on every rank."""
    sent = {api.ranks.wait_for(Load, count, rank)[-1].limits for rank in range(WORLD_SIZE)}
    assert len(sent) == 1
    return sent.pop()


def test_loads_carry_limits_and_what_they_leave_open_is_what_was_or_is_configured(
    tmp_path: Path,
) -> None:
    saved = tmp_path / "state.json"
    api = Api(tmp_path / "api", limits=LIMITS, state_file=str(saved))
    try:
        with api.http() as http:
            wrong = load(http, api, "x", weight=0)
            assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "weight"
            wrong = load(http, api, "x", pinned="yes")
            assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "pinned"
            assert load(http, api, "quiet").status_code == 200
            assert last_limits(api, 1) == AdapterLimits(weight=3.0, max_rows=7)
            assert load(http, api, "hot", pinned=True, max_rows=2).status_code == 200
            assert last_limits(api, 2) == AdapterLimits(pinned=True, max_rows=2)
            again = load(http, api, "hot", load_inplace=True, max_queued=5)
            assert again.status_code == 200
            assert last_limits(api, 3) == AdapterLimits(pinned=True, max_rows=2, max_queued=5)
            api.ranks.commit_cause = "pinned: adapter 'no' cannot be pinned: one slot must be left"
            refused = load(http, api, "no", pinned=True)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "pinned"
        api.lose_ranks()
        api.start_ranks()
        with api.http() as http:
            assert http.get("/v1/models").status_code == 200
        sent = {message.key.name: message.limits for message in api.ranks.wait_for(Load, 3)}
        assert sent == {
            "pirate": AdapterLimits(max_rows=7, max_queued=2),
            "quiet": AdapterLimits(weight=3.0, max_rows=7),
            "hot": AdapterLimits(pinned=True, max_rows=2, max_queued=5),
        }
    finally:
        api.close()
    text = saved.read_text()
    assert '"max_queued": 5' in text and '"weight"' not in text, "only what is not configured"
    anew = Api(tmp_path / "anew", limits=LIMITS)
    try:
        anew.served.add(anew.served.next_key("hot"), "p", limits=AdapterLimits(weight=2.0))
        key = anew.served.resolve("hot")
        assert anew.served.limits_of(key).weight == 2.0
        anew.served.remove("hot")
        assert not anew.served.limits_of(key).pinned
    finally:
        anew.close()


@contextmanager
def asking(api: Api) -> Iterator[Callable[..., Future[httpx.Response]]]:
    """Requests that wait for the ranks, which make no step before the end."""
    with api.http() as http, ThreadPoolExecutor(16) as threads:
        api.ranks.hold()

        def ask(model: str, **fields: Any) -> Future[httpx.Response]:
            body = {"model": model, "prompt": "x", "max_tokens": 2, **fields}
            return threads.submit(http.post, "/v1/completions", json=body)

        try:
            yield ask
        finally:
            api.ranks.go()


def check_full(answer: httpx.Response, name: str) -> None:
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) > 0
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("adapter_queue_full", "model")
    assert name in error["message"]


def test_an_adapter_with_its_limit_of_requests_is_answered_429_and_others_are_taken(
    tmp_path: Path,
) -> None:
    api = Api(tmp_path, limits=LIMITS)
    try:
        with asking(api) as ask:
            held = [ask("pirate"), ask("pirate")]
            api.ranks.wait_for(NewRequest, 2)
            check_full(ask("pirate").result(), "'pirate' of at most 2")
            never = ask("pirate", n=3).result()
            assert never.status_code == 400 and never.json()["error"]["param"] == "n"
            held += [ask("tiny") for _ in range(6)]
            api.ranks.wait_for(NewRequest, 8)
        assert [answer.result().status_code for answer in held] == [200] * 8
        with api.http() as http:
            body = {"model": "pirate", "prompt": "x", "max_tokens": 2}
            assert http.post("/v1/completions", json=body).status_code == 200
    finally:
        api.close()


@pytest.mark.parametrize("policy", ["fair", "fcfs"])
def test_where_adapters_take_turns_none_fills_the_queue_alone(tmp_path: Path, policy: str) -> None:
    api = Api(tmp_path, policy=policy, max_queue=8)
    try:
        with asking(api) as ask:
            held = [ask("pirate") for _ in range(4)]
            api.ranks.wait_for(NewRequest, 4)
            held.append(ask("pirate"))
            if policy == "fcfs":
                api.ranks.wait_for(NewRequest, 5)
                held += [ask("pirate") for _ in range(3)]
                api.ranks.wait_for(NewRequest, 8)
                assert ask("tiny").result().status_code == 503
            else:
                check_full(held.pop().result(), "'pirate' and has 4 places left")
                held += [ask("tiny", n=2)]
                api.ranks.wait_for(NewRequest, 6)
                check_full(ask("tiny").result(), "the base model and has 2 places left")
        assert [answer.result().status_code for answer in held] == [200] * len(held)
    finally:
        api.close()


def test_requests_that_are_being_prepared_count_as_those_of_their_adapter() -> None:
    requests = LiveRequests(8, on_unnamed=lambda key: None, fair=True)
    hot, cold = AdapterKey("hot", 1), AdapterKey("cold", 1)
    with ExitStack() as stack:
        taken = 0
        with pytest.raises(ApiError) as refused:
            while True:
                stack.enter_context(requests.reserve(1, hot))
                taken += 1
        assert refused.value.status == 429 and "'hot'" in refused.value.message
        assert taken == 4
        room = stack.enter_context(requests.reserve(1, cold))
        stack.enter_context(requests.reserve(1, None))
        room.give_back()
        room.give_back()
        stack.enter_context(requests.reserve(1, cold))
    for _ in range(2):  # nothing is counted twice, and nothing is left
        with requests.reserve(4, hot):
            pass
