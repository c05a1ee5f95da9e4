"""Ranks that were asked to stop, by signals that torchrun passed on. The event loop's thread.

They serve on, and their requests get a while to end: those that the ranks know. Whoever comes
meanwhile waits for the next ranks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from mstar_tp.frontend.ranks.live_requests import LiveRequests

logger = logging.getLogger(__name__)

MOST_S = 25.0
"""How long ranks that were asked to stop may serve on: torchrun ends them by force 30 s after its
signal.
"""


class Drain:
    """Of one group of ranks at a time."""

    def __init__(self, requests: LiveRequests, grace_s: float, dismiss: Callable[[], None]) -> None:
        """``dismiss`` ends the ranks: called once no request that they know is live, or after
        ``grace_s``, at most ``MOST_S``.
        """
        self._requests = requests
        self._grace_s = min(grace_s, MOST_S)
        self._dismiss = dismiss
        self._known: set[int] | None = None
        """The requests that the ranks were told of, ended ones among them; None: nobody has been
        asked to leave."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def begun(self) -> bool:
        """Whether the ranks get no more requests."""
        return self._known is not None

    def knows(self, rid: int) -> bool:
        """Whether the ranks were told of a live request."""
        return self._known is None or rid in self._known

    def begin(self) -> None:
        """Once a rank was asked to stop. Idempotent."""
        if self._known is not None:
            return
        self._known = self._requests.rids()
        self._timer = asyncio.get_running_loop().call_later(self._grace_s, self._expire)
        logger.info(
            "the ranks were asked to stop: %d requests get %g s to end on them, others wait for "
            "the next ranks",
            len(self._known),
            self._grace_s,
        )
        self.look()

    def look(self) -> None:
        """Requests may have ended."""
        if self._known is not None and self._known.isdisjoint(self._requests.rids()):
            self._end()

    def cancel(self) -> None:
        """The ranks are gone, or end for another reason. Idempotent."""
        self._known = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        logger.info("requests did not end in time: they go on with the next ranks")
        self._end()

    def _end(self) -> None:
        self.cancel()
        self._dismiss()
