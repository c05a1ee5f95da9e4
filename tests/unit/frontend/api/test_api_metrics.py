"""Pins what ``GET /metrics`` says: every figure under its name and rank, every request's end once,
and no more series however many names and requests there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.api_kit import WORLD_SIZE, Api

from mstar_tp.frontend.metrics import server_metrics
from mstar_tp.frontend.metrics.counters import ADAPTER_SERIES, Times
from mstar_tp.frontend.metrics.outcomes import Outcome
from mstar_tp.wire.commands import Measure, NewRequest
from mstar_tp.wire.states import AdapterState, Place
from mstar_tp.wire.values import AdapterKey

BODY: dict[str, Any] = {"model": "tiny", "prompt": "xyz", "max_tokens": 5, "temperature": 0}
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]

COUNTED = {
    "adapter_requests_total", "adapter_prompt_tokens_total", "adapter_generated_tokens_total",
}  # fmt: skip
"""Metrics of adapters that this process counts itself."""
OFFSETS = {
    "adapter_slots": 1, "adapter_slots_used": 2, "evictions_total": 3, "agreed_failures_total": 4,
    "steps_waited_for_read_total": 5, "cpu_cache_limit": 6, "cpu_cache_used": 7,
    "cpu_cache_peak": 8, "cpu_cache_adapters": 9, "cpu_cache_memory_bytes": 10,
    "cpu_cache_memory_bytes_peak": 11, "steps_total": 12, "preemptions_total": 13,
    "queue_length": 14,
    "requests_running": 15, "requests_open": 16, "kv_pages_used": 17, "kv_pages": 18,
    "cpu_cache_adapters_taken_total": 19, "kv_host_pages_used": 20, "kv_host_pages": 21,
    "kv_offloads_total": 22, "kv_reloads_total": 23, "kv_offloaded_bytes_total": 24,
    "kv_reloaded_bytes_total": 25, "recomputed_tokens_total": 26,
    "prefix_tokens_queried_total": 27, "prefix_tokens_cached_total": 28, "kv_pages_cached": 29,
    "kv_pages_evicted_total": 30,
}  # fmt: skip
"""metric -> how far it stands above 100 times (1 + rank) in what the scripted ranks answer."""


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    api = Api(tmp_path, max_queue=2)
    yield api
    api.ranks.go()
    api.close()


def scrape(api: Api) -> Series:
    with api.http() as http:
        answer = http.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name.removeprefix("mstar_tp_"), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if sample.name.startswith("mstar_tp_")
    }


def outcomes(series: Series) -> dict[str, float]:
    return {labels[0][1]: n for (name, labels), n in series.items() if name == "requests_total"}


def test_every_figure_of_every_rank_stands_under_its_name(api: Api) -> None:
    series = scrape(api)
    for rank in range(WORLD_SIZE):
        for name, offset in OFFSETS.items():
            labels = [("rank", str(rank))]
            if name.startswith(("cpu_cache_limit", "cpu_cache_used", "cpu_cache_peak")):
                labels.append(("unit", "adapters"))
            assert series[name, tuple(labels)] == 100 * (1 + rank) + offset, name
        assert series["rank_answered", (("rank", str(rank)),)] == 1
    assert series["ready", ()] == 1
    places = {labels[0][1]: n for (name, labels), n in series.items() if name == "adapters"}
    # Rank 0's: the others do not know what failed.
    assert places == {"device": 131, "host": 132, "reading": 133, "disk": 134, "failed": 135}


IN_SLOT = {"slot": 3, "num_bytes": 10, "hits": 1, "running": 1}
AWAY = {"num_bytes": 10, "hits": 1, "evictions": 1}
PLACES: list[tuple[str, int, int, list[dict[str, Any]]]] = [
    ("device", 12, 12, [IN_SLOT | {"host": "in"}, IN_SLOT | {"num_bytes": 12, "host": "in"}]),
    ("device", 10, 0, [IN_SLOT, IN_SLOT]),
    ("host", 0, 10, [AWAY | {"host": "in"}] * 2),
    ("reading", 0, 10, [AWAY | {"host": "in"}, AWAY | {"host": "reading", "waiting": 2}]),
    ("disk", 0, 0, [AWAY, AWAY]),
    ("failed", 0, 0, [AWAY | {"cause": "rank 1: gone"}, AWAY]),
    ("failed", 0, 10, [AWAY | {"host": "in"}, AWAY | {"host": "failed", "cause": "gone"}]),
]
"""A place, bytes on the device and in the CPU cache, and what two ranks say to that."""


def test_an_adapter_is_at_one_place_the_farthest_that_a_rank_says(api: Api) -> None:
    with api.http() as http:
        assert http.post("/v1/completions", json=BODY | {"model": "pirate"}).status_code == 200
    for place, device, host, told in PLACES:
        api.ranks.places = lambda rank, key, told=told: (AdapterState(adapter=key, **told[rank]),)
        of_leader = AdapterState(adapter=AdapterKey("pirate", 0), **told[0])
        assert _of_pirate(scrape(api)) == {
            **{("adapter_place", each): each == place for each in Place},
            ("adapter_bytes", "device"): device,
            ("adapter_bytes", "host"): host,
            ("adapter_slot_hits_total",): of_leader.hits,
            ("adapter_evictions_total",): of_leader.evictions,
            ("adapter_requests_running",): of_leader.running,
            ("adapter_requests_waiting",): of_leader.waiting,
        }
    # On a model of several nodes its parts are one.
    api.ranks.places = lambda rank, key: (
        AdapterState(adapter=key, stage="vision", slot=1, num_bytes=7, hits=4, running=2),
        AdapterState(adapter=key, stage="language", host="in", num_bytes=9, hits=5),
    )
    found = _of_pirate(scrape(api))
    assert found["adapter_place", "host"] == 1 and found["adapter_place", "device"] == 0
    assert (found["adapter_bytes", "device"], found["adapter_bytes", "host"]) == (7, 9)
    assert found["adapter_slot_hits_total",] == 5 and found["adapter_requests_running",] == 2
    api.ranks.places = lambda rank, key: ()
    assert _of_pirate(scrape(api)) == {}, "no rank knows it"


def _of_pirate(series: Series) -> dict[tuple[str, ...], float]:
    """What ranks say of it: (metric, place) -> value."""
    return {
        (name, *(value for label, value in labels if label != "adapter")): n
        for (name, labels), n in series.items()
        if ("adapter", "pirate") in labels and name not in COUNTED
    }


def test_ranks_are_asked_about_adapters_with_a_series_alone(api: Api) -> None:
    def served(name: str) -> None:
        api.conductor.requests.request_counters.taken(name, 1, Times(arrived=1.0, taken=1.5))

    async def use() -> None:
        for number in range(5000):
            api.served.add(AdapterKey(f"a{number}", 1), "nowhere")
            served(f"a{number}")
        served("base")

    api.run(use())
    api.ranks.places = lambda rank, key: (AdapterState(adapter=key, slot=1),)
    series = scrape(api)
    (asked,) = api.ranks.messages(Measure)
    assert len(asked.adapters) == ADAPTER_SERIES
    told = {labels for name, labels in series if name == "adapter_place"}
    assert len(told) == ADAPTER_SERIES * len(Place)
    by_name = [dict(labels)["adapter"] for _, labels in series if "adapter" in dict(labels)]
    assert set(by_name) == {key.name for key in asked.adapters} | {"base", "other"}
    counted = len(Outcome) - 1 + 2  # refused requests have no adapter
    assert len(by_name) == ADAPTER_SERIES * (counted + 11) + 2 * counted


def test_every_request_is_counted_once_by_its_end(api: Api) -> None:
    api.answer("ab|cd")
    with api.http() as http:
        http.post("/v1/completions", json=BODY | {"max_tokens": 3, "n": 2})
        http.post("/v1/completions", json=BODY | {"stop": "|"})
        api.ranks.fail = lambda request: "the adapter is gone"
        assert http.post("/v1/completions", json=BODY).status_code == 500
        api.ranks.fail = lambda request: None
        assert http.post("/v1/completions", json=BODY | {"n": 3}).status_code == 400
        api.ranks.hold(0)
        opened = len(api.ranks.messages(NewRequest))
        with api.leaver(BODY | {"n": 2}):
            api.ranks.wait_for(NewRequest, opened + 2)
        api.run(api.conductor.requests.idle.wait())
    series = scrape(api)
    wanted = {"stop": 1, "length": 2, "aborted": 2, "failed": 1}
    assert outcomes(series) == wanted | {"refused": 1, "slow_reader": 0}
    assert series["requests_refused_total", (("reason", "invalid"),)] == 1
    for outcome, count in wanted.items():
        labels = (("adapter", "base"), ("outcome", outcome))
        assert series["adapter_requests_total", labels] == count
    # Times are of what came to its end, or of what has tokens.
    assert series["request_seconds_count", ()] == 3
    assert series["prepare_seconds_count", ()] == sum(wanted.values())
    for name in ("time_to_first_token", "queue", "prefill"):
        assert series[f"{name}_seconds_count", ()] == 3
    assert series["queue_seconds_sum", ()] == pytest.approx(3 * 7e-6)
    tokens = series["generated_tokens_total", ()]
    assert series["inter_token_seconds_count", ()] == tokens - 3
    assert series["requests_preparing", ()] == 0
    assert series["requests_live", ()] == 0
    assert series["prompt_tokens_total", ()] == sum(wanted.values()) * len(api.ids("xyz"))
    assert series["generated_tokens_total", ()] >= 2 * 3 + 3


def test_requests_past_the_queue_are_counted_as_refused(api: Api) -> None:
    api.ranks.hold(0)
    with api.http() as http, ThreadPoolExecutor(1) as threads:
        full = threads.submit(http.post, "/v1/completions", json=BODY | {"n": 2})
        api.ranks.wait_for(NewRequest, 2)
        series = scrape(api)
        assert series["requests_live", ()] == 2
        assert http.post("/v1/completions", json=BODY).status_code == 503
        series = scrape(api)
        assert outcomes(series)["refused"] == 1
        assert series["requests_refused_total", (("reason", "queue_full"),)] == 1
        api.ranks.go()
        assert full.result().status_code == 200
    assert outcomes(scrape(api))["length"] == 2


def test_a_rank_that_is_silent_is_left_out_and_said_to_be(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_metrics, "ANSWER_WITHIN_S", 0.05)
    api.ranks.silent = {1}
    series = scrape(api)
    assert series["rank_answered", (("rank", "1"),)] == 0
    assert series["steps_total", (("rank", "0"),)] == 112
    assert ("steps_total", (("rank", "1"),)) not in series
    assert series["adapters", (("place", "disk"),)] == 134
    api.ranks.silent = set()
    monkeypatch.setattr(server_metrics, "ANSWER_WITHIN_S", 30)
    assert scrape(api)["rank_answered", (("rank", "1"),)] == 1


def test_ranks_are_asked_only_when_somebody_scrapes(api: Api) -> None:
    with api.http() as http:
        http.post("/v1/completions", json=BODY)
    assert api.ranks.messages(Measure) == []
    scrape(api)
    assert len(api.ranks.wait_for(Measure)) == 1


def test_ranks_that_are_gone_leave_this_process_to_answer(api: Api) -> None:
    api.ranks.kill()
    api.run(_die(api))
    series = scrape(api)
    assert series["ready", ()] == 0
    assert series["rank_answered", (("rank", "0"),)] == 0


async def _die(api: Api) -> None:
    api.conductor.group.die()


def test_requests_and_names_that_nobody_serves_add_no_series(api: Api) -> None:
    before = set(scrape(api))
    with api.http() as http:
        for i in range(3):
            path = api.roots / f"late-{i}"
            path.mkdir()
            body = {"lora_name": f"late-{i}", "lora_path": str(path)}
            assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
            http.post("/v1/completions", json=BODY | {"model": f"late-{i}"})
            http.post("/v1/completions", json=BODY | {"model": f"nobody-{i}"})
            late = {name for name, labels in set(scrape(api)) - before}
            assert late == COUNTED
            assert http.post("/v1/unload_lora_adapter", json=body).status_code == 200
    api.ranks.wait_for(NewRequest, 3)
    series = scrape(api)
    assert set(series) == before
    assert series["adapter_requests_total", (("adapter", "other"), ("outcome", "length"))] == 3
    assert series["requests_refused_total", (("reason", "unknown_model"),)] == 3
