"""Reports on a pool's tables: rows for the checks, states for an operator, stats.

Reads only. Main thread; ``rows`` and ``debug_state`` between two steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mstar_tp.common.errors import LockstepError
from mstar_tp.engine.resources.lora.adapters import Adapter
from mstar_tp.engine.resources.lora.admit import Admitter
from mstar_tp.engine.resources.lora.cpu_cache.store import LoraAdapterStore
from mstar_tp.engine.resources.lora.tables import PoolTables
from mstar_tp.engine.table_rows import CpuCacheRow, ServedRow, SlotRow, StageRow
from mstar_tp.wire.states import (
    MAX_STATES,
    AdapterState,
    CpuCacheState,
    FailedRead,
    LoraStats,
    PlaceCounts,
    SlotState,
)
from mstar_tp.wire.values import AdapterKey


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraDebugState:
    """The pool's tables for an operator."""

    slots: tuple[SlotState, ...]
    cpu_cache: tuple[AdapterKey, ...]
    served: tuple[AdapterKey, ...]


class PoolReports:
    """Everything that a pool says of itself.

    Main thread. ``table_rows``, ``debug_state`` and ``slots_hash`` are called between two steps;
    the others may run beside one.
    """

    def __init__(
        self,
        tables: PoolTables,
        store: LoraAdapterStore,
        admitter: Admitter,
        stage: str,
    ) -> None:
        self._tables = tables
        self._store = store
        self._admitter = admitter
        self._stage = stage

    @property
    def steps_waited_for_read(self) -> int:
        """Steps whose admit had to wait for a copy; 0 while R7 holds."""
        return self._admitter.steps_waited_for_read

    def slots_hash(self) -> int:
        """The slot table's running hash, as of the last settled admit."""
        with self._tables.lock:
            return self._tables.slots.hash()

    def cpu_cache_hash(self) -> int:
        """The running hash of the CPU cache's membership."""
        return self._store.cpu_cache.hash()

    def served_hash(self) -> int:
        """The running hash of which names are served."""
        with self._tables.lock:
            return self._tables.registry.hash()

    def table_rows(self, table: str) -> tuple[StageRow, ...]:
        """The rows of ``slots``, ``cpu_cache`` or ``served``."""
        slots, cpu_cache = self._tables.slots, self._store.cpu_cache
        with self._tables.lock:
            if table == "slots":
                return tuple(
                    SlotRow(
                        slot=slot,
                        adapter=None if key is None else str(key),
                        holders=holders,
                        used=slots.used(slot),
                    )
                    for slot, key, holders in slots.rows()
                )
            if table == "cpu_cache":
                numbers = ((key, cpu_cache.number(key)) for key in cpu_cache.keys())
                return tuple(CpuCacheRow(adapter=str(k), fetch_no=n) for k, n in numbers if n)
            assert table == "served", f"the pool has no table of {table}"
            return tuple(ServedRow(adapter=str(key)) for key in self._tables.registry.keys())

    def debug_state(self) -> LoraDebugState:
        """Slots with holders, the CPU cache's members and the served names."""
        with self._tables.lock:
            slots = tuple(
                SlotState(slot=slot, adapter=key, holders=holders)
                for slot, key, holders in self._tables.slots.rows()
            )
            return LoraDebugState(
                slots=slots,
                cpu_cache=tuple(self._tables.cpu_cache.cpu_cache.keys()),
                served=tuple(self._tables.registry.keys()),
            )

    def cpu_cache_state(self) -> CpuCacheState:
        """The CPU cache's bound and what counts against it on this rank now."""
        cpu_cache, budget = self._store.cpu_cache, self._store.budget
        return CpuCacheState(
            unit=self._store.spec.cpu_unit,
            capacity=cpu_cache.capacity,
            used=cpu_cache.used,
            peak=budget.peak,
            memory_bytes=budget.memory_bytes,
            peak_bytes=budget.peak_bytes,
        )

    def failed_reads(self) -> tuple[FailedRead, ...]:
        """Adapters whose last read failed on some rank; nothing but on the leader."""
        with self._tables.lock:
            return self._tables.copies.failed_reads()

    def adapter_states(self, keys: Sequence[AdapterKey] | None = None) -> tuple[AdapterState, ...]:
        """The places of those of ``keys`` that are known.

        None asks for those in a slot, in the CPU cache or named by requests. There are
        ``MAX_STATES`` at most.
        """
        with self._tables.lock:
            if keys is None:
                resident = (key for _, key, _ in self._tables.slots.rows() if key is not None)
                named = self._tables.cpu_cache.named_keys()
                keys = tuple(
                    dict.fromkeys((*resident, *self._tables.cpu_cache.cpu_cache.keys(), *named))
                )
            found = [self._tables.adapters.get(key) for key in keys[:MAX_STATES]]
            return tuple(
                self._adapter_state(adapter)
                for adapter in found
                if adapter is not None and adapter.has_part
            )

    def stats(self) -> LoraStats:
        """The pool in numbers, now."""
        with self._tables.lock:
            return LoraStats(
                slots=self._store.spec.slots,
                slots_held=sum(bool(holders) for _, _, holders in self._tables.slots.rows()),
                evictions=self._tables.slots.evictions,
                agreed_failures=self._tables.agreed_failures,
                steps_waited_for_read=self.steps_waited_for_read,
                adapters_held=len(self._store.cpu_cache),
                adapters_taken=self._store.cpu_cache.taken,
                cpu_cache=self.cpu_cache_state(),
                places=self._place_counts(),
            )

    def _adapter_state(self, adapter: Adapter) -> AdapterState:
        """The place and the counters of one adapter. Under the lock."""
        key, copy = adapter.key, adapter.copy
        users = self._tables.cpu_cache.users(key)
        running = sum(rid in self._tables.assigned for rid in users)
        failure = self._tables.copies.last_failure(key)
        cause = None if adapter.read is None else adapter.read.cause
        return AdapterState(
            adapter=key,
            stage=self._stage,
            slot=self._tables.slots.resident(key),
            host=_in_cache(self._store, key),
            num_bytes=(
                self._store.shard_bytes(adapter.registration) if copy is None else copy.num_bytes
            ),
            hits=adapter.hits,
            installs=adapter.installs,
            evictions=adapter.evictions,
            running=running,
            waiting=len(users) - running,
            cause=cause if failure is None else f"rank {failure.rank}: {failure.cause}",
        )

    def _place_counts(self) -> PlaceCounts:
        """The numbers of adapters in each place. Under the lock.

        The cost follows from slots and failures, not from how many adapters there are.
        """
        # What was unloaded may lie in a slot until that is taken.
        resident = {
            key
            for _, key, _ in self._tables.slots.rows()
            if key is not None and key in self._tables.adapters
        }
        failures = {read.adapter for read in self._tables.copies.failed_reads()} - resident
        in_cache = [_in_cache(self._store, key) for key in failures]
        failed = sum(state in (None, "failed") for state in in_cache)
        held = (
            len(self._store.cpu_cache)
            - sum(key in self._store.cpu_cache for key in resident)
            - in_cache.count("failed")
        )
        host = self._store.num_copies - sum(self._store.get(key) is not None for key in resident)
        device, known = len(resident), len(self._tables.adapters) - self._store.num_elsewhere
        return PlaceCounts(
            device=device,
            host=host,
            reading=held - host,
            disk=known - device - held - failed,
            failed=failed,
        )


def _in_cache(
    store: LoraAdapterStore, key: AdapterKey
) -> Literal["in", "reading", "failed"] | None:
    """The state of the CPU cache's copy of ``key``; None when it holds none. Under the lock."""
    adapter = store.adapters.get(key)
    if adapter is None or key not in store.cpu_cache:
        return None
    if adapter.copy is not None:
        return "in"
    read = adapter.read
    failed = read is not None and read.settled and read.adapter is None
    return "failed" if failed else "reading"


def check_clean(tables: PoolTables, rank: int) -> None:
    """Check that no slot is held and no request is known.

    Raises:
        LockstepError: naming what is left.
    """
    held = {slot: holders for slot, _, holders in tables.slots.rows() if holders}
    if held or tables.assigned or tables.claims:
        raise LockstepError(
            f"rank {rank}: warm-up left slots {held}, assigned requests "
            f"{sorted(tables.assigned)} and claims {sorted(tables.claims)}"
        )
