"""Sends a load to an OpenAI-style server, and follows each stream to its end.

Every request is a streaming, greedy completion with ``ignore_eos``, so it has exactly as many
tokens of output as it asks for. One event loop; needs aiohttp.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, Self

import aiohttp

from mstar_tp.bench.load import Ask, Load, Outcome


class Client:
    """Sends completions to one server. Belongs to one event loop."""

    def __init__(self, url: str, api_key: str, timeout_s: float) -> None:
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=None, sock_read=timeout_s)

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(
            timeout=self._timeout, connector=connector, headers=self._headers
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def cards(self) -> list[dict[str, Any]]:
        """The base's names and the adapters', as /v1/models lists them."""
        async with self._session.get(f"{self._url}/models") as answer:
            answer.raise_for_status()
            return list((await answer.json())["data"])

    async def ask_once(self, method: str, path: str, body: Any = None) -> Any:
        """One request of any other route, and its JSON answer (or text).

        Raises:
            aiohttp.ClientResponseError: the status is an error's.
        """
        url = self._url.removesuffix("/v1") + path
        async with self._session.request(method, url, json=body) as answer:
            if answer.status >= 400:
                raise aiohttp.ClientResponseError(
                    answer.request_info,
                    (),
                    status=answer.status,
                    message=f"{path}: {(await answer.text())[:300]}",
                )
            is_json = answer.content_type == "application/json"
            return await answer.json() if is_json else await answer.text()

    async def complete(self, ask: Ask, max_tokens: int) -> Outcome:
        """Send one request, follow its stream to the end; a failure is in the outcome."""
        outcome = Outcome(model=ask.model, sent_s=time.perf_counter())
        body = {
            "model": ask.model,
            "prompt": ask.prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with self._session.post(f"{self._url}/completions", json=body) as answer:
                if answer.status != 200:
                    outcome.error = f"HTTP {answer.status}: {(await answer.text())[:300]}"
                else:
                    await _follow(answer, outcome)
        except (aiohttp.ClientError, TimeoutError, ValueError, OSError) as error:
            outcome.error = f"{type(error).__name__}: {error}"[:300]
        outcome.tokens = outcome.tokens or len(outcome.pieces_s)
        if outcome.error is None and not outcome.pieces_s:
            outcome.error = "the stream ended without output"
        if outcome.error is None and outcome.tokens != max_tokens:
            outcome.error = f"{outcome.tokens} tokens of output, {max_tokens} asked for"
        return outcome


async def _follow(answer: aiohttp.ClientResponse, outcome: Outcome) -> None:
    """Read server-sent events into ``outcome`` until the stream's end mark or its first error."""
    async for raw in answer.content:
        name, _, data = raw.strip().partition(b":")
        if name != b"data":
            continue
        if data.strip() == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            outcome.error = str(event["error"])[:300]
            return
        if event.get("usage"):
            outcome.tokens = event["usage"].get("completion_tokens") or 0
            outcome.prompt_tokens = event["usage"].get("prompt_tokens")
            details = event["usage"].get("prompt_tokens_details") or {}
            outcome.cached_tokens = details.get("cached_tokens")
        if event.get("choices"):
            outcome.pieces_s.append(time.perf_counter())
            outcome.text += event["choices"][0].get("text") or ""


async def closed_loop(client: Client, asks: Sequence[Ask], load: Load) -> list[Outcome]:
    """``load.concurrency`` workers share the requests; outcomes are in the order of ``asks``."""
    outcomes: dict[int, Outcome] = {}
    queue = iter(enumerate(asks))  # shared: each request is taken once

    async def worker(queue: Iterator[tuple[int, Ask]]) -> None:
        for number, ask in queue:
            outcomes[number] = await client.complete(ask, load.max_tokens)

    await asyncio.gather(*(worker(queue) for _ in range(load.concurrency)))
    return [outcomes[i] for i in range(len(asks))]


async def open_loop(client: Client, asks: Sequence[Ask], load: Load) -> list[Outcome]:
    """Every request leaves at its own time; outcomes are in the order of ``asks``."""
    begin = time.perf_counter()

    async def leave(ask: Ask) -> Outcome:
        await asyncio.sleep(max(0.0, begin + ask.at_s - time.perf_counter()))
        return await client.complete(ask, load.max_tokens)

    return await asyncio.gather(*(leave(ask) for ask in asks))
