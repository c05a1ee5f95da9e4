"""Single interleavings that have split ranks or stopped servers of this kind, each on real ranks as
threads, with a step sent while the one before it runs and without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from support.thread_instance import Ending, ThreadInstance
from trails import check_rest

from mstar_tp.wire.values import AdapterKey


class Make(Protocol):
    def __call__(self, **options: Any) -> ThreadInstance: ...


@pytest.fixture(params=[True, False], ids=["overlap", "one-step"])
def make(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Make]:
    made: list[ThreadInstance] = []

    def build(**options: Any) -> ThreadInstance:
        made.append(ThreadInstance(tmp_path, overlap=request.param, **options))
        return made[-1]

    yield build
    for instance in made:
        instance.close()


def admitted(instance: ThreadInstance) -> list[list[int]]:
    """Rows of every admit, on rank 0."""
    events = instance.ranks[0].events
    return [[rid for rid, _ in event.detail] for event in events if event.kind == "admit"]


def run_until(instance: ThreadInstance, reached: Callable[[], bool]) -> None:
    """One thing after another."""
    for seed in range(10_000):
        if reached():
            return
        assert not instance.run(seed, limit=1), "nothing more can happen"
    raise AssertionError("it never came about")


def at_rest(instance: ThreadInstance) -> None:
    instance.settle()
    check_rest(instance)


def test_a_cold_request_on_an_idle_server_is_admitted(make: Make) -> None:
    """No step follows its ingest: only the bare advance lets the followers hold, read and report
    it.
    """
    instance = make(world_size=3, slots=1, cpu_capacity=1)
    _, cold = instance.start("warm", "cold")
    assert instance.run(seed=0), "idle: nothing moves"
    assert cold not in instance.ranks[1].pool.reports.debug_state().cpu_cache
    rid = instance.submit(cold)
    assert instance.run(seed=0)
    assert instance.endings[rid] == Ending("length", tokens=2)
    at_rest(instance)


def test_a_request_on_a_resident_adapter_without_a_copy_waits_while_a_miss_is_admitted(
    make: Make,
) -> None:
    instance = make(slots=1, cpu_capacity=1)
    a, b = instance.start("a", "b")
    first = instance.submit(a, max_tokens=1)
    second, third = instance.submit(b, max_tokens=1), instance.submit(a, max_tokens=1)
    # b's read takes a's place in the CPU cache while a sits in the one slot.
    instance.settle()
    assert all(instance.endings[rid].how == "length" for rid in (first, second, third))
    order = [rid for rows in admitted(instance) for rid in rows]
    assert order.index(second) < order.index(third) or order[:2] == [first, third]
    at_rest(instance)


def test_an_abort_before_its_ingest_is_ordered_closes_the_request_everywhere(make: Make) -> None:
    instance = make(world_size=3)
    (a,) = instance.start("a")
    instance.settle()
    instance.withheld = {"bodies-1", "bodies-2"}
    rid = instance.submit(a)
    instance.abort(rid)
    for _ in range(2):
        instance.commands[0].arrive()
    assert instance.run(seed=3)
    follower = instance.ranks[1]
    assert not follower.events, "the remove is there, its request's body is not"
    instance.withheld = {"bodies-2"}
    assert instance.run(seed=3)
    kinds = [event.kind for event in follower.events]
    assert kinds == ["apply", "apply", "remove"] and not instance.ranks[2].events
    at_rest(instance)


def test_bodies_that_come_before_their_order_start_a_read_and_nothing_else(make: Make) -> None:
    instance = make(slots=1, cpu_capacity=2)
    _, _, late = instance.start("a", "b", "late")
    instance.settle()
    instance.withheld = {"order-1"}
    instance.abort(instance.submit(late))  # room for its early read comes with a forgotten name
    instance.unload(instance.served["b"])
    assert instance.run(seed=1)
    follower = instance.ranks[1]
    assert not follower.events and len(follower.requests) == 0
    names = [key.name for key in follower.pool.reports.debug_state().cpu_cache]
    assert names == ["a", "b"], "nothing is held or dropped before its order"
    at_rest(instance)


def test_a_failure_on_a_follower_alone_ends_every_request_ingested_before_it_is_ordered(
    make: Make,
) -> None:
    instance = make(slots=1, cpu_capacity=1)
    _, bad = instance.start("a", "bad")
    instance.settle()
    folder = instance.path(bad, 1)
    aside = folder.with_name("aside")
    folder.rename(aside)
    instance.withheld = {"copies-1"}
    first = instance.submit(bad)
    assert instance.run(seed=0)
    second = instance.submit(bad)
    assert instance.run(seed=0)
    assert not instance.endings, "the leader's copy is in; rank 1's report is under way"
    instance.withheld.clear()
    aside.rename(folder)
    assert instance.run(seed=0)
    for rid in (first, second):
        ending = instance.endings[rid]
        assert ending.how == "failed" and "'bad'" in ending.cause and "rank 1" in ending.cause
    third = instance.submit(bad)
    instance.settle()
    drops = [event for event in instance.ranks[1].events if event.kind == "drop_copy"]
    assert len(drops) == 1 and instance.endings[third].how == "length"
    at_rest(instance)


def test_a_stale_report_after_a_drop_and_a_new_hold_admits_nobody(make: Make) -> None:
    instance = make(slots=1, cpu_capacity=1)
    _, cold = instance.start("a", "cold")
    instance.settle()
    folder = instance.path(cold, 0)
    aside = folder.with_name("aside")
    instance.withheld = {"copies-1"}
    folder.rename(aside)
    first = instance.submit(cold)
    instance.stalled = {0}
    assert instance.run(seed=0), "rank 1's copy comes in"
    instance.stalled.clear()
    assert instance.run(seed=0)
    assert "rank 0" in instance.endings[first].cause
    aside.rename(folder)
    instance.stalled = {1}
    second = instance.submit(cold)
    assert instance.run(seed=0)
    assert len(instance.copies[0]) == 1, "rank 1's report of the dropped hold"
    instance.withheld.clear()
    assert instance.run(seed=0)
    assert second not in instance.endings and not admitted(instance)
    instance.stalled.clear()
    assert instance.run(seed=0)
    assert instance.endings[second].how == "length"
    at_rest(instance)


def test_a_preempted_row_keeps_its_slot_and_enters_again_at_its_arrival_place(make: Make) -> None:
    instance = make(slots=2, cpu_capacity=3, num_pages=5)
    a, b, c = instance.start("a", "b", "c")
    instance.settle()
    rids = [instance.submit(key, prompt=3, max_tokens=5) for key in (a, b)]
    last = instance.submit(c, prompt=1, max_tokens=1)
    instance.settle()
    preempted = [event for event in instance.ranks[1].events if event.kind == "preempt"]
    assert preempted, "two rows of eight tokens do not fit five pages of two"
    for event in preempted:
        (rid,) = event.detail
        assert rid == rids[1], "the youngest"
        assert any(rid in holders for _, _, holders in event.slots)
    order = [rid for rows in admitted(instance) for rid in rows]
    assert order.index(last) > len(order) - 1 - order[::-1].index(rids[0])
    assert all(ending.how == "length" for ending in instance.endings.values())
    at_rest(instance)


@pytest.mark.parametrize(
    ("num_host_pages", "offloaded"), [(8, True), (1, False)], ids=["fits", "does not fit"]
)
def test_a_preempted_rows_kv_moves_to_host_memory_where_it_fits(
    make: Make, num_host_pages: int, offloaded: bool
) -> None:
    instance = make(num_pages=5, num_host_pages=num_host_pages)
    instance.start()
    rids = [instance.submit(None, prompt=3, max_tokens=5) for _ in range(3)]
    instance.settle()
    assert all(instance.endings[rid].tokens == 5 for rid in rids)
    for rank in instance.ranks:
        state = rank.kv.kept.state()
        assert (state.offloads > 0) == (state.recomputed_tokens == 0) == offloaded
        assert state.reloads == state.offloads
        assert state.offloaded_bytes == state.reloaded_bytes
    at_rest(instance)


def test_a_request_aborted_while_offloaded_gives_its_host_pages_back(make: Make) -> None:
    instance = make(num_pages=5, num_host_pages=8)
    instance.start()
    older, younger = (instance.submit(None, prompt=3, max_tokens=5) for _ in range(2))
    ranks = instance.ranks
    run_until(instance, lambda: all(rank.kv.kept.fetches(younger) for rank in ranks))
    instance.abort(younger)
    run_until(instance, lambda: older in instance.endings)
    instance.settle()
    assert [rank.kv.kept.reloads for rank in ranks] == [0] * len(ranks)
    assert instance.endings[older].tokens == 5
    at_rest(instance)


def test_a_remove_that_overtakes_a_followers_admit_waits_at_the_fence(tmp_path: Path) -> None:
    """The leader has admitted a step, and ordered a remove after it, while a follower has not begun
    that step.
    """
    instance = ThreadInstance(tmp_path, overlap=True)
    try:
        a, b = instance.start("a", "b")
        instance.settle()
        instance.submit(a, max_tokens=6)
        ended = instance.submit(b, max_tokens=2)
        follower = instance.ranks[1]
        while "the remove of" not in instance.waits("main-1"):
            instance.withheld.clear()
            run_until(instance, lambda: "broadcast" not in instance.waits("step-1"))
            run_until(instance, lambda: "broadcast" in instance.waits("step-1"))
            instance.withheld = {"step-1"}  # the leader goes on to the next step without it
            assert instance.run(seed=0)
        waits = instance.waits("main-1")
        assert f"the remove of request {ended}, waits for the admit of step" in waits
        assert ended in follower.requests
        at_rest(instance)
        assert ended not in follower.requests
    finally:
        instance.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_plan_that_raises_ends_its_rank_and_leaves_nobody_at_the_fence(
    make: Make, rank: int
) -> None:
    instance = make()
    (a,) = instance.start("a")
    instance.settle()
    instance.ranks[rank].model.plan_error = RuntimeError("no memory for a plan")
    for _ in range(3):
        instance.abort(instance.submit(a, prompt=4, max_tokens=4))
        instance.submit(a)
    with pytest.raises(RuntimeError, match="no memory for a plan"):
        instance.run(seed=5)
    check_freed(instance)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_thread_whose_set_up_raises_ends_its_rank_and_leaves_nobody_at_the_fence(
    make: Make, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = make()

    def no_device() -> None:
        raise RuntimeError("no device")

    monkeypatch.setattr(instance.ranks[rank].steps, "_prepare", no_device)
    (a,) = instance.start("a")
    for _ in range(3):
        instance.abort(instance.submit(a))
        instance.submit(a)
    with pytest.raises(RuntimeError, match="no device"):
        instance.run(seed=5)
    check_freed(instance)


def check_freed(instance: ThreadInstance) -> None:
    """The group is broken, as a launcher breaks it when a rank is gone: whoever still waits for
    another rank raises, and no main thread waits at a fence.
    """
    instance.groups.abort()
    while ready := instance.interleaving.ready():
        instance.interleaving.run(ready[0])
    assert not any("waits for" in what for what in instance.interleaving.waits().values())


def test_adapters_loaded_under_one_name_never_serve_each_others_weights(make: Make) -> None:
    instance = make(slots=2, cpu_capacity=2)
    (old,) = instance.start("a")
    running = instance.submit(old, prompt=2, max_tokens=6)
    instance.run(seed=2, limit=60)
    instance.unload(old)
    new = AdapterKey("a", 1)
    instance.load(new)
    assert instance.run(seed=2)
    rids = [instance.submit(instance.served["a"], max_tokens=3) for _ in range(2)]
    assert instance.served["a"] == new
    instance.settle()  # the model stops a rank whose row runs on other weights than its request's
    for rid in (running, *rids):
        assert instance.endings[rid].how == "length"
    at_rest(instance)
