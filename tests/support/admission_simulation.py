"""The leader's scheduler over real pools, CPU caches and KV pages, with steps that compute nothing.

For simulations and tests of who runs when. One thread plays every rank's main thread; admits run on
a thread a rank, because they agree. Each step samples one token for every row that has its prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch

from mstar_tp.common.errors import AdapterError
from mstar_tp.engine.resources.base import AskFailed, StepBatch
from mstar_tp.engine.resources.kv.pages import PageTable
from mstar_tp.engine.resources.kv.pool import KvPool
from mstar_tp.engine.resources.lora.cpu_cache.reads import Land, Read, Readers, describe
from mstar_tp.engine.resources.lora.pool import LoraAdapterPool
from mstar_tp.engine.scheduling.fair_queue import FairQueue
from mstar_tp.engine.scheduling.requests import RequestTable
from mstar_tp.engine.scheduling.scheduler import Plan, Scheduler
from mstar_tp.lora.reading.loaded_adapter import LoadedAdapter
from mstar_tp.lora.spec import LoraReqConfig, LoraSpec
from mstar_tp.wire.adapter_limits import NO_LIMITS, AdapterLimits
from mstar_tp.wire.commands import NewRequest
from mstar_tp.wire.reports import CopyIn
from mstar_tp.wire.values import AdapterKey, SamplingParams
from support.thread_group import ThreadGroups

TOKEN = 7
REPORT_TIMEOUT_S = 60.0


class TimedReaders:
    """Reads that land ``duration`` steps after they began; header checks run at once, here."""

    def __init__(self, land: Land, duration: int) -> None:
        self._land = land
        self._duration = duration
        self._under_way: list[tuple[int, Read, Callable[[], LoadedAdapter]]] = []
        self._now = 0

    def start(self, read: Read, work: Callable[[], LoadedAdapter]) -> None:
        self._under_way.append((self._now + self._duration, read, work))

    def call(self, key: AdapterKey, work: Callable[[], None], late: Callable[[str], None]) -> None:
        work()

    def close(self) -> None:
        self._under_way.clear()

    def advance(self) -> None:
        """A step has passed: land what is due."""
        self._now += 1
        due = [entry for entry in self._under_way if entry[0] <= self._now]
        self._under_way = [entry for entry in self._under_way if entry[0] > self._now]
        for _, read, work in due:
            adapter, cause = None, None
            try:
                adapter = work()
            except AdapterError as error:
                cause = describe(error, read.key)
            self._land(read, adapter, cause)


@dataclass(slots=True, kw_only=True)
class Visit:
    """One request's way, in step numbers; None until it got there."""

    key: AdapterKey | None
    output: int
    arrived: int
    entered: int | None = None
    """The step in which its copies were in, so that it was in the admission queue."""
    ahead: int = 0
    """Requests that arrived before it and had not joined when it entered."""
    joined: int | None = None
    left: int | None = None
    failed: str | None = None

    @property
    def wait(self) -> int:
        """Steps in the queue."""
        assert self.entered is not None and self.joined is not None
        return self.joined - self.entered


