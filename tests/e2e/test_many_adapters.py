"""Sixty-four clients at once on twelve adapters with four slots, through the official client.

Every answer equals the one the same request gets alone, and afterwards nothing is left on any rank.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mstar_tp.testing.server import Server
from mstar_tp.testing.tiny_models import make_adapter

DEMO = Path(__file__).parents[2] / "launch" / "demo"
NUM_ADAPTERS = 12
NUM_REQUESTS = 64
MODELS = ["base", *(f"adapter-{i}" for i in range(NUM_ADAPTERS))]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("adapters")
    flags = []
    for i in range(NUM_ADAPTERS):
        path = make_adapter(folder / str(i), DEMO / "model", rank=2 + i, seed=i, strength=2.0)
        flags += ["--lora", f"adapter-{i}={path}"]
    flags += ["--max-loras", "4", "--max-lora-rank", "13", "--max-num-seqs", "16"]
    flags += ["--tp", "2", "--dtype", "float32", "--max-model-len", "128", "--block-size", "4"]
    with Server(
        str(DEMO / "model"), "--served-model-name", "base", "--num-kv-pages", "128", *flags
    ) as server:
        yield server


def _request(i: int) -> dict[str, object]:
    sampled: dict[str, object] = {"temperature": 0}
    if i % 3 == 0:
        sampled = {"temperature": 0.7, "seed": i}
    elif i % 3 == 1:
        # Ends somewhere in the text, while further steps are under way.
        sampled = {"temperature": 0, "stop": ["e", "a"]}
    return {
        "model": MODELS[i % len(MODELS)],
        "prompt": f"What colour is the sky on day {i}? " * (1 + i % 3),
        "max_tokens": 6 + i % 7,
        **sampled,
    }


async def _ask(client: openai.AsyncOpenAI, i: int) -> tuple[str, str | None, int]:
    answer = await client.completions.create(**_request(i))  # type: ignore[call-overload]
    choice = answer.choices[0]
    return choice.text, choice.finish_reason, answer.usage.completion_tokens


async def _stream(client: openai.AsyncOpenAI, i: int) -> tuple[str, str | None, int]:
    text, finish, tokens = "", None, 0
    async for chunk in await client.completions.create(  # type: ignore[call-overload]
        **_request(i), stream=True, stream_options={"include_usage": True}
    ):
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            text += choice.text
            finish = choice.finish_reason or finish
    return text, finish, tokens


def test_every_answer_equals_the_one_the_request_gets_alone(server: Server) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=240
        ) as client:
            alone = [await _ask(client, i) for i in range(NUM_REQUESTS)]
            asks = [(_stream if i % 2 else _ask)(client, i) for i in range(NUM_REQUESTS)]
            together = await asyncio.gather(*asks)
        differ = [i for i in range(NUM_REQUESTS) if alone[i] != together[i]]
        assert not differ, [(alone[i], together[i]) for i in differ[:3]]
        by_model = {MODELS[i]: alone[i][0] for i in range(13)}
        assert len(set(by_model.values())) > NUM_ADAPTERS // 2, "adapters answer alike"

    asyncio.run(run())


def test_afterwards_nothing_is_left_on_any_rank(server: Server) -> None:
    # A request that a stop string ended is removed after its last step.
    state = httpx.get(f"{server.url}/debug/state").json()
    while any(rank["requests"] for rank in state["ranks"]):
        state = httpx.get(f"{server.url}/debug/state").json()
    assert len(state["ranks"]) == 2
    for rank in state["ranks"]:
        assert rank["requests"] == []
        assert rank["pages_used"] == rank["kv_host"]["pages_used"] == 0
        assert all(slot["holders"] == [] for slot in rank["slots"])
        assert rank["checks"] == state["ranks"][0]["checks"]
        assert rank["steps_waited_for_read"] == 0
    assert state["ranks"][0]["waiting"] == state["ranks"][0]["running"] == 0


def test_metrics_say_what_every_rank_did(server: Server) -> None:
    state = httpx.get(f"{server.url}/debug/state").json()
    text = httpx.get(f"{server.url}/metrics").text
    found = {
        (sample.name, sample.labels.get("rank")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    for rank in state["ranks"]:
        number = str(rank["rank"])
        assert found["mstar_tp_steps_total", number] == rank["steps"] > 0
        assert found["mstar_tp_cpu_cache_adapters", number] == len(rank["cpu_cache"]) > 0
        assert found["mstar_tp_kv_pages", number] == rank["pages_total"]
        assert found["mstar_tp_evictions_total", number] > 0
        assert found["mstar_tp_steps_waited_for_read_total", number] == 0
        assert found["mstar_tp_adapter_slots", number] == 4
        peak = found["mstar_tp_cpu_cache_peak", number]
        assert 0 < peak <= found["mstar_tp_cpu_cache_limit", number] == 8
        assert found["mstar_tp_cpu_cache_memory_bytes", number] > 0


def test_a_client_that_leaves_takes_its_request_with_it(server: Server) -> None:
    async def run() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            body = {**_request(5), "max_tokens": 100, "stream": True, "ignore_eos": True}
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line:
                        break
            # The abort is in the ranks' order before this request, and so is seen by this
            # inspection.
            await client.post("/v1/completions", json=_request(1))
            while True:
                state = (await client.get("/debug/state")).json()
                if all(rank["requests"] == [] for rank in state["ranks"]):
                    return

    asyncio.run(run())
