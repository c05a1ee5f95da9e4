"""Ranks as threads of one process: the real engine, tables and steps, with order given by hand.

Every rank builds its engine as a process would and applies the same calls; a step runs on all of
them at once, through the same runner, checks included. Nothing here waits for time to pass.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

import torch

from mstar_tp.config import EngineConfig
from mstar_tp.distributed.comm import JointGroups
from mstar_tp.engine.build import Engine, build_engine
from mstar_tp.engine.resources.base import AskFailed
from mstar_tp.engine.resources.lora.pool import CopyState
from mstar_tp.engine.step.deferred_runner import DeferredRunner
from mstar_tp.engine.step.runner import StepRunner
from mstar_tp.engine.step.step_thread import StepResult
from mstar_tp.wire.commands import ConductorMessage, NewRequest
from mstar_tp.wire.reports import CopyIn, RankReport
from mstar_tp.wire.schedule import Step
from mstar_tp.wire.values import AdapterKey, ImageInput, SamplingParams
from mstar_tp.worker.state import RankState
from support.recorded_graphs import RecordedGraphs, RecordedGroup
from support.thread_group import ThreadGroups, dispatch_flags_restored

T = TypeVar("T")

CPU = torch.device("cpu")


class LockstepRanks:
    """``config.tensor_parallel_size`` ranks; ``close`` ends their threads."""

    def __init__(
        self,
        config: EngineConfig,
        device: torch.device = CPU,
        *,
        graphs: bool = False,
        deferred: bool = False,
    ) -> None:
        """Build the ranks.

        ``graphs``: steps replay captured graphs, which ``recorded_graphs`` fakes; a CUDA device has
        its own. ``deferred``: tokens stay on the device while the next step is launched.
        """
        self.world_size = config.tensor_parallel_size
        self._groups = ThreadGroups(self.world_size)
        self._threads = ThreadPoolExecutor(self.world_size)
        self._landed: SimpleQueue[CopyIn] = SimpleQueue()
        self.reports: list[tuple[int, RankReport]] = []
        self._tp_seq = -1
        self._next = 0

        self.joint = [
            JointGroups(RecordedGroup(self._groups[rank]) if graphs else self._groups[rank])
            for rank in range(self.world_size)
        ]

        def build(rank: int) -> Engine:
            return build_engine(
                config,
                self.joint[rank],
                device,
                self._landed.put,
                lambda text: None,
                captures=RecordedGraphs() if graphs else None,
            )

        with dispatch_flags_restored():
            self.engines = self._on_all(build)
        self.states = [self._state(rank, engine) for rank, engine in enumerate(self.engines)]
        self.runners = [self._runner(rank, deferred) for rank in range(self.world_size)]

    def _runner(self, rank: int, deferred: bool) -> StepRunner:
        engine = self.engines[rank]
        build: Callable[..., StepRunner] = StepRunner
        if deferred:
            build = partial(DeferredRunner, inputs=engine.inputs)
        return build(
            engine.model,
            engine.requests,
            engine.kv,
            engine.lora,
            self.joint[rank],
            "raw_logits",
            graphs=engine.graphs,
        )

    @property
    def calls(self) -> Counter[str]:
        """The times that rank 0 entered each collective, by name."""
        return self._groups.calls

    def apply(self, message: ConductorMessage) -> list[str | None]:
        """The next conductor message, on every rank; what each answered."""
        return [state.apply(message) for state in self.states]

    def open(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        adapter: AdapterKey | None = None,
        images: Sequence[ImageInput] = (),
    ) -> int:
        """Ingest a request on every rank; its number."""
        rid = self._next
        self._next += 1
        self.apply(
            NewRequest(
                rid=rid,
                prompt=tuple(prompt),
                params=params,
                adapter=adapter,
                images=tuple(images),
            )
        )
        return rid

    def wait_copies(self, rid: int) -> str | None:
        """Until the request's copies are in on every rank, or one failed (the cause)."""
        lora = self.engines[0].lora
        assert lora is not None
        while (state := lora.request_state(rid)) is CopyState.WAITING:
            lora.copy_in(self._landed.get(timeout=60))
        return state.cause if isinstance(state, AskFailed) else None

    def step(self, rows: Sequence[tuple[int, int]]) -> list[StepResult]:
        """Run the next step of (request, tokens) rows on every rank at once; each rank's result."""
        entry = self._entry(rows, behind=1)
        return self._on_all(lambda rank: self.runners[rank].run(entry, lambda: None))

    def launch(self, rows: Sequence[tuple[int, int]]) -> list[Sequence[StepResult]]:
        """Run the next step as one that was planned while the one before it ran.

        Returns each rank's results of the steps that ended with it.
        """
        entry = self._entry(rows, behind=2)
        return self._on_all(lambda rank: self.runners[rank].run_step(entry, lambda: None))

    def flush(self) -> list[Sequence[StepResult]]:
        """Let the last launched step end; each rank's results."""
        return self._on_all(lambda rank: self.runners[rank].flush())

    def _entry(self, rows: Sequence[tuple[int, int]], behind: int) -> Step:
        self._tp_seq += 1
        return Step(
            ingested=self.states[0].ingested,
            tp_seq=self._tp_seq,
            planned_after=max(self._tp_seq - behind, -1),
            rows=tuple(rows),
            checks=self.states[0].checks(),
        )

    def offload(self, rid: int) -> None:
        """Preempt a request on every rank; its KV moves to host memory and is nowhere else.

        No step in flight names it.
        """
        for engine, state in zip(self.engines, self.states, strict=True):
            pages = list(engine.kv.table.held(rid))
            state.preempt(rid, offload=True)
            engine.kv.kept.copy_out()
            for cache in engine.model.kv:
                cache.k[pages], cache.v[pages] = math.nan, math.nan

    def remove(self, rid: int) -> None:
        for state in self.states:
            state.remove(rid)

    def close(self) -> None:
        self._threads.shutdown()
        for engine in self.engines:
            engine.close()

    def _state(self, rank: int, engine: Engine) -> RankState:
        def send(report: RankReport) -> None:
            self.reports.append((rank, report))

        return RankState(rank, engine.requests, engine.kv, engine.lora, send)

    def _on_all(self, work: Callable[[int], T]) -> list[T]:
        futures = [self._threads.submit(work, rank) for rank in range(self.world_size)]
        return [future.result() for future in futures]
