"""What the server counts, and how Prometheus reads it. The event loop's thread.

Nothing is gathered until somebody asks. Then each rank is sent one small message, which its main
thread answers beside whatever step runs. Labels are ranks, outcomes and a unit: as many series as
there were at the start, whatever clients and operators name.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mstar_tp.wire.messages import LoraFigures, Measure, RankFigures

ANSWER_WITHIN_S = 2.0
"""A rank that is silent for longer is left out of the answer, which says so."""


class Outcome(StrEnum):
    """How a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    FAILED = "failed"
    REFUSED = "refused"


class Tally:
    """What this process itself counts of requests."""

    def __init__(self) -> None:
        self.outcomes = dict.fromkeys(Outcome, 0)
        self.prompt_tokens = 0
        self.generated_tokens = 0

    def ended(self, outcome: Outcome, count: int = 1) -> None:
        self.outcomes[outcome] += count


class FigureTaker:
    """Asks every rank for its figures; those who ask at once share one question."""

    def __init__(self, send: Callable[[Measure], None], world_size: int) -> None:
        self._send = send
        self._world_size = world_size
        self._ids = itertools.count()
        self._asked: int | None = None
        self._answers: dict[int, RankFigures] = {}
        self._complete = asyncio.Event()

    async def ask(self) -> dict[int, RankFigures]:
        """Every rank's figures, by rank; without the ranks that do not answer in time."""
        if self._asked is None:
            self._asked, self._answers = next(self._ids), {}
            self._complete = asyncio.Event()
            self._send(Measure(query_id=self._asked))
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

    def take(self, rank: int, report: RankFigures) -> None:
        """One rank's answer. One that nobody waits for any more is dropped."""
        if report.query_id != self._asked:
            return
        self._answers[rank] = report
        if len(self._answers) == self._world_size:
            self._complete.set()


class Snapshot(NamedTuple):
    """All that one answer to a scrape says."""

    tally: Tally
    live: int
    ready: bool
    restarts: int
    world_size: int
    ranks: dict[int, RankFigures]


def exposition(snapshot: Snapshot) -> bytes:
    """The snapshot as Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Fixed([*_of_requests(snapshot), *_of_ranks(snapshot)]))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _Fixed(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _of_requests(snapshot: Snapshot) -> Iterator[Metric]:
    tally = snapshot.tally
    ended = CounterMetricFamily(
        "mstar_tp_requests", "Requests that ended, by how", labels=("outcome",)
    )
    for outcome, count in tally.outcomes.items():
        ended.add_metric((outcome.value,), count)
    yield ended
    yield CounterMetricFamily(
        "mstar_tp_prompt_tokens", "Prompt tokens of requests taken", tally.prompt_tokens
    )
    yield CounterMetricFamily(
        "mstar_tp_generated_tokens", "Tokens that ranks made", tally.generated_tokens
    )
    yield GaugeMetricFamily("mstar_tp_requests_live", "Requests taken, not ended", snapshot.live)
    yield GaugeMetricFamily("mstar_tp_ready", "1 while requests are served", snapshot.ready)
    yield CounterMetricFamily(
        "mstar_tp_restarts", "Times that the ranks were started again", snapshot.restarts
    )


class _Figure(NamedTuple):
    name: str
    help: str
    read: Callable[[RankFigures], float]
    counts: bool = False


class _LoraFigure(NamedTuple):
    name: str
    help: str
    read: Callable[[LoraFigures], float]
    counts: bool = False
    in_unit: bool = False


_FIGURES = (
    _Figure("steps", "Steps run", lambda r: r.steps, counts=True),
    _Figure("preemptions", "Requests that gave pages back", lambda r: r.preemptions, counts=True),
    _Figure("queue_length", "Requests waiting for copies or room, on rank 0", lambda r: r.waiting),
    _Figure("requests_running", "Requests in the running batch, on rank 0", lambda r: r.running),
    _Figure("requests_open", "Requests that the rank holds state of", lambda r: r.requests),
    _Figure("kv_pages", "KV pages there are", lambda r: r.pages_total),
    _Figure("kv_pages_used", "KV pages that requests hold", lambda r: r.pages_used),
)
_LORA_FIGURES = (
    _LoraFigure(
        "steps_waited_for_read",
        "Steps whose admit waited for an adapter's read; 0 unless something is wrong",
        lambda f: f.steps_waited_for_read,
        counts=True,
    ),
    _LoraFigure("adapter_slots", "Adapter slots there are", lambda f: f.slots),
    _LoraFigure("adapter_slots_used", "Adapter slots that requests hold", lambda f: f.slots_held),
    _LoraFigure("evictions", "Adapters that lost their slot", lambda f: f.evictions, counts=True),
    _LoraFigure(
        "agreed_failures",
        "Adapter copies that some rank could not read, failed on every rank",
        lambda f: f.agreed_failures,
        counts=True,
    ),
    _LoraFigure("host_adapters", "Adapters that the host tier holds", lambda f: f.adapters_held),
    _LoraFigure(
        "host_adapters_taken",
        "Adapters taken into the host tier, each with a read",
        lambda f: f.adapters_taken,
        counts=True,
    ),
    _LoraFigure(
        "host_tier_limit",
        "What the host tier may hold, reads in flight included",
        lambda f: f.tier.capacity,
        in_unit=True,
    ),
    _LoraFigure(
        "host_tier_used", "What the held adapters cost", lambda f: f.tier.used, in_unit=True
    ),
    _LoraFigure(
        "host_tier_peak",
        "The most that copies ever cost at once",
        lambda f: f.tier.peak,
        in_unit=True,
    ),
    _LoraFigure("host_pinned_bytes", "Bytes of copies in memory", lambda f: f.tier.pinned_bytes),
    _LoraFigure(
        "host_pinned_bytes_peak",
        "The most bytes of copies ever in memory at once",
        lambda f: f.tier.peak_bytes,
    ),
)


def _of_ranks(snapshot: Snapshot) -> Iterator[Metric]:
    ranks = snapshot.ranks
    answered = GaugeMetricFamily(
        "mstar_tp_rank_answered", "Whether this rank answered this scrape", labels=("rank",)
    )
    for rank in range(snapshot.world_size):
        answered.add_metric((str(rank),), rank in ranks)
    yield answered
    for figure in _FIGURES:
        family = _family(figure.name, figure.help, figure.counts, ("rank",))
        for rank, report in ranks.items():
            family.add_metric((str(rank),), figure.read(report))
        yield family
    named = any(lora.node for report in ranks.values() for lora in report.lora)
    for lora_figure in _LORA_FIGURES:
        labels = (
            "rank",
            *(("node",) if named else ()),
            *(("unit",) if lora_figure.in_unit else ()),
        )
        family = _family(lora_figure.name, lora_figure.help, lora_figure.counts, labels)
        for rank, report in ranks.items():
            for lora in report.lora:
                known = {"rank": str(rank), "node": lora.node, "unit": lora.tier.unit}
                family.add_metric([known[label] for label in labels], lora_figure.read(lora))
        yield family


def _family(
    name: str, text: str, counts: bool, labels: tuple[str, ...]
) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if counts else GaugeMetricFamily
    return kind(f"mstar_tp_{name}", text, labels=labels)
