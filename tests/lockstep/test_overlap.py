"""With a step sent while the one before it runs, ranks stay one and every request gets its own.

Real loops, tables and step threads; the test says who goes on. Where a step is to stay *running*,
a step thread that has settled its admit gets no turn, so its result is out of reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.thread_instance import ThreadInstance
from trails import check_rest
from troubles import NAMES, Faults

from mstar_tp.common.errors import LockstepError
from mstar_tp.engine.resources.base import AdmitOutcome, StepBatch
from mstar_tp.wire.commands import Inspect
from mstar_tp.wire.reports import RequestFailed, Tokens
from mstar_tp.wire.schedule import Remove, ScheduleEntry, Step


class Watched:
    """An instance of two ranks, with what its leader sent and what each rank's steps ran."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.instance = ThreadInstance(folder, **options)
        self.entries: list[ScheduleEntry] = []
        self.tokens: list[tuple[int, int]] = []
        """(step, request) of every token on its way to the frontend."""
        self.failed: list[int] = []
        leader = self.instance.ranks[0]
        order, link = leader.loop._schedule, leader.link
        assert order is not None
        self._spy(order, "broadcast", self.entries.append)
        self._spy(link, "send", self._note_report)

    def _spy(self, owner: Any, name: str, note: Callable[[Any], None]) -> None:
        call = getattr(owner, name)

        def noted(message: Any) -> None:
            note(message)
            call(message)

        setattr(owner, name, noted)

    def _note_report(self, report: Any) -> None:
        if isinstance(report, Tokens):
            self.tokens += [(report.tp_seq, token.rid) for token in report.tokens]
        elif isinstance(report, RequestFailed):
            self.failed.append(report.rid)

    def let(self, *held: str, until: Callable[[], bool] = lambda: False) -> None:
        """Everything happens that can, but for the ``held`` threads, or until something holds."""
        for _ in range(10_000):
            choices = [act for name, act in self.instance.choices() if not name.startswith(held)]
            if not choices or until():
                return
            choices[0]()
            self.instance._raise_errors()
        raise AssertionError(f"no end in sight: {self.instance.interleaving.waits()}")

    @property
    def steps(self) -> list[Step]:
        return [entry for entry in self.entries if isinstance(entry, Step)]

    def named(self, rid: int) -> list[int]:
        """Steps that the leader named the request in."""
        return [step.tp_seq for step in self.steps if rid in dict(step.rows)]

    def ran(self, rid: int, rank: int) -> int:
        """In how many admits of a rank the request was."""
        admits = [event for event in self.instance.ranks[rank].events if event.kind == "admit"]
        return sum(rid in dict(event.detail) for event in admits)

    def removed(self, rid: int) -> bool:
        return any(isinstance(entry, Remove) and entry.rid == rid for entry in self.entries)


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    made: list[Watched] = []

    def start(*names: str, **options: Any) -> Watched:
        watched = Watched(tmp_path, **options)
        made.append(watched)
        watched.instance.start(*names)
        watched.let()
        return watched

    yield start
    for watched in made:
        watched.instance.close()


@pytest.mark.parametrize(("overlap", "window"), [(True, 2), (False, 1)])
def test_the_next_step_is_sent_while_one_runs_and_a_third_is_not(
    watch: Callable[..., Watched], overlap: bool, window: int
) -> None:
    watched = watch(overlap=overlap)
    watched.instance.submit(None, 2, max_tokens=6)
    watched.let("step-1")
    watched.instance.ranks[0].waker.wake()
    watched.let("step-1")
    assert [step.tp_seq for step in watched.steps] == list(range(window))
    assert watched.tokens == [], "the first step was meant to be still running"
    watched.let()
    assert len(watched.tokens) == 6
    check_rest(watched.instance)


def test_a_step_is_not_planned_before_the_one_ahead_has_settled_its_admit(
    watch: Callable[..., Watched],
) -> None:
    watched = watch()
    watched.instance.submit(None, 2, max_tokens=6)
    # Rank 0's step thread has been given the first step and no turn to admit it.
    watched.let("step-")
    assert len(watched.steps) == 1
    watched.let()
    check_rest(watched.instance)


def test_a_row_that_stops_is_skipped_by_the_step_behind_it_on_every_rank(
    watch: Callable[..., Watched],
) -> None:
    watched = watch()
    stops = watched.instance.submit(None, 1, max_tokens=5, stop_token_ids=(0,))
    goes_on = watched.instance.submit(None, 1, max_tokens=5)
    watched.let()
    assert len(watched.named(stops)) == 2, "the step behind was meant to name it"
    assert [watched.ran(stops, rank) for rank in (0, 1)] == [1, 1]
    assert [watched.ran(goes_on, rank) for rank in (0, 1)] == [5, 5]
    assert [rid for _, rid in watched.tokens].count(stops) == 1
    endings = watched.instance.endings
    assert (endings[stops].how, endings[goes_on].how) == ("stop", "length")
    check_rest(watched.instance)


