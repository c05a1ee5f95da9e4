"""The pool's tables in one place, with the one lock that guards them.

``lock`` is a leaf: never held over I/O, a collective or a wait. Equal on every rank: the records,
the CPU cache's membership, the slots, who has a slot or is dead. Ranks may differ, until they agree
(R6), in whether a copy is in. Reservations and reports are the leader's alone.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable

from mstar_tp.engine.resources.base import AskFailed
from mstar_tp.engine.resources.lora.adapters import AdapterTable
from mstar_tp.engine.resources.lora.cpu_cache.membership import CacheMembership, CpuCache
from mstar_tp.engine.resources.lora.rank_copies import CopyTable, unreadable
from mstar_tp.engine.resources.lora.registry.registry import AdapterRegistry
from mstar_tp.engine.resources.lora.slots import SlotTable
from mstar_tp.engine.resources.lora.vote import CopyState
from mstar_tp.wire.values import AdapterKey


class PoolTables:
    """Plain state; every method is called under ``lock``."""

    def __init__(
        self, num_slots: int, cpu_cache: CpuCache, world_size: int, adapters: AdapterTable
    ) -> None:
        self.lock = threading.Lock()
        self.adapters = adapters
        self.registry = AdapterRegistry(adapters)
        self.cpu_cache = CacheMembership(cpu_cache)
        self.slots = SlotTable(num_slots)
        self.copies = CopyTable(world_size)
        self.assigned: set[int] = set()
        """Requests that need nothing more: base rows, and rows that hold their slot."""
        self.dead: dict[int, str] = {}
        """Requests that an agreement (or an unknown adapter) failed -> why; until their remove."""
        self.claims: dict[int, AdapterKey] = {}
        """Requests that the leader reserved a place for, until their remove."""
        self.agreed_failures = 0
        """Adapters whose copy some rank could not read: dropped in order, or failed in an admit."""
        self.growth = 0
        """Moves when a waiting head should be retried."""

    def request_state(self, rid: int) -> CopyState | AskFailed:
        """A request's copies as the leader sees them."""
        if rid in self.dead:
            return AskFailed(self.dead[rid])
        key = self.cpu_cache.key_of(rid)
        if key is None or rid in self.assigned:
            return CopyState.IN
        failed_cause = self.cpu_cache.failed_cause(rid)
        if failed_cause is not None:
            return AskFailed(failed_cause)
        return self._adapter_state(key)

    def settled(self, waiting: Container[int]) -> list[tuple[int, CopyState | AskFailed]]:
        """Those of ``waiting`` whose copies are in, or failed, each with its state.

        The cost follows from what the CPU cache holds, not from how many wait.
        """
        found: list[tuple[int, CopyState | AskFailed]] = []
        for key in self.cpu_cache.cpu_cache.keys():
            state = self._adapter_state(key)
            if state is not CopyState.WAITING:
                users = self.cpu_cache.users(key)
                found += ((r, state) for r in users if r in waiting and r not in self.dead)
        lost = {**self.cpu_cache.failed_requests(), **self.dead}
        found += ((rid, AskFailed(cause)) for rid, cause in lost.items() if rid in waiting)
        return found

    def _adapter_state(self, key: AdapterKey) -> CopyState | AskFailed:
        """Return whether requests on ``key`` that hold no slot may run."""
        if self.copies.failure(key) is not None:
            # One still resident may run on its slot; if a row evicts it first, the admit fails it.
            resident = self.slots.resident(key) is not None
            return CopyState.IN if resident else AskFailed(self.unreadable(key))
        # Outside the kept prefix any ingest may drop the copy, also one that an admit overlaps.
        ready = self.copies.all_in(key) and self.cpu_cache.keeps(key)
        return CopyState.IN if ready else CopyState.WAITING

    def claimed_adapters(self) -> set[AdapterKey]:
        """The distinct adapters that admitted or reserved rows need a slot for."""
        return {*self.claims.values(), *self.slots.held_keys()}

    def has_place(self, key: AdapterKey, pinned: Iterable[AdapterKey]) -> bool:
        """Return whether a slot is left for ``key``; those of ``pinned`` adapters count as held."""
        spoken_for = self.claimed_adapters()
        spoken_for.update(pinned)
        spoken_for.add(key)
        return len(spoken_for) <= self.slots.num_slots

    def unreadable(self, key: AdapterKey) -> str:
        """The message on a failed read: which rank and why, as far as this rank knows."""
        failure = self.copies.failure(key)
        if failure is None:
            return f"adapter {key.name!r} could not be read on some rank"
        return unreadable(key, *failure)
