"""A model's adapter pools, one a stage, in the order the nodes run: as one, for whoever needs all.

A request whose adapter changes several nodes needs a slot in each: the leader reserves all of them
at once, or none; an admit takes them in graph order, and gives all back where one cannot. Whatever
a rank does here is one call a pool, in graph order, so nothing is decided that pools do not decide.
Threads are those of ``pool``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from mstar_tp.engine.history_hash import HistoryHash
from mstar_tp.engine.resources.base import AdmitOutcome, AskFailed, StepBatch
from mstar_tp.engine.resources.lora.pool import LoraAdapterPool
from mstar_tp.engine.resources.lora.registry.validation import Judgements, Validated
from mstar_tp.engine.resources.lora.vote import CopyState
from mstar_tp.engine.table_rows import Row, in_stage
from mstar_tp.lora.spec import ZERO_SLOT, LoraReqConfig
from mstar_tp.lora.stage_specs import joint_digest, part_digest
from mstar_tp.wire.adapter_limits import NO_LIMITS, AdapterLimits
from mstar_tp.wire.reports import CopyIn
from mstar_tp.wire.schedule import DropCopy
from mstar_tp.wire.states import AdapterState, FailedRead, LoraStats, StageState
from mstar_tp.wire.values import AdapterKey

if TYPE_CHECKING:  # what needs torch is imported where it is used: a replay has no device
    from mstar_tp.lora.device.tiles import TileBuffer

Done = Callable[[str | None, int, tuple[str, ...]], None]


class LoraPools:
    """``pools`` in graph order: the last is the decoder's.

    The first's tables say which names are served: every pool's are the same there.
    """

    def __init__(self, pools: Sequence[LoraAdapterPool]) -> None:
        assert [pool.stage.number for pool in pools] == list(range(len(pools)))
        self.pools = tuple(pools)

    # ------------------------------------------------------- start, loads and unloads (main)

    def preload(
        self,
        configured: Sequence[tuple[AdapterKey, str]],
        progress: Callable[[int, int], None] = lambda done, total: None,
        limits: Mapping[AdapterKey, AdapterLimits] | None = None,
    ) -> dict[str, int]:
        """Serve the configured adapters and begin the reads of the first: by adapter (and node), a
        hash of what its header says to decide by.

        Raises:
            AdapterError: naming every configured adapter that cannot be served, one a line.
        """
        found: dict[str, int] = {}
        for pool in self.pools:
            checked = pool.preload(configured, progress, limits)
            found |= {_of_stage(name, pool): decides for name, decides in checked.items()}
        return found

    def load_adapter_async(self, key: AdapterKey, path: str, done: Done) -> None:
        """Check a file's header on other threads; the last calls ``done(cause, rank, changes)``."""
        answers = _Answers(len(self.pools), done)
        for pool in self.pools:
            pool.load_adapter_async(key, path, answers.of(pool))

    def commit_load(
        self,
        key: AdapterKey,
        path: str,
        digest: str | None = None,
        replaces: AdapterKey | None = None,
        limits: AdapterLimits = NO_LIMITS,
    ) -> str | None:
        """From here on requests may name ``key``, also where ``replaces`` is served; or why it is
        not served after all. With ``digest``, weights that hash otherwise are never served.

        Raises:
            LockstepError: this rank never accepted the load.
        """
        why_not = (pool.leaves_no_room(key, limits) for pool in self.pools)
        if (cause := next((why for why in why_not if why is not None), None)) is not None:
            self.abort_load(key)
            return cause
        causes = [
            pool.commit_load(
                key,
                path,
                None if digest is None else part_digest(digest, pool.stage.name),
                replaces,
                limits,
            )
            for pool in self.pools
        ]
        return causes[0]

    def validate_async(self, name: str, path: str, done: Validated) -> None:
        """Validate a file whole on other threads; the last calls ``done``. Nothing is kept."""
        joined = Judgements([pool.stage.name for pool in self.pools], done)
        for pool in self.pools:
            pool.validate_async(name, path, joined.of(pool.stage.number))

    def limits_of(self, key: AdapterKey) -> AdapterLimits:
        """Return what a served or retiring adapter may take.

        Main.
        """
        return self.pools[0].limits_of(key)

    def abort_load(self, key: AdapterKey) -> None:
        """Some rank refused the load of ``key``."""
        for pool in self.pools:
            pool.abort_load(key)

    def unload_adapter(self, key: AdapterKey) -> bool:
        """From here on requests may not name ``key``; whether it was served."""
        served = [pool.unload_adapter(key) for pool in self.pools]
        return served[0]

    @property
    def has_retired(self) -> bool:
        """Return whether ``forget_retired`` has something to forget."""
        return any(pool.has_retired for pool in self.pools)

    def forget_retired(self) -> None:
        """Forget the slots of what was unloaded. At the fence."""
        for pool in self.pools:
            pool.forget_retired()

    # ------------------------------------------------------- requests (main)

    def ingest_request(self, rid: int, config: LoraReqConfig) -> str | None:
        """Open a request; why it can never run, or None. Idempotent."""
        causes = [pool.ingest_request(rid, config) for pool in self.pools]
        return causes[0]

    def remove_request(self, rid: int) -> None:
        """Close a request. At the fence (R3). Unknown: a no-op."""
        for pool in self.pools:
            pool.remove_request(rid)

    def early_read(self, config: LoraReqConfig) -> None:
        """A body that is not ordered yet asks for this: maybe start its reads (R2)."""
        key = config.adapter
        for pool in self.pools:
            if key is not None and pool.has_part(key) and pool.stage.runs(config.has_images):
                pool.early_read(key)

    def drop_copy(self, entry: DropCopy) -> None:
        """Some rank could not read a copy: drop it here too (R7). At the fence."""
        self.pools[entry.stage].drop_copy(entry.key, entry.fetch_no, entry.rank, entry.cause)

    def fingerprint(self, key: AdapterKey) -> str | None:
        """What decides how an adapter changes keys and values; None before every rank has read it.
        Equal on every rank once a row on it has its slot.
        """
        return self.decoder.fingerprint(key)

    def slots_of(self, rids: Collection[int]) -> dict[int, int]:
        """The slot each of these requests holds, the decoder's first; ZERO_SLOT for base rows."""
        slots = dict.fromkeys(rids, ZERO_SLOT)
        for pool in self.pools:
            if pool.any_held:
                slots |= {rid: slot for rid in rids if (slot := pool.slot_of(rid))}
        return slots

    # ------------------------------------------------------- the leader's view (main, leader)

    def copy_in(self, report: CopyIn) -> str | None:
        """Note one rank's report; the adapter's digest, as far as it is known, when it made a copy
        complete, else None.
        """
        digest = self.pools[report.stage].copy_in(report)
        if digest is None or len(self.pools) == 1:
            return digest
        parts = ((pool.stage.name, pool.digest_of(report.key)) for pool in self.pools)
        return joint_digest({stage: part for stage, part in parts if part is not None})

    def needs_copies(self, rid: int) -> bool:
        """Return whether the request runs on an adapter in some pool."""
        return any(pool.needs_copy(rid) for pool in self.pools)

    def request_state(self, rid: int) -> CopyState | AskFailed:
        """Whether the request may join the admission queue: IN, WAITING, or why it never will."""
        states = [pool.request_state(rid) for pool in self.pools]
        failed = next((state for state in states if isinstance(state, AskFailed)), None)
        if failed is not None:
            return failed
        return CopyState.WAITING if CopyState.WAITING in states else CopyState.IN

    def settled(self, waiting: Container[int]) -> list[tuple[int, CopyState | AskFailed]]:
        """Those of the ``waiting`` requests that need wait no more: IN, or why they never run."""
        if len(self.pools) == 1:
            return self.pools[0].settled(waiting)
        rids = dict.fromkeys(rid for pool in self.pools for rid, _ in pool.settled(waiting))
        states = ((rid, self.request_state(rid)) for rid in rids)
        return [(rid, state) for rid, state in states if state is not CopyState.WAITING]

    def failed_copies(self) -> list[tuple[LoraAdapterPool, AdapterKey, int, int, str]]:
        """(pool, adapter, fetch number, rank, cause) of failed copies in no slot: each is for one
        ordered DropCopy, and returned once.
        """
        return [(pool, *failed) for pool in self.pools for failed in pool.failed_copies()]

    # ------------------------------------------------------- steps (step thread)

    def admit(self, step: StepBatch) -> AdmitOutcome:
        """Give every row its adapter's slot in each pool, in graph order; a row that failed in one
        asks for none in the next. Refused, all that was taken is given back. Collective.
        """
        failed: dict[int, str] = {}
        rest = step
        for pool in self.pools:
            outcome = pool.admit(rest)
            if outcome.refused is not None:
                for reached in self.pools[: pool.stage.number + 1]:
                    reached.rollback_admit(step)
                return AdmitOutcome(failed=failed, refused=outcome.refused)
            if outcome.failed:
                failed |= outcome.failed
                rows = tuple(row for row in rest.rows if row.rid not in failed)
                rest = replace(rest, rows=rows)
        return AdmitOutcome(failed=failed)

    def rollback_admit(self, step: StepBatch) -> None:
        """Give back the slots this admit took; adapters it installed stay resident, unheld."""
        for pool in self.pools:
            pool.rollback_admit(step)

    def plan(self, step: StepBatch, tables: TileBuffer | None = None) -> None:
        """Lay the step out for every stage's deltas.

        Current until it ends. ``tables``: where a graph of the decoder reads its.
        """
        for pool in self.pools[:-1]:
            pool.lay_out(step)
        self.decoder.lay_out(step, tables)

    @property
    def decoder(self) -> LoraAdapterPool:
        """The node that graphs are captured of."""
        return self.pools[-1]

    def commit(self, step: StepBatch) -> None:
        """The step ran: nothing of its plans is current any more."""
        for pool in self.pools:
            pool.commit(step)

    @contextmanager
    def base_only(self) -> Iterator[None]:
        """A forward outside any step on this thread: deltas add nothing; what stood before comes
        back.
        """
        with ExitStack() as stack:
            for pool in self.pools:
                stack.enter_context(pool.base_only())
            yield

    # ------------------------------------------------------- checks and reports

    def slots_hash(self) -> int:
        """The slot tables' running hash; between steps, as of the last settled admit."""
        return _joint([pool.slots_hash() for pool in self.pools])

    def cpu_cache_hash(self) -> int:
        """The tiers' running hash. Main."""
        return _joint([pool.cpu_cache_hash() for pool in self.pools])

    def served_hash(self) -> int:
        """The running hash of which names are served. Main."""
        return _joint([pool.served_hash() for pool in self.pools])

    def table_rows(self, table: str) -> tuple[Row, ...]:
        """The rows of ``slots``, ``cpu_cache`` or ``served``, of every stage. Between two steps."""
        return tuple(
            in_stage(row, pool.stage.name) for pool in self.pools for row in pool.table_rows(table)
        )

    def failed_reads(self) -> tuple[FailedRead, ...]:
        """Adapters whose last read failed on some rank; nothing but on the leader."""
        return tuple(
            msgspec.structs.replace(failed, stage=pool.stage.name)
            for pool in self.pools
            for failed in pool.failed_reads()
        )

    @property
    def steps_waited_for_read(self) -> int:
        """Steps whose admit had to wait for a copy; 0 while R7 holds."""
        return sum(pool.steps_waited_for_read for pool in self.pools)

    def stage_states(self) -> tuple[StageState, ...]:
        """Each pool's slots, with holders, and its CPU cache. Between steps."""
        states = []
        for pool in self.pools:
            mine, host = pool.debug_state(), pool.host_state()
            states.append(
                StageState(
                    stage=pool.stage.name, slots=mine.slots, cpu_cache=mine.cpu_cache, host=host
                )
            )
        return tuple(states)

    def served(self) -> tuple[AdapterKey, ...]:
        """Return what new requests may name, in the order they came.

        Between steps.
        """
        return self.pools[0].debug_state().served

    def locate(self, keys: Sequence[AdapterKey]) -> tuple[AdapterState, ...]:
        """Return where each of ``keys`` is on this rank, in every stage.

        Main; may run beside a step.
        """
        return tuple(state for pool in self.pools for state in pool.adapter_states(keys))

    def adapter_states(self) -> tuple[AdapterState, ...]:
        """Return where those are that are in memory or named by requests.

        Between steps.
        """
        return tuple(state for pool in self.pools for state in pool.adapter_states())

    def stats(self) -> tuple[LoraStats, ...]:
        """Each pool in numbers, now. Main; may run beside a step."""
        return tuple(
            msgspec.structs.replace(pool.stats(), stage=pool.stage.name) for pool in self.pools
        )

    def post_warmup_validate(self) -> None:
        """After warm-up no slot is held and no request is known.

        Raises:
            LockstepError: naming what is left.
        """
        for pool in self.pools:
            pool.post_warmup_validate()

    def close(self) -> None:
        """Stop the readers. Reads under way end by themselves and land nowhere."""
        for pool in self.pools:
            pool.close()