@pytest.mark.parametrize(("max_tokens", "page_size"), [(3, 2), (20, 1)])
def test_a_row_at_its_last_token_by_count_is_not_named_again(
    watch: Callable[..., Watched], max_tokens: int, page_size: int
) -> None:
    watched = watch(page_size=page_size)
    rid = watched.instance.submit(None, 2, max_tokens=max_tokens)
    watched.let()
    wanted = min(max_tokens, watched.instance.max_model_len - 2)
    assert len(watched.named(rid)) == watched.instance.endings[rid].tokens == wanted
    check_rest(watched.instance)


def test_an_aborted_row_is_removed_after_the_last_step_that_runs_it_and_sends_no_token(
    watch: Callable[..., Watched],
) -> None:
    watched = watch("a")
    (key,) = watched.instance.configured
    rid = watched.instance.submit(key, 1, max_tokens=12)
    other = watched.instance.submit(None, 1, max_tokens=12)
    watched.let(until=lambda: len(watched.tokens) >= 4)
    watched.let("step-1")
    before, sent = len(watched.tokens), len(watched.steps)
    assert sent - 2 in watched.named(rid) and sent - 1 in watched.named(rid)
    watched.instance.abort(rid)
    watched.let("step-1")
    assert not watched.removed(rid), "two steps that run it have not ended"
    assert len(watched.steps) == sent
    watched.let()
    assert watched.removed(rid)
    assert max(watched.named(rid)) == sent - 1
    assert rid not in [owner for _, owner in watched.tokens[before:]]
    assert watched.instance.endings[other].tokens == 12
    check_rest(watched.instance)


def test_a_row_that_fails_is_skipped_by_the_step_behind_it_on_every_rank(
    watch: Callable[..., Watched],
) -> None:
    watched = watch()
    spoil_logits(watched, step=1, row=0)
    fails = watched.instance.submit(None, 1, max_tokens=5)
    goes_on = watched.instance.submit(None, 1, max_tokens=5)
    watched.let()
    assert watched.failed == [fails]
    assert watched.named(fails) == [0, 1, 2]
    assert [watched.ran(fails, rank) for rank in (0, 1)] == [2, 2]
    assert watched.instance.endings[goes_on].tokens == 5
    check_rest(watched.instance)


def spoil_logits(watched: Watched, step: int, row: int) -> None:
    """Rank 0's logits of one row of one step are not finite."""
    model = watched.instance.ranks[0].model
    logits, calls = model.logits, iter(range(1000))

    def spoilt(codes: Any, rows: Any) -> Any:
        found = logits(codes, rows)
        assert found is not None
        if next(calls) == step:
            found[row] = float("nan")
        return found

    model.logits = spoilt  # type: ignore[method-assign]


def refuse(instance: ThreadInstance, when: Callable[[StepBatch], bool]) -> None:
    """Pages are refused to these steps, on every rank alike."""
    for rank in instance.ranks:
        admit = rank.kv.admit

        def refusing(step: StepBatch, admit: Any = admit) -> AdmitOutcome:
            if when(step):
                return AdmitOutcome(refused=f"step {step.tp_seq}: refused by the test")
            outcome: AdmitOutcome = admit(step)
            return outcome

        rank.kv.admit = refusing  # type: ignore[method-assign]


def test_a_refused_step_makes_the_one_behind_it_void_and_both_are_planned_again(
    watch: Callable[..., Watched],
) -> None:
    watched = watch("a")
    instance = watched.instance
    refuse(instance, lambda step: step.tp_seq == 1)
    leader = instance.ranks[0]
    returned: list[list[int]] = []
    watched._spy(leader.loop._scheduler, "void_step", returned.append)  # type: ignore[union-attr]
    first = instance.submit(None, 1, max_tokens=6)
    watched.let(until=lambda: leader.fence.has_settled(1))
    # Step 1 has been refused and its thread has not said so: step 2 is planned all the same.
    late = [instance.submit(instance.configured[0], 3, max_tokens=3) for _ in range(2)]
    watched.let("step-", "main-0")
    watched.let("step-")
    rows = [dict(step.rows) for step in watched.steps]
    assert rows[1:] == [{first: 1}, {first: 1, late[0]: 3, late[1]: 3}]
    watched.let(until=lambda: leader.fence.has_settled(2))
    watched.let("step-")
    assert len(watched.steps) == 3, "nothing is planned before the void step has ended"
    watched.let()
    assert watched.steps[2].planned_after == 0
    assert returned == [late]
    again = watched.steps[3]
    assert (again.tp_seq, again.planned_after) == (3, 2)
    assert dict(again.rows) == rows[2], "what joined with the void step joins again, in its place"
    for rank in instance.ranks:
        admitted = [event.detail for event in rank.events if event.kind == "admit"]
        assert len(admitted) == len(watched.steps) - 1, "the void step takes nothing"
    assert [instance.endings[rid].tokens for rid in (first, *late)] == [6, 3, 3]
    assert len(watched.tokens) == len(set(watched.tokens)) == 12
    check_rest(instance)


