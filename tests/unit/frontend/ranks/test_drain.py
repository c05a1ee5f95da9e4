"""Pins the drain of ranks that a signal asks to stop.

Requests that the ranks know end on them, others wait for the next ranks, and nothing is lost.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import httpx
import pytest
from support.api_kit import GUARD_S, Api

from mstar_tp.frontend.metrics.outcomes import GroupEnd
from mstar_tp.frontend.ranks.group_state import Phase, Service
from mstar_tp.wire.commands import Abort, NewRequest, Shutdown
from mstar_tp.wire.reports import Leaving
from mstar_tp.worker.stop_signals import STOP_SIGNALS, stop_signals

BODY: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 12, "temperature": 0}


def opened(tmp_path: Path, **server: Any) -> Iterator[Api]:
    api = Api(tmp_path, max_queue=6, **server)
    yield api
    api.ranks.go()
    api.close()


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    yield from opened(tmp_path)


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[Api]:
    yield from opened(tmp_path, shutdown_grace_s=0)


def post(api: Api, **more: Any) -> httpx.Response:
    with api.http() as http:
        return http.post("/v1/completions", json=BODY | more)


def in_background(work: Any, *args: Any, **more: Any) -> Future[Any]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work, *args, **more)
    pool.shutdown(wait=False)
    return future


def until(api: Api, reached: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not reached():
            await asyncio.sleep(0.001)

    api.run(asyncio.wait_for(wait(), GUARD_S))


def health(api: Api) -> httpx.Response:
    with api.http() as http:
        return http.get("/health")


def texts(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def test_running_requests_end_on_the_ranks_that_leave_and_new_ones_wait(api: Api) -> None:
    conductor, old = api.conductor, api.ranks
    wanted = [texts(post(api, model=name)) for name in ("tiny", "pirate")]
    old.hold(5)
    asked = [in_background(post, api, model=name) for name in ("tiny", "pirate")]
    old.wait_for(NewRequest, 4)
    for rank in (1, 0, 1):
        old.report(rank, Leaving(rank=rank))
    until(api, lambda: conductor.state.leaving)
    answer = health(api)
    assert answer.status_code == 503 and "asked to stop" in answer.text
    late = in_background(post, api, model="pirate")
    with api.leaver(BODY):
        until(api, lambda: len(conductor.requests) == 4)
    until(api, lambda: len(conductor.requests) == 3)
    assert not old.messages(Shutdown) and not conductor.group.changed.is_set()
    old.go()
    assert [texts(future.result(GUARD_S)) for future in asked] == wanted
    for rank in (0, 1):
        assert len(old.wait_for(Shutdown, rank=rank)) == 1
    assert len(old.messages(NewRequest)) == 4 and not old.messages(Abort)
    assert conductor.group.changed.is_set() and conductor.state.service is Service.DOWN
    api.lose_ranks("the leader is gone")  # as who left says who was told later
    assert conductor.state.causes.ends == dict.fromkeys(GroupEnd, 0) | {GroupEnd.ASKED_TO_STOP: 1}
    assert "asked to stop" in health(api).text and not late.done()
    api.start_ranks()
    assert texts(late.result(GUARD_S)) == wanted[1]
    assert health(api).status_code == 200
    assert post(api).status_code == 200


def test_what_does_not_end_in_time_goes_on_with_the_next_ranks(hasty: Api) -> None:
    wanted = texts(post(hasty))
    hasty.ranks.hold(5)
    asked = in_background(post, hasty)
    hasty.ranks.wait_for(NewRequest, 2)
    hasty.ranks.report(0, Leaving(rank=0))
    hasty.ranks.wait_for(Shutdown)
    assert not asked.done()
    hasty.lose_ranks()
    hasty.start_ranks()
    assert texts(asked.result(GUARD_S)) == wanted


def test_ranks_leave_at_once_when_the_last_client_does(api: Api) -> None:
    api.ranks.hold()
    with api.leaver(BODY):
        api.ranks.wait_for(NewRequest)
        api.ranks.report(0, Leaving(rank=0))
        until(api, lambda: api.conductor.state.leaving)
    api.ranks.wait_for(Shutdown)


@pytest.mark.parametrize("loses", [True, False])
def test_ranks_that_leave_are_not_waited_for_when_one_is_lost_or_the_server_stops(
    api: Api, loses: bool
) -> None:
    conductor = api.conductor
    api.ranks.hold()
    asked = in_background(post, api)
    api.ranks.wait_for(NewRequest)
    api.ranks.report(0, Leaving(rank=0))
    until(api, lambda: conductor.state.leaving)
    if loses:
        api.loop.call_soon_threadsafe(conductor.group.lose, 1, "its process was ended by signal 9")
        until(api, conductor.group.changed.is_set)
        api.lose_ranks()
        assert conductor.state.causes.ends[GroupEnd.KILLED] == 1
        api.start_ranks()
    else:
        api.loop.call_soon_threadsafe(conductor.group.begin_draining)
        until(api, lambda: conductor.state.draining)
        api.ranks.report(1, Leaving(rank=1))
        api.ranks.go()
    assert asked.result(GUARD_S).status_code == 200
    assert not conductor.state.leaving and conductor.state.phase is not Phase.DISMISSED
    assert not api.ranks.messages(Shutdown)


def test_signals_are_told_on_a_thread_and_end_nothing_until_the_end() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    told: SimpleQueue[tuple[signal.Signals, bool]] = SimpleQueue()
    main = threading.main_thread()
    with stop_signals(lambda number: told.put((number, threading.current_thread() is main))):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
            assert told.get(timeout=GUARD_S) == (number, False)
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1
