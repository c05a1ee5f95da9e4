"""What a pool's tables say of themselves: rows for the checks, states for an operator, figures.

Reads only. Main thread; ``rows`` and ``debug_state`` between two steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mstar_tp.common.errors import LockstepError
from mstar_tp.engine.resources.lora.cpu_cache.fetches import HoldKeeper
from mstar_tp.engine.resources.lora.cpu_cache.store import LoraAdapterStore
from mstar_tp.engine.resources.lora.registry.registry import AdapterRecord
from mstar_tp.engine.resources.lora.tables import PoolTables
from mstar_tp.engine.table_rows import NodeRow, ServedRow, SlotRow, TierRow
from mstar_tp.wire.states import (
    MAX_STATES,
    AdapterState,
    LoraFigures,
    PlaceCounts,
    SlotState,
    TierState,
)
from mstar_tp.wire.values import AdapterKey


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraDebugState:
    """The pool's tables for an operator."""

    slots: tuple[SlotState, ...]
    tier: tuple[AdapterKey, ...]
    served: tuple[AdapterKey, ...]


def table_rows(tables: PoolTables, table: str) -> tuple[NodeRow, ...]:
    """The rows of ``slots``, ``tier`` or ``served``."""
    slots, tier = tables.slots, tables.tier.tier
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
        if table == "tier":
            numbers = ((key, tier.number(key)) for key in tier.keys())
            return tuple(TierRow(adapter=str(k), hold_no=n) for k, n in numbers if n)
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
            tier=tuple(tables.tier.tier.keys()),
            served=tuple(tables.registry.keys()),
        )


def adapter_states(
    tables: PoolTables,
    store: LoraAdapterStore,
    holds: HoldKeeper,
    node: str,
    keys: Sequence[AdapterKey] | None,
) -> tuple[AdapterState, ...]:
    """Where each of ``keys`` is, of those that are known; None: those in a slot, in the host tier
    or named by requests, at most ``MAX_STATES``.
    """
    with tables.lock:
        if keys is None:
            resident = (key for _, key, _ in tables.slots.rows() if key is not None)
            named = tables.tier.named_keys()
            keys = tuple(dict.fromkeys((*resident, *tables.tier.tier.keys(), *named)))
        known = [
            (key, record)
            for key in keys[:MAX_STATES]
            if (record := tables.registry.record(key)) is not None and store.has_part(key)
        ]
        return tuple(
            _adapter_state(tables, store, holds, node, key, record) for key, record in known
        )


def _adapter_state(
    tables: PoolTables,
    store: LoraAdapterStore,
    holds: HoldKeeper,
    node: str,
    key: AdapterKey,
    record: AdapterRecord,
) -> AdapterState:
    """Under the lock."""
    copy, read = store.get(key), holds.read_of(key)
    users = tables.tier.users(key)
    running = sum(rid in tables.seated for rid in users)
    failure, uses = tables.copies.last_failure(key), tables.uses.get(key)
    cause = None if read is None else read.cause
    return AdapterState(
        adapter=key,
        node=node,
        slot=tables.slots.resident(key),
        host=_in_tier(store, holds, key),
        num_bytes=store.shard_bytes(record) if copy is None else copy.num_bytes,
        hits=0 if uses is None else uses.hits,
        installs=0 if uses is None else uses.installs,
        evictions=0 if uses is None else uses.evictions,
        running=running,
        waiting=len(users) - running,
        cause=cause if failure is None else f"rank {failure.rank}: {failure.cause}",
    )


def _in_tier(
    store: LoraAdapterStore, holds: HoldKeeper, key: AdapterKey
) -> Literal["in", "reading", "failed"] | None:
    """How far the tier's copy of ``key`` is; None: it holds none. Under the lock."""
    if key not in store.tier:
        return None
    if store.get(key) is not None:
        return "in"
    read = holds.read_of(key)
    failed = read is not None and read.settled and read.adapter is None
    return "failed" if failed else "reading"


def _place_counts(tables: PoolTables, store: LoraAdapterStore, holds: HoldKeeper) -> PlaceCounts:
    """Costs by slots and failures, not by what the tier holds or how many there are. Under the
    lock.
    """
    known_of = tables.registry.record
    # What was unloaded may lie in a slot until that is taken.
    resident = {
        key for _, key, _ in tables.slots.rows() if key is not None and known_of(key) is not None
    }
    failures = {read.adapter for read in tables.copies.failed_reads()} - resident
    in_tier = [_in_tier(store, holds, key) for key in failures]
    failed = sum(state in (None, "failed") for state in in_tier)
    held = len(store.tier) - sum(key in store.tier for key in resident) - in_tier.count("failed")
    host = store.num_copies - sum(store.get(key) is not None for key in resident)
    device, known = len(resident), tables.registry.num_known - store.num_elsewhere
    return PlaceCounts(
        device=device,
        host=host,
        reading=held - host,
        disk=known - device - held - failed,
        failed=failed,
    )


def host_state(store: LoraAdapterStore) -> TierState:
    """The host tier's bound and what counts against it on this rank now."""
    tier, room = store.tier, store.room
    return TierState(
        unit=store.spec.cpu_unit,
        capacity=tier.capacity,
        used=tier.used,
        peak=room.peak,
        pinned_bytes=room.pinned_bytes,
        peak_bytes=room.peak_bytes,
    )


def figures(
    tables: PoolTables, store: LoraAdapterStore, holds: HoldKeeper, steps_waited_for_read: int
) -> LoraFigures:
    """The pool in numbers, now. May run beside a step."""
    with tables.lock:
        return LoraFigures(
            slots=store.spec.slots,
            slots_held=sum(bool(holders) for _, _, holders in tables.slots.rows()),
            evictions=tables.slots.evictions,
            agreed_failures=tables.agreed_failures,
            steps_waited_for_read=steps_waited_for_read,
            adapters_held=len(store.tier),
            adapters_taken=store.tier.taken,
            tier=host_state(store),
            places=_place_counts(tables, store, holds),
        )


def check_clean(tables: PoolTables, rank: int) -> None:
    """No slot is held and no request is known.

    Raises:
        LockstepError: naming what is left.
    """
    held = {slot: holders for slot, _, holders in tables.slots.rows() if holders}
    if held or tables.seated or tables.claims:
        raise LockstepError(
            f"rank {rank}: warm-up left slots {held}, seated requests "
            f"{sorted(tables.seated)} and claims {sorted(tables.claims)}"
        )
