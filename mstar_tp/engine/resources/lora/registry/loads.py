"""The life of a served adapter: configured or loaded, unloaded, forgotten.

Main thread, but for a file's check, which runs on a checking thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mstar_tp.common.errors import AdapterError
from mstar_tp.engine.resources.lora.cpu_cache.fetches import FetchTracker
from mstar_tp.engine.resources.lora.cpu_cache.reads import describe
from mstar_tp.engine.resources.lora.cpu_cache.store import LoraAdapterStore
from mstar_tp.engine.resources.lora.registry.registry import AdapterRecord
from mstar_tp.engine.resources.lora.registry.validation import (
    OnValidated,
    ValidationResult,
    validate_adapter,
)
from mstar_tp.engine.resources.lora.tables import PoolTables
from mstar_tp.lora.format.batch_checks import check_all
from mstar_tp.recording import Recorder
from mstar_tp.recording.entries import Charged, OverCapacity, Untouched
from mstar_tp.wire.adapter_limits import NO_LIMITS, AdapterLimits
from mstar_tp.wire.reports import CopyIn
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey


class AdapterLoads:
    """Serves and unloads the adapters of one stage.

    Methods marked *locked* are called under the tables' lock; the others take it.
    """

    def __init__(
        self,
        tables: PoolTables,
        fetches: FetchTracker,
        store: LoraAdapterStore,
        recorder: Recorder,
        stage: int = 0,
    ) -> None:
        self._stage = stage
        self._tables = tables
        self._fetches = fetches
        self._store = store
        self._recorder = recorder
        self._to_forget: list[AdapterKey] = []
        self._to_unpin: list[AdapterKey] = []
        """Pinned adapters that were unloaded."""

    def preload(
        self,
        configured: Sequence[tuple[AdapterKey, str]],
        progress: Callable[[int, int], None] = lambda done, total: None,
        limits: Mapping[AdapterKey, AdapterLimits] | None = None,
    ) -> dict[str, int]:
        """Serve the configured adapters and begin the reads of the pinned and the first others.

        They are taken in config order; nothing waits for their reads. Returns by adapter a hash of
        what its header says to decide by, for the ranks to compare. ``progress(done, total)`` is
        told of each check.

        Raises:
            AdapterError: naming every configured adapter that cannot be served, one a line.
        """
        records = check_all(
            [(key.name, path) for key, path in configured], self._check_file, progress
        )
        self._store.check_slots(records)
        with self._tables.lock:
            reports: list[CopyIn] = []
            for (key, path), record in zip(configured, records, strict=True):
                self._tables.registry.check(key)
                self._tables.registry.checked(key, record)
                mine = (limits or {}).get(key, NO_LIMITS)
                if (why := self._over_capacity(key, record, mine)) is not None:
                    raise AdapterError(why)
                cause = self._tables.registry.commit(key, path, limits=mine)
                assert cause is None, cause
                reports += self._register(key)
            for key, _ in configured:
                if not self._store.has_part(key) or key in self._store.cpu_cache:
                    continue
                changes = self._tables.cpu_cache.preload(key)
                if not changes.new:
                    break
                reports += self._fetches.apply(changes)
        self._fetches.send(reports)
        return {record.adapter: record.decides for record in records}

    def begin(
        self,
        key: AdapterKey,
        path: str,
        done: Callable[[str | None, int, tuple[str, ...]], None],
    ) -> None:
        """Check a file's header elsewhere, then call ``done(cause, rank, changes)`` once.

        It is called on the checking thread or, past the deadline, on another one. Keeps no copy.
        """
        answered = False

        def settle(record: AdapterRecord | None, cause: str | None) -> None:
            nonlocal answered
            with self._tables.lock:
                if answered:
                    return
                answered = True
                self._tables.registry.checked(key, record)
            if record is None:
                done(cause, 0, ())
            else:
                done(None, record.lora_rank, record.changes)

        def check() -> None:
            record, cause = None, None
            try:
                with self._store.within(key):
                    record = self._check_file(key.name, path)
            except Exception as error:  # whatever is wrong with the file refuses this load alone
                cause = describe(error, key)
            settle(record, cause)

        with self._tables.lock:
            self._tables.registry.check(key)
        self._fetches.readers.call(key, check, lambda cause: settle(None, cause))

    def validate_adapter(self, name: str, path: str, done: OnValidated) -> None:
        """Validate the adapter in ``path`` whole on a checking thread, which then calls ``done``.

        Past the deadline another thread calls it too. Keeps nothing.
        """
        key = AdapterKey(name, FIRST_GENERATION + 1)

        def work() -> None:
            try:
                with self._store.within(key):
                    found = validate_adapter(self._store, name, path)
            except Exception as error:  # it is the file's, whatever it is
                found = ValidationResult(problems=(describe(error, key),))
            done(found)

        self._fetches.readers.call(
            key, work, lambda cause: done(ValidationResult(problems=(cause,)))
        )

    def commit(
        self,
        key: AdapterKey,
        path: str,
        digest: str | None = None,
        replaces: AdapterKey | None = None,
        limits: AdapterLimits = NO_LIMITS,
    ) -> str | None:
        """Let requests name ``key`` from this place in the order on; or why it is not served.

        That is so where ``replaces`` is served, too. With ``digest``, weights that hash otherwise
        are never served as ``key``.

        Raises:
            LockstepError: this rank never accepted the load.
        """
        reports: list[CopyIn] = []
        with self._tables.lock:
            cause = self._tables.registry.commit(key, path, replaces, limits)
            if cause is None:
                reports = self._register(key)
                if digest is not None:
                    self._fetches.agree(key, digest)
                    self._tables.copies.agree(key, digest)
        self._fetches.send(reports)
        return cause

    def over_capacity(self, key: AdapterKey, limits: AdapterLimits) -> str | None:
        """The reason why an accepted load of ``key`` cannot be committed so, or None."""
        with self._tables.lock:
            record = self._tables.registry.to_be_served(key)
            cause = None if record is None else self._over_capacity(key, record, limits)
        if cause is not None:
            self._recorder.put(OverCapacity(stage=self._stage, key=key))
        return cause

    def _over_capacity(
        self, key: AdapterKey, record: AdapterRecord, limits: AdapterLimits
    ) -> str | None:
        """Pinned adapters must leave a slot, and room in the CPU cache, for any other. Locked.

        It follows from what the order alone decides, so it is equal on every rank.
        """
        pinned = [k for k in self.pinned() if k.name != key.name]
        others = [a.key for a in self._tables.adapters if a.has_part and a.key not in pinned]
        return self._store.over_capacity(key, record, limits.pinned, pinned, others)

    def pinned(self) -> list[AdapterKey]:
        """The served adapters that are pinned and take a slot of this stage. Locked."""
        return [k for k in self._tables.registry.pinned() if self._store.has_part(k)]

    def abort(self, key: AdapterKey) -> None:
        """Some rank refused the load of ``key``: forget it, whether or not its check is over."""
        with self._tables.lock:
            self._tables.registry.abort(key)

    def unload(self, key: AdapterKey) -> bool:
        """Let no new request name ``key``; return whether it was served.

        It is forgotten once no live request names it.
        """
        reports: list[CopyIn] = []
        with self._tables.lock:
            served = self._tables.registry.retire(key)
            if served:
                if self._tables.adapters[key].limits.pinned:
                    reports = self._fetches.apply(self._tables.cpu_cache.unpin(key))
                    self._to_unpin.append(key)
                    self._tables.growth += 1
                self.forget_if_unused(key)
        self._fetches.send(reports)
        return served

    def forget_if_unused(self, key: AdapterKey) -> None:
        """Forget an unloaded adapter that no live request names. Locked.

        Its copy and record go now, its slot's name before the next step.
        """
        tables = self._tables
        if not tables.registry.retiring(key) or tables.cpu_cache.named(key):
            return
        self._fetches.forget(key)
        tables.copies.forget(key)
        tables.registry.forget(key)
        self._to_forget.append(key)

    def limits(self, key: AdapterKey) -> AdapterLimits:
        """The limits of a served or retiring adapter; none for another. Main."""
        adapter = self._tables.adapters.get(key)
        return NO_LIMITS if adapter is None else adapter.limits

    @property
    def to_forget(self) -> Sequence[AdapterKey]:
        """The adapters that were unloaded, and may still be named by a slot."""
        return self._to_forget

    @property
    def any_to_forget(self) -> bool:
        """True when ``forget`` has something to forget."""
        return bool(self._to_forget or self._to_unpin)

    def forget(self) -> None:
        """Forget the slots of what was unloaded, and that they were pinned.

        It happens between the same two admits on every rank.
        """
        with self._tables.lock:
            for key in self._to_unpin:
                self._tables.slots.unpin(key)
            self._to_unpin.clear()
            for key in self._to_forget:
                self._tables.slots.forget(key)
            self._to_forget.clear()

    def _register(self, key: AdapterKey) -> list[CopyIn]:
        """Fetch it if it is pinned; the reports of a copy that was in already. Locked."""
        adapter = self._tables.adapters[key]
        self._store.register(adapter)
        if not adapter.has_part:
            self._recorder.put(Untouched(stage=self._stage, key=key))
        elif self._store.spec.cpu_unit == "bytes":
            self._recorder.put(Charged(stage=self._stage, key=key, cost=adapter.cost))
        if not adapter.has_part or not adapter.limits.pinned:
            return []
        self._tables.slots.pin(key)
        self._tables.growth += 1
        return self._fetches.apply(self._tables.cpu_cache.pin(key))

    def _check_file(self, name: str, path: str) -> AdapterRecord:
        """Check a folder, its charge included. Blocks on the disk; any thread."""
        record = self._store.check(name, path)
        self._store.charge(record)
        return record
