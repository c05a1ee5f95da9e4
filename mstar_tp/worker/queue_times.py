"""The time each request waits between its ingest and its first step. The leader's main thread."""

from __future__ import annotations

import time


class QueueTimes:
    """Times of requests that wait or have no token yet, by request number."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        """When each request came that no step has run yet."""
        self._waited_us: dict[int, int] = {}
        """How long each request waited that runs and has no token yet."""

    def came(self, rid: int) -> None:
        """Note that the request has been ingested."""
        self._since[rid] = time.monotonic()

    def joined(self, rid: int) -> None:
        """Note a request's first step, or one after it gave its pages back."""
        since = self._since.pop(rid, None)
        if since is not None:
            self._waited_us[rid] = round((time.monotonic() - since) * 1e6)

    def take_us(self, rid: int) -> int | None:
        """Return how long the request waited, in microseconds, once; None after that."""
        return self._waited_us.pop(rid, None)

    def forget(self, rid: int) -> None:
        """Drop what is known of a request that ends."""
        self._since.pop(rid, None)
        self._waited_us.pop(rid, None)