class AdmissionSim:
    """``world_size`` ranks' tables; ``visits`` says how each request fared."""

    def __init__(
        self,
        spec: LoraSpec,
        *,
        world_size: int = 1,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        num_pages: int = 4096,
        page_size: int = 16,
        read_steps: int | None = None,
        fair: bool = False,
        limits: Mapping[AdapterKey | None, AdapterLimits] | None = None,
    ) -> None:
        """Build the simulation.

        ``read_steps``: the steps that a read takes; None: real reader threads. ``fair``: adapters
        share by fair queueing; ``limits``: their limits.
        """
        self._groups = ThreadGroups(world_size)
        self._threads = ThreadPoolExecutor(world_size, thread_name_prefix="step")
        self._reports: SimpleQueue[CopyIn] = SimpleQueue()
        self._timed: list[TimedReaders] = []
        self.pools = [self._pool(spec, rank, read_steps) for rank in range(world_size)]
        self.leader = self.pools[0]
        self.requests = RequestTable()
        table = PageTable(num_pages, page_size)
        self.kv = KvPool(table, lambda rid: len(self.requests[rid].tokens))
        self.scheduler = Scheduler(
            self.requests,
            self.kv,
            (self.leader,),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            fair_queue=FairQueue(
                self.requests, lambda key: (limits or {}).get(key, NO_LIMITS), fair=fair
            ),
        )
        self.visits: dict[int, Visit] = {}
        self._waiting_for_copies: dict[int, None] = {}
        self.now = 0

    def _pool(self, spec: LoraSpec, rank: int, read_steps: int | None) -> LoraAdapterPool:
        def timed(land: Land) -> Readers:
            self._timed.append(TimedReaders(land, read_steps or 0))
            return self._timed[-1]

        group = self._groups[rank]
        return LoraAdapterPool(
            spec,
            device="cpu",
            groups=group.joint,
            dtype=getattr(torch, spec.dtype),
            decides=rank == 0,
            report=self._reports.put,
            make_readers=None if read_steps is None else timed,
        )

    def serve(self, configured: Sequence[tuple[AdapterKey, str]]) -> None:
        """Serve these adapters from the start."""
        for pool in self.pools:
            pool.loads.preload(configured)

    def arrive(self, rid: int, key: AdapterKey | None, *, prompt: int = 1, output: int = 1) -> None:
        """A request with ``prompt`` tokens that will run until it has ``output`` more."""
        params = SamplingParams(max_tokens=output)
        message = NewRequest(rid=rid, prompt=tuple(range(prompt)), params=params, adapter=key)
        self.requests.add(message)
        self.visits[rid] = Visit(key=key, output=output, arrived=self.now)
        for pool in self.pools:
            cause = pool.ingest_request(rid, LoraReqConfig(key))
            assert cause is None, cause
        if key is None:
            self._enqueue(rid)
        else:
            self._waiting_for_copies[rid] = None

    def step(self) -> Plan:
        """One turn of the leader: what landed, what failed, then a step if anything may run."""
        self._take_reports()
        for drop in self.leader.failed_copies():
            for pool in self.pools:
                pool.drop_copy(*drop)
        self._enter()
        plan = self.scheduler.plan()
        for rid, cause in plan.failed:
            self._fail(rid, cause)
        for rid, _ in plan.rows:
            visit = self.visits[rid]
            if visit.joined is None:
                visit.joined = self.now
        self.now += 1
        if plan.rows:
            self._run(self.requests.build_step(self.now, plan.rows))
        for readers in self._timed:
            readers.advance()
        return plan

    def wait_for_a_copy(self) -> None:
        """Block until some rank's reader has landed a copy."""
        self.leader.copy_in(self._reports.get(timeout=REPORT_TIMEOUT_S))

    def remove(self, rid: int) -> None:
        """The request ends here, whatever it has."""
        self._waiting_for_copies.pop(rid, None)
        self.scheduler.remove(rid)
        self.kv.remove_request(rid)
        self.requests.remove(rid)
        for pool in self.pools:
            pool.remove_request(rid)

    def close(self) -> None:
        """End the threads."""
        self._groups.abort()
        self._threads.shutdown()
        for pool in self.pools:
            pool.close()

    def _take_reports(self) -> None:
        while True:
            try:
                self.leader.copy_in(self._reports.get_nowait())
            except Empty:
                return

    def _enter(self) -> None:
        """Requests whose copies are in everywhere enter the queue; those that lost theirs end."""
        for rid, state in self.leader.settled(self._waiting_for_copies):
            del self._waiting_for_copies[rid]
            if isinstance(state, AskFailed):
                self._fail(rid, state.cause)
            else:
                self._enqueue(rid)

    def _enqueue(self, rid: int) -> None:
        visit = self.visits[rid]
        visit.entered = self.now
        older = (v for other, v in self.visits.items() if other < rid)
        visit.ahead = sum(v.joined is None and v.failed is None for v in older)
        self.scheduler.enqueue(rid)

    def _fail(self, rid: int, cause: str) -> None:
        self.visits[rid].failed = cause
        self.remove(rid)

    def _run(self, step: StepBatch) -> None:
        futures = [self._threads.submit(pool.admit, step) for pool in self.pools]
        for future in futures:
            outcome = future.result()
            assert outcome.refused is None and not outcome.failed, outcome
        assert self.kv.admit(step).refused is None
        for pool in self.pools:
            pool.commit(step)
        self.kv.commit(step)
        sampling = [row.rid for row in step.rows if row.samples]
        self.requests.commit(step, [TOKEN] * len(sampling))
        for rid in sampling:
            request = self.requests[rid]
            if request.num_output == request.params.max_tokens:
                self.visits[rid].left = self.now
                self.remove(rid)
