"""The cost of an admit by registered adapters and by misses: one rank's pool.

In this process, without a model; microseconds of the calling thread's own time, whatever else runs.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from mstar_tp.distributed.comm import JointGroups, SingleGroup
from mstar_tp.engine.resources.base import StepBatch, StepRow
from mstar_tp.engine.resources.lora.pool import LoraAdapterPool
from mstar_tp.lora.spec import LoraReqConfig
from mstar_tp.testing.lora_files import random_pairs, tiny_spec, write_adapter
from mstar_tp.wire.reports import CopyIn
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey

ROWS = 64
"""Rows of the step whose admit is timed, all with a slot."""
REPEATS = 500
MISSES = (1, 2, 4)


class PoolTimes(NamedTuple):
    """Microseconds; ``miss_us`` by how many adapters of the step were in no slot."""

    registered: int
    slots: int
    register_us: float
    """Checking and registering one adapter at the start, the clock's time."""
    bytes_each: float
    """Resident memory that each registered adapter took."""
    steady_us: float
    miss_us: dict[int, float]


def time_pool(folder: Path, registered: int, slots: int) -> PoolTimes:
    """Register, fill the slots, time admits. At least twice as many adapters as slots count."""
    pool = _Pool(folder, registered, slots)
    try:
        steady = pool.steady_us()
        misses = {count: pool.miss_us(count) for count in MISSES if count <= slots // 2}
        took = (pool.register_us, pool.bytes_each)
        return PoolTimes(registered, slots, *took, steady, misses)
    finally:
        pool.close()


class _Pool:
    """Half the slots are held by the step's rows, the other half is what misses take."""

    def __init__(self, folder: Path, registered: int, slots: int) -> None:
        spec = tiny_spec(slots=slots, cpu_capacity=2 * slots)
        path = str(write_adapter(folder, random_pairs(spec, rank=2, seed=0)))
        self._landed = threading.Condition()
        self._in: list[CopyIn] = []
        self._pool = LoraAdapterPool(
            spec,
            device="cpu",
            groups=JointGroups(SingleGroup()),
            dtype=torch.float32,
            decides=True,
            report=self._report,
        )
        names = (f"adapter-{number:06}" for number in range(max(registered, 2 * slots)))
        self._keys = [AdapterKey(name, FIRST_GENERATION) for name in names]
        before, begin = _resident(), time.perf_counter()
        self._pool.loads.preload([(key, path) for key in self._keys])
        self.register_us = 1e6 * (time.perf_counter() - begin) / len(self._keys)
        self._wait_copies(2 * slots)
        self.bytes_each = max(0, _resident() - before) / len(self._keys)
        self._held = max(1, slots // 2)
        self._next_miss = self._held
        self._most = 2 * slots
        self._rows = tuple(self._open(self._keys[rid % self._held], rid) for rid in range(ROWS))
        self._seq = 0
        self._admit(self._rows)
        self._next_rid = ROWS

    def steady_us(self) -> float:
        """Every row holds its slot."""
        return median(self._admit(self._rows) for _ in range(REPEATS))

    def miss_us(self, count: int) -> float:
        """``count`` more rows, each on an adapter that is in no slot; the copies are in."""
        times = []
        for _ in range(20):
            rids = range(self._next_rid, self._next_rid + count)
            self._next_rid += count
            rows = tuple(self._open(self._miss(), rid) for rid in rids)
            times.append(self._admit(self._rows + rows))
            for rid in rids:
                self._pool.remove_request(rid)
        return median(times)

    def close(self) -> None:
        self._pool.close()

    def _miss(self) -> AdapterKey:
        """The adapters past the held ones in turn: more than fit, so the next is never resident."""
        key = self._keys[self._next_miss]
        self._next_miss += 1
        if self._next_miss == self._most:
            self._next_miss = self._held
        return key

    def _open(self, key: AdapterKey, rid: int) -> StepRow:
        self._pool.ingest_request(rid, LoraReqConfig(key))
        return StepRow(rid=rid, start=0, num_tokens=1, samples=True)

    def _admit(self, rows: tuple[StepRow, ...]) -> float:
        step = StepBatch(tp_seq=self._seq, rows=rows)
        self._seq += 1
        begin = time.thread_time_ns()
        outcome = self._pool.admit(step)
        took = (time.thread_time_ns() - begin) / 1e3
        assert not outcome.failed and outcome.refused is None, outcome
        self._pool.commit(step)
        return took

    def _report(self, copy: CopyIn) -> None:
        assert copy.cause is None, copy.cause
        with self._landed:
            self._in.append(copy)
            self._landed.notify_all()

    def _wait_copies(self, count: int) -> None:
        with self._landed:
            self._landed.wait_for(lambda: len(self._in) >= count)
        for copy in self._in:
            self._pool.copy_in(copy)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
