"""The admission queue: arrival order, all or nothing, nothing held while waiting, passing only what
the head does not ask.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mstar_tp.engine.resources.base import AdmitOutcome, Ask, AskFailed, StepBatch
from mstar_tp.engine.scheduling.admission import AdmissionQueue


class Units:
    """A resource of ``total`` units of which each request wants a number (0: it asks for none,
    negative: it fails).
    """

    def __init__(self, total: int, wants: dict[int, int]) -> None:
        self.total = total
        self.wants = wants
        self.reserved: dict[int, int] = {}
        self.growth = 0
        self.tried: list[int] = []
        self.away: set[int] = set()

    def ask(self, rid: int) -> Ask | AskFailed | None:
        if self.wants[rid] < 0:
            return AskFailed(f"{rid} never fits")
        if rid in self.away:
            return Ask.NOT_IN
        return Ask.ASKS if self.wants[rid] and rid not in self.reserved else None

    def reserve(self, rid: int) -> int | None:
        self.tried.append(rid)
        if sum(self.reserved.values()) + self.wants[rid] > self.total:
            return None
        self.reserved[rid] = self.wants[rid]
        return self.wants[rid]

    def unreserve(self, rid: int) -> None:
        if self.reserved.pop(rid, None) is not None:
            self.growth += 1

    def growth_mark(self) -> int:
        return self.growth

    def grew_since(self, mark: int) -> bool:
        return self.growth != mark

    def remove_request(self, rid: int) -> None:
        self.unreserve(rid)

    def admit(self, step: StepBatch) -> AdmitOutcome:
        raise AssertionError("admission never admits")

    def rollback_admit(self, step: StepBatch) -> None:
        raise AssertionError("admission never admits")

    def commit(self, step: StepBatch) -> None:
        raise AssertionError("admission never admits")

    def post_warmup_validate(self) -> None:
        raise AssertionError("admission never validates")


def _queue(slots: Units, pages: Units, rids: list[int]) -> AdmissionQueue:
    queue = AdmissionQueue([slots, pages])
    for rid in rids:
        queue.push(rid)
    return queue


def test_a_row_that_asks_for_no_slot_passes_a_head_that_lacks_one() -> None:
    slots, pages = Units(1, {1: 1, 2: 1, 3: 0}), Units(9, {1: 1, 2: 1, 3: 1})
    queue = _queue(slots, pages, [1, 2, 3])
    assert queue.admit(9).rows == [1, 3]
    assert slots.reserved == {1: 1}
    assert pages.reserved == {1: 1, 3: 1}, "the waiting head holds nothing"


def test_nobody_passes_a_head_that_lacks_what_everyone_asks() -> None:
    slots, pages = Units(9, {1: 1, 2: 0}), Units(3, {1: 4, 2: 1})
    assert _queue(slots, pages, [1, 2]).admit(9).rows == []
    assert slots.reserved == {}


def test_a_row_that_wants_the_lacking_resource_does_not_pass_even_when_it_would_fit() -> None:
    slots, pages = Units(2, {1: 1, 2: 2, 3: 1}), Units(9, {1: 1, 2: 1, 3: 1})
    queue = _queue(slots, pages, [1, 2, 3])
    assert queue.admit(9).rows == [1]


def test_arrival_order_holds_whatever_order_requests_enter_in() -> None:
    slots, pages = Units(9, {r: 0 for r in range(5)}), Units(9, {r: 1 for r in range(5)})
    assert _queue(slots, pages, [3, 0, 4, 2]).admit(9).rows == [0, 2, 3, 4]


def test_a_request_that_can_never_fit_fails_and_blocks_nobody() -> None:
    slots, pages = Units(1, {1: -1, 2: 1}), Units(9, {1: 1, 2: 1})
    admitted = _queue(slots, pages, [1, 2]).admit(9)
    assert admitted.failed == [(1, "1 never fits")]
    assert admitted.rows == [2]


def test_nothing_is_tried_again_until_something_grew() -> None:
    slots, pages = Units(1, {1: 1, 2: 1}), Units(9, {1: 1, 2: 1})
    queue = _queue(slots, pages, [1, 2])
    queue.admit(9)
    slots.tried.clear()
    assert queue.admit(9).rows == []
    assert slots.tried == []
    slots.unreserve(1)
    assert queue.admit(9).rows == [2]


def test_rows_left_by_the_row_limit_are_tried_at_the_next_pass() -> None:
    slots, pages = Units(0, {1: 0, 2: 0}), Units(9, {1: 1, 2: 1})
    queue = _queue(slots, pages, [1, 2])
    assert queue.admit(1).rows == [1]
    assert queue.admit(0).rows == []
    assert queue.admit(1).rows == [2]


def test_what_a_waiting_head_gives_back_itself_is_no_growth() -> None:
    slots, pages = Units(2, {1: 1, 2: 1}), Units(3, {1: 2, 2: 2})
    queue = _queue(slots, pages, [1, 2])
    assert queue.admit(9).rows == [1]
    assert slots.tried == [1, 2] and slots.reserved == {1: 1}
    assert queue.admit(9).rows == [] and slots.tried == [1, 2]
    pages.unreserve(1)
    assert queue.admit(9).rows == [2]


def test_a_new_entry_is_tried_alone_and_the_waiting_head_is_not_tried_for_it() -> None:
    wants = {1: 1, 2: 1, 3: 0, 4: 1}
    slots, pages = Units(1, wants), Units(9, {rid: 1 for rid in wants})
    queue = _queue(slots, pages, [1, 2])
    assert queue.admit(9).rows == [1]
    slots.tried.clear()
    pages.tried.clear()
    queue.push(4)
    queue.push(3)
    assert queue.admit(9).rows == [3], "4 asks for the slot that 2 lacks"
    assert slots.tried == [] and pages.tried == [3]


def test_a_waiting_head_that_leaves_makes_room_for_those_it_kept_out() -> None:
    slots, pages = Units(2, {1: 1, 2: 2, 3: 1}), Units(9, {1: 1, 2: 1, 3: 1})
    queue = _queue(slots, pages, [1, 2, 3])
    assert queue.admit(9).rows == [1]
    queue.discard(2)
    assert queue.admit(9).rows == [3]


def test_a_row_whose_copies_went_away_is_not_in_the_queue_and_keeps_its_arrival_place() -> None:
    slots, pages = Units(1, {1: 1, 2: 1}), Units(9, {1: 1, 2: 1})
    slots.away.add(1)
    queue = _queue(slots, pages, [1, 2])
    assert queue.admit(9).rows == [2], "one that is not in keeps nobody waiting"
    slots.away.clear()
    queue.push(3)
    slots.wants[3] = pages.wants[3] = 1
    slots.unreserve(2)
    assert queue.admit(9).rows == [1]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), min_size=1, max_size=12),
    st.integers(1, 3),
    st.integers(4, 9),
)
def test_everyone_runs_in_the_end_and_never_past_a_total(
    wants: list[tuple[int, int]], num_slots: int, num_pages: int
) -> None:
    slots = Units(num_slots, {r: min(w[0], num_slots) for r, w in enumerate(wants)})
    pages = Units(num_pages, {r: w[1] for r, w in enumerate(wants)})
    queue = _queue(slots, pages, list(range(len(wants))))
    served: list[int] = []
    for _ in range(len(wants) + 1):
        rows = queue.admit(99).rows
        assert sum(slots.reserved.values()) <= num_slots
        assert sum(pages.reserved.values()) <= num_pages
        served += rows
        for rid in rows:
            slots.unreserve(rid)
            pages.unreserve(rid)
    assert sorted(served) == list(range(len(wants)))
    assert len(queue) == 0
