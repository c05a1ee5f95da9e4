"""Promise: requests reach the conductor in the order in which they came, one a pass of the loop,
whichever was prepared first; none passes a full outbox, none that was abandoned is sent, a failure
keeps its place, and no more is prepared than threads and window allow.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.api_kit import GUARD_S

from mstar_tp.frontend.api.api_errors import ApiError
from mstar_tp.frontend.ranks.request_handle import ClientGoneError
from mstar_tp.frontend.text.prepare import (
    MAX_APART,
    WINDOW,
    Place,
    PreparePool,
    pool_width,
    prepare_threads,
)

T = TypeVar("T")


class HeldThreads:
    """Work that is begun ends when the test says so, in any order."""

    def __init__(self) -> None:
        self.begun: list[tuple[Callable[[], Any], Future[Any]]] = []

    def submit(self, work: Callable[[], T], /) -> Future[T]:
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        self.begun.append((work, future))
        return future

    def end(self, place: int) -> None:
        work, future = self.begun.pop(place)
        try:
            future.set_result(work())
        except OSError as error:
            future.set_exception(error)


class Request:
    """What the model knows of one."""

    def __init__(self, number: int, *, fails: bool, refused: bool) -> None:
        self.number = number
        self.fails = fails
        self.refused = refused
        self.left = False
        self.prepared = 0
        self.sent = 0
        self.place: Place[int, int]

    def work(self) -> int:
        self.prepared += 1
        if self.fails:
            raise OSError(f"{self.number} cannot be read")
        return self.number


class PrepareQueueMachine(RuleBasedStateMachine):
    """The pool against a list: who is let go next is the first that still waits."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(lambda loop, context: self.wrong.append(context))
        self.wrong: list[dict[str, Any]] = []
        """What the loop's callbacks raised."""
        self.threads = HeldThreads()
        self.width = 1
        self.has_capacity = True
        self.pool: PreparePool
        self.came: list[Request] = []
        self.waiting: list[Request] = []
        """The model: in the order they came."""
        self.ends = 0

    @initialize(width=st.integers(1, 3))
    def begins(self, width: int) -> None:
        self.width = width
        self.pool = PreparePool(width, lambda: self.has_capacity, threads=self.threads)

    def teardown(self) -> None:
        self.has_capacity = True
        self.in_pass(self.pool.look)
        for _ in range(4 * len(self.came) + 4):
            while self.threads.begun:
                self.threads.end(0)
            self.passes()
        assert not self.waiting and not len(self.pool)
        self.loop.close()

    @rule()
    def passes(self) -> None:
        """One pass of the loop: what is due now, and nothing that becomes due by it."""
        before = self.ends
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()
        assert not self.wrong, self.wrong[0].get("exception")
        assert self.ends <= before + 1, "two were let go in one pass"

    def in_pass(self, *calls: Callable[[], object]) -> None:
        for call in calls:
            self.loop.call_soon(call)
        self.passes()

    @rule(
        several=st.lists(
            st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=3
        )
    )
    @precondition(lambda self: len(self.came) < 25)
    def come(self, several: list[tuple[bool, bool, bool]]) -> None:
        """In one pass of the loop."""
        calls = []
        for inline, fails, refused in several:
            request = Request(len(self.came), fails=fails, refused=refused)
            self.came.append(request)
            calls.append(partial(self._comes, request, inline))
        self.in_pass(*calls)

    def _comes(self, request: Request, inline: bool) -> None:
        def release(number: int) -> int:
            assert self.has_capacity and not request.left, "it was let go all the same"
            request.sent += 1
            if request.refused:
                raise ApiError(503, f"{number} finds no room")
            return number

        self.waiting.append(request)
        request.place = self.pool.enter(request.work, release, inline=inline)
        request.place._future.add_done_callback(partial(self._ended, request))

    def _ended(self, request: Request, future: asyncio.Future[int]) -> None:
        error = future.exception()
        if request.left:
            assert isinstance(error, ClientGoneError) and not request.sent
            return
        self.ends += 1
        first = self.waiting.pop(0)
        assert first is request, f"{request.number} passed {first.number}"
        assert isinstance(error, OSError) == request.fails
        assert isinstance(error, ApiError) == (request.refused and not request.fails)
        assert request.sent == (not request.fails)
        assert error is not None or future.result() == request.number

    @rule(data=st.data())
    @precondition(lambda self: self.threads.begun)
    def work_ends(self, data: st.DataObject) -> None:
        self.threads.end(data.draw(st.integers(0, len(self.threads.begun) - 1)))

    @rule()
    def outbox_fills(self) -> None:
        self.has_capacity = False

    @rule()
    @precondition(lambda self: not self.has_capacity)
    def outbox_drains(self) -> None:
        self.has_capacity = True
        self.in_pass(self.pool.look)

    @rule(data=st.data())
    @precondition(lambda self: self.waiting)
    def leaves(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting))

        def leave() -> None:
            if not request.place._future.done():
                request.left = True
                self.waiting.remove(request)
            request.place.abandon()

        self.in_pass(leave)

    @invariant()
    def no_more_is_prepared_than_may_be(self) -> None:
        assert len(self.threads.begun) <= (0 if self.width == 1 else self.width)
        assert sum(bool(request.prepared) for request in self.waiting) <= WINDOW * self.width + 1
        assert all(request.prepared <= 1 for request in self.came)


