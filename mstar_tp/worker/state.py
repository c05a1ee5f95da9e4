"""A rank's tables, and how each ordered message changes them.

Leader and follower run the same code.

Main thread. Given the same sequence of calls, two ranks hold the same requests, tier members,
served names, pages and
slots (R1); nothing here reads a clock, a queue's length or what a read came to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from mstar_tp.engine.checks import SCHEDULE_TABLES, TableChecks
from mstar_tp.engine.resources.kv.pool import KvPool
from mstar_tp.engine.resources.lora.pools import LoraPools
from mstar_tp.engine.resources.lora.registry.validation import ValidationResult
from mstar_tp.engine.scheduling.requests import RequestTable
from mstar_tp.engine.table_rows import Row
from mstar_tp.lora.spec import LoraReqConfig
from mstar_tp.recording import NO_RECORDING, Recorder, entries
from mstar_tp.wire.adapter_limits import AdapterShare
from mstar_tp.wire.commands import (
    Abort,
    ConductorMessage,
    Inspect,
    Load,
    LoadAbort,
    LoadCommit,
    Locate,
    Measure,
    NewRequest,
    Shutdown,
    Unload,
    Validate,
)
from mstar_tp.wire.reports import LoadResult, RankReport, Validated
from mstar_tp.wire.schedule import Checks, DropCopy, Step
from mstar_tp.wire.states import Located, RankStats, StateReport
from mstar_tp.wire.stats import ProcessStats, StepStats

logger = logging.getLogger(__name__)

NO_ADAPTERS = "this instance serves no adapters: start it with --lora or --lora-root"


def asked_of(message: NewRequest) -> LoraReqConfig:
    """Return what a request asks of the adapters' pools."""
    return LoraReqConfig(message.adapter, has_images=bool(message.images))


