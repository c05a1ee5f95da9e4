"""The admit of a step with misses: every rank decides the same by itself (R5, R6).

Step thread. Decisions follow from the slot table at the start and the rows in order; the one fact
that may differ between ranks, how far a copy is, goes through an agreement before any slot is
handed out.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from mstar_tp.common.errors import LockstepError
from mstar_tp.engine.resources.base import AdmitOutcome, StepBatch
from mstar_tp.engine.resources.lora import vote
from mstar_tp.engine.resources.lora.cpu_cache.fetches import FetchTracker
from mstar_tp.engine.resources.lora.cpu_cache.reads import Read
from mstar_tp.engine.resources.lora.tables import PoolTables
from mstar_tp.engine.resources.lora.vote import CopyState, Miss, VoteResult
from mstar_tp.lora.reading.loaded_adapter import LoadedAdapter
from mstar_tp.recording import Recorder
from mstar_tp.recording.entries import Agreed
from mstar_tp.wire.values import AdapterKey

if TYPE_CHECKING:
    from mstar_tp.distributed.comm import JointGroups

logger = logging.getLogger(__name__)

WARN_AFTER_S = 10.0

Waiting = dict[AdapterKey, list[int]]
"""Adapters that no slot holds -> the step's rows on them, both in row order."""


class Weights(Protocol):
    """The device's slots, where installs put adapters."""

    def install(self, copies: Sequence[tuple[int, LoadedAdapter]]) -> None:
        """Put each adapter into its slot, before the next forward reads it."""
        ...


