"""The table of slots: which adapter each has, and who holds it. Equal on every rank.

Owned by the pool and guarded by its lock. Every decision here follows from the table at the start
of an admit and the admit's rows in order (R5); nothing reads a wall clock or the
result of a read. No torch.
"""

from __future__ import annotations

import hashlib
import struct

import msgspec

from mstar_tp.engine.history_hash import HistoryHash
from mstar_tp.wire.values import AdapterKey


class _Slot(msgspec.Struct):
    """A struct, since two of them are compared without a line of Python."""

    key: AdapterKey | None = None
    holders: dict[int, None] = msgspec.field(default_factory=dict)
    used: int = 0
    """The admit clock when it was last taken or given back; 0 for a slot never used."""


class SlotTable:
    """Slots 1..num_slots, each held by a set of requests; one that nobody holds is a cache."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots = {slot: _Slot() for slot in range(1, num_slots + 1)}
        self._by_key: dict[AdapterKey, int] = {}
        self._by_rid: dict[int, int] = {}
        self._pinned: set[AdapterKey] = set()
        """Adapters whose slot is no victim, whether or not they have one now."""
        self._clock = 0
        self.evictions = 0
        """Installs that took the place of another adapter."""
        self._history = HistoryHash()
        self._hashed: dict[int, _Slot] = {}
        """The slots as they were when ``_content`` was written, if none was held; else nothing."""
        self._content = b""
        self._named: list[AdapterKey | None] = []
        """What the slots held when ``_names`` was written."""
        self._names = b""

    @property
    def any_held(self) -> bool:
        """Return whether any request holds a slot."""
        return bool(self._by_rid)

    def tick(self) -> None:
        """An admit has begun: the LRU clock moves."""
        self._clock += 1

    def slot_of(self, rid: int) -> int | None:
        """The slot the request holds, or None."""
        return self._by_rid.get(rid)

    def resident(self, key: AdapterKey) -> int | None:
        """The slot whose weights are this adapter's, held or not, or None."""
        return self._by_key.get(key)

    def held_keys(self) -> set[AdapterKey]:
        """Adapters of the slots that somebody holds."""
        return {e.key for e in self._slots.values() if e.holders and e.key is not None}

    def victims(self) -> list[int]:
        """Slots that nobody holds and whose adapter is not pinned, in the order installs take them.

        Those never used come first, then the least recently used.
        """
        pinned = self._pinned
        free = [
            slot
            for slot, entry in self._slots.items()
            if not entry.holders and (not pinned or entry.key not in pinned)
        ]
        return sorted(free, key=lambda slot: (self._slots[slot].used, slot))

    def pin(self, key: AdapterKey) -> None:
        """``key``, which sits in no slot yet, will stay in the slot it gets."""
        assert key not in self._by_key, f"{key} is pinned in slot {self._by_key[key]}, too late"
        self._pinned.add(key)

    def unpin(self, key: AdapterKey) -> None:
        """``key``'s slot may be taken once nobody holds it. Between two admits."""
        self._pinned.discard(key)

    def take(self, rid: int, slot: int) -> None:
        """``rid`` holds ``slot`` from now on."""
        assert rid not in self._by_rid, f"request {rid} holds slot {self._by_rid[rid]} already"
        entry = self._slots[slot]
        assert entry.key is not None, f"request {rid} takes slot {slot}, which holds no adapter"
        entry.holders[rid] = None
        entry.used = self._clock
        self._by_rid[rid] = slot
        self._history.add(1, rid, slot, self._clock)

    def release(self, rid: int) -> int | None:
        """Give back the slot that ``rid`` holds; return it, or None when it held none.

        Its weights stay as a cache.
        """
        slot = self._by_rid.pop(rid, None)
        if slot is None:
            return None
        entry = self._slots[slot]
        del entry.holders[rid]
        entry.used = self._clock
        self._history.add(2, rid, slot, self._clock)
        return slot

    def install(self, slot: int, key: AdapterKey) -> AdapterKey | None:
        """``slot`` holds ``key``'s weights from now on; the adapter it held before, or None."""
        entry = self._slots[slot]
        assert not entry.holders, f"slot {slot} is held by {sorted(entry.holders)}"
        assert key not in self._by_key, f"{key} sits in slot {self._by_key[key]} already"
        evicted = entry.key
        if evicted is not None:
            del self._by_key[evicted]
            self.evictions += 1
        entry.key = key
        entry.used = self._clock
        self._by_key[key] = slot
        self._history.add(3, slot, self._clock)
        self._history.add_text(str(key))
        return evicted

    def forget(self, key: AdapterKey) -> None:
        """No request will name ``key`` again. Its slot is no likelier a victim than before."""
        slot = self._by_key.pop(key, None)
        if slot is None:
            return
        entry = self._slots[slot]
        assert not entry.holders, (
            f"{key} is forgotten while {sorted(entry.holders)} hold slot {slot}"
        )
        entry.key = None
        self._history.add(4, slot)

    def rows(self) -> list[tuple[int, AdapterKey | None, tuple[int, ...]]]:
        """(slot, adapter, holders in the order they came) of every slot."""
        return [(slot, entry.key, tuple(entry.holders)) for slot, entry in self._slots.items()]

    def used(self, slot: int) -> int:
        """The admit clock when the slot was last taken or given back; 0 before."""
        return self._slots[slot].used

    def hash(self) -> int:
        """Hash of the table's history and of what it holds now, refcounts included (R8).

        The history alone would miss a table that was changed behind its methods, so what it holds
        is looked at every time. As long as nobody holds a slot, that is one comparison.
        """
        if self._slots != self._hashed:
            self._content = self._written()
            held = any(entry.holders for entry in self._slots.values())
            # Holders would compare as equal in any order, which the hash tells apart.
            self._hashed = (
                {} if held else {slot: _Slot(s.key, {}, s.used) for slot, s in self._slots.items()}
            )
        moment = struct.pack("<2q", self._history.value(), self._clock)
        digest = hashlib.blake2b(moment + self._content, digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def _written(self) -> bytes:
        """The clock, holders and key of every slot."""
        numbers: list[int] = []
        keys = []
        for entry in self._slots.values():
            keys.append(entry.key)
            if entry.holders:
                numbers += (entry.used, len(entry.holders), *entry.holders)
            else:
                numbers += (entry.used, 0)
        if keys != self._named:
            self._named, self._names = keys, "\n".join(map(str, keys)).encode()
        return struct.pack(f"<{len(numbers) + 1}q", *numbers, len(self._names)) + self._names
