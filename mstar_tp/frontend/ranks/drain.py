"""The drain of ranks that a signal asked to stop, as torchrun passes it on. Event loop's thread.

The ranks serve on, and the requests that they know get a while to end. Requests that come
meanwhile wait for the next ranks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from mstar_tp.frontend.ranks.live_requests import LiveRequests

logger = logging.getLogger(__name__)

MOST_S = 25.0
"""The most seconds that ranks which were asked to stop may serve on.

torchrun ends them by force 30 s after its signal.
"""


class GroupDrain:
    """The requests that leaving ranks still know, and the time that these get."""

    def __init__(
        self, requests: LiveRequests, grace_s: float, on_drained: Callable[[], None]
    ) -> None:
        """``on_drained`` is called once no request that the ranks know is live.

        It is called after ``grace_s`` seconds, at most ``MOST_S``, also where some still are.
        """
        self._requests = requests
        self._grace_s = min(grace_s, MOST_S)
        self._on_drained = on_drained
        self._known: set[int] | None = None
        """The requests that the ranks were told of, ended ones among them; None: no drain runs."""
        self._timer: asyncio.TimerHandle | None = None

    def knows(self, rid: int) -> bool:
        """Return whether the ranks were told of a live request."""
        return self._known is None or rid in self._known

    def begin(self) -> None:
        """Begin the drain, once a rank was asked to stop. Idempotent."""
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
        self.requests_ended()

    def requests_ended(self) -> None:
        """End the drain if no request that the ranks know is left."""
        if self._known is not None and self._known.isdisjoint(self._requests.rids()):
            self._end()

    def cancel(self) -> None:
        """Drop the drain: the ranks are gone, or end for another reason. Idempotent."""
        self._known = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        logger.info("requests did not end in time: they go on with the next ranks")
        self._end()

    def _end(self) -> None:
        self.cancel()
        self._on_drained()
