"""Reader and checking threads: the only threads that wait for a disk.

A read's result lands wholly on its reader thread: nothing it needs runs on the main thread, which
may be waiting at the fence. Reader threads run on the process's CPU mask, not on that of a pinned
thread which made them. A read that passes its deadline settles as a failure; what it yields later
is thrown away.
"""

from __future__ import annotations

import heapq
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from mstar_tp.errors import MstarError
from mstar_tp.lora.adapter import LoadedAdapter
from mstar_tp.wire.messages import AdapterKey

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Read:
    """One read of one adapter. All but ``done`` is guarded by the pool's lock."""

    key: AdapterKey
    hold_no: int | None
    """The hold it serves; None while it is early (R2)."""
    done: threading.Event = field(default_factory=threading.Event)
    """Set once it has settled, whichever way."""
    settled: bool = False
    adapter: LoadedAdapter | None = None
    cause: str | None = None


CHECKERS = 2
"""Header checks that run at once."""

Land = Callable[[Read, LoadedAdapter | None, str | None], None]
"""Takes what a read came to: its copy, or why there is none. The first call for a read counts."""


class Readers(Protocol):
    """Who runs reads and header checks for a pool."""

    def start(self, read: Read, work: Callable[[], LoadedAdapter]) -> None:
        """Run ``work`` elsewhere and land what it yields. Returns at once."""
        ...

    def call(self, work: Callable[[], None]) -> None:
        """Run ``work``, a header check which handles its own errors, elsewhere. Returns at once; no
        read ever waits for it.
        """
        ...

    def close(self) -> None:
        """Start nothing more."""
        ...


class ReaderThreads:
    """Runs reads and header checks. ``land(read, adapter, cause)`` is called once or more a read;
    the first counts.
    """

    def __init__(
        self,
        readers: int,
        timeout_s: float,
        land: Land,
    ) -> None:
        mask = os.sched_getaffinity(os.getpid()) if hasattr(os, "sched_getaffinity") else None
        self._land = land
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(
            readers, thread_name_prefix="lora-reader", initializer=_use_cpus, initargs=(mask,)
        )
        # Checks have threads of their own: one that hangs keeps no read waiting.
        self._checkers = ThreadPoolExecutor(
            CHECKERS, thread_name_prefix="lora-check", initializer=_use_cpus, initargs=(mask,)
        )
        self._changed = threading.Condition()
        self._deadlines: list[tuple[float, int, Read, str]] = []
        """(when, tie-breaker, read, why it fails then)"""
        self._count = 0
        self._closed = False
        self._watcher = threading.Thread(target=self._watch, name="lora-deadlines", daemon=True)
        self._watcher.start()

    def start(self, read: Read, work: Callable[[], LoadedAdapter]) -> None:
        """Run ``work`` on a reader thread and land what it yields. Returns at once. Never raises:
        when no thread can run it, the read fails.
        """
        late = (
            f"adapter {read.key.name!r} was not read within {self._timeout_s:g} s: its storage is "
            "slow or gone; raise read_timeout_s if it is only slow"
        )
        self._fail_at(time.monotonic() + self._timeout_s, read, late)
        try:
            self._threads.submit(self._run, read, work)
        except RuntimeError as error:
            # Landed by the watcher: the caller holds the pool's lock, which a landing takes.
            cause = f"adapter {read.key.name!r} could not be read: no reader thread runs: {error}"
            self._fail_at(time.monotonic(), read, cause)

    def call(self, work: Callable[[], None]) -> None:
        """Run ``work``, which handles its own errors, on a checking thread. Returns at once."""
        self._checkers.submit(_logged, work)

    def close(self) -> None:
        """Start nothing more; reads under way end by themselves."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._checkers.shutdown(wait=False, cancel_futures=True)
        self._watcher.join()

    def _run(self, read: Read, work: Callable[[], LoadedAdapter]) -> None:
        adapter, cause = None, None
        try:
            adapter = work()
        except Exception as error:  # any failure is this adapter's alone, and is reported with it
            cause = describe(error, read.key)
        self._land(read, adapter, cause)

    def _fail_at(self, when: float, read: Read, cause: str) -> None:
        with self._changed:
            self._count += 1
            heapq.heappush(self._deadlines, (when, self._count, read, cause))
            self._changed.notify()

    def _watch(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not self._expired():
                    wait = self._deadlines[0][0] - time.monotonic() if self._deadlines else None
                    self._changed.wait(wait)
                if self._closed:
                    return
                _, _, read, cause = heapq.heappop(self._deadlines)
            self._land(read, None, cause)

    def _expired(self) -> bool:
        """Whether the earliest deadline has passed; those of settled reads are dropped on the
        way.
        """
        while self._deadlines and self._deadlines[0][2].settled:
            heapq.heappop(self._deadlines)
        return bool(self._deadlines) and self._deadlines[0][0] <= time.monotonic()


def describe(error: BaseException, key: AdapterKey) -> str:
    """One clear sentence for what a read or check raised."""
    if isinstance(error, MstarError):
        return str(error)
    if isinstance(error, MemoryError):
        return f"adapter {key.name!r} does not fit in this rank's memory"
    logger.exception("reading adapter %s failed unexpectedly", key, exc_info=error)
    return f"adapter {key.name!r} could not be read: {type(error).__name__}: {error}"


def _logged(work: Callable[[], None]) -> None:
    try:
        work()
    except BaseException:
        logger.exception("a task of a reader thread failed")
        raise


def _use_cpus(mask: set[int] | None) -> None:
    """Runs first on every thread. An error here would break its executor, and with it every later
    read.
    """
    if mask is None:
        return
    try:
        os.sched_setaffinity(0, mask)
    except OSError as error:
        logger.warning("a reader thread keeps its maker's CPUs: %s", error)
