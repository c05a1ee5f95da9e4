"""One real server of two ranks, seen from outside: its log, its metrics, its tables and its top."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mstar_tp.engine.step.step_clock import LEADER_PHASES
from mstar_tp.testing.server import Server
from mstar_tp.testing.tiny_models import make_adapter

MODEL = str(Path(__file__).parents[2] / "launch" / "demo" / "model")
SECRET = "the moon is a secret"
HEADERS = {"Authorization": "Bearer CLIENT-KEY"}
ADMIN = {"Authorization": "Bearer ADMIN-KEY"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("adapters")
    flags = ["--log-format", "json", "--enable-log-requests"]
    flags += ["--api-key", "CLIENT-KEY", "--admin-key", "ADMIN-KEY"]
    for name in ("good", "gone"):
        path = make_adapter(folder / name, MODEL, rank=2, seed=1, strength=2.0)
        flags += ["--lora", f"{name}={path}"]
    # One copy at a time: a read of what has gone is tried only when a request names it.
    flags += ["--max-loras", "1", "--max-cpu-loras", "1", "--max-num-seqs", "4"]
    flags += ["--tp", "2", "--dtype", "float32", "--max-model-len", "128"]
    with Server(MODEL, "--served-model-name", "base", *flags) as server:
        shutil.rmtree(folder / "gone")
        for number in range(3):
            assert ask(server, "good", f"good-{number}").status_code == 200
        assert ask(server, "gone", "gone-0").status_code == 500
        yield server


def ask(server: Server, name: str, request_id: str) -> httpx.Response:
    return httpx.post(
        f"{server.url}/v1/completions",
        json={"model": name, "prompt": SECRET, "max_tokens": 8, "ignore_eos": True},
        headers=HEADERS | {"X-Request-Id": request_id},
        timeout=120,
    )


def metrics(server: Server) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name.removeprefix("mstar_tp_"), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
        for sample in family.samples
    }


def test_what_happened_can_be_seen(server: Server) -> None:
    found = metrics(server)

    def value(name: str, **labels: str) -> float:
        return found[name, frozenset(labels.items())]

    def committed(rank: str) -> float:
        return value("step_phase_seconds_count", rank=rank, phase="commit")

    # A follower ends its last step when it does.
    while not committed("0") == committed("1") == value("steps_total", rank="1"):
        found = metrics(server)
    assert value("adapter_requests_total", adapter="good", outcome="length") == 3
    assert value("adapter_requests_total", adapter="gone", outcome="failed") == 1
    assert value("adapter_generated_tokens_total", adapter="good") == 24
    for adapter, place in (("good", "device"), ("gone", "failed")):
        assert value("adapter_place", adapter=adapter, place=place) == 1
        assert value("adapters", place=place) == 1
    assert value("adapters", place="disk") == value("adapters", place="host") == 0
    assert value("adapter_bytes", adapter="good", place="device") > 0
    assert value("adapter_bytes", adapter="gone", place="device") == 0
    assert value("adapter_slot_hits_total", adapter="good") == 2
    for name in ("time_to_first_token", "queue", "prefill", "request"):
        assert value(f"{name}_seconds_count") == 3
        assert value(f"{name}_seconds_sum") > 0
    assert value("inter_token_seconds_count") == 21
    steps = value("steps_total", rank="0")
    for rank in ("0", "1"):
        assert value("step_rows_count", rank=rank) == steps
        assert value("rank_resident_memory_bytes", rank=rank) > 10e6
        assert value("rank_cpu_seconds_total", rank=rank) > 0
        for phase in ("admit", "plan", "forward", "exchange", "commit"):
            assert value("step_phase_seconds_count", rank=rank, phase=phase) == steps, phase
            assert value("step_phase_seconds_sum", rank=rank, phase=phase) > 0
    for phase in LEADER_PHASES:
        assert value("step_phase_seconds_count", rank="0", phase=phase) == steps
    # The state is asked for after all steps, and says the same.
    state = httpx.get(f"{server.url}/debug/state?limit=1", headers=ADMIN).json()
    assert [rank["steps"] for rank in state["ranks"]] == [steps, steps]
    assert state["ranks"][0]["failed_reads"][0]["adapter"]["name"] == "gone"
    assert state["ranks"][0]["left_out"] == {"served": 1}
    assert state["frontend"]["phase"] == "ready" and state["frontend"]["requests"] == []


def test_top_shows_it(server: Server) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mstar_tp", "top", server.url, "--once", "--interval", "0.2"],
        env={**os.environ, "MSTAR_TP_ADMIN_KEY": "ADMIN-KEY"},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert lines[0] == f"mstar-tp {server.url}  ready"
    assert done.stderr == "" and all(len(line) <= 80 for line in lines)
    ranks = [line.split() for line in lines if line.startswith(("     0 ", "     1 "))]
    assert [line[0] for line in ranks][:2] == ["0", "1"]
    assert all(line[5].endswith("/1") for line in ranks[:2])
    assert ["1", "good"] in [line.split()[:2] for line in lines]
    assert any(line.startswith("read failed: gone: rank ") for line in lines)


def test_every_line_of_the_log_is_an_object_that_names_its_request(server: Server) -> None:
    response = httpx.get(f"{server.url}/v1/models", headers=HEADERS | {"X-Request-Id": "models"})
    assert response.headers["x-request-id"] == "models"
    server.stop()
    lines: list[dict[str, Any]] = [json.loads(line) for line in server.log.splitlines()]
    assert {"frontend", "leader"} <= {line["role"] for line in lines}
    of_gone = [line for line in lines if line.get("request_id") == "gone-0"]
    assert {line["role"] for line in of_gone} == {"frontend", "leader"}
    assert any(line["message"].startswith("request 3 fails: ") for line in of_gone)
    ended = [line for line in lines if line["message"].startswith("ended: ")]
    assert [line["request_id"] for line in ended] == ["good-0", "good-1", "good-2", "gone-0"]
    assert all(line["adapter"] and line["prompt_tokens"] for line in ended)
    for said in (SECRET, "CLIENT-KEY", "ADMIN-KEY"):
        assert said not in server.log
