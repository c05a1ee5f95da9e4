"""Threads for jobs that wait for storage, where a job that hangs holds up no other.

A few threads work through a queue. A job that takes long is made up for by one more thread, so the
next job starts; a job past its deadline is given up on, and its thread ends when the storage lets
it go. The number of threads is bounded: once as many hang as there may be, what waits is given up
on at once instead of waiting for ever.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from mstar_tp.common.os_process import process_cpus, use_cpus

logger = logging.getLogger(__name__)

SLOW_S = 1.0
"""A job that runs longer is made up for by another thread."""
MAX_THREADS = 32
CLOSE_S = 5.0
"""Jobs that run get this long to end when the threads are closed."""


@dataclass(slots=True, eq=False)
class _Job:
    run: Callable[[], None]
    give_up: Callable[[str], None]
    """Called at most once, with what happened; ``run`` may still end later."""
    started: float = 0.0
    slow: bool = False
    given_up: bool = False


class WorkerThreads:
    """``width`` jobs run at once, and more while some are slow. ``_changed`` guards every field."""

    def __init__(
        self,
        name: str,
        width: int,
        timeout_s: float,
        *,
        slow_s: float = SLOW_S,
        max_threads: int = MAX_THREADS,
    ) -> None:
        """``timeout_s``: how long one job may run, from its start."""
        self._name = name
        self._width = width
        self._timeout_s = timeout_s
        self._slow_s = slow_s
        self._max_threads = max_threads
        # The process's mask, not that of a pinned thread that submits the first job.
        self._cpus = process_cpus()
        self._changed = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._busy: dict[_Job, None] = {}
        """Jobs that run, in the order they started."""
        self._threads: set[threading.Thread] = set()
        self._names = itertools.count()
        self._no_thread = ""
        """Why no thread could be started, when last one was needed."""
        self._wake_at: float | None = None
        """When the watcher looks again; None: when it is told to."""
        self._closed = False
        self._watcher = self._spawn(self._watch, "deadlines")

    def submit(self, run: Callable[[], None], give_up: Callable[[str], None]) -> None:
        """Run a job that handles its own errors. Returns at once, and never raises.

        ``give_up(why)`` is called once, on the watcher's thread, if it does not end in time or no
        thread can run it; not after ``close``.
        """
        with self._changed:
            if self._closed:
                return
            self._queue.append(_Job(run, give_up))
            self._staff()
            self._changed.notify_all()

    def close(self) -> None:
        """Start nothing more. Jobs that run get a moment to end; one that hangs is left behind."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
            threads = [*self._threads, self._watcher]
        until = time.monotonic() + CLOSE_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    # ------------------------------------------------------------------ workers

    def _staff(self) -> None:
        """One more thread if a job waits, none is free for it, and those at work are few or slow.
        Locked.
        """
        free = len(self._threads) - len(self._busy)
        if len(self._queue) > free and self._prompt() < self._width:
            if len(self._threads) < self._max_threads:
                try:
                    self._threads.add(self._spawn(self._work, str(next(self._names))))
                except RuntimeError as error:  # the system has no thread left
                    self._no_thread = str(error)

    def _prompt(self) -> int:
        """Threads that no slow job holds up. Locked."""
        return len(self._threads) - sum(job.slow for job in self._busy)

    def _spawn(self, target: Callable[[], None], what: str) -> threading.Thread:
        # A daemon: storage that never answers must not keep the process from ending.
        thread = threading.Thread(target=target, name=f"{self._name}-{what}", daemon=True)
        thread.start()
        return thread

    def _work(self) -> None:
        use_cpus(self._cpus)
        while (job := self._take()) is not None:
            _logged(job.run)
            with self._changed:
                del self._busy[job]
                self._changed.notify_all()
            # A thread that waits keeps nothing of its last job alive, a CPU copy least of all.
            del job

    def _take(self) -> _Job | None:
        """The next job; None when this thread is one too many, or all is over."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._queue or self._closed or self._prompt() > self._width
            )
            if self._closed or self._prompt() > self._width:
                self._threads.discard(threading.current_thread())
                self._changed.notify_all()
                return None
            job = self._queue.popleft()
            job.started = time.monotonic()
            self._busy[job] = None
            self._staff()
            if self._wake_at is None or self._next_look(job) < self._wake_at:
                self._changed.notify_all()
            return job

    # ------------------------------------------------------------------ watcher

    def _watch(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                late, why = self._look()
                if not late:
                    self._wait()
            for job in late:
                _logged(job.give_up, why)

    def _look(self) -> tuple[list[_Job], str]:
        """Note what has become slow; the jobs to give up on now, and why. Locked."""
        now = time.monotonic()
        late = []
        for job in self._busy:
            job.slow = job.slow or now >= job.started + self._slow_s
            if not job.given_up and now >= job.started + self._timeout_s:
                job.slow = job.given_up = True
                late.append(job)
        self._staff()
        if late:
            return late, f"within {self._timeout_s:g} s"
        if not self._threads and self._queue:
            return self._drain(), f"at all: no thread runs: {self._no_thread}"
        if len(self._busy) == self._max_threads and all(job.given_up for job in self._busy):
            why = f"at all: {len(self._busy)} earlier ones still hang, the most there may be"
            return self._drain(), why
        return [], ""

    def _drain(self) -> list[_Job]:
        jobs = list(self._queue)
        self._queue.clear()
        return jobs

    def _wait(self) -> None:
        looks = [self._next_look(job) for job in self._busy if not job.given_up]
        self._wake_at = min(looks, default=None)
        self._changed.wait(
            None if self._wake_at is None else max(0.0, self._wake_at - time.monotonic())
        )
        self._wake_at = None

    def _next_look(self, job: _Job) -> float:
        return job.started + (self._timeout_s if job.slow else min(self._slow_s, self._timeout_s))


def _logged(work: Callable[..., None], *args: str) -> None:
    """No failure of one job may end the thread that others need."""
    try:
        work(*args)
    except Exception:
        logger.exception("a job of thread %s failed", threading.current_thread().name)
