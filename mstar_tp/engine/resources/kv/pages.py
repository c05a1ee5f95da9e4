"""Which KV pages hold which request's tokens: plain data, the same on every rank.

Pages are handed out in an order that follows from the calls alone (lowest free count never matters,
only the free list's
order), so ranks that make the same calls hold the same pages with nothing on the wire.

Owner: the step thread inside an admit; the main thread only between two admits (the fence orders
the two).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from mstar_tp.engine.trail import Trail


class PageTable:
    """Pages of ``page_size`` tokens each, given to requests as they grow and taken back whole."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free: deque[int] = deque(range(num_pages))
        self._held: dict[int, list[int]] = {}
        self._trail = Trail()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` tokens need."""
        return -(-num_tokens // self.page_size)

    def held(self, rid: int) -> Sequence[int]:
        """The request's pages, in token order; empty when it holds none."""
        return self._held.get(rid, ())

    def missing(self, rid: int, num_tokens: int) -> int:
        """Pages the request lacks to hold ``num_tokens`` tokens."""
        return max(0, self.pages_for(num_tokens) - len(self._held.get(rid, ())))

    def try_grow(self, rid: int, num_tokens: int) -> int | None:
        """Give the request pages for ``num_tokens`` tokens; the number taken, or None (nothing
        taken) on shortage.
        """
        count = self.missing(rid, num_tokens)
        if count > len(self._free):
            return None
        if count:
            taken = [self._free.popleft() for _ in range(count)]
            self._held.setdefault(rid, []).extend(taken)
            self._trail.add(1, rid, *taken)
        return count

    def shrink(self, rid: int, count: int) -> None:
        """Give back the ``count`` pages taken last, in reverse order: undoes ``try_grow``."""
        pages = self._held[rid]
        for _ in range(count):
            self._free.appendleft(pages.pop())
        if not pages:
            del self._held[rid]
        self._trail.add(2, rid, count)

    def release(self, rid: int) -> int:
        """Take back everything the request holds; the number of pages."""
        pages = self._held.pop(rid, None)
        if pages is None:
            return 0
        self._free.extend(pages)
        self._trail.add(3, rid)
        return len(pages)

    def trail(self) -> int:
        """Running hash of every change, for R8."""
        return self._trail.value()
