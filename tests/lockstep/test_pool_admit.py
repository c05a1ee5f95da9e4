"""Admits decide alike on every rank, whatever is in, failing, different or still being read on one
of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pool_kit import PoolRanks

from mstar_tp.common.errors import LockstepError
from mstar_tp.distributed.comm import AgreeOp
from mstar_tp.engine.resources.base import Ask, AskFailed
from mstar_tp.engine.resources.lora.pool import CopyState


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[PoolRanks]:
    made = PoolRanks(tmp_path, slots=2, cpu_capacity=4)
    yield made
    made.close()


def count_agreements(ranks: PoolRanks, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each agreement that rank 0 enters."""
    calls: list[int] = []
    joint = ranks.leader._admitter._groups
    agree = joint.agree

    def counted(values: Sequence[int], op: AgreeOp = AgreeOp.MIN) -> list[int]:
        calls.append(len(values))
        return agree(values, op)

    monkeypatch.setattr(joint, "agree", counted)
    return calls


def test_all_misses_of_a_step_take_one_agreement_and_seated_rows_none(
    ranks: PoolRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, q = ranks.serve("p", "q")
    for rid, key in enumerate((p, q, None, p)):
        ranks.open(rid, key)
    for key in (p, q):
        ranks.land(key)
    calls = count_agreements(ranks, monkeypatch)
    assert ranks.admit(0, 1, 2, 3).failed == {}
    assert len(calls) == 1
    assert ranks.slots() == {1: ("p", (0, 3)), 2: ("q", (1,))}
    ranks.admit(3, 2, 1, 0)
    ranks.open(4, p)
    ranks.admit(4, 0)
    assert len(calls) == 1, "a resident adapter needs no agreement"


def test_a_step_of_base_rows_and_seated_rows_takes_no_lock_and_no_agreement(
    ranks: PoolRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    (p,) = ranks.serve("p")
    for rid, key in enumerate((p, None)):
        ranks.open(rid, key)
    ranks.land(p)
    ranks.admit(0, 1)
    for pool in ranks.pools:
        monkeypatch.setattr(pool.tables, "lock", None)  # entering it would raise
        monkeypatch.setattr(pool._admitter, "_groups", None)
        for rids in ((1,), (0, 1), ()):
            outcome = pool.admit(ranks.step(*rids))
            assert outcome.failed == {} and outcome.refused is None


def test_a_read_that_failed_on_one_rank_fails_its_rows_on_all_and_takes_no_slot(
    ranks: PoolRanks,
) -> None:
    p, q = ranks.serve("p", "qq")
    ranks.open(0, p)
    ranks.open(1, q)
    ranks.land(p, only=0)
    ranks.land(p, only=1, error="disk on fire")
    ranks.land(q)
    outcome = ranks.admit(0, 1)
    assert set(outcome.failed) == {0} and outcome.refused is None
    assert ranks.slots() == {1: ("qq", (1,)), 2: (None, ())}
    assert set(ranks.admit(0, 1).failed) == {0}, "dead until its remove"


def test_other_weights_on_one_rank_are_caught_and_fail_its_rows_on_all(tmp_path: Path) -> None:
    ranks = PoolRanks(tmp_path)
    (p,) = ranks.serve("p", values=[0.1, 0.2])
    ranks.open(0, p)
    ranks.land(p)
    state = ranks.leader.request_state(0)
    assert isinstance(state, AskFailed) and "digest" in state.cause
    outcome = ranks.admit(0)
    assert "other weights" in outcome.failed[0]
    assert ranks.slots()[1] == (None, ())
    ranks.close()


def test_a_copy_still_being_read_is_waited_for_and_agreed_on_once_more(
    ranks: PoolRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    (p,) = ranks.serve("p")
    ranks.open(0, p)
    ranks.land(p, only=0)
    calls = count_agreements(ranks, monkeypatch)
    wait = ranks.admit_then([0], lambda: ranks.land(p, only=1))
    assert wait.failed == {} and len(calls) == 2
    assert ranks.slots()[1] == ("p", (0,))
    assert all(pool.reports.steps_waited_for_read == 1 for pool in ranks.pools)


def test_a_read_that_fails_while_waited_for_leaves_its_victim_resident_and_no_slot_moves(
    ranks: PoolRanks,
) -> None:
    p, q, r, s = ranks.serve("p", "qq", "rrr", "ssss")
    for rid, key in ((0, p), (1, q)):
        ranks.open(rid, key)
        ranks.land(key)
        ranks.admit(rid)
        ranks.remove(rid)
    assert ranks.slots() == {1: ("p", ()), 2: ("qq", ())}
    ranks.open(2, r)
    ranks.open(3, s)
    ranks.land(r, only=0)
    ranks.land(s)
    outcome = ranks.admit_then([2, 3], lambda: ranks.land(r, only=1, error="gone"))
    assert set(outcome.failed) == {2}
    # rrr's victim was slot 1, ssss's slot 2: each keeps to its own.
    assert ranks.slots() == {1: ("p", ()), 2: ("ssss", (3,))}


def test_resident_rows_take_their_slots_before_any_victim_is_picked(ranks: PoolRanks) -> None:
    p, q, r = ranks.serve("p", "qq", "rrr")
    for rid, key in ((0, p), (1, q)):
        ranks.open(rid, key)
        ranks.land(key)
        ranks.admit(rid)
        ranks.remove(rid)
    ranks.open(2, r)
    ranks.land(r)
    ranks.open(3, p)
    # p is the least recently used, and would be rrr's victim but for row 3.
    ranks.admit(2, 3)
    assert ranks.slots() == {1: ("p", (3,)), 2: ("rrr", (2,))}


def test_more_survivors_than_victims_refuse_the_step_and_rollback_gives_everything_back(
    ranks: PoolRanks,
) -> None:
    keys = ranks.serve("p", "qq", "rrr")
    ranks.open(9, keys[0])
    ranks.land(keys[0])
    ranks.admit(9)
    ranks.remove(9)
    for rid, key in enumerate(keys):
        ranks.open(rid, key)
        ranks.land(key)
    for rid in (10, 11):
        ranks.open(rid, keys[0])
    batch_rids = (10, 1, 2, 11)
    outcome = ranks.admit(*batch_rids)
    assert outcome.refused is not None and "slots" in outcome.refused
    for pool in ranks.pools:
        pool.rollback_admit(ranks.step())
    ranks.check()
    assert ranks.slots() == {1: ("p", ()), 2: (None, ())}
    assert ranks.admit(10, 1).refused is None


def test_rollback_keeps_an_installed_adapter_resident_and_unheld(ranks: PoolRanks) -> None:
    p, q = ranks.serve("p", "qq")
    ranks.open(0, p)
    ranks.land(p)
    ranks.admit(0)
    ranks.open(1, q)
    ranks.land(q)
    batch = ranks.start_admit(0, 1)
    batch()
    for pool in ranks.pools:
        pool.rollback_admit(ranks.step())
    ranks.check()
    assert ranks.slots() == {1: ("p", (0,)), 2: ("qq", ())}
    ranks.admit(0, 1)
    assert ranks.slots() == {1: ("p", (0,)), 2: ("qq", (1,))}


def test_ranks_in_admits_of_different_steps_stop(ranks: PoolRanks) -> None:
    (p,) = ranks.serve("p")
    ranks.open(0, p)
    ranks.land(p)
    one, two = ranks.step(0), ranks.step(0)
    futures = [
        ranks.threads.submit(pool.admit, s) for pool, s in zip(ranks.pools, (one, two), strict=True)
    ]
    for future in futures:
        with pytest.raises(LockstepError, match="steps 0 to 1"):
            future.result()


def test_ranks_that_miss_different_adapters_stop(ranks: PoolRanks) -> None:
    p, q = ranks.serve("p", "q")
    for rid, key in enumerate((p, q)):
        ranks.open(rid, key)
        ranks.land(key)
    futures = [
        ranks.threads.submit(pool.admit, ranks.step(rid)) for rid, pool in enumerate(ranks.pools)
    ]
    ranks.tp_seq = 0
    for future in futures:
        with pytest.raises(LockstepError, match="step"):
            future.result()


def test_an_unload_under_live_requests_waits_for_them_and_makes_no_slot_likelier_a_victim(
    ranks: PoolRanks,
) -> None:
    p, q, r = ranks.serve("p", "qq", "rrr")
    for rid, key in ((0, p), (1, q)):
        ranks.open(rid, key)
        ranks.land(key)
    ranks.admit(0, 1)
    assert all(pool.loads.unload(q) for pool in ranks.pools)
    assert not any(pool.loads.unload(q) for pool in ranks.pools)
    assert "unloaded" in str(ranks.leader.ingest_request(5, _config(q)))
    ranks.remove(5)
    ranks.admit(0, 1)
    assert ranks.slots()[2] == ("qq", (1,)), "the running row keeps its slot"
    ranks.remove(0)
    ranks.remove(1)
    assert ranks.leader.loads.any_to_forget
    for pool in ranks.pools:
        pool.loads.forget()
    ranks.check()
    assert ranks.slots() == {1: ("p", ()), 2: (None, ())}
    assert [key.name for key in ranks.leader.reports.debug_state().cpu_cache] == ["p"]
    ranks.open(2, r)
    ranks.land(r)
    ranks.admit(2)
    # p was given back first, so p's slot is the victim: being forgotten made slot 2 no likelier.
    assert ranks.slots() == {1: ("rrr", (2,)), 2: (None, ())}


def _config(key: Any) -> Any:
    from mstar_tp.lora.spec import LoraReqConfig

    return LoraReqConfig(key)


def test_a_served_name_is_refused_a_second_load_and_may_be_loaded_again_after_its_unload(
    ranks: PoolRanks,
) -> None:
    (p,) = ranks.serve("p")
    again = type(p)("p", 2)
    for rank, pool in enumerate(ranks.pools):
        path = str(ranks.folder / f"p-{rank}")
        pool.loads.begin(again, path, lambda cause, rank, targets: None)
        assert "served already" in str(pool.loads.commit(again, path))
        with pytest.raises(LockstepError, match="never accepted"):
            pool.loads.unload(p)
            pool.loads.commit(again, path)
        pool.loads.begin(again, path, lambda cause, rank, targets: None)
        assert pool.loads.commit(again, path) is None
    ranks.check()


def test_a_name_loaded_in_place_is_served_in_both_generations_until_the_old_one_is_unloaded(
    tmp_path: Path,
) -> None:
    ranks = PoolRanks(tmp_path, slots=1, cpu_capacity=1)
    (old,) = ranks.serve("p")
    new, third = type(old)("p", 2), type(old)("p", 3)
    ranks.open(0, old)
    ranks.land(old)
    ranks.admit(0)
    for rank, pool in enumerate(ranks.pools):
        path = str(ranks.folder / f"p-{rank}")
        for key, replaces, refused in ((new, old, False), (third, type(old)("p", 9), True)):
            pool.loads.begin(key, path, lambda cause, rank, targets: None)
            cause = pool.loads.commit(key, path, replaces=replaces)
            assert ("served already, as p#2" in str(cause)) == refused
    ranks.open(1, new)
    ranks.open(2, old)
    assert [str(key) for key in ranks.leader.reports.debug_state().served] == ["p#1", "p#2"]
    for pool in ranks.pools:
        assert pool.loads.unload(old)
    ranks.open(3, old)
    assert isinstance(ranks.leader.request_state(3), AskFailed), "it came after the unload"
    ranks.remove(3)
    ranks.admit(0, 2)
    assert ranks.slots() == {1: ("p", (0, 2))}
    # The one slot, and the one place in the CPU cache, go to the new weights when the old's last
    # request has ended.
    ranks.remove(0)
    assert ranks.leader.request_state(1) is CopyState.WAITING
    ranks.remove(2)
    for pool in ranks.pools:
        pool.loads.forget()
    ranks.land(new)
    assert ranks.leader.request_state(1) is CopyState.IN
    ranks.admit(1)
    assert [str(slot.adapter) for slot in ranks.leader.reports.debug_state().slots] == ["p#2"]
    assert [str(key) for key in ranks.leader.reports.debug_state().served] == ["p#2"]
    ranks.close()


def test_an_aborted_load_leaves_nothing(ranks: PoolRanks) -> None:
    (p,) = ranks.serve("p")
    other = type(p)("x", 7)
    path = str(ranks.folder / "p-0")
    ranks.leader.loads.begin(other, path, lambda cause, rank, targets: None)
    ranks.leader.loads.abort(other)
    with pytest.raises(LockstepError):
        ranks.leader.loads.commit(other, path)


def test_a_failed_copy_is_dropped_everywhere_and_a_later_request_reads_it_anew(
    ranks: PoolRanks,
) -> None:
    (p,) = ranks.serve("p")
    ranks.open(0, p)
    ranks.open(1, p)
    assert [ranks.leader.request_state(rid) for rid in (0, 1)] == [CopyState.WAITING] * 2
    ranks.land(p, only=0)
    ranks.land(p, only=1, error="short read")
    failed = ranks.drop_failed()
    assert [(f[0], f[2], f[3]) for f in failed] == [(p, 1, "short read")]
    assert ranks.drop_failed() == []
    for rid in (0, 1):
        for answer in (ranks.leader.request_state(rid), ranks.leader.ask(rid)):
            assert isinstance(answer, AskFailed)
            assert "short read" in answer.cause and "rank 1" in answer.cause
    ranks.open(2, p)
    assert ranks.leader.request_state(2) is CopyState.WAITING
    ranks.land(p)
    assert ranks.leader.request_state(2) is CopyState.IN
    assert isinstance(ranks.leader.request_state(0), AskFailed), "no retry brings it back"
    for rid in (0, 1):
        ranks.remove(rid)
    ranks.admit(2)
    ranks.check()


def test_a_failed_read_of_a_resident_adapter_may_still_run_on_its_slot(ranks: PoolRanks) -> None:
    keys = ranks.serve("p", "qq", "rrr", "ssss", "ttttt")
    p = keys[0]
    ranks.open(0, p)
    ranks.land(p)
    ranks.admit(0)
    ranks.remove(0)
    for rid, key in enumerate(keys[1:], start=1):  # four more push p out of the tier
        ranks.open(rid, key)
        ranks.land(key)
    ranks.remove(1)
    assert p not in ranks.leader.reports.debug_state().cpu_cache
    ranks.open(9, p)
    ranks.land(p, error="gone")
    assert ranks.leader.failed_copies() == []
    assert ranks.leader.request_state(9) is CopyState.IN and ranks.leader.reserve(9) is not None
    assert ranks.admit(9).failed == {}
    assert ranks.slots()[1] == ("p", (9,))


def test_requests_past_the_kept_prefix_wait_and_are_read_when_a_remove_lets_them_in(
    tmp_path: Path,
) -> None:
    ranks = PoolRanks(tmp_path, slots=1, cpu_capacity=1)
    p, q = ranks.serve("p", "qq")
    for rid, key in ((1, p), (2, q), (3, p)):
        ranks.open(rid, key)
    ranks.land(p)
    assert [ranks.leader.request_state(rid) for rid in (1, 2, 3)] == [
        CopyState.IN,
        CopyState.WAITING,
        CopyState.IN,
    ]
    mark = ranks.leader.growth_mark()
    ranks.remove(1)
    ranks.land(q)
    assert ranks.leader.grew_since(mark)
    assert ranks.leader.request_state(2) is CopyState.IN
    assert ranks.leader.request_state(3) is CopyState.WAITING, "older requests come first"
    ranks.admit(2)
    ranks.remove(2)
    ranks.land(p)
    assert ranks.leader.request_state(3) is CopyState.IN
    ranks.admit(3)
    ranks.check()
    ranks.close()


def test_a_row_whose_copy_left_the_kept_prefix_is_not_in_until_it_is_read_again(
    tmp_path: Path,
) -> None:
    ranks = PoolRanks(tmp_path, slots=1, cpu_capacity=1)
    p, q = ranks.serve("p", "qq")
    for rid, key in ((1, p), (2, q), (3, p)):
        ranks.open(rid, key)
    ranks.land(p)
    assert ranks.leader.ask(3) is Ask.ASKS
    ranks.remove(1)
    assert ranks.leader.ask(3) is Ask.NOT_IN
    ranks.land(q)
    mark = ranks.leader.growth_mark()
    ranks.remove(2)
    assert ranks.leader.grew_since(mark)
    ranks.land(p)
    assert ranks.leader.ask(3) is Ask.ASKS
    ranks.close()


def test_reservations_count_distinct_adapters_and_outlive_the_holder_they_leaned_on(
    ranks: PoolRanks,
) -> None:
    p, q, r = ranks.serve("p", "qq", "rrr")
    for rid, key in enumerate((p, p, q, r)):
        ranks.open(rid, key)
    assert ranks.leader.reserve(0) is None, "its copy is not in yet"
    for key in (p, q, r):
        ranks.land(key)
    reserve = ranks.leader.reserve
    assert [reserve(rid) for rid in (0, 1, 2, 3)] == [1, 0, 1, None]
    assert ranks.leader.ask(1) is None
    ranks.admit(0)
    ranks.leader.unreserve(0)  # it holds its slot: a no-op
    ranks.remove(0)
    assert reserve(3) is None, "row 1 still claims p"
    ranks.leader.unreserve(1)
    assert reserve(3) == 1


def test_an_early_read_is_adopted_by_its_hold_and_reported_only_then(ranks: PoolRanks) -> None:
    p, q = ranks.serve("p", "qq")
    for pool in ranks.pools:
        pool.fetches.read_early(p)
        pool.fetches.read_early(p)
        pool.fetches.read_early(q)
    assert [r.started for r in ranks.readers] == [[p, q], [p, q]]
    ranks.land(p)
    ranks.land(q, error="too early")
    assert ranks.reports == [] and ranks.leader.reports.debug_state().cpu_cache == ()
    ranks.open(0, p)
    ranks.deliver()
    assert ranks.leader.request_state(0) is CopyState.IN
    ranks.open(1, q)
    assert ranks.leader.request_state(1) is CopyState.WAITING, "an early failure is discarded"
    ranks.land(q)
    assert ranks.leader.request_state(1) is CopyState.IN
    assert [r.started for r in ranks.readers] == [[p, q, q]] * 2


def test_an_early_failure_takes_no_early_reads_place(ranks: PoolRanks) -> None:
    keys = ranks.serve("p", "qq", "rrr")
    leader, readers = ranks.leader, ranks.readers[0]
    for key in keys:
        leader.fetches.read_early(key)
    assert readers.started == keys[:2], "few at once"
    readers.land(keys[0], error="too early")
    leader.fetches.read_early(keys[2])
    assert readers.started == keys


def test_host_copies_are_the_same_after_many_installs(ranks: PoolRanks) -> None:
    keys = ranks.serve("p", "qq", "rrr")
    for rid, key in enumerate(keys):
        ranks.open(rid, key)
        ranks.land(key)
    copies = [pool.store.get(key) for pool in ranks.pools for key in keys]
    before = [c.b["self_attn.qkv_proj"].clone() for c in copies if c is not None]
    for turn in range(6):
        rid = 10 + turn
        ranks.open(rid, keys[turn % 3])
        ranks.admit(rid)
        ranks.remove(rid)
    after = [c.b["self_attn.qkv_proj"] for c in copies if c is not None]
    assert len(before) == 6 and all(map(torch.equal, before, after))