class RankState:
    """``send`` reports to the frontend and may be called from a reader thread."""

    def __init__(
        self,
        rank: int,
        requests: RequestTable,
        kv: KvPool,
        lora: LoraPools | None,
        send: Callable[[RankReport], None],
        recorder: Recorder = NO_RECORDING,
    ) -> None:
        self.rank = rank
        self.requests = requests
        self.kv = kv
        self.lora = lora
        self._send = send
        self.recorder = recorder
        self._checks = TableChecks(rank, requests, kv, lora, recorder)
        self._loads: dict[int, Load] = {}
        self.ingested = 0

    # ------------------------------------------------------------------ conductor stream

    def apply(self, message: ConductorMessage) -> str | None:
        """Apply the next conductor message in its order.

        Returns why its request or load fails at once, or None.

        Aborts, Inspects, Measures, Locates, Validates and Shutdowns change no table here: the loops
        act on them.
        """
        self.ingested += 1
        self.recorder.put(entries.recorded_command(message))
        match message:
            case NewRequest():
                return self._open(message)
            case Load():
                self._load(message)
            case LoadCommit():
                return self._commit(message)
            case LoadAbort():
                load = self._loads.pop(message.load_id, None)
                if load is not None and self.lora is not None:
                    self.lora.loads.abort(load.key)
            case Unload():
                if self.lora is not None:
                    self.lora.loads.unload(message.key)
            case Abort() | Inspect() | Measure() | Locate() | Validate() | Shutdown():
                pass
        return None

    def _open(self, message: NewRequest) -> str | None:
        request = self.requests.add(message)
        self.kv.ingest_request(message.rid)
        cause = None
        if self.lora is not None:
            cause = self.lora.ingest_request(message.rid, asked_of(message))
        elif message.adapter is not None:
            cause = NO_ADAPTERS
        request.dead = cause
        return cause

    def answer(self, message: ConductorMessage) -> None:
        """Answer what needs no place in the order, as it arrives.

        It is applied in its place, too, and does nothing there.
        """
        lora = self.lora
        match message:
            case Locate(query_id=query_id, adapters=keys):
                found = () if lora is None else lora.reports.adapter_states(keys)
                self._send(Located(rank=self.rank, query_id=query_id, adapters=found))
            case Validate() if lora is None:
                self._validated(message, ValidationResult(problems=(NO_ADAPTERS,)))
            case Validate():
                assert lora is not None
                lora.loads.validate_adapter(
                    message.name, message.path, lambda found: self._validated(message, found)
                )
            case _:
                pass

    def _validated(self, message: Validate, found: ValidationResult) -> None:
        """Any thread."""
        self._send(
            Validated(
                rank=self.rank,
                query_id=message.query_id,
                problems=found.problems,
                warnings=found.notes,
                lora_rank=found.lora_rank,
                targets=found.changes,
                num_bytes=found.num_bytes,
            )
        )

    def _load(self, message: Load) -> None:
        self._loads[message.load_id] = message

        def done(cause: str | None, lora_rank: int, targets: tuple[str, ...]) -> None:
            self._send(
                LoadResult(
                    rank=self.rank,
                    load_id=message.load_id,
                    cause=cause,
                    lora_rank=lora_rank,
                    targets=targets,
                )
            )

        if self.lora is None:
            done(NO_ADAPTERS, 0, ())
        else:
            self.lora.loads.begin(message.key, message.path, done)

    def _commit(self, message: LoadCommit) -> str | None:
        load = self._loads.pop(message.load_id, None)
        if load is None:
            return f"load {message.load_id} was never announced to rank {self.rank}"
        if self.lora is None:
            return NO_ADAPTERS
        return self.lora.loads.commit(
            load.key, load.path, load.digest, message.replaces, load.limits
        )

    # ------------------------------------------------------------------ order stream

    def remove(self, rid: int) -> None:
        """Close a request: its slot hold, pages and entry.

        The caller has waited at the fence (R3, R4).
        """
        request = self.requests.get(rid)
        self.kv.remove_request(rid, spoilt=request is not None and request.dead is not None)
        self.requests.remove(rid)
        if self.lora is not None:
            self.lora.remove_request(rid)

    def preempt(self, rid: int, *, offload: bool = False) -> None:
        """Take a request's pages; its adapter slot stays held.

        If ``offload``, host memory keeps their contents; else the request computes its tokens
        again.

        Raises:
            LockstepError: they do not fit there.
        """
        request = self.requests[rid]
        self.kv.preempt(rid, request.computed, offload=offload)
        request.preempt(offload=offload)

    def drop_copy(self, entry: DropCopy) -> None:
        """Forget a copy that some rank could not read."""
        if self.lora is not None:
            self.lora.drop_copy(entry)

    def forget_retired(self) -> None:
        """Forget what unloads left behind, between the same two admits on every rank."""
        if self.lora is not None:
            self.lora.loads.forget()

    # ------------------------------------------------------------------ checks and reports

    def checks(self) -> Checks:
        """Running hashes of this rank's tables (R8). Between two admits only."""
        return self._checks.now()

    def table_rows(self, table: str) -> tuple[Row, ...]:
        """Return what one of ``engine.checks.TABLES`` holds.

        Between two steps only.
        """
        return self._checks.rows(table)

    def verify(self, step: Step) -> None:
        """Compare what the order alone decides with the leader's tables, at the step's place.

        Raises:
            LockstepError: naming step, rank and table.
        """
        self._checks.verify(step.tp_seq, step.checks, SCHEDULE_TABLES)

    def report(
        self,
        query_id: int,
        *,
        waiting: int,
        running: int,
        steps: int,
        preemptions: int,
        gap_us: int,
        shares: tuple[AdapterShare, ...] = (),
        waiting_for_reads: int = 0,
        waiting_for_grammars: int = 0,
    ) -> StateReport:
        """This rank's tables for an operator. Between two admits only."""
        lora, stages = self.lora, () if self.lora is None else self.lora.reports.stage_states()
        decoder = stages[-1] if stages else None
        return StateReport(
            rank=self.rank,
            query_id=query_id,
            requests=tuple(request.rid for request in self.requests),
            pages_used=self.kv.table.num_used,
            pages_total=self.kv.table.num_pages,
            slots=decoder.slots if decoder is not None else (),
            cpu_cache=decoder.cpu_cache if decoder is not None else (),
            served=lora.reports.served() if lora is not None else (),
            host=decoder.host if decoder is not None else None,
            other_stages=stages[:-1],
            failed_reads=lora.reports.failed_reads() if lora is not None else (),
            adapters=lora.reports.adapter_states() if lora is not None else (),
            waiting=waiting,
            running=running,
            steps=steps,
            steps_waited_for_read=lora.reports.steps_waited_for_read if lora is not None else 0,
            preemptions=preemptions,
            gap_us=gap_us,
            shares=shares,
            checks=self.checks(),
            kv_host=self.kv.kept.state(),
            prefix=self.kv.sharing.stats(),
            waiting_for_reads=waiting_for_reads,
            waiting_for_grammars=waiting_for_grammars,
        )

    def stats(
        self,
        asked: Measure,
        *,
        waiting: int,
        running: int,
        steps: int,
        preemptions: int,
        timing: StepStats | None = None,
        process: ProcessStats | None = None,
    ) -> RankStats:
        """This rank in numbers, now: beside a running step, which is not held up."""
        return RankStats(
            rank=self.rank,
            query_id=asked.query_id,
            steps=steps,
            preemptions=preemptions,
            waiting=waiting,
            running=running,
            requests=len(self.requests),
            pages_used=self.kv.table.num_used,
            pages_total=self.kv.table.num_pages,
            lora=() if self.lora is None else self.lora.reports.stats(),
            timing=timing,
            process=process,
            kv_host=self.kv.kept.state(),
            prefix=self.kv.sharing.stats(),
            adapters=() if self.lora is None else self.lora.reports.adapter_states(asked.adapters),
        )
