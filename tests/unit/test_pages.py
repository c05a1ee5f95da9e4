"""KV pages are never given twice, never lost, and follow from the calls alone."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mstar_tp.engine.resources.kv.pages import PageTable

NUM_PAGES = 12
PAGE_SIZE = 4
RIDS = st.integers(0, 5)


class PageMachine(RuleBasedStateMachine):
    """Against the simplest model there is: a count of tokens a request, and a twin that gets the
    same calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = PageTable(NUM_PAGES, PAGE_SIZE)
        self.twin = PageTable(NUM_PAGES, PAGE_SIZE)
        self.pages: dict[int, int] = {}

    @rule(rid=RIDS, tokens=st.integers(1, 40))
    def grow(self, rid: int, tokens: int) -> None:
        have = self.pages.get(rid, 0)
        want = max(have, (tokens + PAGE_SIZE - 1) // PAGE_SIZE)
        fits = want - have <= NUM_PAGES - sum(self.pages.values())
        taken = self.table.try_grow(rid, tokens)
        assert taken == self.twin.try_grow(rid, tokens)
        if fits:
            assert taken == want - have
            self.pages[rid] = want
        else:
            assert taken is None

    @rule(rid=RIDS, tokens=st.integers(1, 40))
    def grow_and_roll_back(self, rid: int, tokens: int) -> None:
        before = list(self.table.held(rid))
        for table in (self.table, self.twin):
            taken = table.try_grow(rid, tokens)
            if taken:
                table.shrink(rid, taken)
        assert list(self.table.held(rid)) == before

    @rule(rid=RIDS)
    def release(self, rid: int) -> None:
        assert self.table.release(rid) == self.pages.pop(rid, 0)
        self.twin.release(rid)

    @invariant()
    def every_page_has_at_most_one_owner(self) -> None:
        held = [page for rid in range(6) for page in self.table.held(rid)]
        assert len(held) == len(set(held)) == sum(self.pages.values())
        assert self.table.num_free == NUM_PAGES - len(held)

    @invariant()
    def the_twin_holds_the_same_pages_and_hash(self) -> None:
        assert all(list(self.table.held(r)) == list(self.twin.held(r)) for r in range(6))
        assert self.table.trail() == self.twin.trail()


TestPages = PageMachine.TestCase


def test_another_history_has_another_hash() -> None:
    one, other = PageTable(8, 4), PageTable(8, 4)
    one.try_grow(1, 4)
    other.try_grow(2, 4)
    assert one.trail() != other.trail()
