"""Rank 0's main loop: ingests, chooses steps, orders every rank, sends tokens.

One step is in flight at a time. While it runs the loop goes on ingesting (R1 allows it: nothing an
ingest decides is read
by an admit); removes, preemptions and the next step wait until it has finished, which is when R3
and R4 let them land.
"""

from __future__ import annotations

import logging
from queue import Empty, SimpleQueue

from mstar_tp.engine.resources.base import AskFailed
from mstar_tp.engine.runner import StepRunner
from mstar_tp.engine.sampling import Sampled
from mstar_tp.engine.scheduler import Scheduler
from mstar_tp.engine.step_thread import StepResult, StepThread
from mstar_tp.errors import PeerLostError
from mstar_tp.wire.channels import ConductorLink, OrderServer
from mstar_tp.wire.messages import (
    Abort,
    AdapterDigest,
    Advance,
    ConductorMessage,
    CopyIn,
    DropCopy,
    Forget,
    Inspect,
    LoadCommit,
    LoadDone,
    NewRequest,
    OrderEntry,
    Preempt,
    Remove,
    RequestFailed,
    Shutdown,
    Step,
    Token,
    Tokens,
)
from mstar_tp.worker.state import RankState
from mstar_tp.worker.waker import Waker

logger = logging.getLogger(__name__)


