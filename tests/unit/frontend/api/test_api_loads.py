"""Pins loading and unloading at run time: all ranks or none, one load a name however many ask, no
path outside the allowed folders, and a name that is gone is gone at once.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.api_kit import WORLD_SIZE, Api

from mstar_tp.common.errors import ConfigError
from mstar_tp.config import build_config
from mstar_tp.config.limits import LimitsConfig
from mstar_tp.frontend.api.api_errors import ApiError
from mstar_tp.frontend.api.body import MAX_SMALL_BODY_BYTES
from mstar_tp.wire.commands import Load, LoadAbort, LoadCommit, NewRequest, Unload
from mstar_tp.wire.values import AdapterKey


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    api = Api(tmp_path)
    yield api
    api.ranks.go()
    api.close()


@pytest.fixture
def http(api: Api) -> Iterator[httpx.Client]:
    with api.http() as client:
        yield client


def load(http: httpx.Client, name: str, path: Path | str) -> httpx.Response:
    return http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})


def unload(http: httpx.Client, name: str) -> httpx.Response:
    return http.post("/v1/unload_lora_adapter", json={"lora_name": name})


def ask(http: httpx.Client, name: str) -> httpx.Response:
    body = {"model": name, "prompt": "x", "max_tokens": 2}
    return http.post("/v1/completions", json=body)


def names(http: httpx.Client) -> list[str]:
    return [card["id"] for card in http.get("/v1/models").json()["data"]]


def test_a_load_is_committed_on_every_rank_before_it_is_answered(
    api: Api, http: httpx.Client
) -> None:
    assert load(http, "new", api.roots / "extra").status_code == 200
    for rank in range(WORLD_SIZE):
        (sent,) = api.ranks.wait_for(Load, rank=rank)
        assert sent.key.name == "new" and sent.path == str((api.roots / "extra").resolve())
        assert [m.load_id for m in api.ranks.wait_for(LoadCommit, rank=rank)] == [sent.load_id]
    assert ask(http, "new").status_code == 200
    assert api.ranks.messages(NewRequest)[-1].adapter == sent.key
    assert "new" in names(http)
    cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    assert cards["new"]["digest"] == f"digest of {sent.key}"


def test_one_rank_that_refuses_takes_the_load_back_everywhere(api: Api, http: httpx.Client) -> None:
    api.ranks.refusals = {1: "layers.0.q_proj lora_A is [16, 8], wanted rank <= 8"}
    answer = load(http, "new", api.roots / "extra")
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "rank 1: layers.0.q_proj lora_A is [16, 8]" in message and "rank 0" not in message
    assert api.ranks.wait_for(LoadAbort) and not api.ranks.messages(LoadCommit)
    assert ask(http, "new").status_code == 404 and "new" not in names(http)
    api.ranks.refusals = {0: "too big", 1: "too big"}
    message = load(http, "new", api.roots / "extra").json()["error"]["message"]
    assert "all ranks: too big" in message
    api.ranks.refusals = {}
    assert load(http, "new", api.roots / "extra").status_code == 200
    assert [m.key.generation for m in api.ranks.messages(Load)] == [1, 2, 3]


def test_a_commit_the_leader_could_not_apply_is_an_error(api: Api, http: httpx.Client) -> None:
    api.ranks.commit_cause = "adapter new is still retiring"
    answer = load(http, "new", api.roots / "extra")
    assert answer.status_code == 400 and "retiring" in answer.json()["error"]["message"]
    assert ask(http, "new").status_code == 404


def test_a_name_loads_once_and_again_after_an_unload_as_a_new_generation(
    api: Api, http: httpx.Client
) -> None:
    assert load(http, "new", api.roots / "extra").status_code == 200
    again = load(http, "new", api.roots / "extra")
    assert again.status_code == 400
    assert again.json()["error"]["code"] == "adapter_already_loaded"
    assert unload(http, "new").status_code == 200
    assert ask(http, "new").status_code == 404
    assert unload(http, "new").status_code == 404
    assert load(http, "new", api.roots / "extra").status_code == 200
    keys = [message.key for message in api.ranks.messages(Load)]
    assert keys == [AdapterKey("new", 1), AdapterKey("new", 2)]
    assert [m.key for m in api.ranks.wait_for(Unload)] == keys[:1]


def reload(http: httpx.Client, name: str, path: Path | str) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path), "load_inplace": True}
    return http.post("/v1/load_lora_adapter", json=body)


def test_a_load_in_place_serves_the_new_weights_to_new_requests_alone(api: Api) -> None:
    with api.http() as http, ThreadPoolExecutor(2) as pool:
        assert reload(http, "new", api.roots / "extra").status_code == 200, "nothing was there"
        api.ranks.hold()
        running = pool.submit(ask, http, "new")
        api.ranks.wait_for(NewRequest)
        api.ranks.withhold_loads()
        (api.roots / "v2").mkdir()
        loading = pool.submit(reload, http, "new", api.roots / "v2")
        api.ranks.wait_for(Load, 2)
        assert api.served.get("new").key.generation == 1, "the old one is served until then"  # type: ignore[union-attr]
        api.ranks.go()
        answer = loading.result()
        assert answer.status_code == 200
        assert answer.text == "Success: LoRA adapter 'new' added successfully."
        assert running.result().status_code == 200
        assert ask(http, "new").status_code == 200
    old, new = (m.key for m in api.ranks.messages(Load))
    assert [m.adapter for m in api.ranks.messages(NewRequest)] == [old, new]
    assert [m.replaces for m in api.ranks.messages(LoadCommit)] == [None, old]
    assert [m.key for m in api.ranks.wait_for(Unload)] == [old]
    kinds = [type(m) for m in api.ranks.seen[0] if isinstance(m, LoadCommit | Unload)]
    assert kinds == [LoadCommit, LoadCommit, Unload]
    assert [card.path for card in api.served.adapters()][-1].endswith("v2")


def test_a_new_version_that_is_refused_leaves_the_old_one_served(
    api: Api, http: httpx.Client
) -> None:
    assert load(http, "new", api.roots / "extra").status_code == 200
    api.ranks.refusals = {1: "no good"}
    assert reload(http, "new", api.roots / "extra").status_code == 400
    api.ranks.refusals = {}
    assert ask(http, "new").status_code == 200
    assert api.ranks.messages(NewRequest)[-1].adapter == AdapterKey("new", 1)
    assert api.ranks.messages(Unload) == []
    api.ranks.commit_cause = "another was faster"
    assert reload(http, "new", api.roots / "extra").status_code == 400
    assert ask(http, "new").status_code == 200 and api.ranks.messages(Unload) == []


def test_a_request_in_preparation_reaches_the_ranks_before_its_weights_are_unloaded(
    api: Api, http: httpx.Client
) -> None:
    """Also while others, which name the new ones, pass it."""
    assert load(http, "new", api.roots / "extra").status_code == 200
    old = AdapterKey("new", 1)

    async def swap_while_preparing() -> None:
        with api.conductor.reserve(1, old):
            await api.conductor.loads.load("new", str(api.roots / "extra"), in_place=True)
            assert api.served.resolve("new") == AdapterKey("new", 2)
            api.conductor.loads._send(Load(load_id=99, key=AdapterKey("marker", 9), path="x"))

    api.run(swap_while_preparing())
    api.ranks.wait_for(Unload)
    seen = [m for m in api.ranks.seen[0] if isinstance(m, Load | Unload)]
    assert [m.key for m in seen] == [old, AdapterKey("new", 2), AdapterKey("marker", 9), old]


def test_a_load_in_place_replaces_what_was_unloaded_meanwhile_and_ranks_serve_still(
    api: Api, http: httpx.Client
) -> None:
    assert load(http, "new", api.roots / "extra").status_code == 200
    old, new = AdapterKey("new", 1), AdapterKey("new", 2)
    loads = api.conductor.loads
    api.ranks.withhold_loads()

    async def unload_while_loading() -> None:
        with api.conductor.reserve(1, old):
            path = str(api.roots / "extra")
            loading = asyncio.ensure_future(loads.load("new", path, in_place=True))
            await asyncio.to_thread(api.ranks.wait_for, Load, 2)
            loads.unload("new")
            api.ranks.go()
            await loading
            assert api.served.resolve("new") == new

    api.run(unload_while_loading())
    api.ranks.wait_for(Unload)
    assert [m.replaces for m in api.ranks.messages(LoadCommit)] == [None, old]
    assert [m.key for m in api.ranks.messages(Unload)] == [old]


def test_what_no_message_can_hold_is_refused_and_leaves_the_name_free(
    api: Api, http: httpx.Client
) -> None:
    for field in ("max_rows", "max_queued"):
        body = {"lora_name": "new", "lora_path": str(api.roots / "extra"), field: 2**70}
        answer = http.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == field
    badly_named = os.fsencode(api.roots / "bad-") + b"\xff"
    os.mkdir(badly_named)
    os.symlink(badly_named, api.roots / "link")
    for route in ("load", "validate"):
        body = {"lora_name": "new", "lora_path": str(api.roots / "link")}
        answer = http.post(f"/v1/{route}_lora_adapter", json=body)
        assert answer.status_code == 400 and "not UTF-8" in answer.json()["error"]["message"]

    async def load_what_cannot_be_said() -> None:
        limits = LimitsConfig.model_construct(max_rows=2**70)
        with pytest.raises(OverflowError):
            await api.conductor.loads.load("new", "x", limits=limits)

    api.run(load_what_cannot_be_said())
    assert load(http, "new", api.roots / "extra").status_code == 200, "nobody waits for those"


def test_a_folder_that_is_nowhere_is_not_found(api: Api, http: httpx.Client) -> None:
    api.ranks.refusals = {0: "adapter 'new': it is no folder", 1: "adapter 'new': it is no folder"}
    answer = load(http, "new", api.roots / "nowhere")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "adapter_not_found"
    message = answer.json()["error"]["message"]
    assert message == "adapter 'new' was refused by all ranks: it is no folder"


def test_a_configured_adapter_can_be_unloaded(api: Api, http: httpx.Client) -> None:
    assert unload(http, "pirate").status_code == 200
    assert ask(http, "pirate").status_code == 404
    assert [m.key for m in api.ranks.wait_for(Unload)] == [AdapterKey("pirate", 0)]


def test_fifty_loads_at_once_load_once(api: Api) -> None:
    limits = httpx.Limits(max_connections=50)
    with api.http(limits=limits) as http, ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda _: load(http, "new", api.roots / "extra"), range(50)))
        assert Counter(answer.status_code for answer in answers) == {200: 1, 400: 49}
        codes = {answer.json()["error"]["code"] for answer in answers if answer.is_error}
        assert codes == {"adapter_already_loaded"}
        assert all(len(api.ranks.messages(Load, rank)) == 1 for rank in range(WORLD_SIZE))
        asked = list(pool.map(lambda _: ask(http, "new").status_code, range(50)))
        assert asked == [200] * 50
        gone = Counter(pool.map(lambda _: unload(http, "new").status_code, range(50)))
        assert gone == {200: 1, 404: 49}


def test_those_who_waited_for_a_load_that_failed_share_its_reason(api: Api) -> None:
    api.ranks.withhold_loads()
    api.ranks.refusals = {1: "no good"}
    with api.http() as http, ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(load, http, "new", api.roots / "extra") for _ in range(4)]
        api.ranks.wait_for(Load, rank=1)
        assert unload(http, "new").status_code == 404
        api.ranks.go()
        answers = [future.result() for future in waiting]
    assert all("no good" in answer.json()["error"]["message"] for answer in answers)


def test_one_who_waited_for_a_load_of_another_path_that_failed_loads_its_own(api: Api) -> None:
    (api.roots / "other").mkdir()
    api.ranks.withhold_loads()
    api.ranks.refusals = {1: "no good"}
    with api.http() as http, ThreadPoolExecutor(2) as pool:
        first = pool.submit(load, http, "new", api.roots / "extra")
        api.ranks.wait_for(Load, rank=1)
        second = pool.submit(load, http, "new", api.roots / "other")
        api.run(_until_waiting(api, "new"))
        api.ranks.go()
        assert first.result().status_code == 400
        assert "no good" in second.result().json()["error"]["message"]
    assert [Path(m.path).name for m in api.ranks.messages(Load)] == ["extra", "other"]


async def _until_waiting(api: Api, name: str) -> None:
    """Until a second load of ``name`` waits for the first one's outcome."""
    pending = api.conductor.loads._by_name
    while name not in pending or len(pending[name].outcome._callbacks) < 2:  # type: ignore[attr-defined]
        await asyncio.sleep(0)


