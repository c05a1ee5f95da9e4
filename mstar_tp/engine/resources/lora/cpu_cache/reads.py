"""Reader and checking threads: the only threads that wait for a disk.

A read's result lands wholly on its reader thread: nothing it needs runs on the main thread, which
may be waiting at the fence. A read that passes its deadline settles as a failure; what it yields
later is thrown away.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from mstar_tp.common.errors import MstarError
from mstar_tp.engine.resources.lora.cpu_cache.worker_threads import WorkerThreads
from mstar_tp.lora.reading.loaded_adapter import LoadedAdapter
from mstar_tp.wire.values import AdapterKey

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Read:
    """One read of one adapter. All but ``done`` is guarded by the pool's lock."""

    key: AdapterKey
    fetch_no: int | None
    """The fetch it serves; None while it is early (R2)."""
    done: threading.Event = field(default_factory=threading.Event)
    """Set once it has settled, whichever way."""
    settled: bool = False
    adapter: LoadedAdapter | None = None
    cause: str | None = None
    dropped: bool = False
    """Nobody wants it any more: it need not begin."""


CHECKERS = 2
"""Header checks that run at once while none is slow."""

Land = Callable[[Read, LoadedAdapter | None, str | None], None]
"""Takes what a read came to: its copy, or why there is none. The first call for a read counts."""


class Readers(Protocol):
    """The threads that run reads and header checks for a pool."""

    def start(self, read: Read, work: Callable[[], LoadedAdapter]) -> None:
        """Run ``work`` elsewhere and land what it yields. Returns at once."""
        ...

    def call(self, key: AdapterKey, work: Callable[[], None], late: Callable[[str], None]) -> None:
        """Run ``work``, a header check of ``key`` which handles its own errors, elsewhere.

        Returns at once; no read ever waits for it. A check that hangs ends in ``late(cause)``.
        """
        ...

    def close(self) -> None:
        """Start nothing more."""
        ...


class ReaderThreads:
    """Runs reads and header checks on threads of its own.

    ``land(read, adapter, cause)`` is called once or more a read; the first call counts.
    """

    def __init__(self, readers: int, timeout_s: float, land: Land) -> None:
        """``timeout_s``: how long one read, or one check, may take."""
        self._land = land
        self._readers = WorkerThreads("lora-reader", readers, timeout_s)
        # Checks have threads of their own: one that hangs keeps no read waiting.
        self._checkers = WorkerThreads("lora-check", CHECKERS, timeout_s)

    def start(self, read: Read, work: Callable[[], LoadedAdapter]) -> None:
        """Run ``work`` on a reader thread and land what it yields. Returns at once. Never raises:
        when no thread can run it, the read fails.
        """

        def run() -> None:
            adapter, cause = None, None
            try:
                adapter = work()
            except Exception as error:  # any failure is this adapter's alone, and reported with it
                cause = describe(error, read.key)
            self._land(read, adapter, cause)

        def late(why: str) -> None:
            self._land(read, None, _late(read.key, "read", why))

        self._readers.submit(run, late)

    def call(self, key: AdapterKey, work: Callable[[], None], late: Callable[[str], None]) -> None:
        """Run ``work``, which handles its own errors, on a checking thread. Returns at once."""
        self._checkers.submit(work, lambda why: late(_late(key, "checked", why)))

    def close(self) -> None:
        """Start nothing more; a read or check that hangs is left behind."""
        self._readers.close()
        self._checkers.close()


def _late(key: AdapterKey, what: str, why: str) -> str:
    advice = (
        ": its storage is slow or gone; raise read_timeout_s if it is only slow"
        if why.startswith("within")
        else ""
    )
    return f"adapter {key.name!r} was not {what} {why}{advice}"


def describe(error: BaseException, key: AdapterKey) -> str:
    """One clear sentence for what a read or check raised."""
    if isinstance(error, MstarError):
        return str(error)
    if isinstance(error, MemoryError):
        return f"adapter {key.name!r} does not fit in this rank's memory"
    if isinstance(error, OSError):
        return f"adapter {key.name!r}: {error.filename or 'its files'}: {error.strerror or error}"
    logger.exception("reading adapter %s failed unexpectedly", key, exc_info=error)
    return f"adapter {key.name!r} could not be read: {type(error).__name__}: {error}"
