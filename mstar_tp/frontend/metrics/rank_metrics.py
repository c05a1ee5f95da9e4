"""The ranks' stats as Prometheus' metrics. Labels are ranks, stages, phases and units."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from mstar_tp.common.histogram import NUM_ROWS, NUM_TOKENS, STEP_S, Buckets
from mstar_tp.wire.states import LoraStats, RankStats
from mstar_tp.wire.stats import ProcessStats

Kind = TypeVar("Kind", bound=StrEnum)
Source = TypeVar("Source")


class Stat(NamedTuple, Generic[Source]):
    """One metric, and how it is read from a part of a rank's stats."""

    name: str
    help: str
    read: Callable[[Source], float]
    counts: bool = False
    """The metric is a counter, else a gauge."""
    in_unit: bool = False
    """The metric has a label for its unit."""
    on_device: bool = False
    """The metric is there only on ranks with a device."""


_STATS: tuple[Stat[RankStats], ...] = (
    Stat("steps", "Steps run", lambda r: r.steps, counts=True),
    Stat("preemptions", "Requests that gave pages back", lambda r: r.preemptions, counts=True),
    Stat("queue_length", "Requests waiting for copies or memory, on rank 0", lambda r: r.waiting),
    Stat("requests_running", "Requests in the running batch, on rank 0", lambda r: r.running),
    Stat("requests_open", "Requests that the rank holds state of", lambda r: r.requests),
    Stat("kv_pages", "KV pages there are", lambda r: r.pages_total),
    Stat("kv_pages_used", "KV pages that requests hold", lambda r: r.pages_used),
    Stat("kv_host_pages", "KV pages there are in host memory", lambda r: r.kv_host.pages_total),
    Stat(
        "kv_host_pages_used",
        "Host pages with KV of preempted requests",
        lambda r: r.kv_host.pages_used,
    ),
    Stat(
        "kv_offloads",
        "Preempted requests whose KV moved to host memory",
        lambda r: r.kv_host.offloads,
        counts=True,
    ),
    Stat("kv_reloads", "Requests whose KV came back", lambda r: r.kv_host.reloads, counts=True),
    Stat(
        "kv_offloaded_bytes",
        "Bytes of KV moved to host memory",
        lambda r: r.kv_host.offloaded_bytes,
        counts=True,
    ),
    Stat(
        "kv_reloaded_bytes",
        "Bytes of KV moved back",
        lambda r: r.kv_host.reloaded_bytes,
        counts=True,
    ),
    Stat(
        "recomputed_tokens",
        "Tokens of preempted requests whose KV was given up",
        lambda r: r.kv_host.recomputed_tokens,
        counts=True,
    ),
)
_PREFIX_STATS: tuple[Stat[RankStats], ...] = (
    Stat(
        "prefix_tokens_queried",
        "Tokens of requests that began",
        lambda r: r.prefix.tokens_queried,
        counts=True,
    ),
    Stat(
        "prefix_tokens_cached",
        "Tokens of requests that began and were not computed, since pages held them",
        lambda r: r.prefix.tokens_cached,
        counts=True,
    ),
    Stat("kv_pages_cached", "KV pages that requests could lease", lambda r: r.prefix.pages),
    Stat(
        "kv_pages_evicted",
        "Kept KV pages that were given away",
        lambda r: r.prefix.evictions,
        counts=True,
    ),
)
_LORA_STATS: tuple[Stat[LoraStats], ...] = (
    Stat(
        "steps_waited_for_read",
        "Steps whose admit waited for an adapter's read; 0 unless something is wrong",
        lambda f: f.steps_waited_for_read,
        counts=True,
    ),
    Stat("adapter_slots", "Adapter slots there are", lambda f: f.slots),
    Stat("adapter_slots_used", "Adapter slots that requests hold", lambda f: f.slots_held),
    Stat("evictions", "Adapters that lost their slot", lambda f: f.evictions, counts=True),
    Stat(
        "agreed_failures",
        "Adapter copies that some rank could not read, failed on every rank",
        lambda f: f.agreed_failures,
        counts=True,
    ),
    Stat("cpu_cache_adapters", "Adapters that the CPU cache holds", lambda f: f.adapters_held),
    Stat(
        "cpu_cache_adapters_taken",
        "Adapters taken into the CPU cache, each with a read",
        lambda f: f.adapters_taken,
        counts=True,
    ),
    Stat(
        "cpu_cache_limit",
        "What the CPU cache may hold, reads in flight included",
        lambda f: f.cpu_cache.capacity,
        in_unit=True,
    ),
    Stat("cpu_cache_used", "What the held adapters cost", lambda f: f.cpu_cache.used, in_unit=True),
    Stat(
        "cpu_cache_peak",
        "The most that copies ever cost at once",
        lambda f: f.cpu_cache.peak,
        in_unit=True,
    ),
    Stat("cpu_cache_memory_bytes", "Bytes of copies in memory", lambda f: f.cpu_cache.memory_bytes),
    Stat(
        "cpu_cache_memory_bytes_peak",
        "The most bytes of copies ever in memory at once",
        lambda f: f.cpu_cache.peak_bytes,
    ),
)


