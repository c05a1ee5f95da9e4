"""The places of adapters as Prometheus' metrics: totals, and by name those with a series.

Ranks agree on slots, hits and evictions, so one of them speaks for all: a label for ranks would
multiply series and say nothing more. Where they may differ, the worst is told: the farthest place,
the largest copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from mstar_tp.frontend.metrics.rank_metrics import Stat, stat_family
from mstar_tp.wire.states import AdapterState, Place, RankStats

_FAR = {place: far for far, place in enumerate(Place)}


_STATS: tuple[Stat[AdapterState], ...] = (
    Stat(
        "adapter_slot_hits",
        "Requests that found the adapter in a slot",
        lambda s: s.hits,
        counts=True,
    ),
    Stat(
        "adapter_evictions",
        "Times that the adapter lost its slot to another",
        lambda s: s.evictions,
        counts=True,
    ),
    Stat(
        "adapter_requests_running",
        "Requests that hold the adapter's slot",
        lambda s: s.running,
    ),
    Stat(
        "adapter_requests_waiting",
        "Requests on the adapter that wait for its copy, a slot, pages or the schedule",
        lambda s: s.waiting,
    ),
)


def of_places(ranks: Mapping[int, RankStats], with_series: Sequence[str]) -> Iterator[Metric]:
    """Yield the number of adapters by place, and the places of those with a series."""
    yield _totals(ranks)
    told = {name: states for name in with_series if (states := _states_of(ranks, name))}
    place = GaugeMetricFamily(
        "mstar_tp_adapter_place",
        "1 at the place where the adapter is, 0 at the others",
        labels=("adapter", "place"),
    )
    size = GaugeMetricFamily(
        "mstar_tp_adapter_bytes",
        "Bytes of the adapter there, on the rank that has most of it",
        labels=("adapter", "place"),
    )
    for name, by_rank in told.items():
        places = [state.place for of_rank in by_rank for state in of_rank]
        farthest = max(places, key=_FAR.__getitem__)
        for each in Place:
            place.add_metric((name, each.value), each is farthest)
        on_device = max(_bytes(s for s in of if s.slot is not None) for of in by_rank)
        on_host = max(_bytes(s for s in of if s.host == "in") for of in by_rank)
        size.add_metric((name, Place.DEVICE.value), on_device)
        size.add_metric((name, Place.HOST.value), on_host)
    yield from (place, size)
    for stat in _STATS:
        family = stat_family(stat, ("adapter",))
        for name, by_rank in told.items():
            # A request counts once in each stage of a model.
            family.add_metric((name,), max(map(stat.read, by_rank[0])))
        yield family


def _totals(ranks: Mapping[int, RankStats]) -> Metric:
    """Return rank 0's totals: it alone knows of every failure."""
    stages = ranks[0].lora if 0 in ranks else ()
    named = any(lora.stage for lora in stages)
    labels = ("place", *(("stage",) if named else ()))
    family = GaugeMetricFamily("mstar_tp_adapters", "Adapters by where they are", labels=labels)
    for lora in stages:
        for place in Place:
            values = (place.value, lora.stage)
            family.add_metric(values[: len(labels)], getattr(lora.places, place.value))
    return family


def _states_of(ranks: Mapping[int, RankStats], name: str) -> list[list[AdapterState]]:
    """Return the adapter's states, one a stage, of each rank that knows it; by rank."""
    told = ([s for s in stats.adapters if s.adapter.name == name] for stats in ranks.values())
    return [states for states in told if states]


def _bytes(states: Iterator[AdapterState]) -> int:
    return sum(state.num_bytes for state in states)
