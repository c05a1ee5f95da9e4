"""The pool as plainly as it can be said: lists, searched from front to back. The oracle of the
lockstep tests; it shares no code with the product.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

Key = Hashable


class BrutePool:
    """What every rank's slots and CPU cache must be after the same calls in the same order."""

    def __init__(
        self, slots: int, capacity: int, cost: Callable[[Key], int] = lambda key: 1
    ) -> None:
        self.capacity, self.cost = capacity, cost
        self.keys: list[Key | None] = [None] * slots
        self.holders: list[list[int]] = [[] for _ in range(slots)]
        self.used = [0] * slots
        self.clock = 0
        self.cpu_cache: list[tuple[Key, int]] = []  # (adapter, fetch number), least recent first
        self.fetches = 0
        self.live: list[tuple[int, Key]] = []  # requests on adapters, in ingest order
        self.failed_cause: set[int] = set()
        self.dead: set[int] = set()
        self.served: list[Key] = []
        self.retiring: list[Key] = []
        self.to_forget: list[Key] = []
        self.fresh: list[int] = []
        self.pins: dict[Any, int] = {}  # pinned and served -> a request that never ends, below 0
        self.kept_slots: set[Key] = set()  # pinned, as far as slots know
        self.to_unpin: list[Key] = []
        self.next_pin = -1

    # ------------------------------------------------------------------ the CPU cache

    def kept(self) -> list[Key]:
        keys: list[Key] = []
        for rid, key in self.live:
            if rid not in self.failed_cause and key not in keys:
                keys.append(key)
        fit = [sum(map(self.cost, keys[: n + 1])) <= self.capacity for n in range(len(keys))]
        return keys[: fit.index(False)] if False in fit else keys

    def free(self) -> int:
        return self.capacity - sum(map(self.cost, self.held()))

    def held(self) -> list[Key]:
        return [key for key, _ in self.cpu_cache]

    def fetch(self, key: Key) -> None:
        number = dict(self.cpu_cache).get(key)
        if number is None:
            self.fetches += 1
            number = self.fetches
            while self.free() < self.cost(key):
                self.cpu_cache.remove(next(t for t in self.cpu_cache if t[0] not in self.kept()))
        else:
            self.cpu_cache.remove((key, number))
        self.cpu_cache.append((key, number))

    def fill(self) -> None:
        for key in self.kept():
            if key not in self.held():
                self.fetch(key)

    def drop(self, key: Key, number: int) -> None:
        if (key, number) in self.cpu_cache:
            self.cpu_cache.remove((key, number))
            self.failed_cause |= {rid for rid, k in self.live if k == key}
            self.fill()

    # ------------------------------------------------------------------ requests and adapters

    def preload(
        self, keys: Sequence[Key], held: Sequence[Key], pinned: Collection[Key] = ()
    ) -> None:
        """Serve ``keys`` and hold the pinned and the first of ``held``, those that change this
        node.
        """
        for key in keys:
            self.serve(key, key in pinned)
        for key in held:
            if key in self.held():
                continue
            if self.free() < self.cost(key):
                break
            self.fetch(key)

    def serve(self, key: Key, pinned: bool = False) -> None:
        self.served.append(key)
        if pinned:
            self.pins[key] = self.next_pin
            self.next_pin -= 1
            self.kept_slots.add(key)
            self.ingest(self.pins[key], key)

    def may_pin(self) -> bool:
        """Whether one more adapter may be pinned."""
        return len(self.pins) + 1 < len(self.keys)

    def ingest(self, rid: int, key: Key | None) -> None:
        if key is None:
            return
        if key not in self.served:
            self.dead.add(rid)
            return
        self.live.append((rid, key))
        pin = self.pins.get(key)
        if pin in self.failed_cause:
            self.failed_cause.remove(pin)
            self.live.remove((pin, key))
            self.live.append((pin, key))
        if key in self.kept():
            self.fetch(key)

    def remove(self, rid: int) -> None:
        for slot, holders in enumerate(self.holders):
            if rid in holders:
                holders.remove(rid)
                self.used[slot] = self.clock
        was = [(r, k) for r, k in self.live if r == rid]
        self.live = [(r, k) for r, k in self.live if r != rid]
        self.dead.discard(rid)
        if rid not in self.failed_cause:
            self.fill()
        self.failed_cause.discard(rid)
        for _, key in was:
            self.forget_if_unused(key)

    def unload(self, key: Key) -> None:
        if key in self.served:
            self.served.remove(key)
            self.retiring.append(key)
            if key in self.pins:
                self.to_unpin.append(key)
                self.remove(self.pins.pop(key))
            else:
                self.forget_if_unused(key)

    def forget_if_unused(self, key: Key) -> None:
        if key in self.retiring and all(k != key for _, k in self.live):
            self.retiring.remove(key)
            self.cpu_cache = [t for t in self.cpu_cache if t[0] != key]
            self.to_forget.append(key)

    def forget_retired(self) -> None:
        self.keys = [None if key in self.to_forget else key for key in self.keys]
        self.to_forget = []
        self.kept_slots -= set(self.to_unpin)
        self.to_unpin = []

    # ------------------------------------------------------------------ admits

    def admit(
        self,
        rows: Sequence[tuple[int, Key | None]],
        bad: Collection[Key] = (),
        late: Collection[Key] = (),
    ) -> tuple[set[int], bool]:
        """Rows that fail, and whether the step is refused. ``bad`` adapters fail at the first
        agreement, ``late`` ones at the second.
        """
        self.clock += 1
        self.fresh = []
        failed = {rid for rid, _ in rows if rid in self.dead}
        missing: dict[Key, list[int]] = {}
        for rid, key in rows:
            if key is None or rid in failed or any(rid in h for h in self.holders):
                continue
            if key in self.keys:
                self.seat(rid, self.keys.index(key))
            else:
                missing.setdefault(key, []).append(rid)
        free = [
            slot
            for slot, holders in enumerate(self.holders)
            if not holders and self.keys[slot] not in self.kept_slots
        ]
        victims = sorted(free, key=lambda slot: (self.used[slot], slot))
        alive = [key for key in missing if key not in bad]
        lost = [key for key in missing if key in bad]
        refused = len(alive) > len(victims)
        if not refused:
            lost += [key for key in alive if key in late]
            for key, slot in zip(alive, victims, strict=False):
                if key not in late:
                    self.keys[slot], self.used[slot] = key, self.clock
                    for rid in missing[key]:
                        self.seat(rid, slot)
        for key in lost:
            failed.update(missing[key])
            self.dead.update(missing[key])
        return failed, refused

    def seat(self, rid: int, slot: int) -> None:
        self.holders[slot].append(rid)
        self.used[slot] = self.clock
        self.fresh.append(rid)

    def rollback(self) -> None:
        for slot, holders in enumerate(self.holders):
            for rid in [r for r in holders if r in self.fresh]:
                holders.remove(rid)
                self.used[slot] = self.clock
        self.fresh = []

    def slots(self) -> list[tuple[int, Key | None, tuple[int, ...]]]:
        """(slot, adapter, holders) as an operator sees them."""
        return [(i + 1, key, tuple(self.holders[i])) for i, key in enumerate(self.keys)]
