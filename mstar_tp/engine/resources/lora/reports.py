"""What a pool's tables say of themselves: rows for the checks, states for an operator, figures.

Reads only. Main thread; ``rows`` and ``debug_state`` between two steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mstar_tp.common.errors import LockstepError
from mstar_tp.engine.resources.lora.cpu_cache.fetches import FetchTracker
from mstar_tp.engine.resources.lora.cpu_cache.store import LoraAdapterStore
from mstar_tp.engine.resources.lora.registry.registry import AdapterRecord
from mstar_tp.engine.resources.lora.tables import PoolTables
from mstar_tp.engine.table_rows import CpuCacheRow, ServedRow, SlotRow, StageRow
from mstar_tp.wire.states import (
    MAX_STATES,
    AdapterState,
    CpuCacheState,
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


def table_rows(tables: PoolTables, table: str) -> tuple[StageRow, ...]:
    """The rows of ``slots``, ``cpu_cache`` or ``served``."""
    slots, cpu_cache = tables.slots, tables.cpu_cache.cpu_cache
    with tables.lock:
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
        return tuple(ServedRow(adapter=str(key)) for key in tables.registry.keys())


def debug_state(tables: PoolTables) -> LoraDebugState:
    """Slots with holders, the tier's members and the served names."""
    with tables.lock:
        slots = tuple(
            SlotState(slot=slot, adapter=key, holders=holders)
            for slot, key, holders in tables.slots.rows()
        )
        return LoraDebugState(
            slots=slots,
            cpu_cache=tuple(tables.cpu_cache.cpu_cache.keys()),
            served=tuple(tables.registry.keys()),
        )


def adapter_states(
    tables: PoolTables,
    store: LoraAdapterStore,
    fetches: FetchTracker,
    stage: str,
    keys: Sequence[AdapterKey] | None,
) -> tuple[AdapterState, ...]:
    """Where each of ``keys`` is, of those that are known; None: those in a slot, in the CPU cache
    or named by requests, at most ``MAX_STATES``.
    """
    with tables.lock:
        if keys is None:
            resident = (key for _, key, _ in tables.slots.rows() if key is not None)
            named = tables.cpu_cache.named_keys()
            keys = tuple(dict.fromkeys((*resident, *tables.cpu_cache.cpu_cache.keys(), *named)))
        known = [
            (key, record)
            for key in keys[:MAX_STATES]
            if (record := tables.registry.record(key)) is not None and store.has_part(key)
        ]
        return tuple(
            _adapter_state(tables, store, fetches, stage, key, record) for key, record in known
        )


def _adapter_state(
    tables: PoolTables,
    store: LoraAdapterStore,
    fetches: FetchTracker,
    stage: str,
    key: AdapterKey,
    record: AdapterRecord,
) -> AdapterState:
    """Under the lock."""
    copy, read = store.get(key), fetches.read_of(key)
    users = tables.cpu_cache.users(key)
    running = sum(rid in tables.assigned for rid in users)
    failure, uses = tables.copies.last_failure(key), tables.uses.get(key)
    cause = None if read is None else read.cause
    return AdapterState(
        adapter=key,
        stage=stage,
        slot=tables.slots.resident(key),
        host=_in_cpu_cache(store, fetches, key),
        num_bytes=store.shard_bytes(record) if copy is None else copy.num_bytes,
        hits=0 if uses is None else uses.hits,
        installs=0 if uses is None else uses.installs,
        evictions=0 if uses is None else uses.evictions,
        running=running,
        waiting=len(users) - running,
        cause=cause if failure is None else f"rank {failure.rank}: {failure.cause}",
    )


def _in_cpu_cache(
    store: LoraAdapterStore, fetches: FetchTracker, key: AdapterKey
) -> Literal["in", "reading", "failed"] | None:
    """Return how far the tier's copy of ``key`` is; None: it holds none.

    Under the lock.
    """
    if key not in store.cpu_cache:
        return None
    if store.get(key) is not None:
        return "in"
    read = fetches.read_of(key)
    failed = read is not None and read.settled and read.adapter is None
    return "failed" if failed else "reading"


def _place_counts(
    tables: PoolTables, store: LoraAdapterStore, fetches: FetchTracker
) -> PlaceCounts:
    """Costs by slots and failures, not by what the tier holds or how many there are.

    Under the lock.
    """
    known_of = tables.registry.record
    # What was unloaded may lie in a slot until that is taken.
    resident = {
        key for _, key, _ in tables.slots.rows() if key is not None and known_of(key) is not None
    }
    failures = {read.adapter for read in tables.copies.failed_reads()} - resident
    in_cpu_cache = [_in_cpu_cache(store, fetches, key) for key in failures]
    failed = sum(state in (None, "failed") for state in in_cpu_cache)
    held = (
        len(store.cpu_cache)
        - sum(key in store.cpu_cache for key in resident)
        - in_cpu_cache.count("failed")
    )
    host = store.num_copies - sum(store.get(key) is not None for key in resident)
    device, known = len(resident), tables.registry.num_known - store.num_elsewhere
    return PlaceCounts(
        device=device,
        host=host,
        reading=held - host,
        disk=known - device - held - failed,
        failed=failed,
    )


def host_state(store: LoraAdapterStore) -> CpuCacheState:
    """The CPU cache's bound and what counts against it on this rank now."""
    cpu_cache, room = store.cpu_cache, store.budget
    return CpuCacheState(
        unit=store.spec.cpu_unit,
        capacity=cpu_cache.capacity,
        used=cpu_cache.used,
        peak=room.peak,
        pinned_bytes=room.pinned_bytes,
        peak_bytes=room.peak_bytes,
    )


def stats(
    tables: PoolTables, store: LoraAdapterStore, fetches: FetchTracker, steps_waited_for_read: int
) -> LoraStats:
    """The pool in numbers, now. May run beside a step."""
    with tables.lock:
        return LoraStats(
            slots=store.spec.slots,
            slots_held=sum(bool(holders) for _, _, holders in tables.slots.rows()),
            evictions=tables.slots.evictions,
            agreed_failures=tables.agreed_failures,
            steps_waited_for_read=steps_waited_for_read,
            adapters_held=len(store.cpu_cache),
            adapters_taken=store.cpu_cache.taken,
            cpu_cache=host_state(store),
            places=_place_counts(tables, store, fetches),
        )


def check_clean(tables: PoolTables, rank: int) -> None:
    """No slot is held and no request is known.

    Raises:
        LockstepError: naming what is left.
    """
    held = {slot: holders for slot, _, holders in tables.slots.rows() if holders}
    if held or tables.assigned or tables.claims:
        raise LockstepError(
            f"rank {rank}: warm-up left slots {held}, seated requests "
            f"{sorted(tables.assigned)} and claims {sorted(tables.claims)}"
        )
