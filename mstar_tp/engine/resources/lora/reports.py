"""What a pool's tables say of themselves: rows for the checks, states for an operator, figures.

Reads only. Main thread; ``rows`` and ``debug_state`` between two steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from mstar_tp.engine.resources.lora.store import LoraAdapterStore
from mstar_tp.engine.resources.lora.tables import PoolTables
from mstar_tp.engine.rows import NodeRow, ServedRow, SlotRow, TierRow
from mstar_tp.errors import LockstepError
from mstar_tp.wire.messages import AdapterKey, LoraFigures, SlotState, TierState


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


def figures(tables: PoolTables, store: LoraAdapterStore, steps_waited_for_read: int) -> LoraFigures:
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
