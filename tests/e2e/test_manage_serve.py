"""Adapters managed on a real server of two ranks and one slot: the documented curl lines as they
stand, weights changed under running requests, adapters that requests name, and a rank that dies.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.failure_kit import until
from support.processes import ranks

from mstar_tp.testing.server import Server
from mstar_tp.testing.tiny_models import make_adapter

MODEL = Path(__file__).parents[2] / "launch" / "demo" / "model"
GUARD_S = 120.0

LOAD = """curl -X POST http://localhost:8000/v1/load_lora_adapter \\
-H "Content-Type: application/json" \\
-d '{
    "lora_name": "sql_adapter",
    "lora_path": "/path/to/sql-lora-adapter"
}'"""
LOAD_IN_PLACE = """curl -X POST http://localhost:8000/v1/load_lora_adapter \\
  -H "Content-Type: application/json" \\
  -d '{
    "lora_name": "sql_adapter",
    "lora_path": "/path/to/sql-lora-adapter",
    "load_inplace": true
  }'"""
UNLOAD = """curl -X POST http://localhost:8000/v1/unload_lora_adapter \\
-H "Content-Type: application/json" \\
-d '{
    "lora_name": "sql_adapter"
}'"""
COMPLETE = """curl http://localhost:8000/v1/completions \\
    -H "Content-Type: application/json" \\
    -d '{
        "model": "sql_adapter",
        "prompt": "San Francisco is a",
        "max_tokens": 7,
        "temperature": 0
    }'"""
MODELS = "curl localhost:8000/v1/models"


