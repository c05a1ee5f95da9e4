"""The slot table against a brute-force model: refcounts, residents, victims in LRU order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mstar_tp.engine.resources.lora.slots import SlotTable
from mstar_tp.wire.values import AdapterKey

SLOTS = 3
KEYS = [AdapterKey(name, generation) for name in "abc" for generation in (1, 2)]


class SlotMachine(RuleBasedStateMachine):
    """Two tables get the same calls; a model of plain lists says what they must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.twin = SlotTable(SLOTS), SlotTable(SLOTS)
        self.clock = 0
        self.keys: list[AdapterKey | None] = [None] * SLOTS
        self.used = [0] * SLOTS
        self.holders: list[list[int]] = [[] for _ in range(SLOTS)]
        self.next_rid = 0

    def expected_victims(self) -> list[int]:
        free = [i for i in range(SLOTS) if not self.holders[i]]
        return [i + 1 for i in sorted(free, key=lambda i: (self.used[i], i))]

    @rule(key=st.sampled_from(KEYS))
    def admit_one(self, key: AdapterKey) -> None:
        self.clock += 1
        rid, self.next_rid = self.next_rid, self.next_rid + 1
        victims = self.expected_victims()
        for table in (self.table, self.twin):
            table.tick()
            slot = table.resident(key)
            if slot is None and table.victims():
                slot = table.victims()[0]
                table.install(slot, key)
            if slot is not None:
                table.take(rid, slot)
        index = self.keys.index(key) if key in self.keys else victims[0] - 1 if victims else None
        if index is None:
            return
        self.keys[index] = key
        self.used[index] = self.clock
        self.holders[index].append(rid)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        rid = data.draw(st.integers(0, self.next_rid))
        for table in (self.table, self.twin):
            table.release(rid)
        for index, holders in enumerate(self.holders):
            if rid in holders:
                holders.remove(rid)
                self.used[index] = self.clock

    @rule(key=st.sampled_from(KEYS))
    def forget(self, key: AdapterKey) -> None:
        if key in self.keys and self.holders[self.keys.index(key)]:
            return
        for table in (self.table, self.twin):
            table.forget(key)
        self.keys = [None if k == key else k for k in self.keys]

    @invariant()
    def tables_are_the_model(self) -> None:
        expected = [(i + 1, self.keys[i], tuple(self.holders[i])) for i in range(SLOTS)]
        assert self.table.rows() == expected
        assert self.table.victims() == self.expected_victims()
        for key in KEYS:
            place = self.keys.index(key) + 1 if key in self.keys else None
            assert self.table.resident(key) == place
        for index, holders in enumerate(self.holders):
            assert all(self.table.slot_of(rid) == index + 1 for rid in holders)
        assert self.table.hash() == self.twin.hash()


SlotMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSlotTable = SlotMachine.TestCase


def test_the_hash_tells_orders_apart_that_end_in_the_same_table() -> None:
    one, two = SlotTable(2), SlotTable(2)
    for table, order in ((one, (1, 2)), (two, (2, 1))):
        for slot in order:
            table.install(slot, KEYS[slot])
    assert one.rows() == two.rows() and one.hash() != two.hash()


def swap_keys(slots: dict[int, Any]) -> None:
    slots[1].key, slots[2].key = slots[2].key, slots[1].key


def touch(slots: dict[int, Any]) -> None:
    slots[2].used += 1


def hold(slots: dict[int, Any]) -> None:
    slots[1].holders[7] = None


@pytest.mark.parametrize("change", [swap_keys, touch, hold])
def test_what_changes_behind_an_idle_table_shows_at_the_next_hash(
    change: Callable[[dict[int, Any]], None],
) -> None:
    table, twin = SlotTable(2), SlotTable(2)
    for one in (table, twin):
        one.install(1, KEYS[0])
        one.install(2, KEYS[1])
        one.take(5, 1)
        one.release(5)
    for _ in range(3):  # only one of them is asked every time
        for one in (table, twin):
            one.tick()
        kept = table.hash()
    assert kept == twin.hash()
    change(table._slots)
    assert table.hash() not in (kept, twin.hash())
    change(twin._slots)
    assert table.hash() == twin.hash()


def test_a_held_slot_is_never_overwritten() -> None:
    table = SlotTable(1)
    table.install(1, KEYS[0])
    table.take(7, 1)
    with pytest.raises(AssertionError, match=r"held by \[7\]"):
        table.install(1, KEYS[1])


def test_victims_follow_the_clock_of_admits_and_no_other() -> None:
    table = SlotTable(3)
    for slot in (1, 2, 3):
        table.install(slot, KEYS[slot])
        table.take(slot, slot)
    table.tick()
    for slot in (3, 1):  # between the same two admits: equally recent, whichever came first
        table.release(slot)
    table.tick()
    table.release(2)
    assert table.victims() == [1, 3, 2]