@pytest.mark.parametrize("other_ends", ["failed", "loaded just before"])
def test_nothing_is_announced_once_everything_was_failed(api: Api, other_ends: str) -> None:
    """The waiter's turn comes after the group it was meant for has ended."""
    (api.roots / "other").mkdir()
    api.ranks.withhold_loads()

    async def fail_while_one_waits() -> list[BaseException | None]:
        loads = api.conductor.loads
        first = asyncio.ensure_future(loads.load("new", str(api.roots / "extra")))
        second = asyncio.ensure_future(loads.load("new", str(api.roots / "other")))
        await _until_waiting(api, "new")
        if other_ends == "loaded just before":
            loads.take_done(0, None)
        loads.fail_all("the ranks are gone")
        return await asyncio.gather(first, second, return_exceptions=True)

    first, second = api.run(fail_while_one_waits())
    assert (first is None) == (other_ends != "failed")
    assert isinstance(second, ApiError)
    assert (second.status, second.message) == (503, "the ranks are gone")
    assert len(api.ranks.wait_for(Load)) == 1 and not api.conductor.loads._pending


def test_more_loads_at_once_than_the_queue_holds_are_told_to_come_back(tmp_path: Path) -> None:
    api = Api(tmp_path, max_queue=2)
    api.ranks.withhold_loads()
    with api.http() as http, ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(load, http, name, api.roots / "extra") for name in ("a", "b")]
        api.ranks.wait_for(Load, 2)
        answer = load(http, "c", api.roots / "extra")
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "queue_full"
        assert answer.headers["retry-after"]
        api.ranks.go()
        assert [future.result().status_code for future in waiting] == [200, 200]
        assert load(http, "c", api.roots / "extra").status_code == 200
    api.close()


