"""Pins adapters that are loaded because requests name them: one load however many ask, what is in
the folder is what is served, nothing bad is tried again and again, no name leads out of the root,
and what nobody uses goes when there are too many.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.api_kit import GUARD_S, Api

from mstar_tp.frontend.adapters.adapter_folders import AdapterFolders, RootGoneError, may_name
from mstar_tp.frontend.adapters.on_demand import RETRY_S, OnDemand
from mstar_tp.frontend.adapters.served_models import AdapterRoots, ServedModels
from mstar_tp.frontend.adapters.state_file import StateFile
from mstar_tp.frontend.api.api_errors import ApiError
from mstar_tp.wire.commands import Load, NewRequest, Unload
from mstar_tp.wire.values import AdapterKey


def put(folder: Path, text: str = "{}") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(text)
    return folder


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    api = Api(tmp_path, on_demand=2)
    demand(api)._look_s = 0.0  # every request looks
    for name in ("a", "b", "c", "team/a"):
        put(api.roots / name)
    yield api
    api.ranks.go()
    api.close()


def demand(api: Api) -> OnDemand:
    on_demand = api.frontend.on_demand
    assert on_demand is not None
    return on_demand


@pytest.fixture
def http(api: Api) -> Iterator[httpx.Client]:
    with api.http() as client:
        yield client


def ask(http: httpx.Client, name: str) -> httpx.Response:
    body = {"model": name, "prompt": "x", "max_tokens": 1}
    return http.post("/v1/completions", json=body)


def listed(http: httpx.Client) -> set[str]:
    return {card["id"] for card in http.get("/v1/models").json()["data"]}


def loads(api: Api) -> list[str]:
    return [str(message.key) for message in api.ranks.messages(Load)]


def test_a_request_may_name_any_folder_under_the_root(api: Api, http: httpx.Client) -> None:
    assert ask(http, "team/a").status_code == 200
    assert ask(http, "a").status_code == 200
    assert ask(http, "a").status_code == 200
    assert http.post("/tokenize", json={"model": "b", "prompt": "x"}).status_code == 200
    assert loads(api) == ["team/a#1", "a#2", "b#3"]
    assert [str(m.adapter) for m in api.ranks.messages(NewRequest)] == ["team/a#1", "a#2", "a#2"]
    assert listed(http) == {"tiny", "alias", "pirate", "a", "b"}, "the third took a place"
    body = {"model": "tiny", "lora_adapter": "nowhere", "prompt": "x"}
    error = http.post("/v1/completions", json=body).json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "lora_adapter")


def test_many_first_requests_on_one_name_share_one_load(api: Api) -> None:
    api.ranks.withhold_loads()
    limits = httpx.Limits(max_connections=40)
    with api.http(limits=limits) as http, ThreadPoolExecutor(40) as pool:
        asked = [pool.submit(ask, http, name) for name in ("a", "b") * 20]
        api.ranks.wait_for(Load, 2)
        api.run(_until_waiting(api, 40))
        api.ranks.go()
        assert {future.result().status_code for future in asked} == {200}
    assert sorted(loads(api)) in (["a#1", "b#2"], ["a#2", "b#1"])


async def _until_waiting(api: Api, count: int) -> None:
    while demand(api)._waiting.total() < count:
        await asyncio.sleep(0)


def test_a_client_that_leaves_takes_no_load_from_others(api: Api) -> None:
    api.ranks.withhold_loads()
    with api.http() as http, ThreadPoolExecutor(1) as pool:
        with api.leaver({"model": "a", "prompt": "x"}):
            api.ranks.wait_for(Load)
        other = pool.submit(ask, http, "a")
        api.ranks.go()
        assert other.result().status_code == 200
    assert loads(api) == ["a#1"]


def test_a_bad_folder_is_refused_and_not_tried_again_before_it_changes(
    api: Api, http: httpx.Client
) -> None:
    api.ranks.refusals = {1: "adapter 'a': its rank is 99"}
    answers = [ask(http, "a") for _ in range(3)]
    assert {answer.status_code for answer in answers} == {400}
    errors = [answer.json()["error"] for answer in answers]
    assert {error["message"] for error in errors} == {
        "adapter 'a' was refused by rank 1: its rank is 99"
    }
    assert {(error["code"], error["param"]) for error in errors} == {("adapter_refused", "model")}
    assert loads(api) == ["a#1"] and "a" not in listed(http)
    assert demand(api).refusal_of("a") == errors[0]["message"]
    api.ranks.refusals = {}
    assert ask(http, "a").status_code == 400, "it is the same folder"
    put(api.roots / "a", '{"r": 8}')
    assert ask(http, "a").status_code == 200
    assert loads(api) == ["a#1", "a#2"] and demand(api).refusal_of("a") is None


def test_what_was_refused_is_tried_again_after_a_while(api: Api, http: httpx.Client) -> None:
    now = 0.0
    demand(api)._clock = lambda: now
    api.ranks.refusals = {1: "the disk had a bad moment"}
    assert ask(http, "a").status_code == 400
    api.ranks.refusals = {}
    now = RETRY_S
    assert ask(http, "a").status_code == 400
    now = RETRY_S + 1
    assert ask(http, "a").status_code == 200


def test_a_refusal_for_now_is_not_kept(api: Api, http: httpx.Client) -> None:
    api.run(_fail_one_load(api))
    assert ask(http, "a").status_code == 200


async def _fail_one_load(api: Api) -> None:
    api.ranks.withhold_loads()
    waiting = asyncio.ensure_future(demand(api).ensure("a"))
    while not api.conductor.loads._pending:
        await asyncio.sleep(0)
    api.conductor.loads.fail_all("the ranks are gone")
    with pytest.raises(ApiError) as failed:
        await waiting
    assert failed.value.status == 503
    api.ranks.go()


def test_a_changed_folder_is_served_with_its_new_contents_as_a_new_generation(
    api: Api, http: httpx.Client
) -> None:
    assert ask(http, "a").status_code == 200
    put(api.roots / "new", "{ }")
    shutil.rmtree(api.roots / "a")
    os.rename(api.roots / "new", api.roots / "a")
    assert ask(http, "a").status_code == 200
    assert loads(api) == ["a#1", "a#2"]
    assert [str(m.adapter) for m in api.ranks.messages(NewRequest)] == ["a#1", "a#2"]
    assert [str(m.key) for m in api.ranks.wait_for(Unload)] == ["a#1"]
    # New contents that cannot be served: new requests are told so, and nothing stale is given.
    api.ranks.refusals = {0: "no good", 1: "no good"}
    put(api.roots / "a", "no JSON")
    assert ask(http, "a").status_code == 400 and "a" not in listed(http)
    assert [str(m.key) for m in api.ranks.wait_for(Unload, 2)] == ["a#1", "a#2"]


def test_a_folder_that_is_gone_is_gone_for_requests_and_for_the_listing(
    api: Api, http: httpx.Client
) -> None:
    assert [ask(http, name).status_code for name in ("a", "b")] == [200, 200]
    api.run(demand(api).scan())
    assert demand(api).listed == ("a", "b", "c", "team/a"), "extra holds nothing of an adapter"
    shutil.rmtree(api.roots / "a")
    shutil.rmtree(api.roots / "b")
    put(api.roots / "late")
    assert ask(http, "a").status_code == 404
    api.run(demand(api).scan())
    assert demand(api).listed == ("c", "late", "team/a")
    assert listed(http) == {"tiny", "alias", "pirate"}
    assert ask(http, "late").status_code == 200
    (api.roots).rename(api.roots.with_name("away"))
    api.run(demand(api).scan())
    assert "late" in listed(http), "a root that is away says nothing about an adapter"
    assert ask(http, "late").status_code == 200
    answer = ask(http, "c")
    assert answer.status_code == 503 and answer.headers["retry-after"]


def test_storage_that_hangs_holds_up_nobody_who_is_served_already(
    api: Api, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    assert ask(http, "a").status_code == 200
    gate = threading.Event()
    monkeypatch.setattr(demand(api)._folders, "look", lambda name: gate.wait(GUARD_S) and None)
    now = 0.0
    demand(api)._clock = lambda: now
    with ThreadPoolExecutor(1) as pool:
        cold = pool.submit(ask, http, "b")
        assert ask(http, "a").status_code == 200
        demand(api)._look_within_s = 0.0
        late = ask(http, "c")
        assert late.status_code == 503 and "could not be read within" in late.text
        gate.set()
        assert cold.result().status_code == 404


def test_the_least_recently_used_go_when_there_are_too_many(api: Api) -> None:
    with api.http() as http, ThreadPoolExecutor(1) as pool:
        assert [ask(http, name).status_code for name in ("a", "b", "a", "c")] == [200] * 4
        assert listed(http) == {"tiny", "alias", "pirate", "a", "c"}
        api.ranks.hold()
        running = pool.submit(ask, http, "a")
        api.ranks.wait_for(NewRequest, 5)
        # The running one is used, though others were asked for since.
        for name in ("team/a", "b"):
            assert http.post("/tokenize", json={"model": name, "prompt": "x"}).status_code == 200
        assert listed(http) == {"tiny", "alias", "pirate", "a", "b"}
        api.ranks.go()
        assert running.result().status_code == 200
    assert [str(m.key) for m in api.ranks.messages(Unload)] == ["b#2", "c#3", "team/a#4"]


def test_operators_and_requests_share_the_names(api: Api, http: httpx.Client) -> None:
    body = {"lora_name": "a", "lora_path": str(api.roots / "extra")}
    assert ask(http, "a").status_code == 200
    assert http.post("/v1/load_lora_adapter", json=body).status_code == 400, "it is there"
    body["load_inplace"] = True  # type: ignore[assignment]
    assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
    put(api.roots / "a", '{"r": 8}')
    assert ask(http, "a").status_code == 200
    assert loads(api) == ["a#1", "a#2"], "what an operator loaded is the operator's"
    assert http.post("/v1/unload_lora_adapter", json=body).status_code == 200
    assert ask(http, "a").status_code == 200
    assert loads(api) == ["a#1", "a#2", "a#3"], "the folder is there to be named again"
    assert ask(http, "pirate").status_code == 200, "the configured one has no folder there"


def test_the_state_file_keeps_them_and_their_new_contents(tmp_path: Path) -> None:
    file = str(tmp_path / "state.json")
    api = Api(tmp_path, on_demand=5, state_file=file)
    put(api.roots / "a")
    with api.http() as http:
        assert ask(http, "a").status_code == 200
        api.run(api.frontend.state.saved())
    api.close()
    (saved,) = json.loads(Path(file).read_text())["loaded"]
    assert saved == {"name": "a", "path": str(api.roots / "a"), "on_demand": True}
    for on_demand in (True, False):
        served = ServedModels(("base",), "m", {})
        roots = AdapterRoots((str(api.roots),))
        StateFile(file).restore(served, roots, on_demand=on_demand)
        adapters = list(served.adapters())
        assert [adapter.on_demand for adapter in adapters] == ([True] if on_demand else [])


def test_new_ranks_serve_them_again(api: Api, http: httpx.Client) -> None:
    assert ask(http, "a").status_code == 200
    api.lose_ranks()
    api.start_ranks()
    assert ask(http, "a").status_code == 200
    assert loads(api) == ["pirate#0", "a#1"]
    assert api.ranks.messages(NewRequest)[-1].adapter == AdapterKey("a", 1)


HOSTILE = [
    "..", ".", "", "/", "//", "a/..", "a/../b", "../adapters/a", "./a", "a/", "/a", "a//b",
    "/etc", "/etc/passwd", "~", "~root", "a\0", "a\0b", "a\\..\\b", "..\\a", "a\n", "\u202ea",
    "..%2fa", "%2e%2e/a", "%2e%2e%2fa", "..%252fa", "a%00", "\ud800", "x" * 256, "x" * 257,
    "x/" * 127 + "x", ("y" * 200 + "/") + "z", ".hidden", "team/.hidden", "outside", "outside/a",
    "loop", "loop/loop", "file", "file/a", "dangling", "adapter_config.json",
    "a/adapter_config.json",
    "\uff21", "a ", " a", "*", "a*", "${HOME}", "$(id)", "con", "file:///etc", "\ufeffa", "‥",
    "\uff0e\uff0e/a",
]  # fmt: skip


@pytest.fixture(scope="module")
def rooted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    folder = tmp_path_factory.mktemp("hostile")
    api = Api(folder, on_demand=2)
    put(api.roots / "a")
    put(api.roots / ".hidden")
    put(api.roots / "team" / ".hidden")
    put(folder / "secret" / "a")
    (api.roots / "outside").symlink_to(folder / "secret")
    (api.roots / "loop").symlink_to("loop")
    (api.roots / "dangling").symlink_to("nowhere")
    (api.roots / "file").write_text("{}")
    yield api
    api.close()


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_no_name_leads_out_of_the_root_or_to_what_is_no_adapter(rooted: Api, name: str) -> None:
    with rooted.http() as http:
        body = json.dumps({"model": name, "prompt": "x"}).encode()
        headers = {"content-type": "application/json"}
        answer = http.post("/v1/completions", content=body, headers=headers)
        assert answer.status_code in (400, 404), answer.text
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error" and str(rooted.roots.parent) not in str(
            error
        )
    assert rooted.ranks.messages(Load) == []


@given(st.text(alphabet="./~ab%\\\0", max_size=12))
def test_a_name_that_may_be_asked_for_is_a_path_below_the_root(name: str) -> None:
    if not may_name(name):
        return
    root = "/root/of/adapters"
    path = os.path.normpath(os.path.join(root, name))
    assert path == f"{root}/{name}" and os.path.commonpath([root, path]) == root != path
    assert "\0" not in name and not any(part.startswith(".") for part in name.split("/"))


def test_a_listing_follows_no_link_out_and_no_loop(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in ("a", "team/b", "team/deep/er/c", "team/deep/er/than/d", ".git/e"):
        put(root / name)
    put(tmp_path / "outside" / "f")
    (root / "out").symlink_to(tmp_path / "outside")
    (root / "alias").symlink_to("a")
    (root / "up").symlink_to(".")
    (root / "texts").mkdir()
    (root / "texts" / "tokenizer.json").write_text("{}")
    folders = AdapterFolders(str(root))
    assert folders.names() == ["a", "alias", "team/b", "team/deep/er/c"]
    assert folders.look("a") is not None and folders.look("texts") is None
    before = folders.look("a")
    os.utime(root / "a" / "adapter_config.json", (1, 1))
    assert folders.look("a") != before
    shutil.rmtree(root)
    for ask_root in (folders.names, lambda: folders.look("a")):
        with pytest.raises(RootGoneError):
            ask_root()


def test_a_root_that_is_gone_is_said_once(
    api: Api, http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    assert ask(http, "a").status_code == 200
    demand_ = demand(api)
    root = Path(demand_._folders.root)
    root.rename(root.with_name("away"))
    with caplog.at_level("WARNING"):
        for _ in range(3):
            api.run(demand_.scan())
    assert caplog.text.count("cannot be read now") == 1 and demand_.listed == ()
    assert "a" in listed(http), "what is loaded stays served"
    root.with_name("away").rename(root)
    api.run(demand_.scan())
    assert "b" in demand_.listed
