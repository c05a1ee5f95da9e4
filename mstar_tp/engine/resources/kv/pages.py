"""The table of KV pages: who holds which, and which are kept for what they hold.

Plain data, the same on every rank.

A page that is full can be *named* by a key, which stands for every token up to its end and for all
else that made its content. Requests whose tokens begin alike lease the same pages. A named page
that nobody holds is free like any other: it keeps its name until a request that grows finds no
blank page, and then the one that was given back first goes. So keeping pages never costs a request
one.

Pages are handed out in an order that follows from the calls alone, so ranks that make the same
calls hold the same pages with nothing on the wire.

Owner: the step thread inside an admit; the main thread only between two admits (the fence orders
the two).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence

from mstar_tp.engine.history_hash import HistoryHash

PageKey = tuple[bytes, bytes]
"""(what made the content besides tokens, all tokens up to the page's end), each as a hash."""


class PageTable:
    """Pages of ``page_size`` tokens each, given to requests as they grow and taken back whole."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._blank: deque[int] = deque(range(num_pages))
        """Free pages without a name."""
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Free pages with a name, the one to go first in front."""
        self._held: dict[int, list[int]] = {}
        self._holders = [0] * num_pages
        """How many requests hold each page."""
        self._named: dict[PageKey, int] = {}
        self._names: dict[int, PageKey] = {}
        self._offered: dict[int, int] = {}
        """How many of its first pages each request has offered for naming."""
        self.evictions = 0
        """Named pages that were given to a request for something else."""
        self._history = HistoryHash()

    @property
    def num_free(self) -> int:
        """Pages that no request holds, named ones among them."""
        return len(self._blank) + len(self._kept)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    @property
    def num_named(self) -> int:
        """The number of pages that a request could lease, held or free."""
        return len(self._names)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` tokens need."""
        return -(-num_tokens // self.page_size)

    def held(self, rid: int) -> Sequence[int]:
        """The request's pages, in token order; empty when it holds none."""
        return self._held.get(rid, ())

    def missing(self, rid: int, num_tokens: int) -> int:
        """Pages the request lacks to hold ``num_tokens`` tokens."""
        return max(0, self.pages_for(num_tokens) - len(self._held.get(rid, ())))

    def named(self) -> Iterator[tuple[int, PageKey]]:
        """Every page that has a name, with it, in the order of the pages."""
        return iter(sorted(self._names.items()))

    # ------------------------------------------------------------------ pages of one's own

    def try_grow(self, rid: int, num_tokens: int) -> int | None:
        """Give the request pages for ``num_tokens`` tokens; return how many were taken.

        None on shortage: then nothing was taken.
        """
        count = self.missing(rid, num_tokens)
        if count > self.num_free:
            return None
        if count:
            taken = [self._take() for _ in range(count)]
            self._held.setdefault(rid, []).extend(taken)
            self._history.add(1, rid, *taken)
        return count

    def shrink(self, rid: int, count: int) -> None:
        """Give back the ``count`` pages taken last, in reverse order.

        It undoes ``try_grow``, but for the names of the pages that it took.
        """
        pages = self._held[rid]
        for _ in range(count):
            page = pages.pop()
            self._holders[page] = 0
            self._blank.appendleft(page)
        if not pages:
            del self._held[rid]
        self._history.add(2, rid, count)

    def release(self, rid: int) -> int:
        """Take back everything the request holds; return how many pages nobody holds now."""
        pages = self._held.pop(rid, None)
        self._offered.pop(rid, None)
        if pages is None:
            return 0
        # The last page first: a page is of no use to who lacks those before it.
        freed = [page for page in reversed(pages) if self._let_go(page)]
        self._history.add(3, rid)
        return len(freed)

    # ------------------------------------------------------------------ pages that are kept

    def find(self, keys: Sequence[PageKey]) -> int:
        """The number of ``keys``, from the first on, that name a page."""
        for count, key in enumerate(keys):
            if key not in self._named:
                return count
        return len(keys)

    def num_leased(self, keys: Sequence[PageKey]) -> int:
        """The number of ``keys``, which all name a page, whose page some request holds."""
        return sum(self._holders[self._named[key]] > 0 for key in keys)

    def lease(self, rid: int, keys: Sequence[PageKey]) -> None:
        """Make the pages of ``keys`` the request's first ones. It holds none, and all are there."""
        assert rid not in self._held, f"request {rid} leases pages and holds some already"
        pages = [self._named[key] for key in keys]
        for page in pages:
            if not self._holders[page]:
                del self._kept[page]
            self._holders[page] += 1
        self._held[rid] = pages
        self._offered[rid] = len(pages)
        self._history.add(4, rid, *pages)

    def offer(self, rid: int, keys: Sequence[PageKey], count: int) -> None:
        """Name the request's first ``count`` pages, which are full once the admitted step has run.

        ``keys`` name its first pages, as many as may be shared. A page whose name another page has
        already stays the request's own.
        """
        done, count = self._offered.get(rid, 0), min(count, len(keys))
        if count <= done:
            return
        for page, key in zip(self._held[rid][done:count], keys[done:count], strict=True):
            if key not in self._named and page not in self._names:
                self._named[key] = page
                self._names[page] = key
                self._history.add(5, page, *map(_number, key))
        self._offered[rid] = count

    def unname(self, rid: int) -> None:
        """Take the names of the request's pages: what they hold is of no use to anybody."""
        for page in self._held.get(rid, ()):
            self._forget(page)
        self._history.add(6, rid)

    def history(self) -> int:
        """Running hash of every change, for R8."""
        return self._history.value()

    # ------------------------------------------------------------------ inside

    def _take(self) -> int:
        """A free page, for one request alone."""
        if self._blank:
            page = self._blank.popleft()
        else:
            page, _ = self._kept.popitem(last=False)
            self._forget(page)
            self.evictions += 1
        self._holders[page] = 1
        return page

    def _let_go(self, page: int) -> bool:
        """One holder fewer; whether it was the last."""
        self._holders[page] -= 1
        if self._holders[page]:
            return False
        if page in self._names:
            self._kept[page] = None
        else:
            self._blank.append(page)
        return True

    def _forget(self, page: int) -> None:
        key = self._names.pop(page, None)
        if key is not None:
            del self._named[key]


def _number(part: bytes) -> int:
    """A hash's first bytes as a trail takes them."""
    return int.from_bytes(part[:8], "little", signed=True)
