"""The CPU cache against a brute-force model: capacity is never exceeded, kept adapters are the
longest prefix of distinct live ones that fits, every request gets there, and equal calls give equal
tiers. Adapters cost one each, or what their shards take.
"""

from __future__ import annotations

from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mstar_tp.engine.resources.lora.cpu_cache.membership import (
    CacheMembership,
    CpuCache,
    FetchOutcome,
)
from mstar_tp.wire.values import AdapterKey

KEYS = [AdapterKey(name, 1) for name in "abcde"]
CAPACITY = 2
BYTES = dict(zip(KEYS, (3, 1, 2, 5, 1), strict=True))


class CpuCacheMachine(RuleBasedStateMachine):
    capacity = CAPACITY
    costs: ClassVar = dict.fromkeys(KEYS, 1)

    def __init__(self) -> None:
        super().__init__()
        self.cpu_cache = CpuCache(self.capacity, self.costs.__getitem__)
        self.members = CacheMembership(self.cpu_cache)
        self.twin = CacheMembership(CpuCache(self.capacity, self.costs.__getitem__))
        self.live: list[tuple[int, AdapterKey]] = []
        self.failed_cause: set[int] = set()
        self.held: list[AdapterKey] = []
        self.next_rid = 0
        self.pins: dict[AdapterKey, int] = {}
        """A pinned adapter is kept as by a request that never ends."""

    def keep(self) -> list[AdapterKey]:
        keys: list[AdapterKey] = []
        for rid, key in self.live:
            if rid not in self.failed_cause and key not in keys:
                keys.append(key)
        while self.cost(keys) > self.capacity:
            keys.pop()
        return keys

    def cost(self, keys: list[AdapterKey]) -> int:
        return sum(self.costs[key] for key in keys)

    def model_fetch(self, key: AdapterKey, keep: list[AdapterKey]) -> None:
        if key in self.held:
            self.held.remove(key)
        while self.cost([*self.held, key]) > self.capacity:
            self.held.remove(next(k for k in self.held if k not in keep))
        self.held.append(key)

    def model_fill(self) -> None:
        for key in self.keep():
            if key not in self.held:
                self.model_fetch(key, self.keep())

    @rule(key=st.sampled_from(KEYS))
    def ingest(self, key: AdapterKey) -> None:
        rid, self.next_rid = self.next_rid, self.next_rid + 1
        before = self.cpu_cache.keys()
        changes = self.members.ingest(rid, key)
        assert self.members.ingest(rid, key).new == []  # idempotent
        self.twin.ingest(rid, key)
        self.live.append((rid, key))
        pin = self.pins.get(key)
        if pin is not None and pin in self.failed_cause:
            self.failed_cause.remove(pin)
            self.live.remove((pin, key))
            self.live.append((pin, key))
        if key in self.keep():
            self.model_fetch(key, self.keep())
        assert [k for k, _ in changes.new] == (
            [key] if key in self.held and key not in before else []
        )

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        rid = data.draw(st.integers(0, self.next_rid))
        self.members.remove(rid)
        self.twin.remove(rid)
        was_live = any(r == rid and r not in self.failed_cause for r, _ in self.live)
        self.live = [(r, k) for r, k in self.live if r != rid]
        self.failed_cause.discard(rid)
        if was_live:
            self.model_fill()

    @rule(key=st.sampled_from(KEYS))
    def pin(self, key: AdapterKey) -> None:
        if key in self.pins:
            return
        self.members.pin(key)
        self.twin.pin(key)
        self.pins[key] = min(self.pins.values(), default=0) - 1
        self.live.append((self.pins[key], key))
        if key in self.keep():
            self.model_fetch(key, self.keep())

    @rule(key=st.sampled_from(KEYS))
    def unpin(self, key: AdapterKey) -> None:
        self.members.unpin(key)
        self.twin.unpin(key)
        pin = self.pins.pop(key, None)
        was_live = pin is not None and pin not in self.failed_cause
        self.live = [(r, k) for r, k in self.live if r != pin]
        self.failed_cause = {rid for rid in self.failed_cause if rid != pin}
        if was_live:
            self.model_fill()

    @rule(key=st.sampled_from(KEYS), right=st.booleans())
    def drop(self, key: AdapterKey, right: bool) -> None:
        number = self.cpu_cache.number(key)
        if number is None:
            return
        fetch_no = number if right else number - 1
        self.members.drop(key, fetch_no, "it broke")
        self.twin.drop(key, fetch_no, "it broke")
        if right:
            self.held.remove(key)
            self.failed_cause |= {rid for rid, k in self.live if k == key}
            self.model_fill()

    @rule(key=st.sampled_from(KEYS))
    def forget(self, key: AdapterKey) -> None:
        if self.members.named(key):
            return
        self.members.forget(key)
        self.twin.forget(key)
        if key in self.held:
            self.held.remove(key)

    @invariant()
    def tier_is_the_model(self) -> None:
        assert self.cpu_cache.keys() == self.held
        assert self.cpu_cache.used == self.cost(self.held) <= self.capacity
        assert self.cpu_cache.free == self.capacity - self.cpu_cache.used
        assert self.members.keep() == self.keep()
        assert set(self.keep()) <= set(self.held)
        for key in KEYS:
            assert self.members.keeps(key) == (key in self.keep())
            assert self.members.named(key) == any(k == key for _, k in self.live)
            users = [r for r, k in self.live if k == key and r not in self.failed_cause and r >= 0]
            assert self.members.users(key) == users
        assert self.cpu_cache.hash() == self.twin.cpu_cache.hash()


