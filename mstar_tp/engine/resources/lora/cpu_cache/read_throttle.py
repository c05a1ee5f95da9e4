"""A throttle on what readers take of a core while steps run on the same cores. No torch.

A step's threads wait for each other many times a layer, so a reader that takes a core for a moment
holds all of them up for longer than that. Left alone, reads made steps take twice their time and
more. A read that has gone on for long rests no more: its requests have waited enough, and its
deadline comes nearer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SHARE = 0.1
"""The share of one core, for all readers together."""
BIT_S = 0.0005
"""A reader goes on for this much of its own CPU time, at least, before it rests."""
RECENT_S = 1.0
"""Steps run as long as one began so lately."""
PATIENCE_S = 10.0
"""A read rests for no longer than this from its beginning."""


class ReadThrottle:
    """Any thread. ``_lock`` guards ``_resume_at``; it is a leaf."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        worked: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``worked``: the calling thread's own CPU seconds."""
        self._clock, self._worked, self._sleep = clock, worked, sleep
        self._lock = threading.Lock()
        self._resume_at = 0.0
        """Until then what was worked uses up the readers' share."""
        self._last_step = float("-inf")

    def stepped(self) -> None:
        """A step begins. Step thread."""
        self._last_step = self._clock()

    def reader(self) -> Callable[[], None]:
        """The rest of one read, which its thread calls between small bits of work.

        It rests there as long as steps run and the readers have had their share.
        """
        since, begun = self._worked(), self._clock()

        def rest() -> None:
            nonlocal since
            bit = self._worked() - since
            if bit < BIT_S:
                return
            since += bit
            now = self._clock()
            if now - self._last_step > RECENT_S or now - begun > PATIENCE_S:
                return
            with self._lock:
                self._resume_at = max(self._resume_at, now) + bit * (1 / SHARE - 1)
                wait = self._resume_at - now
            self._sleep(wait)
            since = self._worked()

        return rest
