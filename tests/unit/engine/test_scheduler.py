"""The scheduler: budgets hold, running rows never lose a step, preempted rows finish, nothing is
left behind.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mstar_tp.engine.resources.base import Ask
from mstar_tp.engine.resources.kv.pages import PageTable
from mstar_tp.engine.resources.kv.pool import KvPool
from mstar_tp.engine.scheduling.requests import RequestTable
from mstar_tp.engine.scheduling.scheduler import Plan, Scheduler
from mstar_tp.wire.commands import NewRequest
from mstar_tp.wire.values import SamplingParams

PAGE_SIZE = 4


class Engine:
    """The leader's tables and a step that samples token 7 for every row that samples."""

    def __init__(
        self,
        num_pages: int,
        max_num_seqs: int,
        max_tokens: int,
        others: tuple[Any, ...] = (),
    ) -> None:
        self.requests = RequestTable()
        self.table = PageTable(num_pages, PAGE_SIZE)
        self.kv = KvPool(self.table, lambda rid: len(self.requests[rid].tokens))
        self.scheduler = Scheduler(
            self.requests,
            self.kv,
            others,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_tokens,
        )
        self.max_num_seqs, self.max_tokens = max_num_seqs, max_tokens
        self.tp_seq = -1
        self.finished: list[int] = []

    def add(self, rid: int, prompt: int, output: int, priority: int = 0) -> None:
        params, ids = SamplingParams(max_tokens=output), tuple(range(prompt))
        self.requests.add(NewRequest(rid=rid, prompt=ids, params=params, priority=priority))
        self.scheduler.enqueue(rid)

    def step(self) -> Plan:
        decoding = {r.rid for r in self.requests if r.computed and r.pending == 1}
        plan = self.scheduler.plan()
        assert sum(count for _, count in plan.rows) <= self.max_tokens
        assert len(plan.rows) <= self.max_num_seqs
        assert decoding <= {rid for rid, _ in plan.rows} | set(plan.preempted)
        if plan.rows:
            self._run(plan)
        return plan

    def _run(self, plan: Plan) -> None:
        self.tp_seq += 1
        step = self.requests.build_step(self.tp_seq, plan.rows)
        assert self.kv.admit(step).refused is None
        self.kv.commit(step)
        sampling = [row for row in step.rows if row.samples]
        self.requests.commit(step, [7] * len(sampling))
        for row in sampling:
            request = self.requests[row.rid]
            if request.num_output == request.params.max_tokens:
                self.finished.append(row.rid)
                self.scheduler.remove(row.rid)
                self.kv.remove_request(row.rid)
                self.requests.remove(row.rid)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(-1, 1)),
        min_size=1,
        max_size=14,
    ),
    st.integers(11, 24),
    st.integers(1, 6),
    st.integers(6, 40),
)
def test_every_request_finishes_and_every_page_returns(
    work: list[tuple[int, int, int]], num_pages: int, max_num_seqs: int, max_tokens: int
) -> None:
    engine = Engine(num_pages, max_num_seqs, max_tokens)
    for rid, (prompt, output, priority) in enumerate(work):
        engine.add(rid, prompt, output, priority)
    for _ in range(5000):
        if not len(engine.requests):
            break
        assert engine.step().rows, "rows are waiting and nothing runs"
    assert sorted(engine.finished) == list(range(len(work)))
    assert engine.table.num_used == 0
    assert engine.kv.unreserved == num_pages
    assert engine.scheduler.num_running == engine.scheduler.num_waiting == 0


def test_waiting_requests_join_by_priority_and_running_ones_lose_pages_by_it() -> None:
    engine = Engine(num_pages=4, max_num_seqs=2, max_tokens=40)
    for rid, priority in enumerate([0, 1, 5, -3, 0, -3]):
        engine.add(rid, 4, 9, priority)
    joined, preempted = [], []
    while len(engine.requests):
        plan = engine.step()
        joined += [rid for rid in plan.joined if rid not in joined]
        preempted += plan.preempted
    assert joined == [3, 5, 0, 4, 1, 2]
    # Four pages hold one request of 13 tokens: of each two, the second gives its pages back.
    assert preempted == [5, 4, 2]


def test_a_long_prompt_is_computed_in_chunks_beside_decoding_rows() -> None:
    engine = Engine(num_pages=32, max_num_seqs=4, max_tokens=10)
    engine.add(0, 4, 8)
    engine.step()
    engine.add(1, 25, 2)
    assert engine.step().rows == [(0, 1), (1, 9)]
    assert engine.step().rows == [(0, 1), (1, 9)]
    assert engine.step().rows == [(0, 1), (1, 7)]
    assert engine.step().rows == [(0, 1), (1, 1)]


def test_the_youngest_row_gives_its_pages_back_and_comes_back_first() -> None:
    engine = Engine(num_pages=6, max_num_seqs=4, max_tokens=64)
    engine.add(0, 10, 12)
    engine.add(1, 10, 6)
    engine.add(2, 9, 2)
    preempted: list[int] = []
    while len(engine.requests):
        preempted += engine.step().preempted
    assert preempted
    assert set(preempted) == {1}
    assert engine.finished == [0, 1, 2]
    assert engine.scheduler.preemptions == len(preempted)


