"""Pins the pool's numbers: what each counts, and that every rank counts alike."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.pool_kit import PoolRanks

from mstar_tp.wire.states import LoraStats, Place


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[PoolRanks]:
    ranks = PoolRanks(tmp_path, slots=1, cpu_capacity=2)
    yield ranks
    ranks.close()


def _stats(ranks: PoolRanks) -> LoraStats:
    """The leader's. What is decided together is equal on all; memory is each rank's own."""
    leader, *others = [pool.reports.stats() for pool in ranks.pools]
    for name in ("slots_held", "evictions", "agreed_failures", "adapters_held", "adapters_taken"):
        assert all(getattr(other, name) == getattr(leader, name) for other in others), name
    assert all(other.cpu_cache.used == leader.cpu_cache.used for other in others)
    return leader


def test_a_slot_taken_from_another_adapter_is_an_eviction_and_a_fresh_one_is_not(
    ranks: PoolRanks,
) -> None:
    a, b = ranks.serve("a", "bb")
    for rid, key in enumerate((a, b)):
        ranks.open(rid, key)
        ranks.land(key)
        ranks.admit(rid)
        stats = _stats(ranks)
        assert (stats.evictions, stats.slots_held, stats.slots) == (rid, 1, 1)
        ranks.remove(rid)
    assert _stats(ranks).slots_held == 0


def test_the_tier_counts_what_is_held_and_the_most_that_ever_was(ranks: PoolRanks) -> None:
    keys = ranks.serve("a", "bb", "ccc")
    assert _stats(ranks).adapters_held == 0
    for rid, key in enumerate(keys):
        ranks.open(rid, key)
        ranks.land(key)
        ranks.remove(rid)
    assert (_stats(ranks).adapters_held, _stats(ranks).adapters_taken) == (2, 3)
    cpu_cache = _stats(ranks).cpu_cache
    assert (cpu_cache.unit, cpu_cache.capacity, cpu_cache.used, cpu_cache.peak) == (
        "adapters",
        2,
        2,
        2,
    )
    copies = [ranks.leader.store.get(key) for key in keys]
    held = [copy for copy in copies if copy is not None]
    sizes = [sum(t.nbytes for t in (*copy.a.values(), *copy.b.values())) for copy in held]
    assert cpu_cache.memory_bytes == cpu_cache.peak_bytes == sum(sizes) and len(sizes) == 2


def test_a_copy_that_one_rank_could_not_read_is_one_agreed_failure_on_all(
    ranks: PoolRanks,
) -> None:
    (a,) = ranks.serve("a")
    ranks.open(1, a)
    ranks.land(a, only=0)
    ranks.land(a, only=1, error="gone")
    assert len(ranks.drop_failed()) == 1
    assert _stats(ranks).agreed_failures == 1
    assert _stats(ranks).steps_waited_for_read == 0


def test_an_adapter_failed_in_an_admit_is_an_agreed_failure_too(ranks: PoolRanks) -> None:
    (a,) = ranks.serve("a")
    ranks.open(1, a)
    ranks.land(a, only=0)
    outcome = ranks.admit_then([1], lambda: ranks.land(a, only=1, error="gone"))
    assert 1 in outcome.failed
    stats = _stats(ranks)
    assert stats.agreed_failures == 1 and stats.steps_waited_for_read == 1


def test_each_adapter_is_counted_at_one_place_wherever_it_goes(ranks: PoolRanks) -> None:
    a, b, c = ranks.serve("a", "bb", "ccc")

    def places() -> str:
        ranks.check()  # the figures count the same
        return " ".join(state.place for state in ranks.leader.reports.adapter_states((a, b, c)))

    assert places() == "disk disk disk"
    ranks.open(1, a)
    assert places() == "reading disk disk"
    ranks.land(a)
    assert places() == "host disk disk"
    ranks.admit(1)
    assert places() == "device disk disk"
    ranks.remove(1)
    ranks.open(2, b)
    ranks.land(b)
    assert places() == "device host disk"
    ranks.admit(2)
    assert places() == "host device disk", "evicted; its copy is still there"
    assert [s.evictions for s in ranks.leader.reports.adapter_states((a, b))] == [1, 0]
    # The tier holds two: one that is read takes the room of the one used longest ago.
    ranks.open(3, c)
    assert places() == "disk device reading"
    ranks.land(c, only=0)
    ranks.land(c, only=1, error="gone")
    assert places() == "disk device host", "on this rank"
    follower = ranks.pools[1]
    assert [s.place for s in follower.reports.adapter_states((c,))] == [Place.FAILED]
    ranks.drop_failed()
    assert places() == "disk device failed"
    assert [s.place for s in follower.reports.adapter_states((c,))] == [Place.DISK]
    ranks.remove(3)
    ranks.open(4, c)
    assert places() == "disk device reading", "it is tried again"
    ranks.land(c)
    assert places() == "disk device host"


def test_an_adapter_that_was_unloaded_is_counted_nowhere_though_its_slot_is_not_taken_yet(
    ranks: PoolRanks,
) -> None:
    a, _ = ranks.serve("a", "bb")
    ranks.open(0, a)
    ranks.land(a)
    ranks.admit(0)
    ranks.remove(0)
    assert all(pool.loads.unload(a) for pool in ranks.pools)
    places = _stats(ranks).places
    assert (places.device, places.host, places.disk) == (0, 0, 1)
    ranks.check()
