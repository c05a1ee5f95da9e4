"""The adapters that have a place in the CPU cache: plain data, equal on every rank.

Membership follows from the ordered ingests, removes, drops, unloads and pins alone (rule 1 of
docs/lockstep.md). The time at which a read lands, and what sits in a slot, never change it; a
failed read changes it only through the leader's ordered drop. An adapter's cost (1, or the bytes
of the largest shard on any rank) is one number on all ranks, so they cache the same set. A cached
adapter has a place; its weights may still be loading. Main thread, under the pool's lock (readers
look up fetch numbers when they land). No torch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from mstar_tp.engine.history_hash import HistoryHash
from mstar_tp.wire.values import AdapterKey


class FetchOutcome(Enum):
    """The outcome of ``CpuCache.fetch``."""

    CACHED = "held"
    NEW = "new"
    """The caller must start reading the copy."""
    FULL = "full"
    """Not enough may be dropped to make room for it."""


class _Cached(NamedTuple):
    number: int
    cost: int


def _one(key: AdapterKey) -> int:
    return 1


class CpuCache:
    """The cached adapters, each with its fetch number, least recently fetched first.

    Together they never cost more than ``capacity``. ``cost_of(key)`` must not change while ``key``
    is cached or kept (see ``CacheMembership``).
    """

    def __init__(self, capacity: int, cost_of: Callable[[AdapterKey], int] = _one) -> None:
        self.capacity = capacity
        self.cost_of = cost_of
        self.used = 0
        """The cost of the cached adapters together."""
        self._cached: OrderedDict[AdapterKey, _Cached] = OrderedDict()
        self._next = 1
        self._history = HistoryHash()

    def __contains__(self, key: AdapterKey) -> bool:
        return key in self._cached

    def __len__(self) -> int:
        return len(self._cached)

    @property
    def free(self) -> int:
        """The units that are left beside the held adapters."""
        return self.capacity - self.used

    @property
    def taken(self) -> int:
        """The number of fetches begun since the start."""
        return self._next - 1

    def number(self, key: AdapterKey) -> int | None:
        """The fetch number of ``key``, or None when it is not held."""
        cached = self._cached.get(key)
        return None if cached is None else cached.number

    def keys(self) -> list[AdapterKey]:
        """Every held adapter, least recent first."""
        return list(self._cached)

    def fetch(
        self, key: AdapterKey, keep: Collection[AdapterKey] = ()
    ) -> tuple[FetchOutcome, list[AdapterKey]]:
        """Make ``key`` the most recent; return the adapters that were dropped for it, too.

        They come least recent first. FULL changes nothing.
        """
        if key in self._cached:
            self._cached.move_to_end(key)
            self._history.add(1, self._cached[key].number)
            return FetchOutcome.CACHED, []
        cost = self.cost_of(key)
        victims = self._victims(cost, keep)
        if victims is None:
            return FetchOutcome.FULL, []
        for victim in victims:
            self.drop(victim)
        self._cached[key] = _Cached(self._next, cost)
        self.used += cost
        self._history.add(2, self._next, cost)
        self._history.add_text(str(key))
        self._next += 1
        return FetchOutcome.NEW, victims

    def drop(self, key: AdapterKey, fetch_no: int | None = None) -> bool:
        """Forget ``key``'s fetch (only ``fetch_no`` when given); return whether there was one."""
        cached = self._cached.get(key)
        if cached is None or (fetch_no is not None and cached.number != fetch_no):
            return False
        del self._cached[key]
        self.used -= cached.cost
        self._history.add(3, cached.number)
        return True

    def hash(self) -> int:
        """The running hash over the cache's history (R8)."""
        return self._history.value()

    def _victims(self, cost: int, keep: Collection[AdapterKey]) -> list[AdapterKey] | None:
        """The least recent adapters that must go for ``cost`` more; None when too few may."""
        victims: list[AdapterKey] = []
        free = self.free
        for old, cached in self._cached.items():
            if free >= cost:
                break
            if old not in keep:
                victims.append(old)
                free += cached.cost
        return victims if free >= cost else None


@dataclass(slots=True)
class Changes:
    """The changes of one event: copies that must be read, and copies that must be freed."""

    new: list[tuple[AdapterKey, int]] = field(default_factory=list)
    dropped: list[AdapterKey] = field(default_factory=list)