class Leader:
    """Main thread of rank 0. ``landed`` holds this rank's own copies as its readers finish them."""

    def __init__(
        self,
        state: RankState,
        scheduler: Scheduler,
        steps: StepThread,
        runner: StepRunner,
        link: ConductorLink,
        order: OrderServer | None,
        waker: Waker,
        landed: SimpleQueue[CopyIn],
        max_model_len: int,
    ) -> None:
        self._state = state
        self._scheduler = scheduler
        self._steps = steps
        self._runner = runner
        self._link = link
        self._order = order
        self._waker = waker
        self._max_model_len = max_model_len
        self._landed = landed
        self._waiting_for_copies: dict[int, None] = {}
        self._to_remove: dict[int, None] = {}
        self._inspects: list[int] = []
        self._in_flight: int | None = None
        self._tp_seq = -1
        self._ordered = 0
        self._stopping = False

    def run(self) -> None:
        """Serve until a Shutdown is ordered.

        Raises:
            PeerLostError: the frontend or a follower is gone.
            BaseException: what a step raised.
        """
        order = () if self._order is None else (self._order.poll_socket,)
        poller = self._waker.poller(self._link.poll_socket, *order)
        while not (self._stopping and self._in_flight is None):
            poller.poll()
            self._waker.clear()
            self._take_messages()
            self._take_reports()
            self._take_results()
            if self._in_flight is None:
                self._order_removes()
                self._answer_inspects()
                self._order_step()
            self._advance()

    # ------------------------------------------------------------------ phases of the loop

    def _take_messages(self) -> None:
        for message in self._link.receive():
            cause = self._state.apply(message)
            self._follow_up(message, cause)
        if self._link.lost is not None:
            raise PeerLostError(f"the frontend is gone: {self._link.lost}")

    def _follow_up(self, message: ConductorMessage, cause: str | None) -> None:
        """What only the leader does about a message every rank has applied."""
        match message:
            case NewRequest() if cause is not None:
                self._fail(message.rid, cause)
            case NewRequest(rid=rid, adapter=None):
                self._scheduler.enqueue(rid)
            case NewRequest(rid=rid):
                self._waiting_for_copies[rid] = None
            case Abort(rid=rid):
                if rid in self._state.requests:
                    self._to_remove[rid] = None
            case LoadCommit(load_id=load_id):
                self._link.send(LoadDone(load_id=load_id, cause=cause))
            case Inspect(query_id=query_id):
                self._inspects.append(query_id)
            case Shutdown():
                self._stopping = True
            case _:
                pass

    def _take_reports(self) -> None:
        """Note what every rank's readers did; let requests whose copies are in on all of them join
        the
        queue, and end those whose read failed (R7)."""
        if self._order is not None:
            for _, report in self._order.receive():
                self._note_copy(report)
            if self._order.lost is not None:
                raise PeerLostError(f"a follower is gone: {self._order.lost}")
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
            assert result.tp_seq == self._in_flight
            self._in_flight = None
            if result.refused is not None:
                logger.warning("%s; planned again", result.refused)
                self._scheduler.void_step()
            for rid, cause in result.failed.items():
                self._fail(rid, cause)
            if result.sampled:
                tokens = tuple(
                    self._token(rid, drawn, result) for rid, drawn in result.sampled.items()
                )
                self._link.send(Tokens(tp_seq=result.tp_seq, tokens=tokens))

    def _token(self, rid: int, drawn: Sampled, result: StepResult) -> Token:
        finish = self._finish_of(rid, drawn.token)
        if finish is not None:
            self._to_remove[rid] = None
        return Token(
            rid=rid,
            token=drawn.token,
            finish=finish,
            slot=result.slots.get(rid, 0),
            logprobs=drawn.logprobs,
        )

    def _finish_of(self, rid: int, token: int) -> str | None:
        request = self._state.requests[rid]
        if (
            token in request.params.stop_token_ids
            and request.num_output > request.params.min_tokens
        ):
            return "stop"
        if (
            request.num_output >= request.params.max_tokens
            or len(request.tokens) >= self._max_model_len
        ):
            return "length"
        return None

    def _fail(self, rid: int, cause: str) -> None:
        self._link.send(RequestFailed(rid=rid, cause=cause))
        self._to_remove[rid] = None

    def _order_removes(self) -> None:
        """Close what ended. No step is in flight, so the device has finished with it (R4)."""
        self._order_drops()
        for rid in self._to_remove:
            if rid in self._state.requests:
                self._send(Remove(**self._place(), rid=rid))
                self._waiting_for_copies.pop(rid, None)
                self._scheduler.remove(rid)
                self._state.remove(rid)
        self._to_remove.clear()
        lora = self._state.lora
        if lora is not None and lora.has_retired:
            self._send(Forget(**self._place()))
            self._state.forget_retired()

    def _order_drops(self) -> None:
        """Every rank drops a copy that some rank could not read; its requests failed (R7)."""
        if self._state.lora is None:
            return
        for key, hold_no, rank, cause in self._state.lora.failed_copies():
            logger.warning("rank %d could not read adapter %s: %s", rank, key, cause)
            drop = DropCopy(**self._place(), key=key, hold_no=hold_no, rank=rank, cause=cause)
            self._send(drop)
            self._state.drop_copy(drop)

    def _place(self) -> dict[str, int]:
        """Where an entry stands: after what was ingested, after the last step's admit (R1, R3)."""
        return {"ingested": self._state.ingested, "after_tp_seq": self._tp_seq}

    def _order_step(self) -> None:
        if self._stopping:
            return
        plan = self._scheduler.plan()
        for rid in plan.preempted:
            self._send(Preempt(**self._place(), rid=rid))
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
            rows=tuple(plan.rows),
            checks=self._state.checks(),
        )
        self._send(step)
        self._in_flight = self._tp_seq
        self._steps.submit(step)

    def _answer_inspects(self) -> None:
        for query_id in self._inspects:
            self._link.send(
                self._state.report(
                    query_id,
                    waiting=self._scheduler.num_waiting + len(self._waiting_for_copies),
                    running=self._scheduler.num_running,
                    steps=self._runner.steps,
                    preemptions=self._scheduler.preemptions,
                )
            )
        self._inspects.clear()

    # ------------------------------------------------------------------ the order channel

    def _send(self, entry: OrderEntry) -> None:
        self._ordered = entry.ingested
        self._state.recorder.put(entry)
        if self._order is not None:
            self._order.broadcast(entry)

    def _advance(self) -> None:
        """Nothing else followed: let the followers apply what has come, so no read of theirs waits
        for a step.
        """
        if self._ordered < self._state.ingested:
            self._send(Advance(ingested=self._state.ingested))