def test_a_step_that_shares_no_row_with_a_refused_one_runs(watch: Callable[..., Watched]) -> None:
    watched = watch()
    instance = watched.instance
    refuse(instance, lambda step: step.tp_seq == 0)
    only = instance.submit(None, 2, max_tokens=1)
    watched.let(until=lambda: instance.ranks[0].fence.has_settled(0))
    late = instance.submit(None, 2, max_tokens=1)
    watched.let("step-")
    watched.let()
    assert [dict(step.rows) for step in watched.steps] == [{only: 2}, {late: 2}, {only: 2}]
    assert watched.steps[1].planned_after == -1
    assert watched.tokens == [(1, late), (2, only)]
    check_rest(instance)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_storms_with_refused_steps_leave_all_ranks_one(
    tmp_path: Path, world_size: int, seed: int
) -> None:
    instance = ThreadInstance(
        tmp_path,
        world_size=world_size,
        slots=2,
        cpu_capacity=3,
        num_pages=6,
        num_host_pages=3 * (seed % 3),
        fine=seed % 2 == 1,
    )
    try:
        refuse(instance, lambda step: (step.tp_seq * 7 + seed) % 5 == 0)
        instance.start(*NAMES[:4])
        troubles = Faults(instance)
        troubles.stress(seed, requests=40)
        troubles.check()
    finally:
        instance.close()


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one-step"])
@pytest.mark.parametrize("seed", range(4))
def test_rows_are_preempted_only_while_no_step_is_in_flight(
    tmp_path: Path, seed: int, overlap: bool
) -> None:
    instance = ThreadInstance(tmp_path, num_pages=5, page_size=2, overlap=overlap)
    try:
        leader = instance.ranks[0].loop
        scheduler = leader._scheduler  # type: ignore[union-attr]
        preempt = scheduler._preempt_last

        def watched(plan: Any) -> int:
            assert not leader._in_flight  # type: ignore[union-attr]
            return preempt(plan)

        scheduler._preempt_last = watched  # type: ignore[method-assign]
        instance.start()
        draw = Random(seed)
        asked = [instance.submit(None, draw.randint(1, 4), max_tokens=6) for _ in range(8)]
        instance.settle(seed)
        assert scheduler.preemptions > 0
        assert all(instance.endings[rid].tokens == 6 for rid in asked)
        check_rest(instance)
    finally:
        instance.close()


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one-step"])
@pytest.mark.parametrize("seed", range(4))
def test_an_inspection_shows_every_rank_at_one_place_in_the_order(
    tmp_path: Path, seed: int, overlap: bool
) -> None:
    instance = ThreadInstance(tmp_path, world_size=3, num_pages=6, overlap=overlap)
    try:
        keys = [None, *instance.start("a", "b", "c")]
        draw = Random(seed)
        queries = []
        for _ in range(30):
            rid = instance.submit(draw.choice(keys), draw.randint(1, 5), max_tokens=4)
            if draw.random() < 0.3:
                instance.abort(rid)
            instance.run(draw.getrandbits(16), draw.randint(0, 60))
            queries.append(1_000_000 + len(queries))
            instance._broadcast(Inspect(query_id=queries[-1]))
        instance.settle(seed)
        busy = 0
        for query in queries:
            reports = instance.states[query]
            assert len(reports) == 3
            seen = [
                (r.requests, r.pages_used, r.slots, r.cpu_cache, r.steps, r.checks)
                for r in reports.values()
            ]
            assert seen[0] == seen[1] == seen[2]
            busy += bool(seen[0][1])
        assert busy > 5, "nothing ran while it was inspected"
        check_rest(instance)
    finally:
        instance.close()


def test_a_token_that_differs_on_one_rank_stops_it_at_the_step_after_next(
    watch: Callable[..., Watched],
) -> None:
    watched = watch()
    watched.instance.submit(None, 1, max_tokens=12)
    watched.let(until=lambda: len(watched.tokens) >= 3)
    watched.let("step-1")
    follower = watched.instance.ranks[1].requests
    follower._history.add(99)
    with pytest.raises(LockstepError, match=r"rank 1 step \d+: its table of tokens differs"):
        watched.let()