class Site:
    """The server, its folders, and what it answers with each weights."""

    def __init__(self, server: Server, root: Path) -> None:
        self.server, self.root = server, root
        self.http = httpx.Client(base_url=server.url, timeout=GUARD_S)

    def curl(self, lines: str, path: Path | None = None) -> tuple[int, str]:
        """Run documented lines against this server: status and body."""
        lines = lines.replace("http://localhost:8000", self.server.url)
        lines = lines.replace("localhost:8000", self.server.url)
        lines = lines.replace("/path/to/sql-lora-adapter", str(path))
        run = ["bash", "-c", lines + " -s -w '\\n%{http_code}'"]
        text = subprocess.run(run, capture_output=True, text=True, check=True).stdout
        body, _, status = text.rpartition("\n")
        return int(status), body

    def post(self, route: str, **body: Any) -> httpx.Response:
        return self.http.post(route, json=body)

    def ask(self, model: str, tokens: int = 8) -> httpx.Response:
        body = {"model": model, "prompt": "The sky", "max_tokens": tokens, "temperature": 0}
        return self.http.post("/v1/completions", json=body | {"ignore_eos": True})

    def text(self, model: str, tokens: int = 8) -> str:
        answer = self.ask(model, tokens)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    def put(self, name: str, seed: int, rank: int = 4) -> Path:
        """An adapter in the root, put there at once."""
        fresh = make_adapter(
            self.root / f".{seed}-{rank}", MODEL, rank=rank, seed=seed, strength=2.0
        )
        place = self.root / name
        place.parent.mkdir(exist_ok=True, parents=True)
        if place.exists():
            place.rename(self.root / f".was-{time.monotonic_ns()}")
        fresh.rename(place)
        return place

    def until(self, model: str, wanted: str) -> None:
        """Ask until the answer is ``wanted``."""
        end = time.monotonic() + GUARD_S
        while (text := self.text(model)) != wanted:
            assert time.monotonic() < end, text

    def places(self, name: str) -> list[tuple[int, str]]:
        card = self.http.get(f"/v1/adapters/{name}").json()
        return [(place["rank"], place["tier"]) for place in card["residency"]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    root = tmp_path_factory.mktemp("root")
    flags = ["--tp", "2", "--dtype", "float32", "--max-model-len", "512", "--threads", "1"]
    flags += ["--max-loras", "1", "--max-cpu-loras", "2", "--max-lora-rank", "4"]
    flags += ["--adapters-root", str(root), "--on-demand", "--served-model-name", "base"]
    with Server(str(MODEL), *flags) as server:
        site = Site(server, root)
        yield site
        site.http.close()


@pytest.fixture(scope="module")
def texts(site: Site) -> dict[int, str]:
    """What each seed's weights answer."""
    texts = {}
    for seed in (1, 2):
        site.put(f"known/{seed}", seed)
        texts[seed] = site.text(f"known/{seed}")
    assert texts[1] != texts[2]
    return texts


def test_the_documented_lines_do_what_is_documented(site: Site) -> None:
    path = site.put("sql", 1)
    assert site.curl(LOAD, path) == (200, "Success: LoRA adapter 'sql_adapter' added successfully.")
    status, body = site.curl(COMPLETE)
    assert status == 200 and json.loads(body)["model"] == "sql_adapter"
    status, body = site.curl(MODELS)
    assert status == 200
    card = {card["id"]: card for card in json.loads(body)["data"]}["sql_adapter"]
    assert (card["parent"], card["root"], card["object"]) == ("base", str(path), "model")
    status, body = site.curl(LOAD, path)
    assert status == 400 and "has already been loaded" in json.loads(body)["error"]["message"]
    status, body = site.curl(LOAD_IN_PLACE, path)
    assert (status, body) == (200, "Success: LoRA adapter 'sql_adapter' added successfully.")
    status, body = site.curl(UNLOAD)
    assert (status, body) == (200, "Success: LoRA adapter 'sql_adapter' removed successfully.")
    assert site.curl(UNLOAD)[0] == 404 and site.curl(COMPLETE)[0] == 404
    assert site.curl(LOAD, site.root / "nowhere")[0] == 404
    assert site.curl(LOAD, Path("/etc"))[0] == 400


def test_new_weights_serve_new_requests_while_running_ones_end_on_the_old(
    site: Site, texts: dict[int, str]
) -> None:
    first, second = (str(site.root / "known" / str(seed)) for seed in (1, 2))
    assert site.post("/v1/load_lora_adapter", lora_name="x", lora_path=first).status_code == 200
    whole = site.text("x", 200)
    body = {"model": "x", "prompt": "The sky", "max_tokens": 200, "temperature": 0}
    body |= {"stream": True, "ignore_eos": True}
    with site.http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        begun = next(line for line in lines if line.startswith("data: {"))
        # There is one slot, and the running request has it.
        swap = {"lora_name": "x", "lora_path": second, "load_inplace": True}
        with httpx.Client(base_url=site.server.url, timeout=GUARD_S) as other:
            assert other.post("/v1/load_lora_adapter", json=swap).status_code == 200
        events = [line for line in (begun, *lines) if line.startswith("data: {")]
    parts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
    assert "".join(parts) == whole, "the old weights to its end"
    assert site.text("x") == texts[2]
    # A new version that is refused: the old one stays.
    bad = site.put("bad", 3, rank=8)
    swap["lora_path"] = str(bad)
    answer = site.post("/v1/load_lora_adapter", **swap)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith("adapter 'x' was refused by all ranks: ")
    assert message.count("'x'") == 1 and "rank 8" in message
    assert site.text("x") == texts[2]


def test_judging_an_adapter_says_what_a_load_would(site: Site) -> None:
    good, bad = str(site.put("good", 4)), str(site.put("worse", 5, rank=8))
    found = site.post("/v1/validate_lora_adapter", lora_path=good).json()
    assert found["valid"] and found["problems"] == [] and found["rank"] == 4
    assert len(found["bytes_per_rank"]) == 2 and min(found["bytes_per_rank"]) > 0
    found = site.post("/v1/validate_lora_adapter", lora_path=bad).json()
    assert not found["valid"] and found["problems"][0]["ranks"] == [0, 1]
    load = site.post("/v1/load_lora_adapter", lora_name="worse", lora_path=bad)
    assert found["problems"][0]["message"] in load.json()["error"]["message"]
    (Path(good) / "adapter_model.safetensors").write_bytes(b"")
    found = site.post("/v1/validate_lora_adapter", lora_path=good).json()
    assert "empty" in found["problems"][0]["message"], found
    assert {"good", "worse"}.isdisjoint(c["id"] for c in site.http.get("/v1/models").json()["data"])


def test_a_request_loads_what_it_names_and_follows_its_folder(
    site: Site, texts: dict[int, str]
) -> None:
    site.put("team/a", 1)
    assert site.text("team/a") == texts[1]
    assert site.places("team/a") == [(0, "device"), (1, "device")]
    assert {cpu_cache for _, cpu_cache in site.places("known/2")} <= {"host", "disk"}
    site.put("team/a", 2)
    site.until("team/a", texts[2])
    assert site.http.get("/v1/adapters/team/a").json()["generation"] > 1
    # Weights that lie outside are not read, however they got there.
    outside = site.root.parent / "outside"
    (site.root / "team" / "a" / "adapter_model.safetensors").rename(outside)
    (site.root / "team" / "a" / "adapter_model.safetensors").symlink_to(outside)
    end = time.monotonic() + GUARD_S
    while (answer := site.ask("team/a")).status_code == 200:
        assert time.monotonic() < end
    assert answer.status_code == 400
    assert "leads outside" in answer.json()["error"]["message"]
    shutil.rmtree(site.root / "team")
    while (answer := site.ask("team/a")).status_code != 404:
        assert time.monotonic() < end
    os.unlink(outside)


def test_the_listing_and_the_debug_view_say_where_adapters_are(
    site: Site, texts: dict[int, str]
) -> None:
    for seed in (1, 2, 1):
        assert site.text(f"known/{seed}") == texts[seed]

    def places() -> list[list[dict[str, Any]]]:
        cards = {card["id"]: card for card in site.http.get("/v1/adapters").json()["data"]}
        return [cards[f"known/{seed}"]["residency"] for seed in (1, 2)]

    # A follower removes what has ended a moment after the leader told of the end.
    until(lambda: not any(place.get("running") for both in places() for place in both))
    one, two = places()
    assert [(place["rank"], place["tier"]) for place in one] == [(0, "device"), (1, "device")]
    assert [(place["rank"], place["tier"]) for place in two] == [(0, "host"), (1, "host")]
    for place in (*one, *two):
        assert place["num_bytes"] > 0 and place.get("waiting", 0) == 0
    assert all(place["installs"] >= 1 for place in (*one, *two))
    assert all(place["evictions"] >= 1 for place in two)
    ranks_told = site.http.get("/debug/state").json()["ranks"]
    for told in ranks_told:
        states = {state["adapter"]["name"]: state for state in told["adapters"]}
        assert states["known/1"]["slot"] == 1 and states["known/2"]["host"] == "in"
    assert ranks_told[0]["adapters"][0]["installs"] == ranks_told[1]["adapters"][0]["installs"]


def test_a_rank_that_dies_takes_no_adapter_with_it(site: Site, texts: dict[int, str]) -> None:
    before = site.text("known/1")
    assert ranks(site.server.process.pid)[1].send(signal.SIGKILL)
    assert site.text("known/1") == before == texts[1]
    assert site.text("known/2") == texts[2]
