"""KV pages are never given twice, never lost, and follow from the calls alone; what is kept of them
is always what its name says, and never costs a request a page.

The model says what pages *contain*: each was written by one request at one place, so a page that is
leased must still hold what that place's name stands for. Names here are the tokens themselves.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mstar_tp.engine.resources.kv.pages import PageKey, PageTable

NUM_PAGES = 12
PAGE_SIZE = 4
RIDS = st.integers(0, 5)
TEXTS = st.lists(st.integers(0, 1), min_size=0, max_size=9)
"""Of a request's tokens, one number a page: short ones begin alike often."""


def names(text: list[int]) -> list[PageKey]:
    return [(b"root----", bytes([7, *text[: end + 1]]).ljust(8)) for end in range(len(text))]


class PageMachine(RuleBasedStateMachine):
    """Against the simplest model there is: who holds which pages, what each page was written with
    last, and every free page in the order they came free. A twin gets the same calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = PageTable(NUM_PAGES, PAGE_SIZE)
        self.twin = PageTable(NUM_PAGES, PAGE_SIZE)
        self.held: dict[int, list[int]] = {}
        self.texts: dict[int, list[int]] = {}
        self.offered: dict[int, int] = {}
        """request -> how many of its first pages were leased or offered: these get no name anew,
        also where what they hold was spoilt by another holder."""
        self.content: dict[int, PageKey | None] = {}
        """page -> what was written there, once it was offered by that name."""
        self.named: dict[PageKey, int] = {}
        self.blank: list[int] = list(range(NUM_PAGES))
        self.kept: list[int] = []

    def both(self, name: str, *args: object) -> object:
        """Call the table and its twin; both answer alike."""
        answers = [getattr(table, name)(*args) for table in (self.table, self.twin)]
        assert answers[0] == answers[1]
        return answers[0]

    def _foretell_take(self, count: int) -> list[int]:
        """Pages that a request which grows gets: blank ones, then those that are kept longest."""
        taken = []
        for _ in range(count):
            page = self.blank.pop(0) if self.blank else self.kept.pop(0)
            key = self.content.pop(page, None)
            if key is not None and self.named.get(key) == page:
                del self.named[key]
            taken.append(page)
        return taken

    @rule(rid=RIDS, text=TEXTS)
    def join(self, rid: int, text: list[int]) -> None:
        """A request that holds nothing leases all that is kept of its pages."""
        if rid in self.held or not text:
            return
        keys = names(text)
        found = 0
        while found < len(keys) and keys[found] in self.named:
            found += 1
        assert self.both("find", keys) == found
        pages = [self.named[key] for key in keys[:found]]
        leased = {page for other in self.held.values() for page in other}
        assert self.both("num_leased", keys[:found]) == len(leased.intersection(pages))
        self.texts[rid] = text
        if found:
            self.both("lease", rid, keys[:found])
            self.kept = [page for page in self.kept if page not in pages]
            self.held[rid] = pages
            self.offered[rid] = found

    @rule(rid=RIDS, tokens=st.integers(1, 40))
    def grow(self, rid: int, tokens: int) -> None:
        have = self.held.get(rid, [])
        count = max(0, (tokens + PAGE_SIZE - 1) // PAGE_SIZE - len(have))
        taken = self.both("try_grow", rid, tokens)
        if count > len(self.blank) + len(self.kept):
            assert taken is None
            return
        assert taken == count
        if count:
            self.held[rid] = have + self._foretell_take(count)

    @rule(rid=RIDS, tokens=st.integers(1, 40))
    def grow_and_roll_back(self, rid: int, tokens: int) -> None:
        count = self.both("try_grow", rid, tokens)
        if count:
            self.both("shrink", rid, count)
            self.blank[:0] = self._foretell_take(int(str(count)))

    @rule(rid=RIDS, count=st.integers(1, 9))
    def fill(self, rid: int, count: int) -> None:
        """A step writes the request's pages up to ``count``."""
        keys = names(self.texts.get(rid, []))
        count = min(count, len(keys), len(self.held.get(rid, [])))
        if not count:
            return
        self.both("offer", rid, keys, count)
        done = self.offered.get(rid, 0)
        self.offered[rid] = max(done, count)
        for page, key in zip(self.held[rid][done:count], keys[done:count], strict=True):
            if page not in self.content and key not in self.named:
                self.content[page], self.named[key] = key, page

    @rule(rid=RIDS)
    def release(self, rid: int) -> None:
        pages = self.held.pop(rid, [])
        self.offered.pop(rid, None)
        self.texts.pop(rid, None)
        others = {page for other in self.held.values() for page in other}
        freed = [page for page in reversed(pages) if page not in others]
        assert self.both("release", rid) == len(freed)
        self.kept += [page for page in freed if page in self.content]
        self.blank += [page for page in freed if page not in self.content]

    @rule(rid=RIDS)
    def spoil(self, rid: int) -> None:
        """What the request has is worth nothing: it is not kept."""
        self.both("unname", rid)
        for page in self.held.get(rid, []):
            key = self.content.pop(page, None)
            if key is not None:
                del self.named[key]
        self.release(rid)

    @invariant()
    def pages_are_held_or_free_and_free_ones_never_leased(self) -> None:
        for rid in range(6):
            assert list(self.table.held(rid)) == self.held.get(rid, [])
        held = {page for pages in self.held.values() for page in pages}
        assert sorted([*held, *self.blank, *self.kept]) == list(range(NUM_PAGES))
        assert self.table.num_free == NUM_PAGES - len(held)
        assert list(self.table._blank) == self.blank
        assert list(self.table._kept) == self.kept

    @invariant()
    def a_page_that_is_named_holds_what_its_name_says(self) -> None:
        assert dict(self.table.named()) == {page: key for key, page in self.named.items()}
        assert self.table.num_named == len(self.named)

    @invariant()
    def the_twin_has_the_same_hash(self) -> None:
        assert self.table.history() == self.twin.history()


TestPages = PageMachine.TestCase


def test_another_history_has_another_hash() -> None:
    one, other = PageTable(8, 4), PageTable(8, 4)
    one.try_grow(1, 4)
    other.try_grow(2, 4)
    assert one.history() != other.history()
    same = PageTable(8, 4)
    same.try_grow(1, 4)
    assert one.history() == same.history()
    one.offer(1, names([0]), 1)
    same.offer(1, names([1]), 1)
    assert one.history() != same.history()
