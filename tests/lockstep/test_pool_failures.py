"""Reads that fail, late or on one rank alone: every rank fails the same rows with the same cause,
hands out the same slots, and the next request reads anew.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.pool_kit import PoolRanks

from mstar_tp.engine.resources.base import AskFailed, StepBatch
from mstar_tp.engine.resources.lora.pool import CopyState
from mstar_tp.engine.step.step_thread import StepResult, StepThread
from mstar_tp.wire.schedule import Checks, Step
from mstar_tp.worker.fence import AdmitFence

CHECKS = Checks(slots=0, pages=0, cpu_cache=0, served=0, tokens=0)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[PoolRanks]:
    made = PoolRanks(tmp_path, slots=2, cpu_capacity=4)
    yield made
    made.close()


def test_failed_rows_before_and_after_a_counted_row_leave_it_the_one_free_slot(
    ranks: PoolRanks,
) -> None:
    held, bad, good, worse = ranks.serve("p", "qq", "rrr", "ssss")
    ranks.open(0, held)
    ranks.land(held)
    ranks.admit(0)
    for rid, key in enumerate((bad, good, worse), start=1):
        ranks.open(rid, key)
    ranks.land(bad, only=1, error="gone")
    ranks.land(bad, only=0)
    ranks.land(good)
    ranks.land(worse, only=0, error="gone too")
    ranks.land(worse, only=1)
    outcome = ranks.admit(0, 1, 2, 3)
    assert outcome.refused is None, "three misses for one free slot, but one survivor"
    assert set(outcome.failed) == {1, 3}
    assert ranks.slots() == {1: ("p", (0,)), 2: ("rrr", (2,))}


def test_a_failed_row_names_the_rank_that_failed_and_its_cause(ranks: PoolRanks) -> None:
    p, q = ranks.serve("p", "qq")
    for rid, key in enumerate((p, q)):
        ranks.open(rid, key)
    ranks.land(p, only=0)
    ranks.land(p, only=1, error="disk on fire")
    ranks.land(q, error="gone")
    causes = [outcome.failed for outcome in ranks.admit_each(0, 1)]
    for rank, failed in enumerate(causes):
        assert "rank 1" in failed[0] and "rank 0" in failed[1], (rank, failed)
    assert causes[0][0].endswith("could not be read on rank 1: disk on fire")
    assert causes[0][1].endswith("could not be read on rank 0: gone")


def test_a_row_failed_by_an_agreement_stays_dead_though_its_adapter_comes_in_later(
    ranks: PoolRanks,
) -> None:
    (p,) = ranks.serve("p")
    ranks.open(0, p)
    ranks.land(p, error="gone")
    assert set(ranks.admit(0).failed) == {0}
    ranks.drop_failed()
    ranks.open(1, p)
    ranks.land(p)
    assert set(ranks.admit(0, 1).failed) == {0}
    assert ranks.slots()[1] == ("p", (1,))
    ranks.remove(0)
    assert ranks.slots()[1] == ("p", (1,)), "a dead row held nothing"


def test_failures_at_the_second_agreement_hand_their_victims_to_nobody(ranks: PoolRanks) -> None:
    p, q, r, s = ranks.serve("p", "qq", "rrr", "ssss")
    for rid, key in ((0, p), (1, q)):
        ranks.open(rid, key)
        ranks.land(key)
        ranks.admit(rid)
        ranks.remove(rid)
    for rid, key in ((2, r), (3, s)):
        ranks.open(rid, key)

    def land() -> None:
        ranks.land(r, only=0, error="short")
        ranks.land(r, only=1)
        ranks.land(s, only=1, error="long")
        ranks.land(s, only=0)

    assert set(ranks.admit_then([2, 3], land).failed) == {2, 3}
    assert ranks.slots() == {1: ("p", ()), 2: ("qq", ())}, "both stay resident"
    assert all(pool.reports.steps_waited_for_read == 1 for pool in ranks.pools)


def test_a_failure_on_a_follower_alone_takes_a_second_ingest_before_the_admit_with_it(
    ranks: PoolRanks,
) -> None:
    (p,) = ranks.serve("p")
    ranks.open(0, p)
    ranks.land(p, only=0)
    ranks.land(p, only=1, error="short read")
    ranks.open(1, p)  # HELD: the hold that failed still stands
    assert [r.started for r in ranks.readers] == [[p], [p]], "no retry before the ordered failure"
    assert set(ranks.admit(0, 1).failed) == {0, 1}, "a leader that does not know yet"
    assert [(f[0], f[2]) for f in ranks.drop_failed()] == [(p, 1)]
    for rid in (0, 1):
        state = ranks.leader.request_state(rid)
        assert isinstance(state, AskFailed) and "rank 1: short read" in state.cause
    ranks.open(2, p)
    assert [r.started for r in ranks.readers] == [[p, p], [p, p]]
    ranks.land(p)
    assert ranks.admit(2).failed == {}
    for rid in (0, 1, 2):
        ranks.remove(rid)
    ranks.check()


def test_a_stale_report_after_a_drop_and_a_new_hold_is_ignored(ranks: PoolRanks) -> None:
    (p,) = ranks.serve("p")
    ranks.open(0, p)
    ranks.readers[1].land(p)
    stale = ranks.reports.pop()
    ranks.land(p, only=0, error="gone")
    ranks.drop_failed()
    ranks.open(1, p)
    ranks.land(p, only=0)
    assert (stale.rank, stale.fetch_no, stale.cause) == (1, 1, None)
    assert ranks.leader.copy_in(stale) is None
    assert ranks.leader.request_state(1) is CopyState.WAITING, "rank 1 reads hold 2 still"
    ranks.land(p, only=1)
    assert ranks.leader.request_state(1) is CopyState.IN


def test_a_read_that_lands_for_a_hold_that_no_longer_stands_is_kept_nowhere(
    ranks: PoolRanks,
) -> None:
    (p,) = ranks.serve("p")
    ranks.open(0, p)
    old = ranks.readers[1].waiting.pop(p)
    ranks.land(p, only=0, error="gone")
    ranks.drop_failed()
    ranks.open(1, p)
    read, work = ranks.readers[1].waiting[p]
    assert read is not old[0]
    ranks.readers[1].waiting[p] = old
    ranks.land(p, only=1)
    assert ranks.reports == [] and ranks.pools[1].store.get(p) is None
    ranks.readers[1].waiting[p] = read, work
    ranks.land(p)
    assert ranks.leader.request_state(1) is CopyState.IN
    assert ranks.pools[1].store.get(p) is not None


def test_a_request_on_a_resident_adapter_without_a_host_copy_waits_for_it_while_a_miss_goes_ahead(
    tmp_path: Path,
) -> None:
    ranks = PoolRanks(tmp_path, slots=1, cpu_capacity=1)
    p, q = ranks.serve("p", "qq")
    ranks.open(0, p)
    ranks.land(p)
    ranks.admit(0)
    ranks.open(1, q)
    ranks.open(2, p)
    ranks.remove(0)  # q is read, and p, which sits in slot 1, loses its copy
    ranks.land(q)
    assert ranks.slots() == {1: ("p", ())} and p not in ranks.leader.reports.debug_state().cpu_cache
    assert ranks.leader.request_state(2) is CopyState.WAITING, "resident, but no copy anywhere"
    assert ranks.leader.reserve(2) is None
    assert ranks.leader.reserve(1) is not None, "a resident adapter nobody holds pins no slot"
    ranks.admit(1)
    assert ranks.slots() == {1: ("qq", (1,))}
    ranks.remove(1)
    ranks.land(p)
    assert ranks.leader.reserve(2) is not None
    assert ranks.admit(2).failed == {}
    assert ranks.slots() == {1: ("p", (2,))}
    assert all(pool.reports.steps_waited_for_read == 0 for pool in ranks.pools)
    ranks.close()


def test_a_failed_reread_of_a_resident_adapter_fails_its_row_once_a_miss_has_evicted_it(
    tmp_path: Path,
) -> None:
    ranks = PoolRanks(tmp_path, slots=1, cpu_capacity=2)
    p, q, r = ranks.serve("p", "qq", "rrr")
    ranks.open(0, p)
    ranks.land(p)
    ranks.admit(0)
    ranks.remove(0)
    for rid, key in ((1, q), (2, r)):  # p's copy goes, its slot stays
        ranks.open(rid, key)
        ranks.land(key)
    ranks.remove(2)
    ranks.open(3, p)
    ranks.land(p, only=0)
    ranks.land(p, only=1, error="gone")
    assert ranks.leader.ask(3) is not None and ranks.leader.request_state(3) is CopyState.IN
    ranks.admit(1)  # evicts p
    answer = ranks.leader.ask(3)
    assert isinstance(answer, AskFailed) and "rank 1: gone" in answer.cause
    assert set(ranks.admit(1, 3).failed) == {3}
    assert [f[2] for f in ranks.drop_failed()] == [1], "announced once it is in no slot"
    ranks.close()


def test_a_landing_while_the_main_thread_sits_in_the_fence_ends_the_admit_that_waits_for_it(
    ranks: PoolRanks,
) -> None:
    (p,) = ranks.serve("p")
    ranks.open(0, p)
    batch: StepBatch = ranks.step(0)
    fences = [AdmitFence() for _ in ranks.pools]

    def run(rank: int) -> StepThread:
        def admit(step: Step, settled: object) -> list[StepResult]:
            outcome = ranks.pools[rank].admit(batch)
            return [StepResult(tp_seq=step.tp_seq, failed=outcome.failed)]

        return StepThread(admit, fences[rank], lambda: None)

    steps = [run(rank) for rank in range(2)]
    removed: list[int] = []

    def main(rank: int) -> None:
        fences[rank].wait_settled(0, f"rank {rank}, the remove of request 0,")
        ranks.pools[rank].remove_request(0)
        removed.append(rank)

    reached = ranks.when_an_admit_waits()
    for thread in steps:
        thread.start()
        thread.submit(Step(ingested=0, tp_seq=0, planned_after=-1, rows=((0, 1),), checks=CHECKS))
    mains = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(2)]
    for thread in mains:
        thread.start()
    assert reached.wait(60)
    assert removed == []
    # No main thread can help a landing along: both wait for the admit that waits for it.
    for readers in ranks.readers:
        readers.land(p)
    for thread in mains:
        thread.join(60)
    assert sorted(removed) == [0, 1]
    for step in steps:
        assert step.stop(60)
        (result,) = step.results()
        assert result.error is None and result.failed == {}
    assert ranks.slots()[1] == ("p", ())
    assert [report.cause for report in ranks.reports] == [None, None]


def test_other_weights_on_one_of_four_ranks_fail_that_adapters_rows_alone(tmp_path: Path) -> None:
    ranks = PoolRanks(tmp_path, world_size=4)
    (p,) = ranks.serve("p", values=[0.1, 0.1, 0.2, 0.1])
    (q,) = ranks.serve("qq")
    for rid, key in enumerate((p, q)):
        ranks.open(rid, key)
        ranks.land(key)
    outcome = ranks.admit(0, 1)
    assert set(outcome.failed) == {0} and "other weights" in outcome.failed[0]
    assert ranks.slots()[1] == ("qq", (1,))
    assert [(f[0], f[2]) for f in ranks.drop_failed()] == [(p, 2)]
    ranks.close()