class _Answers:
    """One load's verdicts, one a pool, joined. Any thread; the lock guards what came in."""

    def __init__(self, wanted: int, done: Done) -> None:
        self._missing = wanted
        self._done = done
        self._lock = threading.Lock()
        self._causes: list[str] = []
        self._ranks = [0]
        self._changes: dict[int, tuple[str, ...]] = {}

    def of(self, pool: LoraAdapterPool) -> Done:
        """What ``pool`` calls with its verdict."""

        def take(cause: str | None, rank: int, changes: tuple[str, ...]) -> None:
            with self._lock:
                if cause is not None:
                    self._causes.append(cause)
                self._ranks.append(rank)
                named = tuple(_of_stage(change, pool) for change in changes)
                self._changes[pool.stage.number] = named
                self._missing -= 1
                if self._missing:
                    return
            if self._causes:
                self._done(self._causes[0], 0, ())
            else:
                in_order = (self._changes[number] for number in sorted(self._changes))
                self._done(None, max(self._ranks), tuple(c for part in in_order for c in part))

        return take


def _joint(hashes: Sequence[int]) -> int:
    """One hash of all pools' tables; of a lone one its own."""
    if len(hashes) == 1:
        return hashes[0]
    history = HistoryHash()
    history.add(*hashes)
    return history.value()


def _of_stage(text: str, pool: LoraAdapterPool) -> str:
    return f"{pool.stage.name}: {text}" if pool.stage.name else text
