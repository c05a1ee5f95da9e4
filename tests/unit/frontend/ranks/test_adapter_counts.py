"""Pins that metrics of thousands of adapters take a bounded number of series.

Series change hands seldom, and their sums count every request once and never go down.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mstar_tp.frontend.metrics.adapter_counts import BASE, OTHER, REVIEW_INTERVAL, AdapterSeries
from mstar_tp.frontend.metrics.counters import Ended, RequestCounters, Times
from mstar_tp.frontend.metrics.outcomes import GroupEnd, Outcome, group_end
from mstar_tp.frontend.metrics.server_metrics import Snapshot, exposition
from mstar_tp.wire.reports import Fatal, StartFailed

MAX_SERIES = 16


def labels(adapter_series: AdapterSeries) -> list[str]:
    return [label for label, _ in adapter_series.labelled()]


def ended(adapter: str | None) -> Ended:
    times = Times(arrived=1.0, taken=1.5, first_token=2.0, last_token=3.0, ended=3.0)
    return Ended("id", 0, adapter, Outcome.STOP, 5, 7, 1, times)


def request(request_counters: RequestCounters, adapter: str | None) -> None:
    request_counters.taken(adapter, 5, Times(arrived=1.0, taken=1.5))
    request_counters.ended(ended(adapter))


def scrape(request_counters: RequestCounters) -> dict[str, dict[str, float]]:
    """adapter -> metric -> value, of all that has a label ``adapter``."""
    found: dict[str, dict[str, float]] = {}
    text = exposition(
        Snapshot(request_counters, 0, True, 0, 1, {}, dict.fromkeys(GroupEnd, 0))
    ).decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "adapter" in sample.labels:
                name = sample.name + sample.labels.get("outcome", "")
                found.setdefault(sample.labels["adapter"], {})[name] = sample.value
    return found


def test_five_thousand_adapters_make_few_series_that_lose_no_request() -> None:
    draw = random.Random(0)
    request_counters = RequestCounters(MAX_SERIES)
    truth: Counter[str] = Counter()
    names = [f"a{number}" for number in range(5000)]
    ever: set[str] = set()
    total = 0.0
    for round_ in range(40):
        for _ in range(1000):
            # A tenth of the requests goes to a dozen adapters, which change half way.
            hot = draw.randrange(12) + (2000 if round_ >= 20 else 1000)
            name = names[hot if draw.random() < 0.1 else draw.randrange(5000)]
            request(request_counters, name)
            truth[name] += 1
        series = scrape(request_counters)
        assert len(series) == MAX_SERIES + 2
        assert {BASE, OTHER} < set(series)
        ever |= set(series)
        counted = {a: of["mstar_tp_adapter_requests_totalstop"] for a, of in series.items()}
        assert all(counted[name] <= truth[name] for name in counted if name not in (BASE, OTHER))
        assert sum(counted.values()) == (round_ + 1) * 1000 > total
        total = sum(counted.values())
        for metric, each in (("prompt", 5), ("generated", 7)):
            name = f"mstar_tp_adapter_{metric}_tokens_total"
            assert sum(of[name] for of in series.values()) == total * each
    assert {f"a{number}" for number in range(2000, 2012)} < set(series)
    # Names that a store of metrics keeps: the first to get a series, and those that were hot.
    assert len(ever) <= MAX_SERIES + 2 + 2 * 12


def test_one_scrape_never_sees_a_series_go_down_while_its_adapter_keeps_it() -> None:
    adapter_series = AdapterSeries(2)
    for name in ("x", "y", "z"):
        adapter_series.used(name)
        adapter_series.counts(name).prompt_tokens += 1
    assert labels(adapter_series) == [BASE, "x", "y", OTHER]
    for _ in range(REVIEW_INTERVAL):
        adapter_series.used("z")
        adapter_series.counts("z").prompt_tokens += 1
    before = dict(adapter_series.labelled())
    assert "z" in before
    assert (
        before[OTHER].prompt_tokens
        + sum(counts.prompt_tokens for label, counts in before.items() if label != OTHER)
        == REVIEW_INTERVAL + 3
    )


def test_adapters_that_churn_take_no_series_from_those_in_use_and_leave_none_behind() -> None:
    adapter_series = AdapterSeries(4)
    for number in range(20_000):
        name = f"stays{number % 4}" if number % 2 else f"comes{number}"
        adapter_series.used(name)
        adapter_series.counts(name).generated_tokens += 1
        adapter_series.keep(lambda known, now=name: known == now or known.startswith("stays"))
    assert set(labels(adapter_series)) - {BASE, OTHER} <= {"stays1", "stays3", "comes19998"}
    assert sum(counts.generated_tokens for _, counts in adapter_series.labelled()) == 20_000
    adapter_series.keep(lambda known: False)
    assert labels(adapter_series) == [BASE, OTHER]
    assert dict(adapter_series.labelled())[OTHER].generated_tokens == 20_000


@pytest.mark.parametrize("name", [BASE, OTHER])
def test_an_adapter_that_is_called_like_a_label_counts_among_the_others(name: str) -> None:
    request_counters = RequestCounters(MAX_SERIES)
    request(request_counters, name)
    request(request_counters, None)
    series = scrape(request_counters)
    assert series[OTHER]["mstar_tp_adapter_requests_totalstop"] == 1
    assert series[BASE]["mstar_tp_adapter_requests_totalstop"] == 1


def test_without_seats_no_name_is_told() -> None:
    request_counters = RequestCounters(0)
    request(request_counters, "secret")
    assert set(scrape(request_counters)) == {BASE, OTHER}


SIGNAL = "its process was ended by signal 9"
SILENT = "it has been silent for 4 s"


@pytest.mark.parametrize(
    "said, losses, end",
    [
        ([], [SIGNAL, SILENT], GroupEnd.KILLED),
        ([Fatal(rank=0, cause="", error="PeerLostError")], [SIGNAL], GroupEnd.KILLED),
        ([Fatal(rank=1, cause="", error="LockstepError")], [SIGNAL], GroupEnd.DIVERGED),
        ([Fatal(rank=1, cause="", error="HungStep")], [SILENT], GroupEnd.HUNG),
        ([Fatal(rank=1, cause="", error="OutOfMemoryError")], [], GroupEnd.FAILED),
        ([StartFailed(rank=1, cause="")], [SILENT], GroupEnd.START_FAILED),
        ([], ["its process ended with code 1"], GroupEnd.EXITED),
        ([], [SILENT], GroupEnd.UNREACHABLE),
        ([], [], GroupEnd.OTHER),
    ],
)
def test_a_restart_is_counted_by_its_cause(said, losses, end) -> None:
    assert group_end(said, losses) is end
