"""One rank of an instance in one process: its engine, loops, and the trail of what it applied.

Its threads run when ``interleaving`` says so; channels, model and readers are the instance's fakes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

import torch

from mstar_tp.engine.graphs.inputs import StepInputs
from mstar_tp.engine.model import ServedModel
from mstar_tp.engine.resources.base import AdmitOutcome, StepBatch
from mstar_tp.engine.resources.lora.context import PoolContext
from mstar_tp.engine.resources.lora.cpu_cache.reads import Land
from mstar_tp.engine.resources.lora.pool import LoraAdapterPool
from mstar_tp.engine.resources.lora.pools import LoraPools
from mstar_tp.engine.resources.lora.stage import PoolStage
from mstar_tp.engine.scheduling.fair_queue import FairQueue
from mstar_tp.engine.scheduling.scheduler import Scheduler
from mstar_tp.engine.step.deferred_runner import DeferredRunner
from mstar_tp.engine.step.runner import StepRunner
from mstar_tp.engine.step.step_thread import StepResult, WakeAt
from mstar_tp.wire.channels import ConductorLink, ScheduleClient, ScheduleServer
from mstar_tp.wire.reports import CopyIn
from mstar_tp.wire.schedule import Step
from mstar_tp.wire.values import AdapterKey
from mstar_tp.worker.follower import Follower
from mstar_tp.worker.leader import Leader
from mstar_tp.worker.plan_timer import ImmediatePlanTimer
from mstar_tp.worker.state import RankState
from mstar_tp.worker.waker import Waker
from support.code_model import CodeModel, InterleavedReaders
from support.interleaving import (
    InterleavedCondition,
    InterleavedFence,
    InterleavedLock,
    InterleavedReadback,
    InterleavedSteps,
    InterleavedWaker,
    Interleaving,
)
from support.thread_channels import FollowerSchedule, LeaderSchedule, RankLink

if TYPE_CHECKING:
    from support.thread_instance import ThreadInstance


@dataclass(slots=True)
class Event:
    """Something a rank applied, with what it left: what a test compares and predicts."""

    kind: str
    detail: Any
    slots: Any = None
    cpu_cache: list[AdapterKey] = field(default_factory=list)
    outcome: AdmitOutcome | None = None


class ThreadRank:
    """One rank's engine and loop, and the trail of what it applied."""

    def __init__(self, instance: ThreadInstance, rank: int) -> None:
        self.rank = rank
        self.recorder = instance.recorder_of(rank)
        self.events_by_stage: list[list[Event]] = [[] for _ in instance.specs]
        """One a node; what changes every stage's tables stands in all."""
        self.events = self.events_by_stage[-1]
        self.admitted = self._done = -1
        """The last step whose admit has begun, and the last that has ended."""
        self._last_step: dict[int, int] = {}
        self.fence = InterleavedFence(instance.interleaving)
        self.waker = InterleavedWaker(instance.interleaving)
        self.requests = instance.new_requests()
        self.cache = instance.new_cache()
        self.landed: SimpleQueue[CopyIn] = SimpleQueue()
        self.readers: list[InterleavedReaders] = []
        self.lora = LoraPools(
            [
                self._make_pool(instance, PoolStage(number=n, name=name, image_tokens=image_tokens))
                for n, (name, image_tokens) in enumerate(instance.stages)
            ]
        )
        self.kv = instance.new_kv(self.requests, self.cache, self.lora.fingerprint, self.recorder)
        self.pool = self.lora.pools[-1]
        """The decoder's."""
        self.model = CodeModel(rank, self.lora.pools, instance.world_size, self.cache)
        build: Callable[..., StepRunner] = StepRunner
        if instance.deferred:
            inputs = StepInputs(64, instance.max_num_seqs, torch.device("cpu"))
            fetch = partial(InterleavedReadback, instance.interleaving)
            build = partial(DeferredRunner, inputs=inputs, fetch=fetch)
        self.runner = build(
            cast(ServedModel, self.model),
            self.requests,
            self.kv,
            self.lora,
            instance.groups[rank].joint,
            "raw_logprobs",
            self.recorder,
        )
        self.steps = InterleavedSteps(
            instance.interleaving,
            f"step-{rank}",
            self._run_step,
            self.fence,
            self.waker.wake,
            self.model.prepare_thread,
            self._wake_at(instance),
            self,
        )
        self.link = RankLink(instance.commands[rank], instance.reports[rank])
        self.state = RankState(
            rank, self.requests, self.kv, self.lora, self.link.send, self.recorder
        )
        make_loop = self._leader if rank == 0 else self._follower
        self.loop: Leader | Follower = make_loop(instance)
        self._watch()

    def _make_pool(self, instance: ThreadInstance, stage: PoolStage) -> LoraAdapterPool:
        specs = instance.specs
        pool = LoraAdapterPool(
            specs[stage.number],
            device="cpu",
            groups=instance.groups[self.rank].joint,
            dtype=torch.float32,
            decides=self.rank == 0,
            report=self._landed_here if self.rank == 0 else partial(self._report, instance),
            make_readers=lambda land: self._readers(land, instance.interleaving, stage),
            context=PoolContext(
                recorder=self.recorder,
                stage=stage,
                others=tuple(spec for n, spec in enumerate(specs) if n != stage.number),
            ),
        )
        pool.store.budget._moved = InterleavedCondition(instance.interleaving, "room")  # type: ignore[assignment]
        if instance.fine:
            pool.tables.lock = InterleavedLock(
                instance.interleaving, f"the {stage.name} tables' lock"
            )  # type: ignore[assignment]
        return pool

    def _readers(
        self, land: Land, interleaving: Interleaving, stage: PoolStage
    ) -> InterleavedReaders:
        part = f"-{stage.name}" if stage.name else ""
        readers = InterleavedReaders(land, interleaving, f"read-{self.rank}{part}")
        self.readers.append(readers)
        return readers

    def _report(self, instance: ThreadInstance, report: CopyIn) -> None:
        self.recorder.put(report)
        instance.copies[self.rank - 1].send(report)

    def _landed_here(self, report: CopyIn) -> None:
        self.landed.put(report)
        self.waker.wake()

    def _wake_at(self, instance: ThreadInstance) -> WakeAt:
        if self.rank:
            return WakeAt.ERROR
        return WakeAt.LAUNCH if instance.overlap else WakeAt.RESULT

    def _leader(self, instance: ThreadInstance) -> Leader:
        scheduler = Scheduler(
            self.requests,
            self.kv,
            self.lora.pools,
            max_num_seqs=instance.max_num_seqs,
            max_num_batched_tokens=instance.max_num_batched_tokens,
            fair_queue=FairQueue(
                self.requests,
                lambda key: (
                    instance.limits_of(None) if key is None else self.lora.loads.limits(key)
                ),
                fair=instance.fair,
            ),
        )
        order = LeaderSchedule(instance.entries, instance.copies)
        return Leader(
            self.state,
            scheduler,
            self.steps,
            self.runner,
            self.fence,
            cast(ConductorLink, self.link),
            cast(ScheduleServer, order),
            cast(Waker, self.waker),
            self.landed,
            plan_timer=ImmediatePlanTimer() if instance.overlap else None,
        )

    def _follower(self, instance: ThreadInstance) -> Follower:
        wires = instance.entries[self.rank - 1], instance.copies[self.rank - 1]
        return Follower(
            self.state,
            self.steps,
            self.runner,
            self.fence,
            cast(ConductorLink, self.link),
            cast(ScheduleClient, FollowerSchedule(*wires)),
            cast(Waker, self.waker),
        )

    def _run_step(self, step: Step, settled: Callable[[], None]) -> Sequence[StepResult]:
        return self._note_ends(self.runner.run_step(step, settled))

    def flush(self) -> Sequence[StepResult]:
        return self._note_ends(self.runner.flush())

    def has_landed(self) -> bool:
        return self.runner.has_landed()

    def _note_ends(self, results: Sequence[StepResult]) -> Sequence[StepResult]:
        if results:
            self._done = results[-1].tp_seq
        return results

    # ------------------------------------------------------------------ the trail

    def _watch(self) -> None:
        """Note every call that changes a table, with the tables as it left them."""
        changes = ("apply", "remove", "preempt", "drop_copy", "forget_retired")
        self._note_calls(self.state, self.lora.pools, *changes)
        for pool in self.lora.pools:
            self._note_calls(pool, [pool], "rollback_admit")
            pool.admit = partial(self._admit, pool, pool.admit)  # type: ignore[method-assign]

    def _admit(
        self,
        pool: LoraAdapterPool,
        admit: Callable[[StepBatch], AdmitOutcome],
        step: StepBatch,
    ) -> AdmitOutcome:
        event = Event("admit", [(row.rid, self.requests[row.rid].adapter) for row in step.rows])
        self.events_by_stage[pool.stage.number].append(event)
        self.admitted = step.tp_seq
        self._last_step |= dict.fromkeys((row.rid for row in step.rows), step.tp_seq)
        event.outcome = admit(step)
        event.slots = pool.tables.slots.rows()
        return event.outcome

    def _note_calls(self, owner: Any, pools: Sequence[LoraAdapterPool], *names: str) -> None:
        for name in names:
            setattr(owner, name, self._noted(name, getattr(owner, name), pools))

    def _noted(
        self, name: str, call: Callable[..., Any], pools: Sequence[LoraAdapterPool]
    ) -> Callable[..., Any]:
        def noted(*args: Any, **more: Any) -> Any:
            if name not in ("apply", "rollback_admit"):
                self._at_fence(name, args)
            result = call(*args, **more)
            for pool in pools:
                event = Event(name, args, cpu_cache=pool.store.cpu_cache.keys())
                if name != "apply":  # an admit may be under way while bodies are applied
                    event.slots = pool.tables.slots.rows()
                self.events_by_stage[pool.stage.number].append(event)
            return result

        return noted

    def _at_fence(self, name: str, args: Any) -> None:
        """Check the invariants at a fence.

        The tables that an admit reads change between two admits only (R3); what a request holds
        goes once its last step has left the device (R4).
        """
        where = f"rank {self.rank}: {name} {args}"
        assert self.fence._settled >= self.admitted, f"{where} inside the admit of {self.admitted}"
        if name in ("remove", "preempt"):
            last = self._last_step.get(args[0], -1)
            assert self._done >= last, f"{where} while step {last} runs"
