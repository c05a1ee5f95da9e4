"""A follower's main loop: applies bodies and order exactly as the leader did. It decides nothing.

Bodies (conductor stream) and order (leader's stream) arrive on two channels; each order entry says
how many bodies come
before it. A body that arrived early may start a read and nothing else (R2).
"""

from __future__ import annotations

import logging
from collections import deque

from mstar_tp.common import log
from mstar_tp.common.errors import LockstepError, PeerLostError
from mstar_tp.engine.step.runner import StepRunner
from mstar_tp.engine.step.step_thread import StepThread
from mstar_tp.wire.channels import ConductorLink, ScheduleClient
from mstar_tp.wire.commands import ConductorMessage, Inspect, Measure, NewRequest, Shutdown
from mstar_tp.wire.schedule import Advance, DropCopy, Forget, Preempt, Remove, ScheduleEntry, Step
from mstar_tp.worker.fence import AdmitFence
from mstar_tp.worker.memory import process_stats
from mstar_tp.worker.state import RankState, asked_of
from mstar_tp.worker.waker import Waker

logger = logging.getLogger(__name__)

WARN_AFTER_MS = 10_000


class Follower:
    """Main thread of every rank but 0."""

    def __init__(
        self,
        state: RankState,
        steps: StepThread,
        runner: StepRunner,
        fence: AdmitFence,
        link: ConductorLink,
        schedule: ScheduleClient,
        waker: Waker,
    ) -> None:
        self._state = state
        self._steps = steps
        self._runner = runner
        self._fence = fence
        self._link = link
        self._schedule = schedule
        self._waker = waker
        self._commands: deque[ConductorMessage] = deque()
        self._entries: deque[ScheduleEntry] = deque()
        self._tp_seq = -1
        self._stopping = False

    def run(self) -> None:
        """Serve until a Shutdown is ordered.

        Raises:
            PeerLostError: the frontend or the leader is gone.
            LockstepError: the order or a table differs from the leader's.
            BaseException: what a step raised.
        """
        poller = self._waker.poller(self._link.poll_socket, self._schedule.poll_socket)
        while not self._stopping:
            if not poller.poll(WARN_AFTER_MS if self._entries else None):
                self._warn()
            # The order first: the leader has begun the step that this rank is about to hear of.
            self._entries.extend(self._schedule.receive())
            self._apply_entries()
            self._waker.clear()
            self._check_peers()
            self._take_commands()
            self._apply_entries()

    def _apply_entries(self) -> None:
        while self._entries and not self._stopping and self._apply(self._entries[0]):
            self._entries.popleft()

    def _check_peers(self) -> None:
        for result in self._steps.results():
            if result.error is not None:
                raise result.error
        if self._stopping:
            return  # both may leave as soon as they have said so
        if self._schedule.lost is not None and not self._leader_has_left():
            raise PeerLostError(f"the leader is gone: {self._schedule.lost}")
        if self._link.lost is not None:
            raise PeerLostError(f"the frontend is gone: {self._link.lost}")

    def _leader_has_left(self) -> bool:
        """Return whether a Shutdown is scheduled.

        Its command may come from the frontend after the leader, who had it first, is gone.
        """
        return any(isinstance(entry, Advance) and entry.last for entry in self._entries)

    def _take_commands(self) -> None:
        for message in self._link.receive():
            self._commands.append(message)
            self._state.answer(message)
            if isinstance(message, Measure):
                self._link.send(
                    self._state.stats(
                        message,
                        waiting=0,
                        running=0,
                        steps=self._runner.steps,
                        preemptions=0,
                        timing=self._runner.clock.stats(),
                        process=process_stats(),
                    )
                )
            if isinstance(message, NewRequest) and self._state.lora is not None:
                self._state.lora.early_read(asked_of(message))

    def _apply(self, entry: ScheduleEntry) -> bool:
        """Apply the commands before ``entry``, then the entry.

        Returns False while a command has not arrived yet.
        """
        while self._state.ingested < entry.ingested:
            if not self._commands:
                self._take_commands()
            if not self._commands:
                return False
            message = self._commands.popleft()
            self._state.apply(message)
            self._follow_up(message)
        self._state.recorder.put(entry)
        match entry:
            case Step():
                self._step(entry)
            case Remove():
                self._at_fence(entry.after_tp_seq, f"the remove of request {entry.rid}", entry.rid)
                self._state.remove(entry.rid)
            case Preempt():
                what = f"the preemption of request {entry.rid}"
                self._at_fence(entry.after_tp_seq, what, entry.rid)
                self._state.preempt(entry.rid, offload=entry.offload)
            case DropCopy():
                self._at_fence(entry.after_tp_seq, f"the drop of adapter {entry.key}")
                self._state.drop_copy(entry)
            case Forget():
                self._at_fence(entry.after_tp_seq, "forgetting what was unloaded")
                self._state.forget_retired()
            case Advance():
                pass
        return True

    def _follow_up(self, message: ConductorMessage) -> None:
        match message:
            case Inspect(query_id=query_id):
                self._at_fence(self._tp_seq, "an inspection")
                report = self._state.report(
                    query_id,
                    waiting=0,
                    running=0,
                    steps=self._runner.steps,
                    preemptions=0,
                    gap_us=self._runner.gap_us,
                )
                self._link.send(report)
            case Shutdown():
                self._stopping = True
            case _:
                pass

    def _step(self, step: Step) -> None:
        if step.tp_seq != self._tp_seq + 1:
            raise LockstepError(
                f"rank {self._state.rank}: step {step.tp_seq} came after step {self._tp_seq}"
            )
        self._state.verify(step)
        self._tp_seq = step.tp_seq
        self._steps.submit(step)

    def _at_fence(self, tp_seq: int, what: str, rid: int | None = None) -> None:
        """Wait until ``tp_seq`` has settled its admit (R3).

        It also waits until the last step that ran ``rid`` has left this rank's device (R4).
        """
        waiter = f"rank {self._state.rank}, {what},"
        request = None if rid is None else self._state.requests.get(rid)
        with log.about("" if request is None else request.request_id):
            self._fence.wait_settled(tp_seq, waiter)
            if request is not None:
                self._fence.wait_done(request.last_step, waiter)
        self._raise_failed_step()

    def _raise_failed_step(self) -> None:
        for result in self._steps.results():
            if result.error is not None:
                raise result.error

    def _warn(self) -> None:
        entry = self._entries[0]
        logger.warning(
            "rank %d waits for conductor message %d of %d before it can apply %s",
            self._state.rank,
            self._state.ingested + 1,
            entry.ingested,
            type(entry).__name__,
        )
