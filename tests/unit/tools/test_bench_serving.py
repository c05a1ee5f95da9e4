"""Pins what ``mstar-tp bench serving`` measures: which requests it sends, what its figures mean.

A small server on loopback answers with known text, so every count can be worked out from the
server's own log. Set MSTAR_TP_OTHER_LOADER to the path of another load generator (one that takes
--url --models --requests --concurrency --prompt-tokens --max-tokens --seed and prints one JSON
line) to check that both report the same counts for the same server.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from mstar_tp.bench.load import Load, Outcome, dealt, departures, word_prompts
from mstar_tp.bench.stats import percentile, run_stats
from mstar_tp.cli.main import main

ROOT = Path(__file__).resolve().parents[3]


class FakeServer:
    """Streams ``max_tokens`` words a completion, or fails in the way that the model's name says."""

    def __init__(self) -> None:
        self.log: list[dict[str, Any]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._up = threading.Event()
        self.url = ""

    def __enter__(self) -> FakeServer:
        self._thread.start()
        assert self._up.wait(120), "the fake server did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(120)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        runner = self._loop.run_until_complete(self._start())
        self._up.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    async def _models(self, _: web.Request) -> web.Response:
        cards = [{"id": "base"}, *({"id": f"ad-{i}", "parent": "base"} for i in range(3))]
        return web.json_response({"data": cards})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.log.append(body)
        model, wanted = body["model"], body["max_tokens"]
        if model == "missing":
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        tokens = wanted - 1 if model == "short" else wanted
        for event in self._events(model, body["prompt"], tokens):
            await answer.write(b"data: " + event.encode() + b"\n\n")
        return answer

    def _events(self, model: str, prompt: Any, tokens: int) -> Iterator[str]:
        size = len(prompt)
        for i in range(tokens):
            yield json.dumps({"choices": [{"text": text_of(model, prompt, i)}]})
            if model == "broken" and i == 1:
                yield json.dumps({"error": {"message": "fell over"}})
                return
        usage = {"prompt_tokens": size, "completion_tokens": tokens}
        yield json.dumps({"choices": [], "usage": usage})
        yield "[DONE]"


def text_of(model: str, prompt: Any, i: int) -> str:
    return f" {model}/{prompt[0]}/{i}"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


def run(server: FakeServer, tmp_path: Path, *more: str) -> tuple[int, list[dict[str, Any]]]:
    out = tmp_path / "figures.json"
    code = main(["bench", "serving", "--url", server.url, "--json", str(out), *more])
    return code, json.loads(out.read_text())["details"]["runs"]["ours"]


SMALL = ("--requests", "9", "--concurrency", "4", "--prompt-tokens", "5", "--max-tokens", "6")


def expected_digest(models: list[str], seed: int) -> str:
    """Worked out from the rules alone: ids drawn in order, models dealt in turn."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(300, 2000) for _ in range(5)] for _ in range(9)]
    texts = []
    for number, prompt in enumerate(prompts):
        model = models[number % len(models)]
        kept = {"missing": 0, "short": 5, "broken": 2}.get(model, 6)
        texts.append("".join(text_of(model, prompt, i) for i in range(kept)))
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def test_counts_tokens_and_digest_are_those_of_the_servers_log(
    server: FakeServer, tmp_path: Path
) -> None:
    code, (stats,) = run(server, tmp_path, "--models", "a,b,c", "--seed", "3", *SMALL)
    assert code == 0
    assert Counter(body["model"] for body in server.log) == {"a": 3, "b": 3, "c": 3}
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in server.log)
    assert (stats["output_tokens"], stats["errors"]) == (9 * 6, 0)
    assert stats["output_tok_s"] == pytest.approx(54 / stats["wall_s"], rel=0.01)
    assert stats["digest"] == expected_digest(["a", "b", "c"], 3)
    assert "prompt_tokens_seen" not in stats


def test_each_way_to_fail_is_an_error_and_adds_no_tokens(
    server: FakeServer, tmp_path: Path
) -> None:
    code, (stats,) = run(server, tmp_path, "--models", "missing,short,broken", *SMALL)
    assert code == 1
    assert (stats["errors"], stats["output_tokens"]) == (9, 0)
    assert "HTTP 404" in stats["first_error"]
    assert stats["ttft_ms"] == {"p50": None, "p95": None, "p99": None}


def test_a_server_that_is_not_there_fails_every_request(tmp_path: Path) -> None:
    with FakeServer() as gone:
        url = gone.url
    code = main(["bench", "serving", "--url", url, "--models", "a", *SMALL])
    assert code == 1


def test_runs_step_the_seed_and_warm_up_is_not_reported(server: FakeServer, tmp_path: Path) -> None:
    _, runs = run(server, tmp_path, "--models", "a", "--runs", "2", "--warmup", "2", *SMALL)
    assert [r["load"]["seed"] for r in runs] == [0, 1]
    assert [r["digest"] for r in runs] == [expected_digest(["a"], 0), expected_digest(["a"], 1)]
    assert len(server.log) == 2 + 2 * 9


def test_adapters_are_taken_from_the_servers_list(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(server, tmp_path, "--adapters", "2", *SMALL)
    assert {body["model"] for body in server.log} == {"ad-0", "ad-1"}
    assert main(["bench", "serving", "--url", server.url, "--adapters", "4", *SMALL]) == 1
    assert "lists 3 adapters" in capsys.readouterr().err


def test_an_open_loop_sends_every_request(server: FakeServer, tmp_path: Path) -> None:
    code, (stats,) = run(server, tmp_path, "--models", "a,b", "--rate", "500", *SMALL)
    assert code == 0
    assert stats["digest"] == expected_digest(["a", "b"], 0)


def a_load(**changes: Any) -> Any:
    base = {
        "models": ("a", "b", "c", "d"),
        "requests": 400,
        "concurrency": 4,
        "prompt_tokens": 5,
        "max_tokens": 6,
        "seed": 1,
    }
    return Load(**(base | changes))


def test_zipf_makes_early_names_popular_and_is_seeded() -> None:
    names = dealt(a_load(zipf=1.0))
    counts = Counter(names)
    assert counts["a"] > counts["b"] > counts["d"]
    assert names == dealt(a_load(zipf=1.0)) != dealt(a_load(zipf=1.0, seed=2))
    even = Counter(dealt(a_load(zipf=0.0)))
    assert max(even.values()) < 2 * min(even.values())


def test_departures_grow_and_keep_the_asked_rate() -> None:
    times = departures(a_load(rate=10.0))
    assert times == sorted(times)
    assert times[-1] == pytest.approx(400 / 10.0, rel=0.25)


def test_percentiles_are_numpys() -> None:
    rng = np.random.default_rng(0)
    values = rng.exponential(size=37).tolist()
    for share in (0.0, 0.5, 0.95, 0.99, 1.0):
        assert percentile(values, share) == pytest.approx(np.quantile(values, share))


def test_latencies_are_pooled_over_good_requests_only() -> None:
    def outcome(sent: float, pieces: list[float], error: str | None = None) -> Any:
        return Outcome(
            model="a", sent_s=sent, pieces_s=pieces, text="x", tokens=len(pieces), error=error
        )

    stats = run_stats(
        a_load(requests=3),
        [outcome(0.0, [0.1, 0.2, 0.4]), outcome(1.0, [1.3]), outcome(0.0, [9.0, 99.0], "fell")],
        wall_s=2.0,
    )
    assert stats["output_tok_s"] == 2.0
    assert stats["ttft_ms"]["p50"] == pytest.approx(200)  # between 100 and 300
    assert stats["itl_ms"]["p50"] == pytest.approx(150)  # between 100 and 200
    assert stats["tpot_ms"]["p50"] == pytest.approx(150)  # 0.3 s over two gaps; one token has none
    assert stats["errors"] == 1


def test_word_prompts_have_exactly_the_length_asked_for() -> None:
    from tokenizers import Tokenizer

    file = ROOT / "launch" / "demo" / "model" / "tokenizer.json"
    load = a_load(requests=5, prompt_tokens=40)
    prompts = word_prompts(file.parent, load, random.Random(0))
    tokenizer = Tokenizer.from_file(str(file))
    assert [len(tokenizer.encode(p, add_special_tokens=False).ids) for p in prompts] == [40] * 5


@pytest.mark.skipif(
    not os.environ.get("MSTAR_TP_OTHER_LOADER"), reason="MSTAR_TP_OTHER_LOADER names no loader"
)
@pytest.mark.parametrize("models", ["a,b,c", "a,missing,short,broken"])
def test_another_load_generator_reports_the_same_counts(
    server: FakeServer, tmp_path: Path, models: str
) -> None:
    command = [sys.executable, os.environ["MSTAR_TP_OTHER_LOADER"], "--url", server.url]
    done = subprocess.run(
        [*command, "--models", models, "--seed", "3", *SMALL],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    theirs = json.loads(done.stdout)
    asked = sorted(json.dumps(body, sort_keys=True) for body in server.log)
    server.log.clear()
    _, (ours,) = run(server, tmp_path, "--models", models, "--seed", "3", *SMALL)
    assert sorted(json.dumps(body, sort_keys=True) for body in server.log) == asked
    for key in ("errors", "digest"):
        assert ours[key] == theirs[key]
    their_tokens = round(theirs["output_tok_s"] * theirs["wall_s"])
    assert ours["output_tokens"] == their_tokens
    assert {k: v is None for k, v in ours["itl_ms"].items()} == {
        k: v is None for k, v in theirs["itl_ms"].items()
    }