class CacheMembership:
    """Live requests in ingest order, and the adapters that the CPU cache must keep for them.

    The *kept* adapters are those of the live requests in ingest order, up to the first that no
    longer fits. A request whose adapter comes after them waits until another request ends, so a
    younger request never keeps an older one's adapter out. A request whose adapter's copy was
    dropped as unreadable has *failed* and protects no adapter. A pin acts as a request that never
    ends; if its copy failed, the next request on the adapter retries it.
    """

    def __init__(self, cpu_cache: CpuCache) -> None:
        self.cpu_cache = cpu_cache
        self._seq = 0
        self._key_of: dict[int, AdapterKey] = {}
        self._users: dict[AdapterKey, OrderedDict[int, int]] = {}
        """For each adapter: its live, unfailed requests -> ingest number, oldest first."""
        self._order: list[tuple[int, AdapterKey]] = []
        """(ingest number of its oldest request, adapter), ascending: the order of keeping."""
        self._kept: dict[AdapterKey, None] = {}
        """The longest prefix of ``_order`` that fits the capacity together."""
        self._kept_cost = 0
        """The cost of ``_kept``."""
        self._failed: dict[int, str] = {}
        self._pinned_rids: dict[AdapterKey, int] = {}
        """Pinned adapter -> the negative number of the request that stands for its pin."""
        self._next_pinned_rid = -1

    def key_of(self, rid: int) -> AdapterKey | None:
        """Return the adapter of an open request, or None."""
        return self._key_of.get(rid)

    def failed_cause(self, rid: int) -> str | None:
        """Return why the request's adapter could not be read, or None."""
        return self._failed.get(rid)

    def failed_requests(self) -> dict[int, str]:
        """Live requests whose adapter could not be read -> why."""
        return {rid: cause for rid, cause in self._failed.items() if rid >= 0}

    def users(self, key: AdapterKey) -> list[int]:
        """Live, unfailed requests that name ``key``, in ingest order."""
        return [rid for rid in self._users.get(key, ()) if rid >= 0]

    def named_keys(self) -> list[AdapterKey]:
        """Return the adapters that unfailed requests or pins name."""
        return list(self._users)

    def named(self, key: AdapterKey) -> bool:
        """Return whether any request or pin names ``key``, failed ones included."""
        return key in self._users or any(self._key_of[rid] == key for rid in self._failed)

    def keep(self) -> list[AdapterKey]:
        """Return the adapters that no fetch may evict, by their oldest request."""
        return list(self._kept)

    def keeps(self, key: AdapterKey) -> bool:
        """Return whether ``key`` is in the kept prefix."""
        return key in self._kept

    def ingest(self, rid: int, key: AdapterKey) -> Changes:
        """Record a new request on ``key``. Idempotent."""
        if rid in self._key_of:
            return Changes()
        self._key_of[rid] = key
        self._use(rid, key)
        pin = self._pinned_rids.get(key)
        if pin is not None and self._failed.pop(pin, None) is not None:
            self._use(pin, key)
        changes = Changes()
        if self.keeps(key):
            self._fetch(key, self._kept, changes)
        return changes

    def remove(self, rid: int) -> Changes:
        """Record a request's end, and fetch the adapters that fit now."""
        key = self._key_of.pop(rid, None)
        if key is None or self._failed.pop(rid, None) is not None:
            return Changes()
        self._leave(rid, key)
        return self._fill()

    def pin(self, key: AdapterKey) -> Changes:
        """Pin ``key``, ordered as a new request."""
        self._pinned_rids[key] = self._next_pinned_rid
        self._next_pinned_rid -= 1
        return self.ingest(self._pinned_rids[key], key)

    def unpin(self, key: AdapterKey) -> Changes:
        """Undo ``pin``. No-op where ``key`` is not pinned."""
        pin = self._pinned_rids.pop(key, None)
        return Changes() if pin is None else self.remove(pin)

    def preload(self, key: AdapterKey) -> Changes:
        """Fetch a configured adapter before any request exists, if it fits; it may be evicted."""
        changes = Changes()
        if self.cpu_cache.cost_of(key) <= self.cpu_cache.free:
            self._fetch(key, (), changes)
        return changes

    def drop(self, key: AdapterKey, fetch_no: int, cause: str) -> Changes:
        """Drop the copy of fetch ``fetch_no``, which some rank could not read.

        Its live requests fail.
        """
        changes = Changes()
        if not self.cpu_cache.drop(key, fetch_no):
            return changes
        for rid in list(self._users.get(key, ())):
            self._failed[rid] = cause
            self._leave(rid, key)
        filled = self._fill()
        return Changes(new=filled.new, dropped=[key, *filled.dropped])

    def forget(self, key: AdapterKey) -> Changes:
        """Drop the copy of an unloaded adapter, which no request may name."""
        assert key not in self._users, f"{key} is forgotten while {self.users(key)} name it"
        return Changes(dropped=[key]) if self.cpu_cache.drop(key) else Changes()

    def _use(self, rid: int, key: AdapterKey) -> None:
        users = self._users.setdefault(key, OrderedDict())
        if not users:
            self._order.append((self._seq, key))
            self._extend_kept()
        users[rid] = self._seq
        self._seq += 1

    def _fill(self) -> Changes:
        """Fetch every kept adapter that is not cached yet, in order."""
        changes = Changes()
        for key in self._kept:
            if key not in self.cpu_cache:
                self._fetch(key, self._kept, changes)
        return changes

    def _fetch(self, key: AdapterKey, keep: Collection[AdapterKey], changes: Changes) -> None:
        outcome, dropped = self.cpu_cache.fetch(key, keep)
        assert outcome is not FetchOutcome.FULL, (
            f"{key} is kept, yet {self.cpu_cache.keys()} leave it no place"
        )
        changes.dropped += dropped
        if outcome is FetchOutcome.NEW:
            number = self.cpu_cache.number(key)
            assert number is not None
            changes.new.append((key, number))

    def _leave(self, rid: int, key: AdapterKey) -> None:
        users = self._users[key]
        first = next(iter(users))
        place = bisect_left(self._order, (users[first], key))
        del users[rid]
        if rid != first:
            return
        del self._order[place]
        if users:
            insort(self._order, (next(iter(users.values())), key))
        else:
            del self._users[key]
        if key in self._kept:
            self._kept.clear()  # the order has changed, so the prefix is built anew
            self._kept_cost = 0
        # Also when ``key`` was not kept: it may have been the one that did not fit.
        self._extend_kept()

    def _extend_kept(self) -> None:
        """Keep what follows the kept prefix, as long as it fits."""
        while len(self._kept) < len(self._order):
            _, key = self._order[len(self._kept)]
            cost = self.cpu_cache.cost_of(key)
            if self._kept_cost + cost > self.cpu_cache.capacity:
                return
            self._kept[key] = None
            self._kept_cost += cost
