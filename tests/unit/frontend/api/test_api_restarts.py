"""Pins that requests, loads and unloads outlive the ranks (R9): the next ranks are told all that
there was, in its old order, and no client sees a token lost, doubled or changed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.api_kit import GUARD_S, WORLD_SIZE, Api, FakeRanks

from mstar_tp.common.errors import ConfigError
from mstar_tp.frontend.adapters.served_models import AdapterRoots, ServedModels
from mstar_tp.frontend.adapters.state_file import StateFile
from mstar_tp.wire.commands import Abort, Load, LoadCommit, NewRequest, Unload
from mstar_tp.wire.values import AdapterKey

BODY: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 12, "temperature": 0}
PIRATE = AdapterKey("pirate", 0)


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    api = Api(tmp_path, max_queue=6, state_file=str(tmp_path / "state.json"))
    yield api
    api.ranks.go()
    api.close()


def post(api: Api, **more: Any) -> httpx.Response:
    with api.http() as http:
        return http.post("/v1/completions", json=BODY | more)


def operate(api: Api, what: str, **body: Any) -> httpx.Response:
    with api.http() as http:
        return http.post(f"/v1/{what}_lora_adapter", json=body)


def in_background(work: Any, *args: Any, **more: Any) -> Future[Any]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work, *args, **more)
    pool.shutdown(wait=False)
    return future


def order(ranks: FakeRanks) -> list[str]:
    """What the ranks were told, but for the checks of adapters, which stand in no order."""
    words = []
    loads = {load.load_id: load.key for load in ranks.messages(Load)}
    for message in list(ranks.seen[0]):
        match message:
            case LoadCommit(load_id=load_id):
                words.append(f"commit {loads[load_id]}")
            case Unload(key=key):
                words.append(f"unload {key}")
            case NewRequest(rid=rid, adapter=adapter):
                words.append(f"request {rid} on {adapter}")
            case _:
                pass
    return words


def test_requests_go_on_behind_the_tokens_they_have(api: Api) -> None:
    wanted = [post(api, model=name, n=2, seed=1).json() for name in ("tiny", "pirate")]
    api.ranks.hold(5)
    asked = [in_background(post, api, model=name, n=2, seed=1) for name in ("tiny", "pirate")]
    opened = api.ranks.wait_for(NewRequest, 4 + 4)[4:]
    api.run(_tokens(api, 5))
    api.lose_ranks()
    assert not any(future.done() for future in asked)
    api.start_ranks()
    again = api.ranks.wait_for(NewRequest, 4)
    assert [(m.rid, m.prompt, m.params) for m in again] == [
        (m.rid, m.prompt, m.params) for m in sorted(opened, key=lambda m: m.rid)
    ]
    assert sorted(len(m.output) for m in again)[-1] >= 1
    answers = [future.result(GUARD_S).json() for future in asked]
    for answer, want in zip(answers, wanted, strict=True):
        assert answer["choices"] == want["choices"]
        assert answer["usage"] == want["usage"]


async def _tokens(api: Api, count: int) -> None:
    """Until the live requests have ``count`` tokens."""
    while sum(len(live.tokens) for live in api.conductor.requests._live.values()) < count:
        await asyncio.sleep(0.001)


def test_a_stream_goes_on_and_is_kept_open_meanwhile(api: Api) -> None:
    wanted = post(api).json()["choices"][0]["text"]
    api.ranks.hold(3)
    with (
        api.http() as http,
        http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as stream,
    ):
        lines = (line for line in stream.iter_lines() if line)
        first = next(lines)
        api.lose_ranks()
        api.loop.call_soon_threadsafe(api.conductor.requests.keep_open)
        while not (line := next(lines)).startswith(": the ranks"):
            first += line
        api.start_ranks()
        rest = list(lines)
    text = "".join(part.split('"text":"')[1].split('"')[0] for part in _events(first, *rest))
    assert _unescaped(text) == wanted and rest[-1] == "data: [DONE]"


def _events(*lines: str) -> list[str]:
    return [part for line in lines for part in line.split("data: ") if '"text":"' in part]


def _unescaped(text: str) -> str:
    return str(httpx.Response(200, content=f'"{text}"'.encode()).json())


def test_while_the_ranks_are_down_health_says_why_and_requests_queue_up_to_the_bound(
    api: Api,
) -> None:
    api.lose_ranks("rank 1: out of memory in step 7")
    with api.http() as http:
        health = http.get("/health")
    assert health.status_code == 503 and "rank 1: out of memory in step 7" in health.text
    held = [in_background(post, api, n=3) for _ in range(2)]
    _until(lambda: len(api.conductor.requests) == 6)
    full = post(api)
    assert full.status_code == 503 and full.headers["retry-after"]
    assert full.json()["error"]["code"] == "queue_full"
    api.start_ranks()
    assert [future.result(GUARD_S).status_code for future in held] == [200, 200]
    with api.http() as http:
        assert http.get("/health").status_code == 200


def _until(reached: Any) -> None:
    end = time.monotonic() + GUARD_S
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_client_that_leaves_while_the_ranks_are_down_is_forgotten(api: Api) -> None:
    api.lose_ranks()
    with pytest.raises(httpx.ReadTimeout), api.http() as http:
        http.post("/v1/completions", json=BODY, timeout=0.2)
    _until(lambda: len(api.conductor.requests) == 0)
    api.start_ranks()
    assert post(api).status_code == 200
    assert not api.ranks.messages(Abort) and len(api.ranks.messages(NewRequest)) == 1


def test_adapters_come_back_as_they_were_each_before_the_requests_that_name_it(api: Api) -> None:
    folder = str(api.roots / "extra")
    assert operate(api, "load", lora_name="new", lora_path=folder).status_code == 200
    api.ranks.hold()
    old = in_background(post, api, model="new")
    api.ranks.wait_for(NewRequest)
    assert operate(api, "unload", lora_name="new").status_code == 200
    assert operate(api, "load", lora_name="new", lora_path=folder).status_code == 200
    assert operate(api, "unload", lora_name="pirate").status_code == 200
    young = in_background(post, api, model="new")
    api.ranks.wait_for(NewRequest, 2)
    api.lose_ranks()
    api.start_ranks()
    assert [old.result(GUARD_S).status_code, young.result(GUARD_S).status_code] == [200, 200]
    loads = {load.key: load for load in api.ranks.messages(Load)}
    assert loads[AdapterKey("new", 1)].digest == "digest of new#1"
    assert order(api.ranks) == [
        "commit new#1",
        "request 0 on new#1",
        "commit new#2",
        "request 1 on new#2",
        "unload new#1",
    ]
    assert api.ranks.messages(LoadCommit)[1].replaces == AdapterKey("new", 1)
    assert post(api, model="pirate").status_code == 404
    assert api.served._retired == {}, "no request names an unloaded adapter any more"


def test_loads_and_unloads_are_taken_for_the_next_ranks(api: Api) -> None:
    folder = str(api.roots / "extra")
    api.ranks.withhold_loads()
    cut = in_background(operate, api, "load", lora_name="cut", lora_path=folder)
    api.ranks.wait_for(Load)
    api.lose_ranks()
    meanwhile = in_background(operate, api, "load", lora_name="late", lora_path=folder)
    assert operate(api, "unload", lora_name="pirate").status_code == 200
    _until(lambda: len(api.conductor.loads._pending) == 2)
    api.start_ranks()
    assert [cut.result(GUARD_S).status_code, meanwhile.result(GUARD_S).status_code] == [200] * 2
    assert order(api.ranks) == ["commit cut#1", "commit late#2"]
    assert post(api, model="late").status_code == 200


def test_a_request_whose_adapter_is_refused_now_ends_with_the_cause_and_others_go_on(
    api: Api,
) -> None:
    api.ranks.hold()
    doomed = in_background(post, api, model="pirate")
    fine = in_background(post, api)
    api.ranks.wait_for(NewRequest, 2)
    api.lose_ranks()
    api.start_ranks(lambda ranks: ranks.refusals.update({1: "no such folder"}))
    answer = doomed.result(GUARD_S)
    assert answer.status_code == 500 and "rank 1: no such folder" in answer.text
    assert fine.result(GUARD_S).status_code == 200
    assert post(api, model="pirate").status_code == 404
    api.ranks.refusals.clear()
    back = operate(api, "load", lora_name="pirate", lora_path=str(api.roots / "extra"))
    assert back.status_code == 200 and post(api, model="pirate").status_code == 200


def test_ranks_that_die_while_they_are_told_leave_it_to_the_next(api: Api) -> None:
    api.ranks.hold()
    asked = in_background(post, api, model="pirate")
    api.ranks.wait_for(NewRequest)
    for _ in range(2):
        api.lose_ranks()
        with pytest.raises(TimeoutError):
            api.run(_start_and_hold(api))
    api.lose_ranks()
    api.start_ranks()
    assert asked.result(GUARD_S).status_code == 200


async def _start_and_hold(api: Api) -> None:
    api.ranks = FakeRanks(api._link.address, api._hello, lambda ranks: ranks.withhold_loads())
    await asyncio.to_thread(api.ranks.wait_for, Load)
    await asyncio.wait_for(api.conductor.group.became_ready.wait(), 0.05)


def test_the_state_file_brings_loads_and_unloads_back(api: Api, tmp_path: Path) -> None:
    folder = str(api.roots / "extra")
    assert operate(api, "load", lora_name="new", lora_path=folder).status_code == 200
    assert operate(api, "unload", lora_name="pirate").status_code == 200
    _until(lambda: "digest of new#1" in (tmp_path / "state.json").read_text())
    served = ServedModels(("tiny",), "model", {"pirate": "p", "other": "o"})
    StateFile(str(tmp_path / "state.json")).restore(served, AdapterRoots((str(api.roots),)))
    found = {adapter.key.name: (adapter.path, adapter.digest) for adapter in served.adapters()}
    assert found == {"other": ("o", None), "new": (folder, "digest of new#1")}
    # Outside the roots by now: not served, and no reason not to start.
    served = ServedModels(("tiny",), "model", {})
    StateFile(str(tmp_path / "state.json")).restore(served, AdapterRoots((str(tmp_path / "no"),)))
    assert list(served.adapters()) == []
    bad_name = f'{{"format": 1, "loaded": [{{"name": "../x", "path": "{folder}"}}]}}'
    (tmp_path / "state.json").write_text(bad_name)
    StateFile(str(tmp_path / "state.json")).restore(served, AdapterRoots((str(api.roots),)))
    assert list(served.adapters()) == []
    limits = '{"name": "x", "path": "y", "limits": {"max_rows": 0}}'
    for text, why in (
        (b"{", r"state\.json cannot be read"),
        (b"[" * 200_000, r"state\.json cannot be read"),
        (b'{"format": 1, "unloaded": ["\xff"]}', r"state\.json cannot be read"),
        (b'{"format": 2, "new": []}', "has format 2, wanted 1"),
        (b'{"format": 1, "loaded": [%s]}' % limits.encode(), "max_rows"),
    ):
        (tmp_path / "state.json").write_bytes(text)
        with pytest.raises(ConfigError, match=why):
            StateFile(str(tmp_path / "state.json")).restore(served, AdapterRoots(()))
    with pytest.raises(ConfigError, match="could not be written"):
        StateFile(str(tmp_path / "no" / "state.json")).restore(served, AdapterRoots(()))


def test_every_rank_is_told_the_same(api: Api) -> None:
    api.ranks.hold()
    asked = [in_background(post, api, model=name) for name in ("pirate", "tiny")]
    api.ranks.wait_for(NewRequest, 2)
    api.lose_ranks()
    api.start_ranks()
    assert [future.result(GUARD_S).status_code for future in asked] == [200, 200]
    for rank in range(WORLD_SIZE):
        api.ranks.wait_for(NewRequest, 2, rank)
    assert api.ranks.seen[0] == api.ranks.seen[1]
