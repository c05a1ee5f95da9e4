"""Rank 0's main loop: ingests, chooses steps, orders every rank, sends tokens.

At most one step has been sent and not ended, or two with overlap: then a step is planned while the
one before it runs. Removes and the next step wait until that one's admit has settled (R3), which is
when the one before that has ended; preemptions wait for its end. A request that a running step
names is not removed before that step ends (R4). Ingests wait for nothing (R1 allows it: nothing an
ingest decides is read by an admit).
"""

from __future__ import annotations

import logging
from collections import deque
from queue import Empty, SimpleQueue
from typing import NamedTuple

from mstar_tp.common.errors import PeerLostError
from mstar_tp.engine.resources.base import AskFailed
from mstar_tp.engine.sampling.grammar import GrammarFault, Grammars
from mstar_tp.engine.scheduling.scheduler import Scheduler
from mstar_tp.engine.step.runner import StepRunner
from mstar_tp.engine.step.step_clock import LEADER_PHASES, StepClock
from mstar_tp.engine.step.step_thread import StepResult, StepThread
from mstar_tp.wire.channels import ConductorLink, ScheduleServer
from mstar_tp.wire.commands import (
    Abort,
    ConductorMessage,
    Inspect,
    LoadCommit,
    Measure,
    NewRequest,
    Shutdown,
)
from mstar_tp.wire.reports import AdapterDigest, CopyIn, LoadDone, RequestFailed, Token, Tokens
from mstar_tp.wire.schedule import Advance, DropCopy, Forget, Preempt, Remove, ScheduleEntry, Step
from mstar_tp.worker.fence import AdmitFence
from mstar_tp.worker.memory import process_stats
from mstar_tp.worker.plan_timer import PlanTimer
from mstar_tp.worker.queue_times import QueueTimes
from mstar_tp.worker.state import RankState
from mstar_tp.worker.waker import Waker

logger = logging.getLogger(__name__)

POLL_S = 1e-3
"""The shortest wait of a poller."""


class _Sent(NamedTuple):
    """A step that was sent and whose result has not been taken."""

    tp_seq: int
    num_tokens: int
    joined: list[int]


