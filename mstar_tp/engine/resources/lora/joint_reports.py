"""Reports over all stages of a model: each pool's, in graph order, with the stage's name."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mstar_tp.engine.history_hash import HistoryHash
from mstar_tp.engine.resources.lora.pool import LoraAdapterPool
from mstar_tp.engine.table_rows import Row, in_stage
from mstar_tp.wire.states import AdapterState, FailedRead, LoraStats, StageState
from mstar_tp.wire.values import AdapterKey


class JointReports:
    """The ``PoolReports`` of all pools as one. Threads are those of each."""

    def __init__(self, pools: Sequence[LoraAdapterPool]) -> None:
        self._pools = pools

    def slots_hash(self) -> int:
        """The slot tables' running hash; between steps, as of the last settled admit."""
        return _joint([pool.reports.slots_hash() for pool in self._pools])

    def cpu_cache_hash(self) -> int:
        """The running hash of the CPU caches' membership. Main."""
        return _joint([pool.reports.cpu_cache_hash() for pool in self._pools])

    def served_hash(self) -> int:
        """The running hash of which names are served. Main."""
        return _joint([pool.reports.served_hash() for pool in self._pools])

    def table_rows(self, table: str) -> tuple[Row, ...]:
        """The rows of ``slots``, ``cpu_cache`` or ``served``, of every stage. Between two steps."""
        return tuple(
            in_stage(row, pool.stage.name)
            for pool in self._pools
            for row in pool.reports.table_rows(table)
        )

    def failed_reads(self) -> tuple[FailedRead, ...]:
        """Adapters whose last read failed on some rank; nothing but on the leader."""
        return tuple(
            msgspec.structs.replace(failed, stage=pool.stage.name)
            for pool in self._pools
            for failed in pool.reports.failed_reads()
        )

    @property
    def steps_waited_for_read(self) -> int:
        """Steps whose admit had to wait for a copy; 0 while R7 holds."""
        return sum(pool.reports.steps_waited_for_read for pool in self._pools)

    def stage_states(self) -> tuple[StageState, ...]:
        """Each pool's slots, with holders, and its CPU cache. Between steps."""
        states = []
        for pool in self._pools:
            mine, host = pool.reports.debug_state(), pool.reports.cpu_cache_state()
            states.append(
                StageState(
                    stage=pool.stage.name, slots=mine.slots, cpu_cache=mine.cpu_cache, host=host
                )
            )
        return tuple(states)

    def served(self) -> tuple[AdapterKey, ...]:
        """The adapters that new requests may name, in the order they came. Between steps."""
        return self._pools[0].reports.debug_state().served

    def adapter_states(self, keys: Sequence[AdapterKey] | None = None) -> tuple[AdapterState, ...]:
        """The place of each of ``keys`` on this rank, in every stage. May run beside a step.

        None asks for those that are in memory or named by requests.
        """
        return tuple(state for pool in self._pools for state in pool.reports.adapter_states(keys))

    def stats(self) -> tuple[LoraStats, ...]:
        """Each pool in numbers, now. Main; may run beside a step."""
        return tuple(
            msgspec.structs.replace(pool.reports.stats(), stage=pool.stage.name)
            for pool in self._pools
        )


def _joint(hashes: Sequence[int]) -> int:
    """One hash of all pools' tables; a lone pool's own."""
    if len(hashes) == 1:
        return hashes[0]
    history = HistoryHash()
    history.add(*hashes)
    return history.value()
