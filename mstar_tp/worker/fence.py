"""The admit fence (R3): where a remove lands between the same two admits on every rank.

The step thread says how far each step has come; the main thread waits for it before it changes a
table that an admit reads. A wait ends when the step's launch has started, or when no admit of it
can run any more: it failed, or the step thread ended or never started. It never gives up before
that, because a remove that lands inside an admit would split the ranks; it says every ten seconds
who waits for what.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

WARN_AFTER_S = 10.0


class AdmitFence:
    """Steps run one after another, so two numbers tell all; ``_moved`` guards both."""

    def __init__(self, warn_after_s: float = WARN_AFTER_S) -> None:
        self._moved = threading.Condition()
        self._settled = -1
        self._done = -1
        self._closed = False
        self._warn_after_s = warn_after_s

    def settle(self, tp_seq: int) -> None:
        """The step's admit and plan are over: its launch has started. Step thread."""
        with self._moved:
            self._settled = max(self._settled, tp_seq)
            self._moved.notify_all()

    def finish(self, tp_seq: int) -> None:
        """The step's future is done, whether it ran or failed. Step thread, in a ``finally``."""
        with self._moved:
            self._settled = max(self._settled, tp_seq)
            self._done = max(self._done, tp_seq)
            self._moved.notify_all()

    def close(self) -> None:
        """No step will run any more, also none that was submitted: nobody waits for one."""
        with self._moved:
            self._closed = True
            self._moved.notify_all()

    def has_settled(self, tp_seq: int) -> bool:
        """Return whether the admit and plan of ``tp_seq`` are over.

        Never blocks. Main thread.
        """
        with self._moved:
            return self._settled >= tp_seq

    def wait_settled(self, tp_seq: int, waiter: str) -> None:
        """Block until the admit and plan of ``tp_seq`` are over (R3). Main thread."""
        self._wait(lambda: self._settled >= tp_seq, f"the admit of step {tp_seq}", waiter)

    def wait_done(self, tp_seq: int, waiter: str) -> None:
        """Block until ``tp_seq`` has left the device too (R4). Main thread."""
        self._wait(lambda: self._done >= tp_seq, f"the end of step {tp_seq}", waiter)

    def _wait(self, reached: Callable[[], bool], what: str, waiter: str) -> None:
        with self._moved:
            while not self._moved.wait_for(
                lambda: reached() or self._closed, timeout=self._warn_after_s
            ):
                logger.warning("%s waits for %s", waiter, what)
