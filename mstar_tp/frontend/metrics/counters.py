"""The frontend's counters of requests, and their latency phases. The event loop's thread.

Times are in seconds by ``time.monotonic``, and run from when a request's headers were in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mstar_tp.common.histogram import NUM_TOKENS, TOKEN_S, WAIT_S, WHOLE_S, Histogram
from mstar_tp.frontend.api.api_errors import ApiError
from mstar_tp.frontend.metrics.adapter_counts import AdapterSeries
from mstar_tp.frontend.metrics.outcomes import Outcome, Refusal, refusal

ADAPTER_SERIES = 64


@dataclass(slots=True)
class Times:
    """The times at which one request reached each phase; 0 before it does."""

    arrived: float
    taken: float
    """The time at which it was handed to the ranks."""
    queued_s: float | None = None
    """The seconds it then waited for its first step; None where no rank has said."""
    first_token: float = 0.0
    last_token: float = 0.0
    ended: float = 0.0


class Ended(NamedTuple):
    """A request that is over."""

    request_id: str
    place: int
    """The index of the answer, among those of one API request."""
    adapter: str | None
    outcome: Outcome
    prompt_tokens: int
    generated_tokens: int
    slot: int
    times: Times


class RequestCounters:
    """The counters of all requests since the start."""

    def __init__(self, max_series: int = ADAPTER_SERIES) -> None:
        """``max_series``: the most adapters that are counted under their own names."""
        self.outcomes = dict.fromkeys(Outcome, 0)
        self.refusals = dict.fromkeys(Refusal, 0)
        self.by_adapter = AdapterSeries(max_series)
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.preparing = 0
        """The requests for tokens that came and have not been handed to the ranks."""
        self.prepare_s = Histogram(WAIT_S)
        self.queue_s = Histogram(WAIT_S)
        self.first_token_s = Histogram(WAIT_S)
        self.next_token_s = Histogram(TOKEN_S)
        self.prefill_s = Histogram(WAIT_S)
        self.decode_s = Histogram(WHOLE_S)
        self.whole_s = Histogram(WHOLE_S)
        self.request_prompt_tokens = Histogram(NUM_TOKENS)
        self.request_generated_tokens = Histogram(NUM_TOKENS)

    def refused(self, error: ApiError) -> None:
        """Count a request for tokens that was turned away."""
        self.outcomes[Outcome.REFUSED] += 1
        self.refusals[refusal(error)] += 1

    @contextlib.contextmanager
    def prepares(self) -> Iterator[None]:
        """Count a request that is handed to the ranks, or turned away, within."""
        self.preparing += 1
        try:
            yield
        except ApiError as error:
            self.refused(error)
            raise
        finally:
            self.preparing -= 1

    def taken(self, adapter: str | None, prompt_tokens: int, times: Times) -> None:
        """Count a request that was taken."""
        self.prompt_tokens += prompt_tokens
        self.by_adapter.used(adapter)
        self.by_adapter.counts(adapter).prompt_tokens += prompt_tokens
        self.prepare_s.observe(times.taken - times.arrived)
        self.request_prompt_tokens.observe(prompt_tokens)

    def token(self, times: Times, now: float, queued_us: int | None) -> None:
        """Count one more token of a request."""
        self.generated_tokens += 1
        if times.last_token:
            self.next_token_s.observe(now - times.last_token)
        else:
            self._first(times, now, queued_us)
        times.last_token = now

    def _first(self, times: Times, now: float, queued_us: int | None) -> None:
        times.first_token = now
        self.first_token_s.observe(now - times.arrived)
        if queued_us is not None:
            times.queued_s = min(queued_us / 1e6, now - times.taken)
            self.queue_s.observe(times.queued_s)
            self.prefill_s.observe(now - times.taken - times.queued_s)

    def ended(self, request: Ended) -> None:
        """Count a request that is over."""
        self.outcomes[request.outcome] += 1
        counts = self.by_adapter.counts(request.adapter)
        counts.outcomes[request.outcome] += 1
        counts.generated_tokens += request.generated_tokens
        times = request.times
        if request.outcome in (Outcome.STOP, Outcome.LENGTH):
            self.whole_s.observe(times.ended - times.arrived)
            self.request_generated_tokens.observe(request.generated_tokens)
            if times.first_token:
                self.decode_s.observe(times.last_token - times.first_token)
