"""Pools of several ranks in one process, with reads that land when a test says so."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from mstar_tp.common.errors import AdapterError
from mstar_tp.engine.resources.base import AdmitOutcome, StepBatch, StepRow
from mstar_tp.engine.resources.lora.cpu_cache.reads import Land, Read, describe
from mstar_tp.engine.resources.lora.pool import LoraAdapterPool
from mstar_tp.lora.reading.loaded_adapter import LoadedAdapter
from mstar_tp.lora.spec import LoraReqConfig, LoraSpec
from mstar_tp.testing.lora_files import q_pairs, tiny_spec, write_adapter
from mstar_tp.wire.reports import CopyIn
from mstar_tp.wire.states import Place
from mstar_tp.wire.values import AdapterKey
from support.thread_group import ThreadGroups

T = TypeVar("T")


class ManualReaders:
    """Reads wait until ``land``; header checks run at once, here."""

    def __init__(self, land: Land) -> None:
        self._land = land
        self.waiting: dict[AdapterKey, tuple[Read, Callable[[], LoadedAdapter]]] = {}
        self.started: list[AdapterKey] = []

    def start(self, read: Read, work: Callable[[], LoadedAdapter]) -> None:
        self.waiting[read.key] = (read, work)
        self.started.append(read.key)

    def call(self, key: AdapterKey, work: Callable[[], None], late: Callable[[str], None]) -> None:
        work()

    def close(self) -> None:
        self.waiting.clear()

    def land(self, key: AdapterKey, error: str | None = None) -> None:
        """Let the read of ``key`` end: with its file's content, or with ``error``."""
        read, work = self.waiting.pop(key)
        try:
            if error is not None:
                raise AdapterError(error)
            adapter = work()
        except AdapterError as failure:
            self._land(read, None, describe(failure, key))
        else:
            self._land(read, adapter, None)


