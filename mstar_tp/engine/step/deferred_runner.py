"""Steps whose tokens stay on the device: the next one is launched before they reach the host.

The step thread launches step N + 1 while N runs. What N sampled is gathered on the device into the
input of N + 1, and reaches the host by a copy of its own, with which N is committed. So N + 1 is
built without N's tokens: a row that N ended runs once more, and what comes of it is dropped. That
must be so on every rank, however early it hears of N's tokens, so the rule goes by what the leader
knew when it planned N + 1 (``planned_after``), which stands in the order.

A row may ask for what only the host computes (log probabilities, penalties): then its step's logits
wait until the step before is committed, and are sampled as without deferral. Step thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mstar_tp.engine.checks import STEP_TABLES
from mstar_tp.engine.graphs.inputs import FROM_HOST, StepInputs
from mstar_tp.engine.resources.base import StepBatch, StepRow
from mstar_tp.engine.sampling.device_sampling import needs_host, sample_on_device
from mstar_tp.engine.sampling.sampler import NOT_FINITE, Sampled, SampleFailed
from mstar_tp.engine.scheduling.requests import NO_TOKEN
from mstar_tp.engine.step.images import RowImages
from mstar_tp.engine.step.runner import RunForward, StepRunner, token_of
from mstar_tp.engine.step.step_thread import StepResult
from mstar_tp.layers.attention.attention import AttentionRow, ForwardContext
from mstar_tp.wire.schedule import Step


class Readback(Protocol):
    """Tokens on their way to the host."""

    def done(self) -> bool:
        """Return whether ``wait`` would not block."""
        ...

    def wait(self) -> list[int]:
        """Block until all that was launched before the fetch has ended."""
        ...


class PageLockedReadback:
    """Tokens of a tensor on any device, copied to page-locked memory; on a CPU at once."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=tokens.is_cuda)
        self._host.copy_(tokens, non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def done(self) -> bool:
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def wait(self) -> list[int]:
        if self._copied is not None:
            self._copied.synchronize()
        tokens: list[int] = self._host.tolist()
        return tokens


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that runs, or has run, and is not committed.

    ``places`` gives for each row that samples the index of its token among the step's.
    """

    step: StepBatch
    failed: dict[int, str]
    tokens: Readback
    places: dict[int, int]


class DeferredRunner(StepRunner):
    """Results of a step come with a later call: ``run_step``'s of the next one, or ``flush``'s."""

    def __init__(
        self,
        *args: Any,
        inputs: StepInputs,
        fetch: Callable[[torch.Tensor], Readback] = PageLockedReadback,
        **kwargs: Any,
    ) -> None:
        """``inputs`` hold as many tokens as a step may have; graphs read theirs there."""
        super().__init__(*args, **kwargs, deferred=True)
        self._inputs = inputs
        self._fetch = fetch
        self._launched: Launched | None = None

    def run(self, entry: Step, settled: Callable[[], None]) -> StepResult:
        """Run a step to its end, as no other follows. For tests."""
        *_, result = [*self.run_step(entry, settled), *self.flush()]
        return result

    def run_step(self, entry: Step, settled: Callable[[], None]) -> Sequence[StepResult]:
        results: list[StepResult] = []
        if self._launched is not None and entry.planned_after >= self._launched.step.tp_seq:
            results += self.flush()  # the plan counts on its commit
        self.clock.begin()
        self._checks.verify(entry.tp_seq, entry.checks, STEP_TABLES)
        step, failed, refused = self._tables.admit(entry)
        self.clock.lap("admit")
        if refused is not None or not step.rows:
            self._tables.clear(step)
            self._settle(entry, settled)
            results += self.flush()
            void = StepResult(tp_seq=entry.tp_seq, failed=failed, refused=refused)
            self._record(void)
            return [*results, void]
        laid_out = self._lay_out(step)
        on_host = self._needs_host(step)
        positions = [(self._requests[r.rid].params, r.start + r.num_tokens) for r in step.rows]
        sources = self._sources(step)
        self.clock.lap("plan")
        self._settle(entry, settled)
        logits = self._launch(laid_out, sources)
        self.clock.lap("forward")
        if on_host:
            results += self.flush()
            self.clock.begin()
            results.append(self._finish_on_host(step, logits, failed))
            return results
        sampled = [
            position for row, position in zip(step.rows, positions, strict=True) if row.samples
        ]
        launched = self._sample_later(step, logits, sampled, failed)
        self.clock.lap("sample")
        # The tokens of the step before are committed once this one runs.
        results += self.flush()
        self._launched = launched
        return results

    def flush(self) -> Sequence[StepResult]:
        launched, self._launched = self._launched, None
        if launched is None:
            return ()
        self.clock.begin()
        tokens = launched.tokens.wait()
        self.clock.lap("wait")
        ended = self._tables.commit_launched(launched.step, tokens)
        self.clock.lap("commit")
        drawn: dict[int, Sampled | SampleFailed] = {}
        for rid, place in launched.places.items():
            request = self._requests[rid]
            if -1 < request.ended_by < launched.step.tp_seq:
                continue  # a step before ended it
            token = tokens[place]
            drawn[rid] = SampleFailed(NOT_FINITE) if token == NO_TOKEN else Sampled(token, None)
        result = self._result(launched.step.tp_seq, drawn, launched.failed, ended)
        self._record(result)
        return (result,)

    def has_landed(self) -> bool:
        return self._launched is None or self._launched.tokens.done()

    # ------------------------------------------------------------------ inside

    def _needs_host(self, step: StepBatch) -> bool:
        """Equal on every rank."""
        for row in step.rows:
            request = self._requests[row.rid]
            if request.params.prompt_logprobs is not None:
                return True
            if row.samples and needs_host(request.params, request.num_output):
                return True
        return False

    def _sources(self, step: StepBatch) -> list[int]:
        """The place on the device of each of the step's tokens, or FROM_HOST."""
        sources: list[int] = []
        for row in step.rows:
            tokens = self._requests[row.rid].tokens[row.start : row.start + row.num_tokens]
            sources += [FROM_HOST] * row.num_tokens
            if tokens[-1] == NO_TOKEN and self._launched is not None:
                sources[-1] = self._launched.places.get(row.rid, FROM_HOST)
        return sources

    def _sample_later(
        self,
        step: StepBatch,
        logits: torch.Tensor | None,
        rows: Sequence[Any],
        failed: dict[int, str],
    ) -> Launched:
        """Launch a step's sampling, and the copies of its tokens to every rank and the host."""
        with torch.inference_mode():
            tokens = self._inputs.last_tokens[: len(rows)]
            group = self._groups.tp
            if logits is not None and rows:
                tokens.copy_(sample_on_device(logits, rows))
            if group.world_size > 1 and rows:
                group.broadcast(tokens)
            fetch = self._fetch(tokens)
        sampling = (row.rid for row in step.rows if row.samples)
        launched = Launched(step, failed, fetch, {rid: at for at, rid in enumerate(sampling)})
        self._tables.launch(step)
        return launched

    def _finish_on_host(
        self, step: StepBatch, logits: torch.Tensor | None, failed: dict[int, str]
    ) -> StepResult:
        if logits is not None:
            logits = self._score(logits, step.rows)
        sampling: list[StepRow] = [row for row in step.rows if row.samples]
        drawn = self._sample(logits, sampling) if sampling else {}
        over = {r.rid for r in sampling if -1 < self._requests[r.rid].ended_by < step.tp_seq}
        ended = self._tables.commit(step, [token_of(s) for s in drawn.values()])
        self.clock.lap("commit")
        kept = {rid: s for rid, s in drawn.items() if rid not in over}
        result = self._result(step.tp_seq, kept, failed, ended)
        self._record(result)
        return result

    def _plan_in_cpp(
        self,
        ids: Sequence[int],
        heads: Sequence[int],
        attention: Sequence[AttentionRow],
        images: Sequence[RowImages],
    ) -> RunForward | None:
        return None  # it takes its ids from the host

    def _run_eagerly(
        self,
        context: ForwardContext,
        images: Sequence[RowImages],
        ids: Sequence[int],
        positions: Sequence[int],
        heads: Sequence[int],
        sources: Sequence[int] | None,
    ) -> torch.Tensor | None:
        self._inputs.write(len(ids), ids, positions, sources)
        hidden = self._model.forward(
            self._inputs.ids(len(ids)), self._inputs.positions(len(ids)), context, images
        )
        return self._model.logits(hidden, heads) if heads else None
