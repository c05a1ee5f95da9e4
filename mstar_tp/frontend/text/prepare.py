"""Prepares requests on threads, and lets them go on in the order in which they came.

The event loop's thread owns the line; the threads run what they are given and touch nothing else.
What a request becomes is decided by ``release``, on the loop: one request a pass of it, the oldest
one, whichever was prepared first. A failure keeps its request's place. Beyond what the threads can
do requests wait as they came, and while the ranks' outbox is full nothing is released.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, islice
from typing import Generic, Protocol, TypeVar

from mstar_tp.common.os_process import process_cpus, use_cpus
from mstar_tp.frontend.api.api_errors import unavailable
from mstar_tp.frontend.ranks.request_handle import ClientGoneError

T = TypeVar("T")
R = TypeVar("R")

MAX_THREADS = 8
NICE = 10
"""The niceness of the threads that prepare: what streams wait for runs before them."""
WINDOW = 4
"""Requests a thread that are in preparation, or are prepared and wait for those before them."""
MAX_APART = 256
"""Pieces of work beside the line that may wait."""
INLINE_BYTES = 2048
"""The size of a request up to which preparing it costs less than handing it over."""


def pool_width(configured: int | None, cpus: int, busy: int) -> int:
    """Return the number of threads that prepare requests.

    It is as configured, or as many as there are CPUs beside the ``busy`` ones (a text takes one),
    at most 8. At least two: on the loop, a long text would hold every stream up, also where no CPU
    is left over.
    """
    if configured is not None:
        return configured
    return max(2, min(MAX_THREADS, cpus - busy))


class Threads(Protocol):
    """The threads that work is run on."""

    def submit(self, work: Callable[[], T], /) -> Future[T]: ...


def prepare_threads(width: int) -> ThreadPoolExecutor:
    """Return threads on the process's CPUs, whatever the affinity of the thread that starts them.

    They let the event loop and ranks that share those CPUs run first.
    """
    return ThreadPoolExecutor(
        width, thread_name_prefix="prepare", initializer=_begin_thread, initargs=(process_cpus(),)
    )


def _begin_thread(cpus: frozenset[int] | None) -> None:
    use_cpus(cpus)
    if sys.platform == "linux":  # elsewhere a priority is the whole process's
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


class Place(Generic[T, R]):
    """One request's place in the line, until it is released or abandoned."""

    def __init__(
        self,
        work: Callable[[], T],
        release: Callable[[T], R],
        leave: Callable[[], None],
        future: asyncio.Future[R],
        *,
        inline: bool,
    ) -> None:
        self._work = work
        self._release = release
        self._leave = leave
        self._future = future
        self.inline = inline
        self.started = False
        self._prepared: Future[T] | None = None

    @property
    def prepared(self) -> bool:
        return self._prepared is not None

    async def result(self) -> R:
        """Return what its release gave.

        Who stops waiting leaves the line.

        Raises:
            ClientGoneError: it was abandoned.
            Exception: what its work or its release raised.
        """
        try:
            return await self._future
        finally:
            self._leave()

    def abandon(self) -> None:
        """Drop it, unsent. No-op once it is released."""
        if not self._future.done():
            self._future.set_exception(ClientGoneError())
            self._leave()

    # ------------------------------------------------------------------ the pool's side

    def begin(self, threads: Threads) -> Future[T]:
        self.started = True
        return threads.submit(self._work)

    def take(self, prepared: Future[T]) -> None:
        self._prepared = prepared

    def run(self) -> None:
        """Prepare it here and now."""
        done: Future[T] = Future()
        try:
            done.set_result(self._work())
        except Exception as error:
            done.set_exception(error)
        self._prepared = done

    def finish(self) -> None:
        """Its turn has come."""
        assert self._prepared is not None, "it is not prepared"
        if self._future.done():
            return  # whoever waited was cancelled, and has not left yet
        try:
            self._future.set_result(self._release(self._prepared.result()))
        except Exception as error:
            self._future.set_exception(error)


class PreparePool:
    """The line of requests that are being prepared. The loop's thread, but for the work."""

    def __init__(
        self,
        width: int,
        has_capacity: Callable[[], bool] = lambda: True,
        *,
        threads: Threads | None = None,
    ) -> None:
        """Take the ``width``: the number of threads.

        With 1 all is done on the loop, as it must be for a model whose processing may not overlap.
        ``has_capacity``: whether a request may be released now; call ``look`` when it may have
        become true.
        """
        self.width = width
        self._has_capacity = has_capacity
        self._threads = threads or prepare_threads(width)
        self._queue: OrderedDict[int, Place[object, object]] = OrderedDict()
        self._numbers = count()
        self._running = 0
        """Work on threads, that of abandoned requests included."""
        self._pass_due = False
        self._apart = 0
        self._one_apart = asyncio.Semaphore()

    def __len__(self) -> int:
        return len(self._queue)

    def enter(
        self, work: Callable[[], T], release: Callable[[T], R], *, inline: bool = False
    ) -> Place[T, R]:
        """Take the next place.

        ``work`` runs on a thread, on the loop where it is ``inline``; ``release`` is given what it
        made, on the loop, once all before it have been released.
        """
        number, loop = next(self._numbers), asyncio.get_running_loop()
        place: Place[T, R] = Place(
            work,
            release,
            lambda: self._leave(number),
            loop.create_future(),
            inline=inline or self.width == 1,
        )
        self._queue[number] = place  # type: ignore[assignment]  # a place knows its own types
        if not self._pass_due:
            self._pass()
        return place

    def look(self) -> None:
        """Something may be released, or begun, at the loop's next pass."""
        if not self._pass_due:
            self._pass_due = True
            asyncio.get_running_loop().call_soon(self._due_pass)

    def _due_pass(self) -> None:
        self._pass_due = False
        self._pass()

    def _pass(self) -> None:
        """Begin what there are threads for; release one request, the oldest."""
        self._staff()
        if not self._queue or not self._has_capacity():
            return
        number, place = next(iter(self._queue.items()))
        if place.inline and not place.prepared:
            place.run()
        if place.prepared:
            del self._queue[number]
            place.finish()
            self.look()  # also with an empty line: who comes in this pass waits for the next

    def _staff(self) -> None:
        for place in islice(self._queue.values(), WINDOW * self.width):
            if self._running >= self.width:
                return
            if not (place.started or place.inline):
                self._begin(place)

    def _begin(self, place: Place[object, object]) -> None:
        loop = asyncio.get_running_loop()

        def land(prepared: Future[object]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
                loop.call_soon_threadsafe(self._land, place, prepared)

        self._running += 1
        place.begin(self._threads).add_done_callback(land)

    def _land(self, place: Place[object, object], prepared: Future[object]) -> None:
        self._running -= 1
        place.take(prepared)
        self.look()

    def _leave(self, number: int) -> None:
        if self._queue.pop(number, None) is not None:
            self.look()

    # ------------------------------------------------------------------ beside the line

    async def apart(self, work: Callable[[], T], *, inline: bool = False) -> T:
        """Run work that sends nothing to the ranks: no place in the line, one piece at a time.

        Raises:
            ApiError: 503, too much of it waits.
        """
        if inline or self.width == 1:
            return work()
        if self._apart >= MAX_APART:
            raise unavailable(
                f"{self._apart} texts wait to be tokenized: try again later", code="queue_full"
            )
        self._apart += 1
        try:
            async with self._one_apart:
                return await asyncio.wrap_future(self._threads.submit(work))
        finally:
            self._apart -= 1
