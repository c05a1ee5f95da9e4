"""Ends a rank whose wait has no other way out.

A peer that dies is noticed on the wire's own threads at once; whoever waits for it on another
thread may not notice: a collective that gloo or NCCL would wait half an hour for, the admit fence
behind it, a thread's join. The main thread gets a moment to end in order; then the process ends,
and with it every wait.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

GRACE_S = 1.5
"""The seconds that the main thread may take to say why it ends, and to end."""
LOOK_EVERY_S = 0.25
FAILED = 1


class Watchdog:
    """One a rank. Any thread."""

    def __init__(self, rank: int, end: Callable[[int], object] = os._exit) -> None:
        self._rank = rank
        self._end = end
        self._lock = threading.Lock()  # guards _armed and _leaving
        self._armed = True
        self._leaving = False

    def peer_lost(self, cause: str) -> None:
        """A process that this one depends on is gone: end soon, by force if need be."""
        self._leave(f"a peer is gone ({cause})", GRACE_S)

    def disarm(self) -> None:
        """The rank was told to stop: peers that go away now are no failure."""
        with self._lock:
            self._armed = False

    def watch_steps(
        self,
        running_for_s: Callable[[], float],
        limit_s: float,
        report_fatal: Callable[[str], None],
    ) -> None:
        """End the rank when a step runs for more than ``limit_s``; ``report_fatal`` reports why."""

        def watch() -> None:
            while running_for_s() <= limit_s:
                time.sleep(min(LOOK_EVERY_S, limit_s / 4))
            cause = (
                f"a step has run for more than {limit_s:g} s: another rank or the device hangs, or "
                "raise --step-timeout"
            )
            logger.error("%s", cause)
            report_fatal(f"rank {self._rank}: {cause}")
            self._leave(cause, GRACE_S)

        threading.Thread(target=watch, name="step-watch", daemon=True).start()

    def _leave(self, cause: str, within_s: float) -> None:
        with self._lock:
            if not self._armed or self._leaving:
                return
            self._leaving = True

        def leave() -> None:
            time.sleep(within_s)
            with self._lock:
                if not self._armed:
                    return
            logger.error("%s, and this rank's main thread waits: ending the process", cause)
            logging.shutdown()
            self._end(FAILED)

        threading.Thread(target=leave, name="way-out", daemon=True).start()
