#!/usr/bin/env python3
"""Load an OpenAI-style server and report its rates and latencies.

    python scripts/bench_serving.py --url http://127.0.0.1:8000 --tokenizer MODEL_DIR --adapters 8
    python scripts/bench_serving.py --models base,pirate --zipf 1.1 --rate 20 --json out.json

Every request is a streaming, greedy completion with ``ignore_eos``, so it has exactly
``--max-tokens`` of output. Closed loop (the default): ``--concurrency`` workers each send one
request after the other. Open loop (``--rate``): requests leave at seeded Poisson times whatever the
server does. The same ``--seed`` asks the same prompts of the same models in the same order.

What the figures mean:
    output tokens/s   completion tokens of all good requests / wall time of the run
    TTFT              from sending a request to its first streamed piece of output
    inter-token       gaps between the streamed pieces of one request, all requests pooled
    per-token         (last piece - first piece) / (tokens - 1), one value a request
    digest            hash of all output texts by request number: equal for equal greedy outputs

Needs aiohttp and rich, and tokenizers for --tokenizer. Exit code 1 when any request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

Prompt = str | list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one run asks: equal loads send equal requests."""

    models: tuple[str, ...]
    requests: int
    concurrency: int
    prompt_tokens: int
    max_tokens: int
    seed: int
    zipf: float | None = None
    """Exponent of a Zipf draw over ``models`` in their order; None deals them in turn."""
    rate: float | None = None
    """Requests a second, open loop; None for a closed loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request before it is sent."""

    model: str
    prompt: Prompt
    at_s: float
    """Open loop: when to send it, from the start of the run."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One request after it ended. Times are of ``time.perf_counter``, in seconds."""

    model: str
    sent_s: float
    pieces_s: list[float] = field(default_factory=list)
    """When each streamed piece came."""
    text: str = ""
    tokens: int = 0
    prompt_tokens: int | None = None
    error: str | None = None


# ---- what to ask


def plain_words(tokenizer: Any) -> list[str]:
    """Texts of tokens that are one plain word after a space: joined, they encode back."""

    def survives(token: int, text: str) -> bool:
        plain = text.startswith(" ") and text.strip().isalpha() and text.isascii()
        return plain and tokenizer.encode(text, add_special_tokens=False).ids == [token]

    texts = (
        (i, tokenizer.decode([i], skip_special_tokens=False))
        for i in range(tokenizer.get_vocab_size())
    )
    return [text for token, text in texts if survives(token, text)]


def word_prompts(path: Path, load: Load, rng: random.Random) -> list[Prompt]:
    """``load.requests`` random texts of exactly ``load.prompt_tokens`` tokens each.

    Raises:
        ValueError: the tokenizer has too few one-word tokens to build such texts.
    """
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    tokenizer = Tokenizer.from_file(str(file))
    words = plain_words(tokenizer)
    if len(words) < 16:
        raise ValueError(
            f"{file}: has {len(words)} one-word tokens, wanted 16 or more: leave --tokenizer out"
        )
    prompts: list[Prompt] = []
    for _ in range(100 * load.requests):
        text = "".join(rng.choice(words) for _ in range(load.prompt_tokens))
        if len(tokenizer.encode(text, add_special_tokens=False).ids) == load.prompt_tokens:
            prompts.append(text)
        if len(prompts) == load.requests:
            return prompts
    raise ValueError(f"{file}: joined words rarely keep their token count: leave --tokenizer out")


def id_prompts(low: int, high: int, load: Load, rng: random.Random) -> list[Prompt]:
    """``load.requests`` lists of random token ids in ``[low, high)``."""
    return [
        [rng.randrange(low, high) for _ in range(load.prompt_tokens)] for _ in range(load.requests)
    ]


def dealt(load: Load) -> list[str]:
    """The model of each request: in turn, or drawn by Zipf so that early names are popular."""
    if load.zipf is None:
        return [load.models[i % len(load.models)] for i in range(load.requests)]
    weights = [1 / (place + 1) ** load.zipf for place in range(len(load.models))]
    # A generator of its own: the prompts stay the same whatever way the models are dealt.
    return random.Random(f"models {load.seed}").choices(load.models, weights, k=load.requests)


