"""Pins what ``GET /metrics`` says: every figure under its name and rank, every request's end once,
and no more series however many names and requests there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from api_kit import WORLD_SIZE, Api
from prometheus_client.parser import text_string_to_metric_families

from mstar_tp.frontend import metrics
from mstar_tp.wire.bodies import Measure, NewRequest

BODY: dict[str, Any] = {"model": "tiny", "prompt": "xyz", "max_tokens": 5, "temperature": 0}
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]

ADAPTER_FAMILIES = {
    "adapter_requests_total", "adapter_prompt_tokens_total", "adapter_generated_tokens_total",
}  # fmt: skip
OFFSETS = {
    "adapter_slots": 1, "adapter_slots_used": 2, "evictions_total": 3, "agreed_failures_total": 4,
    "steps_waited_for_read_total": 5, "host_tier_limit": 6, "host_tier_used": 7,
    "host_tier_peak": 8, "host_adapters": 9, "host_pinned_bytes": 10,
    "host_pinned_bytes_peak": 11, "steps_total": 12, "preemptions_total": 13, "queue_length": 14,
    "requests_running": 15, "requests_open": 16, "kv_pages_used": 17, "kv_pages": 18,
    "host_adapters_taken_total": 19, "kv_host_pages_used": 20, "kv_host_pages": 21,
    "kv_offloads_total": 22, "kv_reloads_total": 23, "kv_offloaded_bytes_total": 24,
    "kv_reloaded_bytes_total": 25, "recomputed_tokens_total": 26,
    "prefix_tokens_queried_total": 27, "prefix_tokens_cached_total": 28, "kv_pages_kept": 29,
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
            if name.startswith("host_tier"):
                labels.append(("unit", "adapters"))
            assert series[name, tuple(labels)] == 100 * (1 + rank) + offset, name
        assert series["rank_answered", (("rank", str(rank)),)] == 1
    assert series["ready", ()] == 1


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
    monkeypatch.setattr(metrics, "ANSWER_WITHIN_S", 0.05)
    api.ranks.silent = {1}
    series = scrape(api)
    assert series["rank_answered", (("rank", "1"),)] == 0
    assert series["steps_total", (("rank", "0"),)] == 112
    assert ("steps_total", (("rank", "1"),)) not in series
    api.ranks.silent = set()
    monkeypatch.setattr(metrics, "ANSWER_WITHIN_S", 30)
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
    api.conductor.die()


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
            assert late == ADAPTER_FAMILIES
            assert http.post("/v1/unload_lora_adapter", json=body).status_code == 200
    api.ranks.wait_for(NewRequest, 3)
    series = scrape(api)
    assert set(series) == before
    assert series["adapter_requests_total", (("adapter", "other"), ("outcome", "length"))] == 3
    assert series["requests_refused_total", (("reason", "unknown_model"),)] == 3
