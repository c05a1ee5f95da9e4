"""Pins what becomes of requests when somebody leaves: a client (its request is aborted), a stop
string (likewise), the ranks (every answer ends with a clear error), or the server itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.api_kit import CONTEXT, GUARD_S, WORLD_SIZE, Api
from support.frontend_kit import byte_level_folder

from mstar_tp.common.errors import MstarError
from mstar_tp.config import build_config
from mstar_tp.frontend.api.api_errors import ApiError
from mstar_tp.frontend.console import ServerConsole
from mstar_tp.frontend.ranks.group_state import Phase
from mstar_tp.frontend.ranks.request_handle import Submission
from mstar_tp.frontend.supervisor import FrontendOptions, Supervisor
from mstar_tp.wire.commands import Abort, Inspect, Load, LoadCommit, NewRequest, Shutdown, Unload
from mstar_tp.wire.reports import Ready
from mstar_tp.wire.values import SamplingParams

BODY: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 40, "temperature": 0}


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    api = Api(tmp_path, max_queue=4)
    yield api
    api.ranks.go()
    api.close()


def idle(api: Api) -> None:
    api.run(api.conductor.requests.idle.wait())
    assert len(api.conductor.requests) == 0


def post(api: Api, **more: Any) -> httpx.Response:
    with api.http() as http:
        return http.post("/v1/completions", json=BODY | more)


def in_background(work: Any, *args: Any, **more: Any) -> Future[Any]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work, *args, **more)
    pool.shutdown(wait=False)
    return future


def test_the_server_closes_idle_connections_later_than_any_common_client(api: Api) -> None:
    # httpx keeps them 5 s, aiohttp 15, nginx 60, Go 90. The earlier end must be the client's.
    assert api._server._server.config.timeout_keep_alive > 90


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_its_request(api: Api, stream: bool, steps: int) -> None:
    api.ranks.hold(steps)
    with api.leaver(BODY | {"stream": stream, "n": 2}) as client:
        opened = api.ranks.wait_for(NewRequest, 2)
        if stream and steps:
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
    aborted = {message.rid for message in api.ranks.wait_for(Abort, 2)}
    assert aborted == {message.rid for message in opened}
    idle(api)
    api.ranks.go()
    assert post(api).status_code == 200


def test_a_stop_string_ends_the_request_on_the_ranks(api: Api) -> None:
    api.answer("abcdef")
    answer = post(api, stop="cd", n=2).json()
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "ab"]
    assert answer["usage"]["completion_tokens"] == 8
    opened = [message.rid for message in api.ranks.messages(NewRequest)]
    assert sorted(message.rid for message in api.ranks.wait_for(Abort, 2)) == opened
    idle(api)


def test_beyond_the_bound_the_answer_is_503_and_comes_back_later(api: Api) -> None:
    api.ranks.hold()
    held = [in_background(post, api) for _ in range(4)]
    api.ranks.wait_for(NewRequest, 4)
    full = post(api)
    assert full.status_code == 503
    assert int(full.headers["retry-after"]) > 0
    assert full.json()["error"]["code"] == "queue_full"
    api.ranks.go()
    assert [future.result(GUARD_S).status_code for future in held] == [200] * 4
    assert post(api).status_code == 200


def test_lost_ranks_end_every_answer_and_health(api: Api) -> None:
    api.ranks.hold(3)
    client = api.client()
    stream = client.completions.create(**BODY, stream=True)
    first = next(iter(stream))
    assert first.choices[0].text
    whole = in_background(post, api)
    api.ranks.wait_for(NewRequest, 2)
    api.conductor.state.causes.said[1] = "rank 1: out of memory in step 7"
    api.loop.call_soon_threadsafe(api.conductor.group.die)
    with pytest.raises(openai.APIError, match="rank 1: out of memory in step 7"):
        for _ in stream:
            pass
    answer = whole.result(GUARD_S)
    assert answer.status_code == 503
    assert "rank 1: out of memory in step 7" in answer.json()["error"]["message"]
    with api.http() as http:
        health = http.get("/health")
        assert health.status_code == 503 and "rank 1" in health.text
        assert post(api).status_code == 503
        assert http.get("/debug/state").status_code == 503
    idle(api)


def test_a_stream_that_fails_ends_with_an_error_event_and_done(api: Api) -> None:
    api.ranks.hold(2)
    with (
        api.http() as http,
        http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as s,
    ):
        lines = (line for line in s.iter_lines() if line)
        assert '"text"' in next(lines)
        api.loop.call_soon_threadsafe(api.conductor.group.fail_all, "the server is shutting down")
        rest = list(lines)
    assert '{"error":{"message":"the server is shutting down"' in rest[-2]
    assert rest[-1] == "data: [DONE]"


def test_a_draining_server_finishes_what_runs_and_takes_nothing_new(api: Api) -> None:
    api.ranks.hold()
    running = in_background(post, api)
    api.ranks.wait_for(NewRequest)
    api.loop.call_soon_threadsafe(api.conductor.group.begin_draining)
    refused = post(api)
    assert refused.status_code == 503 and "shutting down" in refused.text
    api.ranks.go()
    assert running.result(GUARD_S).status_code == 200
    idle(api)


def test_the_debug_view_shows_every_ranks_tables_and_our_own(api: Api) -> None:
    api.ranks.hold(2)
    running = in_background(post, api, model="pirate")
    opened = api.ranks.wait_for(NewRequest)[0]
    with api.http() as http:
        state = http.get("/debug/state").json()
    assert [rank["rank"] for rank in state["ranks"]] == list(range(WORLD_SIZE))
    assert api.ranks.messages(Inspect, rank=1)
    (ours,) = state["frontend"]["requests"]
    assert ours["rid"] == opened.rid and ours["adapter"] == "pirate#0"
    api.ranks.go()
    assert running.result(GUARD_S).status_code == 200


def test_before_the_ranks_are_ready_everything_is_503(api: Api) -> None:
    api.lose_ranks()

    async def time_out() -> None:
        api.conductor.group.time_out("the ranks were not ready within 1 s")

    api.run(time_out())
    for answer in (post(api), post(api, stream=True)):
        assert answer.status_code == 503 and "starting" in answer.text
    with api.http() as http:
        assert http.get("/health").status_code == 503
        assert http.get("/version").status_code == 200


def test_a_long_text_is_tokenized_off_the_loop_and_still_answered(api: Api) -> None:
    answer = post(api, prompt="word " * 4000)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_long_text_never_reaches_the_tokenizer(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.tokenizer, "_tokenizer", None)
    text = "x" * 100_000
    with api.http() as http:
        chat = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
        answers = [post(api, prompt=text), http.post("/v1/chat/completions", json=chat)]
    for answer, param in zip(answers, ("prompt", "messages"), strict=True):
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["code"] == "context_length_exceeded"
        assert error["param"] == param and f"context of {CONTEXT} tokens" in error["message"]


def test_a_reload_follows_the_unload_that_waits_for_a_request(api: Api) -> None:
    loads, key = api.conductor.loads, api.served.resolve("pirate")

    async def reload_while_preparing() -> None:
        with api.conductor.reserve(1, key):
            loads.unload("pirate")
            loading = [asyncio.ensure_future(loads.load("pirate", "/new")) for _ in range(2)]
            await asyncio.sleep(0)
        results = await asyncio.gather(*loading, return_exceptions=True)
        assert [getattr(result, "code", None) for result in results] == [
            None,
            "adapter_already_loaded",
        ]

    api.run(reload_while_preparing())
    api.ranks.wait_for(LoadCommit)
    order = [type(m) for m in api.ranks.seen[0] if isinstance(m, Unload | Load | LoadCommit)]
    assert order == [Unload, Load, LoadCommit]


def test_a_reload_that_waits_for_an_unload_ends_with_the_ranks(api: Api) -> None:
    loads, key = api.conductor.loads, api.served.resolve("pirate")

    async def lose_ranks() -> None:
        with api.conductor.reserve(1, key):
            loads.unload("pirate")
            loading = asyncio.ensure_future(loads.load("pirate", "/new"))
            await asyncio.sleep(0)
            api.conductor.state.causes.said[1] = "out of memory"
            api.conductor.group.die()
            with pytest.raises(ApiError, match="out of memory"):
                await loading

    api.run(lose_ranks())
    assert not api.ranks.messages(Load)


def test_after_the_ranks_were_told_to_stop_the_debug_view_is_503(api: Api) -> None:
    api.ranks.hold()
    api.loop.call_soon_threadsafe(api.conductor.group.send_shutdown)
    api.ranks.wait_for(Shutdown)
    assert api.run(_status(api)) == 503


async def _status(api: Api) -> int | None:
    asking = asyncio.ensure_future(api.conductor.queries.inspect())
    await asyncio.sleep(0)
    if not asking.done():
        asking.cancel()
        return None
    error = asking.exception()
    return error.status if isinstance(error, ApiError) else None


@pytest.mark.parametrize("phase", ["starting", "serving", "stopping"])
def test_a_router_that_fails_ends_the_server_and_its_requests(
    tmp_path: Path, phase: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tmp_path / "model"
    byte_level_folder(model)
    (model / "config.json").write_text("{}")
    config = build_config({"engine": {"model": str(model)}, "server": {"port": 0}}, source="test")
    console = ServerConsole()

    ready = Ready(
        rank=0,
        vocab_size=320,
        max_model_len=CONTEXT,
        num_pages=8,
        page_size=16,
        eos_token_ids=(1,),
        targets=(),
    )

    async def serve() -> int:
        supervisor = Supervisor(FrontendOptions(config=config, start_ranks=False, console=console))
        conductor, reports = supervisor._conductor, asyncio.Queue[Any]()
        monkeypatch.setattr(supervisor._link, "receive", reports.get)
        monkeypatch.setattr(supervisor._link, "send_all", lambda message: None)
        serving = asyncio.Event()
        monkeypatch.setattr(
            console, "say", lambda text: serving.set() if text.startswith("Serving") else None
        )
        running = asyncio.ensure_future(supervisor.run())
        if phase == "starting":
            reports.put_nowait("not a pair")
            return await running
        reports.put_nowait((0, ready))
        await serving.wait()
        params = SamplingParams(max_tokens=1)
        handle = conductor.submit([Submission(prompt=(5,), params=params, adapter=None)])
        if phase == "stopping":
            supervisor._stop.set()
            while not conductor.state.draining:
                await asyncio.sleep(0)
        reports.put_nowait("not a pair")
        code = await running
        (arrival,) = await handle.next()
        assert isinstance(arrival.item, ApiError) and arrival.item.status == 503
        assert conductor.state.phase is Phase.DEAD
        return code

    async def guarded() -> int:
        return await asyncio.wait_for(serve(), GUARD_S)

    if phase == "starting":
        with pytest.raises(MstarError, match="ValueError"):
            asyncio.run(guarded())
    else:
        assert asyncio.run(guarded()) == 1
    assert any(record.exc_info for record in caplog.records)