def test_an_adapter_that_is_another_on_one_rank_is_taken_back(api: Api, http: httpx.Client) -> None:
    api.ranks.lora_ranks = {0: 8, 1: 4}
    answer = load(http, "new", api.roots / "extra")
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert "rank 0: LoRA rank 8 on nothing; rank 1: LoRA rank 4 on nothing" in message
    assert api.ranks.wait_for(LoadAbort) and not api.ranks.messages(LoadCommit)
    assert ask(http, "new").status_code == 404


def test_an_unload_never_overtakes_a_request_that_was_resolved_before(api: Api) -> None:
    key = AdapterKey("pirate", 0)

    async def unload_while_preparing() -> None:
        with api.conductor.reserve(1, key):
            api.conductor.loads.unload("pirate")
            assert api.served.get("pirate") is None
            api.conductor.loads._send(Load(load_id=99, key=AdapterKey("marker", 9), path="x"))

    api.run(unload_while_preparing())
    api.ranks.wait_for(Unload)
    kinds = [type(message) for message in api.ranks.seen[0]]
    assert kinds.index(Load) < kinds.index(Unload)


@pytest.mark.parametrize("name", ["tiny", "alias"])
def test_an_adapter_cannot_take_a_name_of_the_base(api: Api, http: httpx.Client, name: str) -> None:
    answer = load(http, name, api.roots / "extra")
    assert answer.status_code == 400 and f"'{name}'" in answer.json()["error"]["message"]
    assert api.ranks.messages(Load) == []
    answer = unload(http, name)
    assert answer.status_code == 400
    assert "is the base model, which cannot be unloaded" in answer.json()["error"]["message"]
    engine = {"model": "m", "lora": {"adapters": {name: "x"}}}
    tree: dict[str, Any] = {"engine": engine, "server": {"served_model_name": ["tiny", "alias"]}}
    with pytest.raises(ConfigError, match=name):
        build_config(tree, source="x")