_PROCESS_STATS: tuple[Stat[ProcessStats], ...] = (
    Stat("rank_resident_memory_bytes", "Resident memory of a rank", lambda p: p.resident_bytes),
    Stat("rank_cpu_seconds", "CPU time of a rank", lambda p: p.cpu_s, counts=True),
    Stat(
        "rank_device_allocated_bytes",
        "Device memory that a rank's tensors take",
        lambda p: p.device_allocated_bytes,
        on_device=True,
    ),
    Stat(
        "rank_device_reserved_bytes",
        "Device memory that a rank's allocator holds",
        lambda p: p.device_reserved_bytes,
        on_device=True,
    ),
    Stat(
        "rank_device_memory_bytes",
        "Memory of a rank's device",
        lambda p: p.device_total_bytes,
        on_device=True,
    ),
)


def of_ranks(ranks: Mapping[int, RankStats], world_size: int) -> Iterator[Metric]:
    """Yield the metrics of each of ``ranks``, and which of ``world_size`` did not answer."""
    answered = GaugeMetricFamily(
        "mstar_tp_rank_answered", "Whether this rank answered this scrape", labels=("rank",)
    )
    for rank in range(world_size):
        answered.add_metric((str(rank),), rank in ranks)
    yield answered
    for stat in (*_STATS, *_PREFIX_STATS):
        family = stat_family(stat, ("rank",))
        for rank, report in ranks.items():
            family.add_metric((str(rank),), stat.read(report))
        yield family
    named = any(lora.stage for report in ranks.values() for lora in report.lora)
    for lora_stat in _LORA_STATS:
        labels = (
            "rank",
            *(("stage",) if named else ()),
            *(("unit",) if lora_stat.in_unit else ()),
        )
        family = stat_family(lora_stat, labels)
        for rank, report in ranks.items():
            for lora in report.lora:
                known = {"rank": str(rank), "stage": lora.stage, "unit": lora.cpu_cache.unit}
                family.add_metric([known[label] for label in labels], lora_stat.read(lora))
        yield family
    yield from _of_processes(ranks)
    yield from _of_steps(ranks)


def _of_processes(ranks: Mapping[int, RankStats]) -> Iterator[Metric]:
    for stat in _PROCESS_STATS:
        family = stat_family(stat, ("rank",))
        for rank, report in ranks.items():
            process = report.process
            if process is not None and (process.device_total_bytes or not stat.on_device):
                family.add_metric((str(rank),), stat.read(process))
        yield family


def _of_steps(ranks: Mapping[int, RankStats]) -> Iterator[Metric]:
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
    """Add one series to ``family``, whose buckets count all values that are not larger."""
    upper = [*map(repr, bounds), "+Inf"]
    counts = itertools.accumulate(buckets.counts)
    family.add_metric(list(labels), list(zip(upper, counts, strict=True)), buckets.sum)


def counters(name: str, text: str, label: str, values: Mapping[Kind, int]) -> CounterMetricFamily:
    """Return a counter for each member of an enum."""
    family = CounterMetricFamily(f"mstar_tp_{name}", text, labels=(label,))
    for value, count in values.items():
        family.add_metric((value,), count)
    return family


def stat_family(
    stat: Stat[Source], labels: tuple[str, ...]
) -> CounterMetricFamily | GaugeMetricFamily:
    """Return the empty metric of ``stat``."""
    kind = CounterMetricFamily if stat.counts else GaugeMetricFamily
    return kind(f"mstar_tp_{stat.name}", stat.help, labels=labels)
