"""The server's metrics, as Prometheus reads them. The event loop's thread.

Nothing is gathered until somebody asks. Then each rank is sent one small message, which its main
thread answers beside whatever step runs. There are as many series as at the start, whatever clients
and operators name, but for the most used adapters: ``adapter_counts`` bounds those, and ranks are
asked about no others.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from mstar_tp.common.histogram import Histogram
from mstar_tp.frontend.metrics.adapter_places import of_places
from mstar_tp.frontend.metrics.counters import RequestCounters
from mstar_tp.frontend.metrics.outcomes import GroupEnd, Outcome
from mstar_tp.frontend.metrics.rank_metrics import add_histogram, counters, of_ranks
from mstar_tp.wire.commands import Measure
from mstar_tp.wire.states import RankStats
from mstar_tp.wire.values import AdapterKey

ANSWER_WITHIN_S = 2.0
"""The seconds after which a silent rank is left out of the answer, which says so."""


class StatsPoller:
    """A poll of every rank's stats; callers at the same time share one query."""

    def __init__(
        self,
        send: Callable[[Measure], None],
        world_size: int,
        adapters: Callable[[], Iterable[AdapterKey]],
    ) -> None:
        """``adapters`` gives the adapters whose places are asked for, too."""
        self._send = send
        self._adapters = adapters
        self._world_size = world_size
        self._ids = itertools.count()
        self._asked: int | None = None
        self._answers: dict[int, RankStats] = {}
        self._complete = asyncio.Event()

    async def ask(self) -> dict[int, RankStats]:
        """Return every rank's stats, by rank; without the ranks that do not answer in time."""
        if self._asked is None:
            self._asked, self._answers = next(self._ids), {}
            self._complete = asyncio.Event()
            self._send(Measure(query_id=self._asked, adapters=tuple(self._adapters())))
        asked, answers, complete = self._asked, self._answers, self._complete
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                await complete.wait()
        except TimeoutError:
            pass
        finally:
            if self._asked == asked:
                self._asked = None
        return dict(sorted(answers.items()))

    def take(self, rank: int, report: RankStats) -> None:
        """Take one rank's answer; an answer that nobody waits for any more is dropped."""
        if report.query_id != self._asked:
            return
        self._answers[rank] = report
        if len(self._answers) == self._world_size:
            self._complete.set()


class Snapshot(NamedTuple):
    """The values of one answer to a scrape."""

    request_counters: RequestCounters
    live: int
    ready: bool
    restarts: int
    world_size: int
    ranks: dict[int, RankStats]
    ends: dict[GroupEnd, int]
    """The number of groups of ranks that ended and were followed by others, by reason."""


def exposition(snapshot: Snapshot) -> bytes:
    """Return the snapshot in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Fixed(list(families(snapshot))))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


def families(snapshot: Snapshot) -> Iterator[Metric]:
    """Yield every metric but the process's own."""
    yield from _of_requests(snapshot)
    yield from _of_adapters(snapshot.request_counters)
    yield from of_places(snapshot.ranks, snapshot.request_counters.by_adapter.with_series())
    yield from _of_times(snapshot.request_counters)
    yield from of_ranks(snapshot.ranks, snapshot.world_size)


class _Fixed(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _of_requests(snapshot: Snapshot) -> Iterator[Metric]:
    request_counters = snapshot.request_counters
    yield counters("requests", "Requests that ended, by how", "outcome", request_counters.outcomes)
    yield counters(
        "requests_refused",
        "Requests that were turned away, by why",
        "reason",
        request_counters.refusals,
    )
    yield CounterMetricFamily(
        "mstar_tp_prompt_tokens", "Prompt tokens of requests taken", request_counters.prompt_tokens
    )
    yield CounterMetricFamily(
        "mstar_tp_generated_tokens", "Tokens that ranks made", request_counters.generated_tokens
    )
    yield GaugeMetricFamily("mstar_tp_requests_live", "Requests taken, not ended", snapshot.live)
    yield GaugeMetricFamily(
        "mstar_tp_requests_preparing",
        "Requests for tokens that came and are not handed to the ranks yet",
        request_counters.preparing,
    )
    yield GaugeMetricFamily("mstar_tp_ready", "1 while requests are served", snapshot.ready)
    yield counters(
        "restarts", "Times that the ranks were started again, by why", "reason", snapshot.ends
    )


def _of_adapters(request_counters: RequestCounters) -> Iterator[Metric]:
    ended = CounterMetricFamily(
        "mstar_tp_adapter_requests",
        "Requests that ended, by adapter and how",
        labels=("adapter", "outcome"),
    )
    prompt = CounterMetricFamily(
        "mstar_tp_adapter_prompt_tokens", "Prompt tokens by adapter", labels=("adapter",)
    )
    generated = CounterMetricFamily(
        "mstar_tp_adapter_generated_tokens",
        "Generated tokens of requests that ended, by adapter",
        labels=("adapter",),
    )
    for adapter, counts in request_counters.by_adapter.labelled():
        for outcome, count in counts.outcomes.items():
            if outcome is not Outcome.REFUSED:
                ended.add_metric((adapter, outcome.value), count)
        prompt.add_metric((adapter,), counts.prompt_tokens)
        generated.add_metric((adapter,), counts.generated_tokens)
    yield from (ended, prompt, generated)


_TIMES: tuple[tuple[str, str, Callable[[RequestCounters], Histogram]], ...] = (
    ("prepare_seconds", "From a request's headers to the ranks", lambda t: t.prepare_s),
    ("queue_seconds", "From the ranks' taking a request to its first step", lambda t: t.queue_s),
    ("prefill_seconds", "From a request's first step to its first token", lambda t: t.prefill_s),
    (
        "time_to_first_token_seconds",
        "From a request's headers to its first token",
        lambda t: t.first_token_s,
    ),
    ("inter_token_seconds", "Between two tokens of a request", lambda t: t.next_token_s),
    ("decode_seconds", "From a request's first token to its last", lambda t: t.decode_s),
    ("request_seconds", "From a request's headers to its end", lambda t: t.whole_s),
    (
        "request_prompt_tokens",
        "Prompt tokens of a request",
        lambda t: t.request_prompt_tokens,
    ),
    (
        "request_generated_tokens",
        "Tokens of a request that came to its end",
        lambda t: t.request_generated_tokens,
    ),
)


def _of_times(request_counters: RequestCounters) -> Iterator[Metric]:
    for name, text, read in _TIMES:
        family = HistogramMetricFamily(f"mstar_tp_{name}", text)
        histogram = read(request_counters)
        add_histogram(family, (), histogram.bounds, histogram.buckets())
        yield family
