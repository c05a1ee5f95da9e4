"""Memory for CPU copies: the bound that the bytes themselves keep, on this rank alone.

What is *held* follows from the order and never costs more than the capacity. But a read that was
begun for a hold since dropped goes on for a while, and an install may still copy from an adapter
that is held no more. So a read takes room before it pins anything, and the room comes back when its
copy is really gone; a read for which there is none waits its turn. That delays a report on this
rank; it decides nothing.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable

from mstar_tp.lora.reading.loaded_adapter import LoadedAdapter

LOOK_AGAIN_S = 1.0
"""Python may collect a copy on the very thread that is about to wait, which is not told then."""


class CpuCacheBudget:
    """The memory budget of the CPU cache's copies; ``capacity`` is in the cache's unit.

    ``_moved`` guards all but ``_returned``; but for ``reap`` it is a leaf.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.reap: Callable[[], None] = lambda: None
        """Lets go of copies that a device has read; called by who waits for room, on any thread."""
        self._moved = threading.Condition(threading.RLock())
        self._waiters: deque[object] = deque()
        """Reads that wait for room, first come, first served."""
        self._taken = 0
        self._memory_bytes = 0
        self._peak = 0
        self._peak_bytes = 0
        self._returned: deque[tuple[int, int]] = deque()
        """(cost, bytes) of copies that are gone. A copy may go at any point of any thread, so its
        room is only noted here, which takes no lock."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of this rank's CPU copies, reads in flight included."""
        with self._moved:
            self._collect()
            return self._memory_bytes

    @property
    def peak(self) -> int:
        """The most that was ever taken at once, in the tier's unit."""
        return self._peak

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were ever pinned at once."""
        return self._peak_bytes

    def take(self, cost: int, num_bytes: int, cancelled: Callable[[], bool]) -> bool:
        """Wait for room for a copy and take it; False once ``cancelled`` says that nobody wants it.

        ``cancelled`` takes no lock; whoever makes it true calls ``nudge``. Blocks. Reader threads.
        """
        waiter = object()
        with self._moved:
            self._waiters.append(waiter)
            try:
                while not cancelled():
                    self.reap()
                    self._collect()
                    if self._waiters[0] is waiter and self._taken + cost <= self._capacity:
                        self._taken += cost
                        self._memory_bytes += num_bytes
                        self._peak = max(self._peak, self._taken)
                        self._peak_bytes = max(self._peak_bytes, self._memory_bytes)
                        return True
                    self._moved.wait(LOOK_AGAIN_S)
                return False
            finally:
                self._waiters.remove(waiter)
                self._moved.notify_all()

    def give(self, cost: int, num_bytes: int) -> None:
        """Free again what ``take`` took. Any thread."""
        self._returned.append((cost, num_bytes))
        self.nudge()

    def give_with(self, adapter: LoadedAdapter, cost: int, num_bytes: int) -> None:
        """Give the room back when nothing refers to ``adapter`` any more."""
        weakref.finalize(adapter, self.give, cost, num_bytes).atexit = False

    def nudge(self) -> None:
        """Let those that wait look again."""
        with self._moved:
            self._moved.notify_all()

    def _collect(self) -> None:
        while self._returned:
            cost, num_bytes = self._returned.popleft()
            self._taken -= cost
            self._memory_bytes -= num_bytes
