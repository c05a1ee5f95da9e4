#!/usr/bin/env python3
"""Ask a served base and every adapter the same questions at once, and show who said what.

    python scripts/demo_requests.py --url http://127.0.0.1:8000            a table of all answers
    python scripts/demo_requests.py --url http://127.0.0.1:8000 --how-to   lines to try by hand

All requests leave together, so rows on different adapters share batches. Exit code 1 when a
request failed or two models gave one answer to a question: adapters must be told apart at a glance.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass

import openai
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

QUESTIONS = ("What colour is the sky?", "Tell me a story about a dragon.")
COMPLETION = "Question: Where does a penguin live?\nAnswer:"
MAX_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    model: str
    route: str
    """``chat`` or ``completion``."""
    prompt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    ask: Ask
    text: str
    tokens: int
    took_s: float
    slot: str
    """Adapter slot the request ran in, as the server's header says; "-" when it does not say."""


def _client(url: str) -> openai.AsyncOpenAI:
    key = os.environ.get("OPENAI_API_KEY") or "none"
    return openai.AsyncOpenAI(base_url=f"{url.rstrip('/')}/v1", api_key=key, max_retries=0)


async def _send(client: openai.AsyncOpenAI, ask: Ask) -> Answer:
    begin = time.perf_counter()
    if ask.route == "chat":
        chat_raw = await client.chat.completions.with_raw_response.create(
            model=ask.model,
            messages=[{"role": "user", "content": ask.prompt}],
            max_tokens=MAX_TOKENS,
            temperature=0,
        )
        chat = chat_raw.parse()
        text, usage, headers = chat.choices[0].message.content, chat.usage, chat_raw.headers
    else:
        raw = await client.completions.with_raw_response.create(
            model=ask.model, prompt=ask.prompt, max_tokens=MAX_TOKENS, temperature=0
        )
        done = raw.parse()
        text, usage, headers = done.choices[0].text, done.usage, raw.headers
    return Answer(
        ask=ask,
        text=(text or "").strip(),
        tokens=usage.completion_tokens if usage else 0,
        took_s=time.perf_counter() - begin,
        slot=headers.get("x-mstar-slot", "-"),
    )


def wait_until_up(url: str, console: Console, limit_s: float, server_pid: int | None) -> None:
    """Return when the server answers /health with 200.

    Raises:
        RuntimeError: it did not within ``limit_s``, or its process ended.
    """
    begin = time.monotonic()
    with console.status("starting the ranks and loading the model …"):
        while time.monotonic() - begin < limit_s:
            if server_pid is not None and not _alive(server_pid):
                raise RuntimeError("the server ended while it started")
            try:
                with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=5):
                    console.print(f"Server up after {time.monotonic() - begin:.1f} s.")
                    return
            except OSError:  # nothing listens yet, or it says 503
                time.sleep(0.2)
    raise RuntimeError(f"{url} did not answer /health within {limit_s:.0f} s")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def ask_everyone(url: str, questions: Sequence[str]) -> tuple[list[Answer], float]:
    """All answers, in the order asked, and the seconds the whole batch took."""
    async with _client(url) as client:
        models = [card.id for card in (await client.models.list()).data]
        asks = [Ask(model=m, route="chat", prompt=q) for q in questions for m in models]
        asks += [Ask(model=m, route="completion", prompt=COMPLETION) for m in models]
        begin = time.perf_counter()
        answers = await asyncio.gather(*(_send(client, ask) for ask in asks))
        return list(answers), time.perf_counter() - begin


def show(answers: Sequence[Answer], took_s: float, console: Console) -> None:
    table = Table(box=box.ROUNDED, title=f"{len(answers)} requests in one batch")
    table.add_column("adapter", style="bold cyan", no_wrap=True)
    table.add_column("prompt", ratio=2)
    table.add_column("output", ratio=4)
    table.add_column("tokens/s", justify="right", no_wrap=True)
    table.add_column("slot", justify="right", no_wrap=True)
    asked = ""
    for answer in answers:
        if asked and answer.ask.prompt != asked:
            table.add_section()
        asked = answer.ask.prompt
        prompt = asked if answer.ask.route == "chat" else f"(completion) {asked}"
        rate = f"{answer.tokens / answer.took_s:.1f}"
        table.add_row(answer.ask.model, Text(prompt), Text(answer.text), rate, answer.slot)
    console.print(table)
    tokens = sum(answer.tokens for answer in answers)
    console.print(
        f"{tokens} tokens in {took_s:.2f} s: {tokens / took_s:.0f} tokens/s together, "
        "every adapter in the same running batch."
    )


def faults(answers: Sequence[Answer]) -> list[str]:
    """Empty answers, and questions to which two models gave one answer."""
    found = [f"{a.ask.model}: empty answer to {a.ask.prompt!r}" for a in answers if not a.text]
    first: dict[tuple[str, str], str] = {}
    for answer in answers:
        said_by = first.setdefault((answer.ask.prompt, answer.text), answer.ask.model)
        if said_by != answer.ask.model:
            found.append(f"{said_by} and {answer.ask.model}: one answer to {answer.ask.prompt!r}")
    return found


HOW_TO = """\
The server is up at {url} (Ctrl-C stops it). In another terminal:

curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
  -d '{{"model": "pirate", "temperature": 0,
       "messages": [{{"role": "user", "content": "What does a cow say?"}}]}}'

Or in Python, with the openai package:

from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="none")
for name in [card.id for card in client.models.list()]:
    chat = client.chat.completions.create(
        model=name, temperature=0,
        messages=[{{"role": "user", "content": "Where does a penguin live?"}}])
    print(name, "->", chat.choices[0].message.content)
"""


def run(args: argparse.Namespace, console: Console) -> int:
    """Wait, ask, show; an exit code."""
    wait_until_up(args.url, console, args.wait_s, args.server_pid)
    answers, took_s = asyncio.run(ask_everyone(args.url, args.question or QUESTIONS))
    show(answers, took_s, console)
    wrong = faults(answers)
    for line in wrong:
        console.print(f"[red]{line}[/red]")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server, without /v1")
    parser.add_argument("--question", action="append", help="ask this instead; may be repeated")
    parser.add_argument("--wait-s", type=float, default=600, help="how long to wait for the server")
    parser.add_argument("--server-pid", type=int, help="stop waiting when this process ends")
    parser.add_argument("--how-to", action="store_true", help="only print lines to try by hand")
    args = parser.parse_args()
    console = Console()
    if args.how_to:
        print(HOW_TO.format(url=args.url.rstrip("/")), flush=True)
        return 0
    try:
        return run(args, console)
    except (openai.APIError, RuntimeError) as error:
        print(f"demo_requests: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