def departures(load: Load) -> list[float]:
    """Open loop: seconds from the start at which each request leaves, with exponential gaps."""
    if load.rate is None:
        return [0.0] * load.requests
    rng = random.Random(f"arrivals {load.seed}")
    return list(itertools.accumulate(rng.expovariate(load.rate) for _ in range(load.requests)))


# ---- asking


class Client:
    """Sends completions to one server. Belongs to one event loop."""

    def __init__(self, url: str, api_key: str, timeout_s: float) -> None:
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=None, sock_read=timeout_s)

    async def __aenter__(self) -> Client:
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(
            timeout=self._timeout, connector=connector, headers=self._headers
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def names(self) -> tuple[list[str], list[str]]:
        """The base's names and the adapters', as /v1/models lists them."""
        async with self._session.get(f"{self._url}/models") as answer:
            answer.raise_for_status()
            cards = (await answer.json())["data"]
        adapters = [card["id"] for card in cards if card.get("parent")]
        return [card["id"] for card in cards if not card.get("parent")], adapters

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


# ---- what came of it


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` (0..1) of ``values`` lie, linear between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def spread_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    """p50, p95 and p99 in milliseconds; None for no values."""
    shares = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
    if not seconds:
        return dict.fromkeys(shares)
    return {name: round(1e3 * percentile(seconds, share), 3) for name, share in shares.items()}


def report(load: Load, outcomes: Sequence[Outcome], wall_s: float) -> dict[str, Any]:
    """The figures of one run as plain JSON values."""
    good = [o for o in outcomes if o.error is None]
    bad = [o for o in outcomes if o.error is not None]
    gaps = [later - earlier for o in good for earlier, later in itertools.pairwise(o.pieces_s)]
    per_token = [(o.pieces_s[-1] - o.pieces_s[0]) / (o.tokens - 1) for o in good if o.tokens > 1]
    texts = "\0".join(o.text for o in outcomes)
    figures: dict[str, Any] = {
        "load": asdict(load),
        "wall_s": round(wall_s, 4),
        "output_tokens": sum(o.tokens for o in good),
        "output_tok_s": round(sum(o.tokens for o in good) / wall_s, 2),
        "requests_s": round(len(good) / wall_s, 3),
        "ttft_ms": spread_ms([o.pieces_s[0] - o.sent_s for o in good]),
        "itl_ms": spread_ms(gaps),
        "tpot_ms": spread_ms(per_token),
        "e2e_ms": spread_ms([o.pieces_s[-1] - o.sent_s for o in good]),
        "errors": len(bad),
        "digest": hashlib.sha256(texts.encode()).hexdigest()[:16],
    }
    seen = sorted({o.prompt_tokens for o in good if o.prompt_tokens is not None})
    if seen and seen != [load.prompt_tokens]:
        figures["prompt_tokens_seen"] = (
            seen  # the server added or merged tokens: rates compare unequal work
        )
    if bad:
        figures["first_error"] = bad[0].error
    return figures


def show(runs: Sequence[dict[str, Any]], console: Console) -> None:
    """Print a row a run, and their medians when there are several."""
    load = runs[0]["load"]
    kind = "closed loop" if load["rate"] is None else f"{load['rate']:g} requests/s"
    title = (
        f"{len(load['models'])} model(s), {load['requests']} requests, "
        f"{load['concurrency']} at once, {kind}, "
        f"{load['prompt_tokens']} + {load['max_tokens']} tokens"
    )
    table = Table(title=title)
    latencies = [("TTFT", "ttft_ms"), ("inter-token", "itl_ms")]
    columns = [f"{name} {share} ms" for name, _ in latencies for share in ("p50", "p95")]
    for name in ("run", "tokens/s", *columns, "errors", "digest"):
        table.add_column(name, justify="right")

    def figures(run: dict[str, Any]) -> list[float]:
        spread = [run[key][share] for _, key in latencies for share in ("p50", "p95")]
        return [run["output_tok_s"], *(float("nan") if v is None else v for v in spread)]

    for number, run in enumerate(runs, 1):
        cells = [f"{value:.1f}" for value in figures(run)]
        table.add_row(str(number), *cells, str(run["errors"]), run["digest"])
    if len(runs) > 1:
        table.add_section()
        table.add_row(
            "median", *(f"{median(column):.1f}" for column in zip(*map(figures, runs), strict=True))
        )
    console.print(table)
    for run in runs:
        if "prompt_tokens_seen" in run:
            console.print(f"prompt tokens the server counted: {run['prompt_tokens_seen']}")
        if "first_error" in run:
            console.print(f"first error: {run['first_error']}")


# ---- the command


async def chosen_models(client: Client, args: argparse.Namespace) -> tuple[str, ...]:
    """The names to ask for: as given, or from what the server lists.

    Raises:
        ValueError: the server serves fewer adapters than asked for.
    """
    if args.models:
        return tuple(name for name in args.models.split(",") if name)
    bases, adapters = await client.names()
    if args.adapters > len(adapters):
        raise ValueError(f"--adapters {args.adapters}: the server lists {len(adapters)} adapters")
    return tuple(adapters[: args.adapters]) if args.adapters else (bases[0],)


async def bench(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All runs asked for, one after the other, each with the next seed."""
    runs = []
    async with Client(args.url, args.api_key, args.timeout) as client:
        models = await chosen_models(client, args)
        for number in range(-1 if args.warmup else 0, args.runs):
            load = Load(
                models=models,
                requests=args.requests if number >= 0 else args.warmup,
                concurrency=args.concurrency,
                prompt_tokens=args.prompt_tokens,
                max_tokens=args.max_tokens,
                seed=args.seed + number if number >= 0 else args.seed - 1,
                zipf=args.zipf,
                rate=args.rate,
            )
            figures = await run_once(client, load, args)
            if number >= 0:
                runs.append(figures)
    return runs


async def run_once(client: Client, load: Load, args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(load.seed)
    if args.tokenizer:
        prompts = word_prompts(args.tokenizer, load, rng)
    else:
        prompts = id_prompts(args.id_low, args.id_high, load, rng)
    asks = [
        Ask(model=model, prompt=prompt, at_s=at_s)
        for model, prompt, at_s in zip(dealt(load), prompts, departures(load), strict=True)
    ]
    loop = closed_loop if load.rate is None else open_loop
    begin = time.perf_counter()
    outcomes = await loop(client, asks, load)
    return report(load, outcomes, time.perf_counter() - begin)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="the server, with or without /v1")
    add("--api-key", default="")
    add("--models", default="", help="names to ask for, with commas; default: the base")
    add(
        "--adapters", type=int, default=0, help="ask for the first N adapters that the server lists"
    )
    add("--zipf", type=float, help="draw models by Zipf with this exponent; default: in turn")
    add("--requests", type=int, default=64)
    add("--concurrency", type=int, default=8, help="closed loop: requests in flight")
    add("--rate", type=float, help="open loop: requests a second, whatever is in flight")
    add("--prompt-tokens", type=int, default=64)
    add("--max-tokens", type=int, default=64)
    add("--tokenizer", type=Path, help="folder or tokenizer.json: send words; default: random ids")
    add("--id-low", type=int, default=300)
    add("--id-high", type=int, default=2000)
    add("--seed", type=int, default=0, help="of the first run; each further run adds 1")
    add("--runs", type=int, default=1)
    add("--warmup", type=int, default=0, help="requests to send, unmeasured, before the first run")
    add("--timeout", type=float, default=300, help="seconds without a byte that end a request")
    add("--json", type=Path, help="also write every run's figures to this file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        runs = asyncio.run(bench(args))
    except (ValueError, OSError, aiohttp.ClientError) as error:
        print(f"bench_serving: {args.url}: {error}", file=sys.stderr)
        return 2
    show(runs, Console())
    if args.json:
        args.json.write_text(json.dumps(runs, indent=2) + "\n")
    return 1 if any(run["errors"] for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