TestPrepareQueue = PrepareQueueMachine.TestCase
TestPrepareQueue.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_under_load_the_slowest_holds_all_behind_it_and_nothing_overtakes() -> None:
    """Real threads: the first piece of work ends last, and the rest in the worst order."""

    async def load() -> list[int]:
        pool, out = PreparePool(2), []
        gates = [threading.Event() for _ in range(40)]

        def work(number: int) -> int:
            assert gates[number].wait(GUARD_S)
            return number

        async def handle(number: int) -> None:
            def release(made: int) -> None:
                out.append(made)
                if number == 20:
                    raise ApiError(503, "no room")

            with contextlib.suppress(ApiError):
                place = pool.enter(partial(work, number), release, inline=number % 5 == 4)
                await place.result()

        for number in (4, 9, 14, 19, 24, 29, 34, 39):
            gates[number].set()
        tasks = [asyncio.ensure_future(handle(number)) for number in range(40)]
        await asyncio.sleep(0)
        for number in (8, 17, 26):
            tasks[number].cancel()
        for number in reversed(range(40)):
            gates[number].set()
        await asyncio.wait(tasks)
        assert not len(pool)
        return out

    out = asyncio.run(asyncio.wait_for(load(), GUARD_S))
    assert out == [number for number in range(40) if number not in (8, 17, 26)]


def test_threads_run_on_the_process_cpus_not_on_those_of_who_starts_them() -> None:
    cpus = os.sched_getaffinity(0)
    if len(cpus) < 2:
        pytest.skip("this machine has one CPU")
    found: list[set[int]] = []

    def start() -> None:
        os.sched_setaffinity(0, {min(cpus)})  # this thread's alone
        threads = prepare_threads(1)
        found.append(threads.submit(os.sched_getaffinity, 0).result(GUARD_S))
        threads.shutdown()

    thread = threading.Thread(target=start)
    thread.start()
    thread.join(GUARD_S)
    assert found == [cpus]


def test_work_beside_the_line_is_bounded_and_takes_one_thread() -> None:
    async def flood() -> None:
        held = HeldThreads()
        pool = PreparePool(4, threads=held)
        tasks = [asyncio.ensure_future(pool.apart(lambda: 1)) for _ in range(MAX_APART)]
        await asyncio.sleep(0)
        assert len(held.begun) == 1
        with pytest.raises(ApiError, match="wait to be tokenized") as refused:
            await pool.apart(lambda: 1)
        assert refused.value.status == 503 and "Retry-After" in refused.value.headers
        tasks[1].cancel()
        held.end(0)
        assert await tasks[0] == 1
        for task in tasks[2:]:
            task.cancel()
        await asyncio.wait(tasks)

    asyncio.run(asyncio.wait_for(flood(), GUARD_S))


@pytest.mark.parametrize(
    ("configured", "cpus", "busy", "width"),
    [(None, 2, 3, 2), (None, 16, 9, 7), (None, 64, 9, 8), (1, 64, 9, 1), (20, 2, 3, 20)],
)
def test_there_are_as_many_threads_as_cpus_that_nothing_else_keeps_busy(
    configured: int | None, cpus: int, busy: int, width: int
) -> None:
    assert pool_width(configured, cpus, busy) == width
