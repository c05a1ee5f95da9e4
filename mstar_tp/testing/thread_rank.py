"""One rank of an instance in one process: its engine, loops, and the trail of what it applied.

Its threads run when ``turns`` says so; channels, model and readers are the instance's stand-ins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

import torch

from mstar_tp.engine.model import ServedModel
from mstar_tp.engine.resources.base import AdmitOutcome, StepBatch
from mstar_tp.engine.resources.lora.context import PoolContext
from mstar_tp.engine.resources.lora.pool import LoraAdapterPool
from mstar_tp.engine.resources.lora.reads import Land
from mstar_tp.engine.runner import StepRunner
from mstar_tp.engine.scheduler import Scheduler
from mstar_tp.engine.step_thread import StepResult, WakeAt
from mstar_tp.testing.code_model import CodeModel, TurnReaders
from mstar_tp.testing.turns import (
    TurnCondition,
    TurnFence,
    TurnLock,
    Turns,
    TurnSteps,
    TurnWaker,
)
from mstar_tp.testing.wires import FollowerOrder, LeaderOrder, RankLink
from mstar_tp.wire.channels import ConductorLink, OrderClient, OrderServer
from mstar_tp.wire.messages import (
    AdapterKey,
    CopyIn,
    Step,
)
from mstar_tp.worker.follower import Follower
from mstar_tp.worker.leader import Leader
from mstar_tp.worker.pace import AtOnce
from mstar_tp.worker.state import RankState
from mstar_tp.worker.waker import Waker

if TYPE_CHECKING:
    from mstar_tp.testing.thread_instance import ThreadInstance


@dataclass(slots=True)
class Event:
    """Something a rank applied, with what it left: what a test compares and predicts."""

    kind: str
    detail: Any
    slots: Any = None
    tier: list[AdapterKey] = field(default_factory=list)
    outcome: AdmitOutcome | None = None


class ThreadRank:
    """One rank's engine and loop, and the trail of what it applied."""

    def __init__(self, instance: ThreadInstance, rank: int) -> None:
        self.rank = rank
        self.recorder = instance.recorder_of(rank)
        self.trail: list[Event] = []
        self.admitted = self._done = -1
        """The last step whose admit has begun, and the last that has ended."""
        self._last_step: dict[int, int] = {}
        self.fence = TurnFence(instance.turns)
        self.waker = TurnWaker(instance.turns)
        self.requests = instance.new_requests()
        self.kv = instance.new_kv(self.requests)
        self.landed: SimpleQueue[CopyIn] = SimpleQueue()
        self.pool = LoraAdapterPool(
            instance.spec,
            device="cpu",
            groups=instance.groups[rank].joint,
            dtype=torch.float32,
            decides=rank == 0,
            report=self._landed_here if rank == 0 else partial(self._report, instance),
            make_readers=lambda land: self._readers(land, instance.turns),
            context=PoolContext(recorder=self.recorder),
        )
        self.pool.store.room._moved = TurnCondition(instance.turns, "room")  # type: ignore[assignment]
        if instance.fine:
            self.pool._tables.lock = TurnLock(instance.turns, "the tables' lock")  # type: ignore[assignment]
        self.model = CodeModel(rank, self.pool, instance.spec, instance.world_size)
        self.runner = StepRunner(
            cast(ServedModel, self.model),
            self.requests,
            self.kv,
            self.pool,
            instance.groups[rank].joint,
            "raw_logprobs",
            self.recorder,
        )
        self.steps = TurnSteps(
            instance.turns,
            f"step-{rank}",
            self._run_step,
            self.fence,
            self.waker.wake,
            self.model.prepare_thread,
            self._wake_at(instance),
        )
        self.link = RankLink(instance.bodies[rank], instance.reports[rank])
        self.state = RankState(
            rank, self.requests, self.kv, self.pool, self.link.send, self.recorder
        )
        make_loop = self._leader if rank == 0 else self._follower
        self.loop: Leader | Follower = make_loop(instance)
        self._watch()

    def _readers(self, land: Land, turns: Turns) -> TurnReaders:
        self.readers = TurnReaders(land, turns, f"read-{self.rank}")
        return self.readers

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
            (self.pool,),
            max_num_seqs=instance.max_num_seqs,
            max_num_batched_tokens=instance.max_num_batched_tokens,
        )
        order = LeaderOrder(instance.entries, instance.copies)
        return Leader(
            self.state,
            scheduler,
            self.steps,
            self.runner,
            self.fence,
            cast(ConductorLink, self.link),
            cast(OrderServer, order),
            cast(Waker, self.waker),
            self.landed,
            pace=AtOnce() if instance.overlap else None,
        )

    def _follower(self, instance: ThreadInstance) -> Follower:
        wires = instance.entries[self.rank - 1], instance.copies[self.rank - 1]
        return Follower(
            self.state,
            self.steps,
            self.runner,
            self.fence,
            cast(ConductorLink, self.link),
            cast(OrderClient, FollowerOrder(*wires)),
            cast(Waker, self.waker),
        )

    def _run_step(self, step: Step, settled: Callable[[], None]) -> StepResult:
        result = self.runner.run(step, settled)
        self._done = step.tp_seq
        return result

    # ------------------------------------------------------------------ the trail

    def _watch(self) -> None:
        """Note every call that changes a table, with the tables as it left them."""
        self._note_calls(self.state, "apply", "remove", "preempt", "drop_copy", "forget_retired")
        self._note_calls(self.pool, "rollback_admit")
        admit = self.pool.admit

        def noted(step: StepBatch) -> AdmitOutcome:
            keys = [(row.rid, self.requests[row.rid].adapter) for row in step.rows]
            event = Event("admit", keys)
            self.trail.append(event)
            self.admitted = step.tp_seq
            self._last_step |= dict.fromkeys((row.rid for row in step.rows), step.tp_seq)
            event.outcome = admit(step)
            event.slots = self.pool._tables.slots.rows()
            return event.outcome

        self.pool.admit = noted  # type: ignore[method-assign]

    def _note_calls(self, owner: Any, *names: str) -> None:
        for name in names:
            setattr(owner, name, self._noted(name, getattr(owner, name)))

    def _noted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            if name not in ("apply", "rollback_admit"):
                self._at_fence(name, args)
            result = call(*args)
            event = Event(name, args, tier=self.pool.store.tier.keys())
            if name != "apply":  # an admit may be under way while the conductor's stream is applied
                event.slots = self.pool._tables.slots.rows()
            self.trail.append(event)
            return result

        return noted

    def _at_fence(self, name: str, args: Any) -> None:
        """What an admit reads changes between two admits only (R3); what a request holds goes once
        its last step has left the device (R4).
        """
        where = f"rank {self.rank}: {name} {args}"
        assert self.fence._settled >= self.admitted, f"{where} inside the admit of {self.admitted}"
        if name in ("remove", "preempt"):
            last = self._last_step.get(args[0], -1)
            assert self._done >= last, f"{where} while step {last} runs"
