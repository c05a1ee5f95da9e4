"""The places of requests' KV in host memory: plain data, the same on every rank.

A preempted request's pages move there when they fit, and back before it runs again. Places follow
from the calls alone, the lowest free ones first, so a rank's host memory is touched no further up
than was ever needed at once.

Owner: the step thread inside an admit; the main thread only between two admits (the fence orders
the two).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from mstar_tp.engine.history_hash import HistoryHash


class HostPages:
    """``num_pages`` host pages, each as large as one of the device's; given and taken back whole.

    Without any, nothing is ever offloaded.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages))
        self._held: dict[int, tuple[int, ...]] = {}
        self._history = HistoryHash()

    def __contains__(self, rid: int) -> bool:
        return rid in self._held

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    @property
    def rids(self) -> Sequence[int]:
        """The requests whose KV lies here, as they came."""
        return tuple(self._held)

    def held(self, rid: int) -> Sequence[int]:
        """The request's host pages, in token order; empty when it has none."""
        return self._held.get(rid, ())

    def fits(self, count: int) -> bool:
        """Return whether ``count`` more pages are free."""
        return count <= len(self._free)

    def take(self, rid: int, count: int) -> Sequence[int]:
        """Give ``count`` pages, which must be free, to a request that holds none."""
        assert rid not in self._held, f"request {rid} is offloaded twice"
        assert self.fits(count), f"request {rid} needs {count} host pages, {len(self._free)} free"
        taken = self._held[rid] = tuple(heappop(self._free) for _ in range(count))
        self._history.add(1, rid, *taken)
        return taken

    def release(self, rid: int) -> Sequence[int]:
        """Take back what the request holds; the pages, none when it holds none."""
        pages = self._held.pop(rid, ())
        if pages:
            for page in pages:
                heappush(self._free, page)
            self._history.add(2, rid)
        return pages

    def history(self) -> int:
        """Running hash of every change, for R8."""
        return self._history.value()