class PoolRanks:
    """A group of ``world_size`` pools.

    Main threads' work runs here rank by rank, admits run on a thread a rank.
    """

    def __init__(self, folder: Path, world_size: int = 2, **spec: int) -> None:
        torch.set_num_threads(1)
        self.spec: LoraSpec = tiny_spec(**spec)
        self.folder = folder
        self.groups = ThreadGroups(world_size)
        self.readers: list[ManualReaders] = []
        self.reports: list[CopyIn] = []
        self.threads = ThreadPoolExecutor(world_size)
        self.pools = [self._pool(rank) for rank in range(world_size)]
        self.leader = self.pools[0]
        self.tp_seq = -1

    def _pool(self, rank: int) -> LoraAdapterPool:
        def readers(land: Land) -> ManualReaders:
            self.readers.append(ManualReaders(land))
            return self.readers[-1]

        return LoraAdapterPool(
            self.spec,
            device="cpu",
            groups=self.groups[rank].joint,
            dtype=torch.float32,
            decides=rank == 0,
            report=self.reports.append,
            make_readers=readers,
        )

    def close(self) -> None:
        """Free whoever still waits (after a failed test), then end the threads."""
        self.groups.abort()
        for pool in self.pools:
            pool.close()
        self.threads.shutdown()

    def serve(self, *names: str, values: Sequence[float] | None = None) -> list[AdapterKey]:
        """Load adapters by name, each with A and B entries of its own (``values``: one a rank)."""
        keys = []
        for name in names:
            key = AdapterKey(name, 1)
            for rank, pool in enumerate(self.pools):
                b = 0.1 + 0.01 * len(name) if values is None else values[rank]
                folder = write_adapter(self.folder / f"{name}-{rank}", q_pairs(self.spec, b=b))
                causes: list[str | None] = []
                pool.loads.begin(key, str(folder), lambda c, r, t, to=causes: to.append(c))
                assert causes == [None], causes
                assert pool.loads.commit(key, str(folder)) is None
            keys.append(key)
        return keys

    def open(self, rid: int, key: AdapterKey | None) -> None:
        for pool in self.pools:
            pool.ingest_request(rid, LoraReqConfig(key))

    def remove(self, rid: int) -> None:
        for pool in self.pools:
            pool.remove_request(rid)

    def land(self, key: AdapterKey, *, only: int | None = None, error: str | None = None) -> None:
        """Let ``key``'s read end on every rank that reads it (or on ``only``)."""
        for rank, readers in enumerate(self.readers):
            if only in (None, rank) and key in readers.waiting:
                readers.land(key, error)
        self.deliver()

    def deliver(self) -> None:
        """Carry reports to the leader."""
        while self.reports:
            self.leader.copy_in(self.reports.pop(0))

    def drop_failed(self) -> list[tuple[AdapterKey, int, int, str]]:
        """Order the drop of every failed copy on every rank."""
        failed = self.leader.failed_copies()
        for drop in failed:
            for pool in self.pools:
                pool.drop_copy(*drop)
        return failed

    def step(self, *rids: int) -> StepBatch:
        self.tp_seq += 1
        rows = tuple(StepRow(rid=rid, start=0, num_tokens=1, samples=True) for rid in rids)
        return StepBatch(tp_seq=self.tp_seq, rows=rows)

    def when_an_admit_waits(self) -> threading.Event:
        """An event set once the leader's first agreement said that some rank still reads."""
        reached = threading.Event()
        original = self.leader._admitter._wait_and_agree

        def wait_and_agree(*args: Any) -> dict[int, str]:
            reached.set()
            self.leader._admitter._wait_and_agree = original  # type: ignore[method-assign]
            return original(*args)

        self.leader._admitter._wait_and_agree = wait_and_agree  # type: ignore[method-assign]
        return reached

    def admit_then(self, rids: Sequence[int], then: Callable[[], None]) -> AdmitOutcome:
        """Admit, and do ``then`` once some rank still reads.

        It runs once the first agreement said so, or the admit is over.
        """
        reached = self.when_an_admit_waits()
        wait = self.start_admit(*rids, over=reached.set)
        assert reached.wait(60), "an admit neither ended nor waited"
        then()
        outcome = wait()
        self.check()
        return outcome

    def start_admit(
        self, *rids: int, over: Callable[[], None] = lambda: None
    ) -> Callable[[], AdmitOutcome]:
        """Begin an admit on every rank's step thread.

        The call returned waits and compares outcomes.
        """
        wait = self._start(rids, over)
        return lambda: wait()[0]

    def admit(self, *rids: int) -> AdmitOutcome:
        return self.admit_each(*rids)[0]

    def admit_each(self, *rids: int) -> list[AdmitOutcome]:
        """Admit; every rank's outcome, which differ in the wording of causes at most."""
        outcomes = self._start(rids, lambda: None)()
        self.check()
        return outcomes

    def _start(
        self, rids: Sequence[int], over: Callable[[], None]
    ) -> Callable[[], list[AdmitOutcome]]:
        batch = self.step(*rids)
        futures = [self.threads.submit(pool.admit, batch) for pool in self.pools]
        futures[0].add_done_callback(lambda future: over())

        def wait() -> list[AdmitOutcome]:
            outcomes = [future.result() for future in futures]
            assert len({frozenset(o.failed) for o in outcomes}) == 1
            assert len({o.refused for o in outcomes}) == 1
            return outcomes

        return wait

    def check(self) -> None:
        """Every table that ranks must share is the same on all."""
        assert len({pool.reports.slots_hash() for pool in self.pools}) == 1
        assert len({pool.reports.cpu_cache_hash() for pool in self.pools}) == 1
        assert len({str(pool.reports.debug_state()) for pool in self.pools}) == 1
        assert len(self.leader.reports.debug_state().cpu_cache) <= self.spec.cpu_capacity
        # Figures count what the states of all known adapters say one by one.
        states = self.leader.reports.adapter_states([a.key for a in self.leader.tables.adapters])
        wanted = {place: 0 for place in Place} | Counter(state.place for state in states)
        assert msgspec.structs.asdict(self.leader.reports.stats().places) == wanted

    def slots(self) -> dict[int, tuple[str | None, tuple[int, ...]]]:
        state = self.leader.reports.debug_state()
        return {s.slot: (s.adapter and s.adapter.name, s.holders) for s in state.slots}
