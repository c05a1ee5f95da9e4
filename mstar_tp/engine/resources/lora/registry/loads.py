"""Which adapters are served, and how one comes and goes: configured, loaded, unloaded, forgotten.

Main thread, but for a file's check, which runs on a checking thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mstar_tp.common.errors import AdapterError
from mstar_tp.engine.resources.lora.cpu_cache.fetches import FetchTracker
from mstar_tp.engine.resources.lora.cpu_cache.reads import describe
from mstar_tp.engine.resources.lora.cpu_cache.store import LoraAdapterStore
from mstar_tp.engine.resources.lora.registry.registry import AdapterRecord
from mstar_tp.engine.resources.lora.registry.validation import Judgement, Validated, validator
from mstar_tp.engine.resources.lora.tables import PoolTables
from mstar_tp.lora.format.batch_checks import check_all
from mstar_tp.recording import Recorder
from mstar_tp.recording.entries import Charged, Crowded, Untouched
from mstar_tp.wire.adapter_limits import NO_LIMITS, AdapterLimits
from mstar_tp.wire.reports import CopyIn
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey


class AdapterLoads:
    """Methods marked *locked* are called under the tables' lock; the others take it."""

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
        progress: Callable[[int, int], None],
        limits: Mapping[AdapterKey, AdapterLimits],
    ) -> dict[str, int]:
        """Serve the configured adapters and hold those that ``limits`` pins and the first of the
        others, in config order. Does not wait
        for their reads. Of each, a hash of what its header says to decide by, for the ranks to
        compare. ``progress(done, total)`` is told of each check.

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
                mine = limits.get(key, NO_LIMITS)
                if (why := self._why_no_room(key, record, mine)) is not None:
                    raise AdapterError(why)
                cause = self._tables.registry.commit(key, path, limits=mine)
                assert cause is None, cause
                reports += self._register(key, record)
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
        """Check a file's header on a checking thread, then call ``done(cause, rank, changes)``
        once, there or, past the deadline, on another thread. Keeps no copy.
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
                done(None, record.rank, record.changes)

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

    def validator(self, name: str, path: str, done: Validated) -> None:
        """Validate the adapter in ``path`` whole on a checking thread, then call ``done``, there
        or, past the deadline, on another thread too. Keeps nothing.
        """
        key = AdapterKey(name, FIRST_GENERATION + 1)

        def work() -> None:
            try:
                with self._store.within(key):
                    found = validator(self._store, name, path)
            except Exception as error:  # it is the file's, whatever it is
                found = Judgement(problems=(describe(error, key),))
            done(found)

        self._fetches.readers.call(key, work, lambda cause: done(Judgement(problems=(cause,))))

    def commit(
        self,
        key: AdapterKey,
        path: str,
        digest: str | None = None,
        replaces: AdapterKey | None = None,
        limits: AdapterLimits = NO_LIMITS,
    ) -> str | None:
        """From this place in the order requests may name ``key``, also where ``replaces`` is
        served; or why it is not served after all. With ``digest``, weights that hash otherwise are
        never served as ``key``.

        Raises:
            LockstepError: this rank never accepted the load.
        """
        reports: list[CopyIn] = []
        with self._tables.lock:
            cause = self._tables.registry.commit(key, path, replaces, limits)
            record = self._tables.registry.record(key)
            if cause is None and record is not None:
                reports = self._register(key, record)
                if digest is not None:
                    self._fetches.set_agreed_digest(key, digest)
                    self._tables.copies.set_agreed_digest(key, digest)
        self._fetches.send(reports)
        return cause

    def leaves_no_room(self, key: AdapterKey, limits: AdapterLimits) -> str | None:
        """Return why an accepted load of ``key`` cannot be committed with these limits, or None."""
        with self._tables.lock:
            record = self._tables.registry.to_be_served(key)
            cause = None if record is None else self._why_no_room(key, record, limits)
        if cause is not None:
            self._recorder.put(Crowded(stage=self._stage, key=key))
        return cause

    def _why_no_room(
        self, key: AdapterKey, record: AdapterRecord, limits: AdapterLimits
    ) -> str | None:
        """Pinned adapters must leave a slot, and room in the CPU cache, for any other.

        From what the order alone decides, so equal on every rank. Locked.
        """
        registry, store = self._tables.registry, self._store
        pinned = [k for k in self.pinned() if k.name != key.name]
        others = [k for k in registry.known() if store.has_part(k) and k not in pinned]
        return store.crowded(key, record, limits.pinned, pinned, others)

    def pinned(self) -> list[AdapterKey]:
        """Served adapters that are pinned and change this node: one without a part here takes no
        slot. Locked.
        """
        return [k for k in self._tables.registry.pinned() if self._store.has_part(k)]

    def abort(self, key: AdapterKey) -> None:
        """Some rank refused the load of ``key``: forget it, whether or not its check is over."""
        with self._tables.lock:
            self._tables.registry.abort(key)

    def unload(self, key: AdapterKey) -> bool:
        """New requests may not name ``key``; it is forgotten once no live request does.

        Whether it was served.
        """
        reports: list[CopyIn] = []
        with self._tables.lock:
            served = self._tables.registry.retire(key)
            if served:
                if self._tables.registry.limits(key).pinned:
                    reports = self._fetches.apply(self._tables.cpu_cache.unpin(key))
                    self._to_unpin.append(key)
                    self._tables.growth += 1
                self.forget_if_unused(key)
        self._fetches.send(reports)
        return served

    def forget_if_unused(self, key: AdapterKey) -> None:
        """An unloaded adapter no live request names: its copy goes now, its slot's name before the
        next step. Locked.
        """
        tables = self._tables
        if not tables.registry.retiring(key) or tables.cpu_cache.named(key):
            return
        self._fetches.forget(key)
        tables.copies.forget(key)
        tables.registry.forget(key)
        tables.uses.pop(key, None)
        self._to_forget.append(key)

    @property
    def to_forget(self) -> Sequence[AdapterKey]:
        """Return what was unloaded, and may still be named by a slot."""
        return self._to_forget

    @property
    def any_to_forget(self) -> bool:
        return bool(self._to_forget or self._to_unpin)

    def forget(self) -> None:
        """Forget the slots of what was unloaded, and that they were pinned: between the same two
        admits on every rank.
        """
        with self._tables.lock:
            for key in self._to_unpin:
                self._tables.slots.unpin(key)
            self._to_unpin.clear()
            for key in self._to_forget:
                self._tables.slots.forget(key)
            self._to_forget.clear()

    def _register(self, key: AdapterKey, record: AdapterRecord) -> list[CopyIn]:
        """Hold it if it is pinned; reports of a copy that was in already. Locked."""
        self._store.register(key, record)
        if not self._store.has_part(key):
            self._recorder.put(Untouched(stage=self._stage, key=key))
        elif self._store.spec.cpu_unit == "bytes":
            cost = self._store.cost_of(key)
            self._recorder.put(Charged(stage=self._stage, key=key, cost=cost))
        if not self._store.has_part(key) or not self._tables.registry.limits(key).pinned:
            return []
        self._tables.slots.pin(key)
        self._tables.growth += 1
        return self._fetches.apply(self._tables.cpu_cache.pin(key))

    def _check_file(self, name: str, path: str) -> AdapterRecord:
        """Return what stays of a folder's check, its charge included.

        Blocks on the disk; any thread.
        """
        record = self._store.check(name, path)
        self._store.charge(record)
        return record