class Leader:
    """Main thread of rank 0. ``landed`` holds this rank's own copies as its readers finish them.

    ``plan_timer`` says when to plan the step behind one that runs; None: never, one step at a time.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - one argument for each collaborator
        self,
        state: RankState,
        scheduler: Scheduler,
        steps: StepThread,
        runner: StepRunner,
        fence: AdmitFence,
        link: ConductorLink,
        schedule: ScheduleServer | None,
        waker: Waker,
        landed: SimpleQueue[CopyIn],
        plan_timer: PlanTimer | None,
        grammars: Grammars | None = None,
    ) -> None:
        self._state = state
        self._scheduler = scheduler
        self._steps = steps
        self._runner = runner
        self._fence = fence
        self._link = link
        self._schedule = schedule
        self._waker = waker
        self._landed = landed
        self._window = 1 if plan_timer is None else 2
        self._plan_timer = plan_timer
        self._plan_in_s: float | None = None
        """How long to wait for messages before the next step is due; None: until one comes."""
        self._commands: deque[ConductorMessage] = deque()
        self._grammars = grammars
        self._waiting_for_grammar: dict[int, NewRequest] = {}
        self._waiting_for_copies: dict[int, None] = {}
        self._to_remove: dict[int, None] = {}
        """Requests that ended, and whose remove has not been sent."""
        self._in_flight: deque[_Sent] = deque()
        self._refused: list[int] | None = None
        """Rows that joined with a refused step: no step is planned while others are in flight."""
        self._tp_seq = -1
        self._done = -1
        self._ordered = 0
        self._stopping = False
        self._sent_last = False
        self._clock = StepClock(LEADER_PHASES)
        self._queue_times = QueueTimes()

    def run(self) -> None:
        """Serve until a Shutdown is ordered.

        Raises:
            PeerLostError: the frontend or a follower is gone.
            BaseException: what a step raised.
        """
        schedule = () if self._schedule is None else (self._schedule.poll_socket,)
        poller = self._waker.poller(self._link.poll_socket, *schedule)
        while not (self._stopping and not self._in_flight):
            wait_s = self._plan_in_s
            poller.poll(None if wait_s is None else int(wait_s * 1e3))
            self._waker.clear()
            self.iterate()

    def iterate(self) -> None:
        """Do all that can be done now; never blocks."""
        self._take_messages()
        self._take_grammars()
        self._take_reports()
        self._take_results()
        self._plan_in_s = None
        if len(self._in_flight) < self._window and self._settled():
            self._schedule_removes()
            self._plan_in_s = self._due_in_s()
            if self._plan_in_s == 0:
                self._plan_in_s = None
                self._schedule_step()
        self._advance()

    def _due_in_s(self) -> float | None:
        """Seconds until the next step is to be planned; None when the running one's end says."""
        if not self._in_flight or self._plan_timer is None:
            return 0.0
        (running,) = self._in_flight
        wait_s = self._plan_timer.wait_s(running.num_tokens, self._steps.launched_at)
        # Sockets are polled in whole milliseconds: less than one is now.
        return 0.0 if wait_s is not None and wait_s < POLL_S else wait_s

    def _settled(self) -> bool:
        """Return whether every step sent has settled its admit: entries may follow it (R3)."""
        return self._fence.has_settled(self._tp_seq)

    # ------------------------------------------------------------------ phases of the loop

    def _take_messages(self) -> None:
        for message in self._link.receive():
            self._commands.append(message)
            self._state.answer(message)
            if isinstance(message, Measure):
                self._send_stats(message)
        while self._commands:
            # An inspection reads the tables at its own place in the order, on every rank.
            if isinstance(self._commands[0], Inspect) and not self._settled():
                break
            message = self._commands.popleft()
            cause = self._state.apply(message)
            self._follow_up(message, cause)
        if self._link.lost is not None:
            raise PeerLostError(f"the frontend is gone: {self._link.lost}")

    def _follow_up(self, message: ConductorMessage, cause: str | None) -> None:
        """Do the leader's own part of a message that every rank has applied."""
        match message:
            case NewRequest() if cause is not None:
                self._fail(message.rid, cause)
            case NewRequest():
                self._queue_times.came(message.rid)
                self._begin(message)
            case Abort(rid=rid):
                if rid in self._state.requests:
                    self._end(rid)
            case LoadCommit(load_id=load_id):
                self._link.send(LoadDone(load_id=load_id, cause=cause))
            case Inspect(query_id=query_id):
                self._inspect(query_id)
            case Shutdown():
                self._stopping = True
            case _:
                pass

    def _begin(self, message: NewRequest) -> None:
        """Let a request wait for what it lacks before it may enter the queue."""
        grammar = message.params.grammar
        if grammar is None:
            self._await_copies(message)
        elif self._grammars is None:
            self._fail(message.rid, "this leader builds no grammars", param=grammar.field)
        else:
            self._waiting_for_grammar[message.rid] = message
            self._grammars.build(message.rid, grammar)

    def _take_grammars(self) -> None:
        if self._grammars is None or not self._waiting_for_grammar:
            return
        for rid, built in self._grammars.built():
            message = self._waiting_for_grammar.pop(rid, None)
            if message is None:
                continue  # it ended meanwhile
            if isinstance(built, GrammarFault):
                grammar = message.params.grammar
                assert grammar is not None
                self._fail(rid, f"{grammar.field}: {built.cause}", param=grammar.field)
            else:
                self._state.requests[rid].grammar = built
                self._await_copies(message)

    def _await_copies(self, message: NewRequest) -> None:
        """Look among the copies only for what settles later.

        An adapter may change no stage that the request runs, and then there is none to wait for.
        """
        rid, lora = message.rid, self._state.lora
        if message.adapter is not None and lora is not None and lora.needs_copies(rid):
            self._waiting_for_copies[rid] = None
        else:
            self._scheduler.enqueue(rid)

    def _take_reports(self) -> None:
        """Note what every rank's readers did.

        Requests whose copies are in on all ranks join the queue, and those whose read failed end
        (R7).
        """
        if self._schedule is not None:
            for _, report in self._schedule.receive():
                self._note_copy(report)
            if self._schedule.lost is not None and not self._stopping:
                raise PeerLostError(f"a follower is gone: {self._schedule.lost}")
        while True:
            try:
                self._note_copy(self._landed.get_nowait())
            except Empty:
                break
        lora = self._state.lora
        if lora is None or not self._waiting_for_copies:
            return
        for rid, answer in lora.settled(self._waiting_for_copies):
            del self._waiting_for_copies[rid]
            if isinstance(answer, AskFailed):
                self._fail(rid, answer.cause)
            else:
                self._scheduler.enqueue(rid)

    def _note_copy(self, report: CopyIn) -> None:
        assert self._state.lora is not None
        self._state.recorder.put(report)
        digest = self._state.lora.copy_in(report)
        if digest is not None:
            self._link.send(AdapterDigest(key=report.key, digest=digest))

    def _take_results(self) -> None:
        for result in self._steps.results():
            if result.error is not None:
                raise result.error
            sent = self._in_flight.popleft()
            assert result.tp_seq == sent.tp_seq
            self._done = sent.tp_seq
            if self._plan_timer is not None and result.sampled:
                self._plan_timer.note(sent.num_tokens, result.ended_at - result.launched_at)
            if result.refused is not None:
                logger.warning("%s; planned again", result.refused)
                self._refused = [*(self._refused or ()), *sent.joined]
            for rid, cause in result.failed.items():
                if rid not in self._to_remove:
                    self._fail(rid, cause)
            tokens = self._tokens(result)
            # A scored prompt can be megabytes: several in one frame would be more than a frame may.
            scored = [token for token in tokens if token.prompt_logprobs]
            plain = (
                tuple(token for token in tokens if not token.prompt_logprobs) if scored else tokens
            )
            for part in (plain, *((token,) for token in scored)):
                if part:
                    self._link.send(Tokens(tp_seq=result.tp_seq, tokens=part))
        if self._refused is not None and not self._in_flight:
            self._scheduler.void_step(self._refused)
            self._refused = None

    def _tokens(self, result: StepResult) -> tuple[Token, ...]:
        """Return the tokens for the frontend, without those of requests that ended meanwhile."""
        tokens = []
        for rid, drawn in result.sampled.items():
            if rid in self._to_remove:
                continue
            queued_us = self._queue_times.take_us(rid)
            finish = result.ended.get(rid)
            if finish is not None:
                self._end(rid)
            slot = result.slots.get(rid, 0)
            request = self._state.requests.get(rid)
            cached = 0 if request is None else request.tell_cached()
            tokens.append(
                Token(
                    rid=rid,
                    token=drawn.token,
                    finish=finish,
                    slot=slot,
                    queued_us=queued_us,
                    logprobs=drawn.logprobs,
                    prompt_logprobs=drawn.prompt_logprobs,
                    cached=cached,
                )
            )
        return tuple(tokens)

    def _fail(self, rid: int, cause: str, param: str | None = None) -> None:
        request = self._state.requests.get(rid)
        name = "" if request is None else request.request_id
        logger.info("request %d fails: %s", rid, cause, extra={"request_id": name})
        self._link.send(RequestFailed(rid=rid, cause=cause, param=param))
        self._end(rid)

    def _end(self, rid: int) -> None:
        """No further step names the request; its remove follows."""
        self._to_remove[rid] = None
        self._waiting_for_grammar.pop(rid, None)
        self._waiting_for_copies.pop(rid, None)
        self._queue_times.forget(rid)
        self._scheduler.remove(rid)

    def _schedule_removes(self) -> None:
        """Close what ended and no step in flight runs (R4)."""
        self._schedule_drops()
        for rid in list(self._to_remove):
            request = self._state.requests.get(rid)
            if request is not None:
                if request.last_step > self._done:
                    continue
                self._send(Remove(**self._place(), rid=rid))
                self._state.remove(rid)
            del self._to_remove[rid]
        lora = self._state.lora
        if lora is not None and lora.loads.any_to_forget:
            self._send(Forget(**self._place()))
            self._state.forget_retired()

    def _schedule_drops(self) -> None:
        """Every rank drops a copy that some rank could not read; its requests failed (R7)."""
        if self._state.lora is None:
            return
        for pool, key, fetch_no, rank, cause in self._state.lora.failed_copies():
            part = f"its part of the {pool.stage.name} stage: " if pool.stage.name else ""
            logger.warning("rank %d could not read adapter %s: %s%s", rank, key, part, cause)
            drop = DropCopy(
                **self._place(),
                key=key,
                fetch_no=fetch_no,
                rank=rank,
                cause=cause,
                stage=pool.stage.number,
            )
            self._send(drop)
            self._state.drop_copy(drop)

    def _place(self) -> dict[str, int]:
        """Return an entry's place: after what was ingested and the last step's admit (R1, R3)."""
        return {"ingested": self._state.ingested, "after_tp_seq": self._tp_seq}

    def _schedule_step(self) -> None:
        if self._stopping or self._refused is not None:
            return
        self._clock.begin()
        plan = self._scheduler.plan(may_preempt=not self._in_flight)
        for rid in plan.preempted:
            self._send(Preempt(**self._place(), rid=rid, offload=rid in plan.offloaded))
        for rid, cause in plan.failed:
            self._fail(rid, cause)
        if plan.failed:
            self._waker.wake()
        if not plan.rows:
            return
        self._tp_seq += 1
        step = Step(
            ingested=self._state.ingested,
            tp_seq=self._tp_seq,
            planned_after=self._done,
            rows=tuple(plan.rows),
            checks=self._state.checks(),
            cached=tuple(plan.cached),
        )
        self._clock.lap("schedule")
        self._send(step)
        self._clock.lap("broadcast")
        num_tokens = sum(count for _, count in plan.rows)
        self._in_flight.append(_Sent(self._tp_seq, num_tokens, plan.joined))
        self._steps.submit(step)
        for rid in plan.joined:
            self._queue_times.joined(rid)

    def _progress(self) -> dict[str, int]:
        """Return the counts that reports of tables and of stats share."""
        lacking = len(self._waiting_for_grammar) + len(self._waiting_for_copies)
        return {
            "waiting": self._scheduler.num_waiting + lacking,
            "running": self._scheduler.num_running,
            "steps": self._runner.steps,
            "preemptions": self._scheduler.preemptions,
        }

    def _inspect(self, query_id: int) -> None:
        self._link.send(
            self._state.report(
                query_id,
                **self._progress(),
                gap_us=self._runner.gap_us,
                shares=self._scheduler.flow_shares(),
                waiting_for_reads=len(self._waiting_for_copies),
                waiting_for_grammars=len(self._waiting_for_grammar),
            )
        )

    def _send_stats(self, asked: Measure) -> None:
        self._link.send(
            self._state.stats(
                asked,
                **self._progress(),
                timing=self._runner.clock.stats(self._clock),
                process=process_stats(),
            )
        )

    # ------------------------------------------------------------------ the schedule channel

    def _send(self, entry: ScheduleEntry) -> None:
        self._ordered = entry.ingested
        self._state.recorder.put(entry)
        if self._schedule is not None:
            self._schedule.broadcast(entry)

    def _advance(self) -> None:
        """Send a bare Advance, since nothing else followed.

        The followers apply what has come, so no read of theirs waits for a step.
        """
        leaves = self._stopping and not self._sent_last
        if self._ordered < self._state.ingested or leaves:
            self._send(Advance(ingested=self._state.ingested, last=self._stopping))
            self._sent_last = self._stopping