def test_a_step_planned_while_one_runs_takes_it_that_every_row_goes_on() -> None:
    engine = Engine(num_pages=8, max_num_seqs=4, max_tokens=8)
    engine.add(0, 4, 8)
    engine.add(1, 10, 2)
    first, second, third = (engine.scheduler.plan(may_preempt=False) for _ in range(3))
    assert first.rows == [(0, 4), (1, 4)]
    assert second.rows == [(0, 1), (1, 6)]
    assert third.rows == [(0, 1), (1, 1)]
    # Row 1 samples its second token, the last of two, in the third step.
    assert engine.scheduler.plan(may_preempt=False).rows == [(0, 1)]


def test_a_page_for_a_token_that_does_not_come_is_counted_and_never_taken() -> None:
    engine = Engine(num_pages=5, max_num_seqs=4, max_tokens=64)
    engine.add(0, 7, 8)
    engine.add(1, 3, 8)
    engine.step()
    assert (engine.table.num_used, engine.kv.unreserved) == (3, 2)
    running = engine.scheduler.plan(may_preempt=False)
    assert running.rows == [(0, 1), (1, 1)]
    # Its ninth token, should the running step's be no stop token, needs a third page, and row
    # 1's fifth a second.
    assert engine.scheduler.plan(may_preempt=False).rows == [(0, 1), (1, 1)]
    assert (engine.table.num_used, engine.kv.unreserved) == (3, 0)
    engine.requests[0].ended = "stop"
    step = engine.requests.build_step(7, [(0, 1), (1, 1)])
    assert [row.rid for row in step.rows] == [1]
    engine.scheduler.remove(0)
    engine.kv.remove_request(0)
    assert (engine.table.num_used, engine.kv.unreserved) == (1, 3)


def test_a_plan_that_must_preempt_waits_for_the_running_step_and_plans_nothing() -> None:
    engine = Engine(num_pages=4, max_num_seqs=4, max_tokens=64)
    engine.add(0, 7, 9)
    engine.add(1, 7, 9)
    engine.step()
    before = engine.scheduler.plan(may_preempt=False)
    assert not before.blocked
    blocked = engine.scheduler.plan(may_preempt=False)
    assert blocked.blocked and not blocked.rows and not blocked.preempted
    assert engine.requests[0].planned == 8
    engine._run(before)
    after = engine.scheduler.plan()
    assert after.preempted == [1] and after.rows == [(0, 1)]


def test_a_row_at_its_last_token_gives_its_seat_in_the_next_step_away() -> None:
    engine = Engine(num_pages=8, max_num_seqs=1, max_tokens=64)
    engine.add(0, 4, 1)
    engine.add(1, 4, 1)
    assert engine.scheduler.plan(may_preempt=False).rows == [(0, 4)]
    assert engine.scheduler.plan(may_preempt=False).rows == [(1, 4)]


def test_a_void_step_returns_the_rows_that_joined_with_it() -> None:
    engine = Engine(num_pages=8, max_num_seqs=4, max_tokens=64)
    engine.add(0, 4, 4)
    engine.step()
    engine.add(1, 5, 2)
    plan = engine.scheduler.plan()
    assert plan.rows == [(0, 1), (1, 5)]
    engine.scheduler.void_step(plan.joined)
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (1, 1)
    assert engine.scheduler.plan().rows == [(0, 1), (1, 5)]


class Slots:
    """A second resource of which every row claims one unit."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.reserved: set[int] = set()
        self.growth = 0

    def ask(self, rid: int) -> Ask | None:
        return None if rid in self.reserved else Ask.ASKS

    def reserve(self, rid: int) -> int | None:
        if len(self.reserved) == self.total:
            return None
        self.reserved.add(rid)
        return 1

    def unreserve(self, rid: int) -> None:
        if rid in self.reserved:
            self.reserved.remove(rid)
            self.growth += 1

    def growth_mark(self) -> int:
        return self.growth

    def grew_since(self, mark: int) -> bool:
        return self.growth != mark


def test_a_row_that_gets_no_token_in_its_first_step_holds_nothing() -> None:
    slots = Slots(2)
    engine = Engine(num_pages=32, max_num_seqs=4, max_tokens=10, others=(slots,))
    for rid in range(3):
        engine.add(rid, 8, 2)
    assert engine.step().rows == [(0, 8), (1, 2)]
    assert set(slots.reserved) == {0, 1}
    assert engine.step().rows == [(0, 1), (1, 6)]
    engine.add(3, 30, 2)
    engine.scheduler.remove(1)
    engine.kv.remove_request(1)
    engine.requests.remove(1)
    while len(engine.requests):
        plan = engine.step()
        holding = {rid for rid, _ in plan.rows} | {r.rid for r in engine.requests if r.computed}
        assert set(slots.reserved) <= holding