@pytest.mark.parametrize(
    "name", ["../outside", "/outside", "a/../b", "", "a\nb", "a\\b", "x" * 300]
)
def test_names_that_look_like_paths_are_refused(api: Api, http: httpx.Client, name: str) -> None:
    for answer in (load(http, name, api.roots / "extra"), unload(http, name)):
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "lora_name"
    assert api.ranks.messages(Load) == []


def test_nothing_outside_the_roots_is_loaded(api: Api, http: httpx.Client, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (api.roots / "link").symlink_to(outside)
    (outside / "inward").symlink_to(api.roots / "extra")
    (tmp_path / "adapters-too").mkdir()
    for path in (
        outside,
        api.roots / ".." / "outside",
        api.roots / "link",
        api.roots / "extra" / ".." / ".." / "outside",
        tmp_path / "adapters-too",
        "/etc/passwd",
        "//etc",
        "/proc/self/root/etc",
        "/dev/stdin",
        "%2e%2e/outside",
        "~",
        ".",
        "x" * 100_000,
        "a/" * 40_000,
        "",
        " ",
        "a\0b",
        "\ud800",
    ):
        body = {"lora_name": "new", "lora_path": str(path)}
        for route in ("load", "validate"):
            answer = http.post(f"/v1/{route}_lora_adapter", content=json.dumps(body).encode())
            too_long = len(str(path)) > MAX_SMALL_BODY_BYTES
            assert answer.status_code == (413 if too_long else 400), str(path)[:80]
        assert too_long or answer.json()["error"]["param"] == "lora_path"
    assert api.ranks.messages(Load) == []
    assert load(http, "new", outside / "inward").status_code == 200


@pytest.mark.parametrize(
    "name",
    [
        "adapter_config.json",
        "adapter_model.safetensors",
        "adapter_model.bin",
        "adapter_model.safetensors.index.json",
        "other.index.json",
        "kohya.safetensors",
    ],
)
def test_no_file_that_leads_outside_the_roots_is_loaded(
    api: Api, http: httpx.Client, tmp_path: Path, name: str
) -> None:
    outside = tmp_path / "secret"
    outside.write_text("{}")
    (api.roots / "extra" / name).symlink_to(outside)
    answer = load(http, "new", api.roots / "extra")
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "lora_path"
    assert f"its {name} leads outside" in error["message"]
    assert api.ranks.messages(Load) == []
    (api.roots / "extra" / name).unlink()
    (api.roots / "blob").write_text("{}")
    (api.roots / "extra" / name).symlink_to(api.roots / "blob")
    assert load(http, "new", api.roots / "extra").status_code == 200


def test_bodies_are_checked(api: Api, http: httpx.Client) -> None:
    for body, param in (
        ({}, "lora_name"),
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": 3, "lora_path": "x"}, "lora_name"),
        ({"lora_name": "x", "lora_path": "y", "load_inplace": "yes"}, "load_inplace"),
    ):
        answer = http.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param
