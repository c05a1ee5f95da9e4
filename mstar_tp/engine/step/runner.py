"""One step on one rank: admit, plan, forward, sample, commit. Step thread only.

Every rank runs the same code over the same rows. Only rank 0 samples; its tokens reach the others
by one broadcast inside the step, so no rank ever draws for itself. They are committed here, before
the next step is built: that one may have been announced while this one ran, and takes its input
tokens from this commit.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import NamedTuple

import torch

from mstar_tp.distributed.comm import JointGroups
from mstar_tp.engine.checks import STEP_TABLES, TableChecks
from mstar_tp.engine.graphs.forwards import CapturedForwards
from mstar_tp.engine.model import ServedModel
from mstar_tp.engine.resources.base import Resource, StepBatch, StepRow
from mstar_tp.engine.resources.kv.pool import KvPool
from mstar_tp.engine.resources.lora.pools import LoraPools
from mstar_tp.engine.sampling.sampler import (
    NOT_FINITE,
    LogprobsMode,
    Sampled,
    SampleFailed,
    SampleRow,
    sample,
    score,
)
from mstar_tp.engine.scheduling.requests import NO_TOKEN, RequestTable
from mstar_tp.engine.step.images import RowImages
from mstar_tp.engine.step.step_clock import STEP_PHASES, StepClock
from mstar_tp.engine.step.step_tables import StepTables
from mstar_tp.engine.step.step_thread import StepResult
from mstar_tp.layers.attention.attention import AttentionRow, ForwardContext
from mstar_tp.recording import NO_RECORDING, Recorder
from mstar_tp.recording.entries import Ran
from mstar_tp.wire.schedule import Step

GAPS_KEPT = 256
"""The number of last steps whose median gap an inspection reports."""

RunForward = Callable[
    [Sequence[int], Sequence[int], Sequence[int], Sequence[int] | None], torch.Tensor | None
]
"""Runs a forward; returns the logits of the rows that the head sees, on rank 0.