class ByteCpuCacheMachine(CpuCacheMachine):
    """Adapters of several sizes, the largest as large as the tier."""

    capacity = 5
    costs: ClassVar = BYTES


SETTINGS = settings(max_examples=80, stateful_step_count=30, deadline=None)
CpuCacheMachine.TestCase.settings = SETTINGS
ByteCpuCacheMachine.TestCase.settings = SETTINGS
TestTierMembership = CpuCacheMachine.TestCase
TestTierMembershipInBytes = ByteCpuCacheMachine.TestCase


def test_what_does_not_fit_ends_the_kept_prefix_also_for_smaller_ones_behind_it() -> None:
    a, b, c, d, e = KEYS
    members = CacheMembership(CpuCache(5, BYTES.__getitem__))
    for rid, key in enumerate((a, d, b)):
        members.ingest(rid, key)
    assert members.keep() == [a] and members.cpu_cache.keys() == [a]
    changes = members.remove(1)
    assert members.keep() == [a, b] and [k for k, _ in changes.new] == [b]
    members.ingest(3, c)
    assert members.keep() == [a, b] and c not in members.cpu_cache
    changes = members.remove(0)
    assert changes.dropped == [a] and members.cpu_cache.keys() == [b, c]
    members.ingest(4, e)
    assert members.cpu_cache.used == 4


def test_several_small_adapters_are_dropped_for_one_large_one() -> None:
    a, b, c, d, e = KEYS
    cpu_cache = CpuCache(5, BYTES.__getitem__)
    for key in (b, c, e):
        assert cpu_cache.fetch(key) == (FetchOutcome.NEW, [])
    assert cpu_cache.fetch(a, keep=[c]) == (FetchOutcome.NEW, [b, e])
    assert cpu_cache.fetch(d, keep=[c]) == (FetchOutcome.FULL, []) and cpu_cache.keys() == [c, a]
    assert cpu_cache.fetch(d) == (FetchOutcome.NEW, [c, a])


def test_a_younger_request_never_keeps_an_older_ones_adapter_out() -> None:
    a, b = KEYS[:2]
    members = CacheMembership(CpuCache(1))
    members.ingest(1, a)
    members.ingest(2, b)
    members.ingest(3, a)
    assert members.cpu_cache.keys() == [a]
    changes = members.remove(1)
    assert members.cpu_cache.keys() == [b] and [k for k, _ in changes.new] == [b]
    assert changes.dropped == [a]
    members.remove(2)
    assert members.cpu_cache.keys() == [a]


def test_a_burst_on_a_thousand_adapters_stays_within_the_bound_and_every_request_gets_there() -> (
    None
):
    members = CacheMembership(CpuCache(4))
    keys = [AdapterKey(f"a{i}", 1) for i in range(1000)]
    for rid, key in enumerate(keys):
        members.ingest(rid, key)
    for rid, key in enumerate(keys):
        assert len(members.cpu_cache) == 4 and members.keeps(key) and key in members.cpu_cache
        members.remove(rid)


def test_holding_past_the_capacity_is_full_when_all_are_kept() -> None:
    cpu_cache = CpuCache(2)
    assert [cpu_cache.fetch(key)[0] for key in KEYS[:2]] == [FetchOutcome.NEW, FetchOutcome.NEW]
    assert cpu_cache.fetch(KEYS[2], keep=KEYS[:2]) == (FetchOutcome.FULL, [])
    assert cpu_cache.fetch(KEYS[0]) == (FetchOutcome.CACHED, [])
    assert cpu_cache.fetch(KEYS[2]) == (FetchOutcome.NEW, [KEYS[1]])
    assert not cpu_cache.drop(KEYS[2], fetch_no=1) and cpu_cache.drop(KEYS[2], fetch_no=3)


def test_a_request_whose_copy_was_dropped_holds_nothing_and_a_later_one_reads_anew() -> None:
    members = CacheMembership(CpuCache(2))
    ((key, number),) = members.ingest(1, KEYS[0]).new
    members.drop(key, number, "no such file")
    assert members.failed_cause(1) == "no such file" and members.cpu_cache.keys() == []
    assert members.remove(1).new == []
    ((_, again),) = members.ingest(2, KEYS[0]).new
    assert again > number and members.failed_cause(2) is None
