"""Keeps the copies of the CPU cache as its membership says: reads begin, land and are dropped.

Membership changes come from the main thread; copies land on reader threads, wholly, under the
tables' lock. Nothing here decides what is held.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence

from mstar_tp.common.errors import AdapterError
from mstar_tp.engine.resources.lora.adapters import Adapter
from mstar_tp.engine.resources.lora.cpu_cache.membership import Changes
from mstar_tp.engine.resources.lora.cpu_cache.reads import Land, Read, Readers
from mstar_tp.engine.resources.lora.cpu_cache.store import LoraAdapterStore
from mstar_tp.engine.resources.lora.registry.registry import AdapterRecord
from mstar_tp.engine.resources.lora.tables import PoolTables
from mstar_tp.lora.reading.loaded_adapter import LoadedAdapter
from mstar_tp.wire.reports import CopyIn
from mstar_tp.wire.values import AdapterKey

EARLY_READS = 2
"""Reads that may run for requests whose place in the order is not known yet (R2)."""


class FetchTracker:
    """Fetches copies for one stage; a fetch is one ordered bringing of an adapter into the cache.

    Methods marked *locked* are called under the tables' lock; ``send`` never is.
    """

    def __init__(
        self,
        rank: int,
        tables: PoolTables,
        store: LoraAdapterStore,
        report: Callable[[CopyIn], None],
        make_readers: Callable[[Land], Readers],
        stage: int = 0,
    ) -> None:
        self._rank = rank
        self._stage = stage
        self._tables = tables
        self._store = store
        self._report = report
        self._early: dict[AdapterKey, Read] = {}
        """Reads begun for fetches that may come, oldest first."""
        self.readers = make_readers(self._land)

    def read_of(self, key: AdapterKey) -> Read | None:
        """The read of a held adapter. Locked."""
        adapter = self._tables.adapters.get(key)
        return None if adapter is None else adapter.read

    def agree(self, key: AdapterKey, digest: str) -> None:
        """Every rank agreed on this digest: a later read with another is refused. Locked."""
        adapter = self._tables.adapters[key]
        if adapter.agreed_digest is None:
            adapter.agreed_digest = digest

    def apply(self, changes: Changes) -> list[CopyIn]:
        """Make the copies follow the membership; return reports of those already in. Locked."""
        for key in changes.dropped:
            adapter = self._tables.adapters[key]
            self._give_up(adapter.read)
            adapter.read = None
            self._store.discard(adapter)
            self._tables.copies.close(key)
        # A fetch adopts its early read before those that leave no room for it go.
        reports = [r for r in (self._begin(*new) for new in changes.new) if r is not None]
        while self._early and self._early_cost() > self._store.cpu_cache.free:
            self._give_up(self._early.pop(next(iter(self._early))))
        return reports

    def read_early(self, key: AdapterKey) -> None:
        """Maybe begin a read for a fetch that may come; its cost counts against the capacity (R2).

        A message that is not ordered yet names ``key``. Main thread.
        """
        with self._tables.lock:
            adapter = self._tables.adapters.get(key)
            if adapter is None or adapter.read is not None or key in self._early:
                return
            if len(self._early) == EARLY_READS:
                return
            if self._early_cost() + adapter.cost > self._store.cpu_cache.free:
                return
            read = self._early[key] = Read(key, None)
            self._start(read, adapter)

    def forget(self, key: AdapterKey) -> None:
        """An unloaded adapter that nobody names: its copy, reads and digest go. Locked."""
        self.apply(self._tables.cpu_cache.forget(key))
        self._give_up(self._early.pop(key, None))
        self._store.forget(self._tables.adapters[key])

    def send(self, reports: Sequence[CopyIn]) -> None:
        """Hand reports over, in order. Not locked: the taker may lock what it likes."""
        for report in reports:
            self._report(report)

    def close(self) -> None:
        """Stop the readers and free whoever waits for a read."""
        self.readers.close()
        with self._tables.lock:
            reads = [a.read for a in self._tables.adapters if a.read is not None]
            reads += self._early.values()
        for read in reads:
            self._land(read, None, f"rank {self._rank} is shutting down")

    def _begin(self, key: AdapterKey, fetch_no: int) -> CopyIn | None:
        """Begin a new fetch: with an early read's copy, or a read of its own. Locked."""
        self._tables.copies.open(key, fetch_no)
        adapter = self._tables.adapters[key]
        read = self._early.pop(key, None)
        if read is not None and read.cause is None:
            read.fetch_no = fetch_no
            adapter.read = read
            return self._settle(read) if read.settled else None
        read = adapter.read = Read(key, fetch_no)
        self._start(read, adapter)
        return None

    def _early_cost(self) -> int:
        return sum(self._store.cpu_cache.cost_of(key) for key in self._early)

    def _give_up(self, read: Read | None) -> None:
        """Nobody wants ``read`` any more: it need not begin, and its copy may go. Locked."""
        if read is not None:
            read.dropped = True
            self._store.budget.nudge()

    def _start(self, read: Read, adapter: Adapter) -> None:
        # The reader thread must look at no record: it runs without the lock.
        record, digest, cost = adapter.registration, adapter.agreed_digest, adapter.cost
        self.readers.start(read, lambda: self._run(read, record, digest, cost))

    def _run(
        self, read: Read, record: AdapterRecord, digest: str | None, cost: int
    ) -> LoadedAdapter:
        """Read a copy once the memory budget has room, which goes with the copy. Reader thread.

        Storage that hangs before the headers are read takes no room.
        """
        budget, num_bytes = self._store.budget, self._store.shard_bytes(record)
        taken = False

        def unwanted() -> bool:
            return read.dropped or read.settled

        def take() -> None:
            nonlocal taken
            taken = budget.take(cost, num_bytes, unwanted)
            if not taken:
                raise AdapterError(f"adapter {read.key.name!r} is not wanted any more")

        try:
            with self._store.within(read.key):
                adapter = self._store.read(read.key, record, digest, take)
        except BaseException as error:
            _release_frames(error)
            if taken:
                budget.give(cost, num_bytes)
            raise
        budget.give_with(adapter, cost, num_bytes)
        return adapter

    def _land(self, read: Read, adapter: LoadedAdapter | None, cause: str | None) -> None:
        """A read has ended: its copy, its report and its waiters, all here. Any thread."""
        report = None
        with self._tables.lock:
            if not read.settled:
                read.settled, read.adapter, read.cause = True, adapter, cause
                report = self._settle(read)
                if adapter is None and self._early.get(read.key) is read:
                    del self._early[read.key]  # discarded: its fetch reads anew
        read.done.set()
        self._store.budget.nudge()
        if report is not None:
            self._report(report)

    def _settle(self, read: Read) -> CopyIn | None:
        """Keep a settled read's copy if its fetch still stands, and report it. Locked."""
        if read.fetch_no is None or self._store.cpu_cache.number(read.key) != read.fetch_no:
            return None
        if read.adapter is not None:
            self._store.put(read.adapter, read.fetch_no)
        return CopyIn(
            rank=self._rank,
            key=read.key,
            fetch_no=read.fetch_no,
            digest=read.adapter.digest if read.adapter is not None else None,
            cause=read.cause,
            stage=self._stage,
        )


def _release_frames(error: BaseException | None) -> None:
    """Let go of what a failed read was building: its frames hold the shard while they live."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