class Admitter:
    """Admits steps; ``steps_waited_for_read`` counts those that had to wait for a copy."""

    def __init__(
        self,
        groups: JointGroups,
        tables: PoolTables,
        fetches: FetchTracker,
        weights: Weights,
        recorder: Recorder,
        stage: int = 0,
    ) -> None:
        self._stage = stage
        self._groups = groups
        self._rank = groups.tp.rank
        self._tables = tables
        self._fetches = fetches
        self._weights = weights
        self._recorder = recorder
        self._fresh: list[int] = []
        """Requests that this admit gave a slot."""
        self.steps_waited_for_read = 0

    def admit(self, step: StepBatch) -> AdmitOutcome:
        """Assign a slot to every row of the step.

        Collective when some adapter is in no slot; one set check when all rows have theirs.

        Raises:
            LockstepError: the ranks are in different admits, or miss different adapters.
        """
        self._fresh = []
        self._tables.slots.tick()
        if self._tables.assigned.issuperset([row.rid for row in step.rows]):
            return AdmitOutcome()
        return self._assign_all(step)

    def rollback(self) -> None:
        """Take the slots that the last admit gave; an adapter it installed stays resident."""
        with self._tables.lock:
            for rid in self._fresh:
                self._tables.slots.release(rid)
                self._tables.assigned.discard(rid)
        self._fresh = []

    def settle(self) -> None:
        """The step ran: there is nothing to roll back."""
        self._fresh = []

    def _assign_all(self, step: StepBatch) -> AdmitOutcome:
        failed: dict[int, str] = {}
        waiting: Waiting = {}
        with self._tables.lock:
            self._assign_residents(step, failed, waiting)
            victims = self._tables.slots.victims()
            reads = {key: self._fetches.read_of(key) for key in waiting}
            misses = [_miss(key, read) for key, read in reads.items()]
        if not misses:
            return AdmitOutcome(failed=failed)
        results = self._agree(step, misses)
        failed |= self._fail(results, waiting)
        alive = {key: reads[key] for key, result in results.items() if result.survives}
        if len(alive) > len(victims):
            cause = (
                f"step {step.tp_seq} needs {len(alive)} slots for adapters that have none, and "
                f"{len(victims)} are free to take"
            )
            return AdmitOutcome(failed=failed, refused=cause)
        places = dict(zip(alive, victims, strict=False))
        if any(results[key].state is CopyState.WAITING for key in alive):
            failed |= self._wait_and_agree(step, alive, waiting, places)
        self._install(places, alive, waiting)
        return AdmitOutcome(failed=failed)

    def _assign_residents(self, step: StepBatch, failed: dict[int, str], waiting: Waiting) -> None:
        """Assign resident adapters' slots to their rows before any victim is picked.

        The other rows wait. Under the lock.
        """
        tables = self._tables
        for row in step.rows:
            if row.rid in tables.assigned:
                continue
            if row.rid in tables.dead:
                failed[row.rid] = tables.dead[row.rid]
                continue
            key = tables.cpu_cache.key_of(row.rid)
            assert key is not None, f"step {step.tp_seq} names request {row.rid}, which is not open"
            slot = tables.slots.resident(key)
            if slot is None:
                waiting.setdefault(key, []).append(row.rid)
            else:
                tables.adapters[key].hits += 1
                self._assign(row.rid, slot)

    def _assign(self, rid: int, slot: int) -> None:
        self._tables.slots.take(rid, slot)
        self._tables.assigned.add(rid)
        self._fresh.append(rid)

    def _agree(self, step: StepBatch, misses: list[Miss]) -> dict[AdapterKey, VoteResult]:
        """One agreement on all misses. Collective on the block's CPU twin."""
        votes = vote.cast(
            step.tp_seq, misses, self._tables.slots.num_slots, self._rank, self._stage
        )
        agreed = self._groups.agree(votes)
        self._recorder.put(Agreed(tp_seq=step.tp_seq, values=tuple(agreed)))
        results = vote.count(step.tp_seq, misses, agreed, self._rank)
        return {miss.key: result for miss, result in zip(misses, results, strict=True)}

    def _fail(self, results: dict[AdapterKey, VoteResult], waiting: Waiting) -> dict[int, str]:
        """Fail the rows of adapters that failed anywhere, on every rank; they get no slot."""
        failed: dict[int, str] = {}
        with self._tables.lock:
            for key, result in results.items():
                if result.survives:
                    continue
                self._tables.agreed_failures += 1
                cause = self._cause(key, result)
                for rid in waiting[key]:
                    failed[rid] = self._tables.dead[rid] = cause
        return failed

    def _cause(self, key: AdapterKey, result: VoteResult) -> str:
        """The reason why a miss did not survive, for the client.

        It names the first rank that failed, and its cause where this rank knows it. Under the lock.
        """
        if result.failed_rank is None:
            return (
                f"adapter {key.name!r} has other weights on another rank: make its files equal and "
                "load it again"
            )
        known = self._tables.copies.failure(key)
        read = self._fetches.read_of(key)
        if result.failed_rank == self._rank and read is not None and read.cause is not None:
            known = self._rank, read.cause
        cause = "" if known is None or known[0] != result.failed_rank else f": {known[1]}"
        return f"adapter {key.name!r} could not be read on rank {result.failed_rank}{cause}"

    def _wait_and_agree(
        self,
        step: StepBatch,
        alive: dict[AdapterKey, Read | None],
        waiting: Waiting,
        places: dict[AdapterKey, int],
    ) -> dict[int, str]:
        """Wait for this rank's own copies, as some rank still reads, and agree once more.

        Entered by every rank, exactly when the first agreement said so. One that fails now leaves
        its victim resident; no survivor's slot changes.
        """
        self.steps_waited_for_read += 1
        for key, read in alive.items():
            while read is not None and not read.done.wait(WARN_AFTER_S):
                logger.warning("step %d waits for the read of adapter %s", step.tp_seq, key)
        with self._tables.lock:
            misses = [_miss(key, read) for key, read in alive.items()]
        results = self._agree(step, misses)
        for key, result in results.items():
            if result.state is CopyState.WAITING:
                raise LockstepError(
                    f"rank {self._rank} step {step.tp_seq}: adapter {key} is still being read, "
                    "though "
                    "every rank waited for it"
                )
            if not result.survives:
                del places[key]
        return self._fail(results, waiting)

    def _install(
        self,
        places: dict[AdapterKey, int],
        alive: dict[AdapterKey, Read | None],
        waiting: Waiting,
    ) -> None:
        """Put survivors' weights into their victims' slots; then assign these to their rows."""
        copies: list[tuple[int, LoadedAdapter]] = []
        with self._tables.lock:
            for key, slot in places.items():
                read = alive[key]
                assert read is not None and read.adapter is not None
                copies.append((slot, read.adapter))
                self._fetches.agree(key, read.adapter.digest)
                self._tables.adapters[key].installs += 1
                evicted = self._tables.slots.install(slot, key)
                if evicted is not None:
                    self._tables.growth += 1
                    known = self._tables.adapters.get(evicted)
                    if known is not None:
                        known.evictions += 1
        self._weights.install(copies)
        with self._tables.lock:
            for key, slot in places.items():
                for rid in waiting[key]:
                    self._assign(rid, slot)


def _miss(key: AdapterKey, read: Read | None) -> Miss:
    """The state of one missing adapter's copy on this rank. Under the lock."""
    if read is None:
        return Miss(key, CopyState.FAILED, None)
    if not read.settled:
        return Miss(key, CopyState.WAITING, None)
    if read.adapter is None:
        return Miss(key, CopyState.FAILED, None)
    return Miss(key, CopyState.IN, read.adapter.digest)