It takes ids, positions, the rows that the head sees, and where ids are on the device (None: all are
on the host)."""


class LaidOut(NamedTuple):
    """A step before its launch."""

    ids: list[int]
    positions: list[int]
    heads: list[int]
    run: RunForward
    num_rows: int


class StepRunner:
    """Runs steps over the rank's tables; see the modules of each for who owns it."""

    def __init__(
        self,
        model: ServedModel,
        requests: RequestTable,
        kv: KvPool,
        lora: LoraPools | None,
        groups: JointGroups,
        logprobs_mode: LogprobsMode,
        recorder: Recorder = NO_RECORDING,
        graphs: CapturedForwards | None = None,
        *,
        deferred: bool = False,
    ) -> None:
        """``graphs`` are replayed for the steps they hold; ``deferred``: see ``StepTables``."""
        self._model = model
        self._graphs = graphs
        self._requests = requests
        self._kv = kv
        self._lora = lora
        self._groups = groups
        self._logprobs_mode: LogprobsMode = logprobs_mode
        self._recorder = recorder
        self._checks = TableChecks(groups.tp.rank, requests, kv, lora, recorder)
        resources: tuple[Resource, ...] = (kv,) if lora is None else (*lora.pools, kv)
        self._tables = StepTables(requests, resources, deferred=deferred)
        self.steps = 0
        """Steps whose admit has settled."""
        self.clock = StepClock(STEP_PHASES)
        self._forward_ended: float | None = None
        self._gaps_s: deque[float] = deque(maxlen=GAPS_KEPT)

    @property
    def gap_us(self) -> int:
        """The median microseconds from the end of one forward to the start of the next.

        While requests are running, it is what a step costs beside its forward. Any thread.
        """
        gaps = list(self._gaps_s)
        return round(median(gaps) * 1e6) if gaps else 0

    def prepare_thread(self) -> None:
        """Set up the step thread, on that thread, before its first step."""
        self._model.prepare_thread()

    def run(self, entry: Step, settled: Callable[[], None]) -> StepResult:
        """Run the leader's ``entry``; ``settled`` is called when admit and plan are over.

        Raises:
            LockstepError: this rank's tables differ from the leader's.
        """
        self.clock.begin()
        self._checks.verify(entry.tp_seq, entry.checks, STEP_TABLES)
        result = self._run(entry, settled)
        self._record(result)
        return result

    def _record(self, result: StepResult) -> None:
        self._recorder.put(
            Ran(
                tp_seq=result.tp_seq,
                failed=tuple(result.failed),
                ended=tuple(result.ended),
                refused=result.refused is not None,
            )
        )

    def run_step(self, entry: Step, settled: Callable[[], None]) -> Sequence[StepResult]:
        """``run``; results of the steps that have ended with it, in their order."""
        return (self.run(entry, settled),)

    def flush(self) -> Sequence[StepResult]:
        """Wait for the steps that still run on the device; their results, in order."""
        return ()

    def has_landed(self) -> bool:
        """Return whether ``flush`` would not wait."""
        return True

    def _run(self, entry: Step, settled: Callable[[], None]) -> StepResult:
        step, failed, refused = self._tables.admit(entry)
        self.clock.lap("admit")
        if refused is not None or not step.rows:
            self._tables.clear(step)
            self._settle(entry, settled)
            return StepResult(tp_seq=entry.tp_seq, failed=failed, refused=refused)
        drawn = self._forward(entry, step, settled)
        ended = self._tables.commit(step, [token_of(s) for s in drawn.values()])
        self.clock.lap("commit")
        return self._result(entry.tp_seq, drawn, failed, ended)

    def _result(
        self,
        tp_seq: int,
        drawn: dict[int, Sampled | SampleFailed],
        failed: dict[int, str],
        ended: dict[int, str],
    ) -> StepResult:
        sampled = {rid: s for rid, s in drawn.items() if isinstance(s, Sampled)}
        unsampled = {rid: s.cause for rid, s in drawn.items() if isinstance(s, SampleFailed)}
        slots = {}
        if self._lora is not None:
            slots = self._lora.slots_of(sampled)
        return StepResult(
            tp_seq=tp_seq,
            sampled=sampled,
            slots=slots,
            ended=ended,
            failed=failed | unsampled,
        )

    def _settle(self, entry: Step, settled: Callable[[], None]) -> None:
        """The step's admit and plan are over: the main thread may change what admits read."""
        self._tables.settle(entry)
        self.steps += 1
        settled()

    def _forward(
        self, entry: Step, step: StepBatch, settled: Callable[[], None]
    ) -> dict[int, Sampled | SampleFailed]:
        laid_out = self._lay_out(step)
        self.clock.lap("plan")
        self._settle(entry, settled)
        logits = self._launch(laid_out)
        if logits is not None:
            logits = self._score(logits, step.rows)
        self.clock.lap("forward")
        self._forward_ended = time.perf_counter()
        sampling = [row for row in step.rows if row.samples]
        return self._sample(logits, sampling) if sampling else {}

    def _launch(self, step: LaidOut, sources: Sequence[int] | None = None) -> torch.Tensor | None:
        """Logits of the rows that the head sees, on rank 0."""
        if self._forward_ended is not None:
            self._gaps_s.append(time.perf_counter() - self._forward_ended)
        self.clock.runs(step.num_rows, len(step.ids))
        return step.run(step.ids, step.positions, step.heads, sources)

    def _lay_out(self, step: StepBatch) -> LaidOut:
        ids: list[int] = []
        positions: list[int] = []
        heads: list[int] = []
        images: list[RowImages] = []
        for row in step.rows:
            end = row.start + row.num_tokens
            request = self._requests[row.rid]
            if request.images:
                images.append(request.row_images(row, len(ids)))
            ids += request.tokens[row.start : end]
            positions += range(row.start, end)
            heads += range(len(ids) - row.num_tokens, len(ids) - row.num_tokens + row.scored)
            if row.samples:
                heads.append(len(ids) - 1)
        attention = [
            AttentionRow(row.num_tokens, row.start, self._kv.table.held(row.rid))
            for row in step.rows
        ]
        if self._graphs is not None:
            eager = any(row.begins or row.pieces() for row in images)
            captured = self._graphs.plan(step, attention, eager=eager)
            if captured is not None:
                run = partial(self._graphs.run, captured)
                return LaidOut(ids, positions, heads, run, len(step.rows))
        if self._lora is not None:
            self._lora.plan(step)
        own_run = self._plan_in_cpp(ids, heads, attention, images)
        if own_run is None:
            own_run = partial(self._run_eagerly, self._model.plan(attention), images)
        return LaidOut(ids, positions, heads, own_run, len(step.rows))

    def _plan_in_cpp(
        self,
        ids: Sequence[int],
        heads: Sequence[int],
        attention: Sequence[AttentionRow],
        images: Sequence[RowImages],
    ) -> RunForward | None:
        """Lay a step out for one call that runs all of it, if there is such for this one."""
        if len(heads) != len(ids) or images or not self._model.plan_decode(ids, attention):
            return None
        return lambda ids, positions, heads, sources: self._model.decode()

    def _run_eagerly(
        self,
        context: ForwardContext,
        images: Sequence[RowImages],
        ids: Sequence[int],
        positions: Sequence[int],
        heads: Sequence[int],
        sources: Sequence[int] | None,
    ) -> torch.Tensor | None:
        assert sources is None, "every token is on the host"
        hidden = self._model.forward(ids, positions, context, images)
        return self._model.logits(hidden, heads) if heads else None

    def _score(self, logits: torch.Tensor, rows: Sequence[StepRow]) -> torch.Tensor:
        """Keep what the head says of prompts' tokens; return the logits of the rows that sample.

        Rank 0. Their order stays.
        """
        if not any(row.scored for row in rows):
            return logits
        sampling: list[int] = []
        first = 0
        for row in rows:
            if row.scored:
                request = self._requests[row.rid]
                count = request.params.prompt_logprobs
                assert count is not None, "a row is scored that asks for no log probabilities"
                following = request.tokens[row.start + 1 : row.start + 1 + row.scored]
                part = logits[first : first + row.scored]
                request.prompt_scores += score(part, following, count, self._logprobs_mode)
            first += row.num_head_rows
            if row.samples:
                sampling.append(first - 1)
        return logits[sampling]

    def _sample(
        self, logits: torch.Tensor | None, sampling: list[StepRow]
    ) -> dict[int, Sampled | SampleFailed]:
        """Rank 0 draws; its tokens, and NO_TOKEN for a failed row, reach all by one broadcast."""
        group = self._groups.tp
        drawn: list[Sampled | SampleFailed] = []
        if group.rank == 0:
            assert logits is not None
            rows = [self._sample_row(row.rid) for row in sampling]
            drawn = sample(logits, rows, self._logprobs_mode)
            drawn = [self._with_scores(row.rid, s) for row, s in zip(sampling, drawn, strict=True)]
            self.clock.lap("sample")
        if group.world_size > 1:
            tokens = [token_of(s) for s in drawn] or [0] * len(sampling)
            tokens = group.broadcast(self._model.ids(tokens)).tolist()
            if group.rank != 0:
                drawn = [_follow(token) for token in tokens]
            self.clock.lap("exchange")
        return {row.rid: s for row, s in zip(sampling, drawn, strict=True)}

    def _with_scores(self, rid: int, drawn: Sampled | SampleFailed) -> Sampled | SampleFailed:
        """Add what is known of the prompt to the first token of a row."""
        scores = self._requests[rid].prompt_scores
        if not scores or not isinstance(drawn, Sampled):
            return drawn
        if any(math.isnan(each.chosen) for each in scores):
            return SampleFailed(NOT_FINITE)
        told = tuple(scores)
        scores.clear()
        return replace(drawn, prompt_logprobs=told)

    def _sample_row(self, rid: int) -> SampleRow:
        request = self._requests[rid]
        return SampleRow(
            params=request.params,
            tokens=request.tokens,
            prompt_len=request.prompt_len,
            grammar=request.grammar,
            request_id=request.request_id,
        )


def token_of(drawn: Sampled | SampleFailed) -> int:
    """The token that is broadcast and committed for a row."""
    return drawn.token if isinstance(drawn, Sampled) else NO_TOKEN


def _follow(token: int) -> Sampled | SampleFailed:
    """The result of rank 0's draw, as a follower knows it."""
    if token == NO_TOKEN:
        return SampleFailed("rank 0 could choose no token")
    return Sampled(token, None)
