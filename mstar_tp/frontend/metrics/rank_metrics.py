"""What ranks tell of themselves, as Prometheus' metrics. Labels are ranks, nodes, phases, units."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from mstar_tp.common.histogram import NUM_ROWS, NUM_TOKENS, STEP_S, Buckets
from mstar_tp.wire.states import LoraFigures, RankFigures
from mstar_tp.wire.stats import ProcessFigures

Kind = TypeVar("Kind", bound=StrEnum)


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


class _ProcessFigure(NamedTuple):
    name: str
    help: str
    read: Callable[[ProcessFigures], float]
    counts: bool = False
    on_device: bool = False


_FIGURES = (
    _Figure("steps", "Steps run", lambda r: r.steps, counts=True),
    _Figure("preemptions", "Requests that gave pages back", lambda r: r.preemptions, counts=True),
    _Figure("queue_length", "Requests waiting for copies or room, on rank 0", lambda r: r.waiting),
    _Figure("requests_running", "Requests in the running batch, on rank 0", lambda r: r.running),
    _Figure("requests_open", "Requests that the rank holds state of", lambda r: r.requests),
    _Figure("kv_pages", "KV pages there are", lambda r: r.pages_total),
    _Figure("kv_pages_used", "KV pages that requests hold", lambda r: r.pages_used),
    _Figure("kv_host_pages", "KV pages there are in host memory", lambda r: r.kv_host.pages_total),
    _Figure(
        "kv_host_pages_used",
        "Host pages with KV of preempted requests",
        lambda r: r.kv_host.pages_used,
    ),
    _Figure(
        "kv_offloads",
        "Preempted requests whose KV moved to host memory",
        lambda r: r.kv_host.offloads,
        counts=True,
    ),
    _Figure("kv_reloads", "Requests whose KV came back", lambda r: r.kv_host.reloads, counts=True),
    _Figure(
        "kv_offloaded_bytes",
        "Bytes of KV moved to host memory",
        lambda r: r.kv_host.offloaded_bytes,
        counts=True,
    ),
    _Figure(
        "kv_reloaded_bytes",
        "Bytes of KV moved back",
        lambda r: r.kv_host.reloaded_bytes,
        counts=True,
    ),
    _Figure(
        "recomputed_tokens",
        "Tokens of preempted requests whose KV was given up",
        lambda r: r.kv_host.recomputed_tokens,
        counts=True,
    ),
)
_PREFIX_FIGURES = (
    _Figure(
        "prefix_tokens_queried",
        "Tokens of requests that began",
        lambda r: r.prefix.tokens_queried,
        counts=True,
    ),
    _Figure(
        "prefix_tokens_cached",
        "Tokens of requests that began and were not computed, since pages held them",
        lambda r: r.prefix.tokens_cached,
        counts=True,
    ),
    _Figure("kv_pages_kept", "KV pages that requests could lease", lambda r: r.prefix.pages),
    _Figure(
        "kv_pages_evicted",
        "Kept KV pages that were given away",
        lambda r: r.prefix.evictions,
        counts=True,
    ),
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


_PROCESS_FIGURES = (
    _ProcessFigure(
        "rank_resident_memory_bytes", "Resident memory of a rank", lambda p: p.resident_bytes
    ),
    _ProcessFigure("rank_cpu_seconds", "CPU time of a rank", lambda p: p.cpu_s, counts=True),
    _ProcessFigure(
        "rank_device_allocated_bytes",
        "Device memory that a rank's tensors take",
        lambda p: p.device_allocated_bytes,
        on_device=True,
    ),
    _ProcessFigure(
        "rank_device_reserved_bytes",
        "Device memory that a rank's allocator holds",
        lambda p: p.device_reserved_bytes,
        on_device=True,
    ),
    _ProcessFigure(
        "rank_device_memory_bytes",
        "Memory of a rank's device",
        lambda p: p.device_total_bytes,
        on_device=True,
    ),
)


def of_ranks(ranks: Mapping[int, RankFigures], world_size: int) -> Iterator[Metric]:
    """What each of ``ranks`` says of itself, and which of ``world_size`` said nothing."""
    answered = GaugeMetricFamily(
        "mstar_tp_rank_answered", "Whether this rank answered this scrape", labels=("rank",)
    )
    for rank in range(world_size):
        answered.add_metric((str(rank),), rank in ranks)
    yield answered
    for figure in (*_FIGURES, *_PREFIX_FIGURES):
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
    yield from _of_processes(ranks)
    yield from _of_steps(ranks)


def _of_processes(ranks: Mapping[int, RankFigures]) -> Iterator[Metric]:
    for figure in _PROCESS_FIGURES:
        family = _family(figure.name, figure.help, figure.counts, ("rank",))
        for rank, report in ranks.items():
            process = report.process
            if process is not None and (process.device_total_bytes or not figure.on_device):
                family.add_metric((str(rank),), figure.read(process))
        yield family


def _of_steps(ranks: Mapping[int, RankFigures]) -> Iterator[Metric]:
    phases = HistogramMetricFamily(
        "mstar_tp_step_phase_seconds", "Seconds of a step, by phase", labels=("rank", "phase")
    )
    rows = HistogramMetricFamily("mstar_tp_step_rows", "Rows of a step", labels=("rank",))
    tokens = HistogramMetricFamily("mstar_tp_step_tokens", "Tokens of a step", labels=("rank",))
    for rank, report in ranks.items():
        if report.timing is None:
            continue
        for phase in report.timing.phases:
            add_histogram(phases, (str(rank), phase.phase), STEP_S, phase.seconds)
        add_histogram(rows, (str(rank),), NUM_ROWS, report.timing.rows)
        add_histogram(tokens, (str(rank),), NUM_TOKENS, report.timing.tokens)
    yield from (phases, rows, tokens)


def add_histogram(
    family: HistogramMetricFamily,
    labels: Sequence[str],
    bounds: Sequence[float],
    buckets: Buckets,
) -> None:
    """One series of ``family``: buckets there count all that is not larger."""
    upper = [*map(repr, bounds), "+Inf"]
    counts = itertools.accumulate(buckets.counts)
    family.add_metric(list(labels), list(zip(upper, counts, strict=True)), buckets.sum)


def counters(name: str, text: str, label: str, values: Mapping[Kind, int]) -> CounterMetricFamily:
    """One counter a member of an enum."""
    family = CounterMetricFamily(f"mstar_tp_{name}", text, labels=(label,))
    for value, count in values.items():
        family.add_metric((value,), count)
    return family


def _family(
    name: str, text: str, counts: bool, labels: tuple[str, ...]
) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if counts else GaugeMetricFamily
    return kind(f"mstar_tp_{name}", text, labels=labels)
