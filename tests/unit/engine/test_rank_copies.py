"""The leader's view of copies: a failed read is remembered with its rank and cause, until a later
read succeeds or the adapter is unloaded, and keeps nobody from trying again.
"""

from __future__ import annotations

from mstar_tp.engine.resources.lora.rank_copies import MAX_REMEMBERED, CopyTable
from mstar_tp.wire.reports import CopyIn
from mstar_tp.wire.states import FailedRead
from mstar_tp.wire.values import AdapterKey

P, Q = AdapterKey("p", 1), AdapterKey("q", 1)


def report(
    rank: int, fetch_no: int, cause: str | None = None, *, key: AdapterKey = P, digest: str = "d"
) -> CopyIn:
    found = None if cause is not None else digest
    return CopyIn(rank=rank, key=key, fetch_no=fetch_no, digest=found, cause=cause)


def failed(rank: int, fetch_no: int, cause: str, key: AdapterKey = P) -> FailedRead:
    return FailedRead(adapter=key, fetch_no=fetch_no, rank=rank, cause=cause)


def test_a_failed_read_is_remembered_with_rank_and_cause_past_its_hold() -> None:
    table = CopyTable(2)
    table.open(P, 1)
    table.report(report(0, 1))
    table.report(report(1, 1, "no such file"))
    assert table.failure(P) == (1, "no such file")
    table.close(P)
    assert table.failure(P) is None, "a new hold starts without it"
    assert table.failed_reads() == (failed(1, 1, "no such file"),)


def test_a_later_failure_replaces_the_one_before_and_a_read_that_succeeds_ends_it() -> None:
    table = CopyTable(2)
    for fetch_no, cause in ((1, "no such file"), (2, "truncated")):
        table.open(P, fetch_no)
        table.report(report(0, fetch_no, cause))
        table.close(P)
    assert table.failed_reads() == (failed(0, 2, "truncated"),)
    table.open(P, 3)
    table.report(report(0, 3))
    assert table.failed_reads() != (), "one rank's copy is not all ranks'"
    table.report(report(1, 3))
    assert table.all_in(P) and table.failed_reads() == ()


def test_other_weights_on_one_rank_are_remembered_as_a_failure_of_that_rank() -> None:
    table = CopyTable(2)
    table.open(P, 1)
    table.report(report(0, 1))
    table.report(report(1, 1, digest="e"))
    (entry,) = table.failed_reads()
    assert entry.rank == 1 and "digest e on rank 1" in entry.cause


def test_a_report_for_another_hold_is_ignored_and_remembers_nothing() -> None:
    table = CopyTable(1)
    table.open(P, 2)
    assert not table.report(report(0, 1, "stale"))
    assert table.failed_reads() == () and table.failure(P) is None


def test_unloading_forgets_the_failure() -> None:
    table = CopyTable(1)
    table.open(P, 1)
    table.report(report(0, 1, "broken"))
    table.forget(P)
    assert table.failed_reads() == ()


def test_only_the_latest_failures_are_kept() -> None:
    table = CopyTable(1)
    keys = [AdapterKey(f"a{i}", 1) for i in range(MAX_REMEMBERED + 3)]
    for key in keys:
        table.open(key, 1)
        table.report(report(0, 1, "broken", key=key))
    assert [entry.adapter for entry in table.failed_reads()] == keys[3:]
