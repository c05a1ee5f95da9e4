"""``mstar-tp bench serving``: one load on our server and on a peer, in turn.

Main thread; the load generator is one event loop in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import aiohttp

from mstar_tp.bench.client import Client, closed_loop, open_loop
from mstar_tp.bench.hardware import new_report
from mstar_tp.bench.load import Ask, Load, Outcome, Prompts, asks_of
from mstar_tp.bench.report import Cell, Report, Table, ratio
from mstar_tp.bench.stats import run_stats
from mstar_tp.common.errors import ConfigError, MstarError

OURS, PEER, PEFT = "ours", "peer", "peft"
LATENCIES = tuple(
    (f"{name} {share} ms", key, share)
    for name, key in (("TTFT", "ttft_ms"), ("inter-token", "itl_ms"))
    for share in ("p50", "p95")
)


class Target(Protocol):
    """A server that a load can be put on."""

    def run(self, asks: Sequence[Ask], load: Load) -> list[Outcome]:
        """Serve all; the outcomes in the order of ``asks``."""
        ...


@dataclass(slots=True)
class HttpTarget:
    """A server; ``names`` are what it calls our base and adapters, where those differ."""

    url: str
    api_key: str
    timeout_s: float
    names: dict[str, str] = field(default_factory=dict)

    def client(self) -> Client:
        return Client(self.url, self.api_key, self.timeout_s)

    def cards(self) -> list[dict[str, Any]]:
        """The models that /v1/models lists.

        Raises:
            MstarError: the server does not answer.
        """

        async def ask() -> list[dict[str, Any]]:
            async with self.client() as client:
                return await client.cards()

        try:
            return asyncio.run(ask())
        except (aiohttp.ClientError, OSError, KeyError, ValueError) as error:
            raise MstarError(f"{self.url}: cannot list its models: {error}") from error

    def run(self, asks: Sequence[Ask], load: Load) -> list[Outcome]:
        named = [replace(ask, model=self.names.get(ask.model, ask.model)) for ask in asks]

        async def send() -> list[Outcome]:
            async with self.client() as client:
                loop = closed_loop if load.rate is None else open_loop
                return await loop(client, named, load)

        return asyncio.run(send())


def bench_serving(args: argparse.Namespace) -> Report:
    """Measure what the flags ask for.

    Raises:
        MstarError: a server does not start or answer, or lacks what is asked for.
    """
    report = new_report("serving", args.argv)
    with ExitStack() as stack:
        url = args.url or stack.enter_context(own_server(args)).url
        ours = HttpTarget(url, args.api_key, args.timeout)
        models = chosen_models(ours, args.models, args.adapters)
        targets: dict[str, Target] = {OURS: ours} | _peers(args, ours, models)
        runs = _measure(targets, args, models)
    report.tables.append(_table(args, runs))
    report.details["runs"] = runs
    report.failed = sum(run["errors"] for found in runs.values() for run in found)
    return report


def own_server(args: argparse.Namespace) -> Any:
    """``mstar-tp serve`` with what stands behind ``--``, or with a built-in model; not started.

    Its folder of models goes when the process ends.
    """
    from mstar_tp.testing.server import Server

    return Server(*(args.serve or _built_in(args)))


def _built_in(args: argparse.Namespace) -> list[str]:
    from mstar_tp.bench.models import SHAPES, make_adapters, make_model

    folder = TemporaryDirectory(prefix="mstar-bench-")
    args.kept_folder = folder  # for as long as the arguments live
    shape, home = SHAPES[args.size], Path(folder.name)
    make_model(home / "model", shape)
    adapters = make_adapters(home, shape, args.adapters, args.rank)
    args.id_high = min(args.id_high, shape.vocab)
    flags = [str(home / "model"), "--tp", str(args.tp), "--served-model-name", "base"]
    if adapters:
        flags += ["--max-loras", str(args.max_loras or len(adapters))]
        flags += [word for item in adapters.items() for word in ("--lora", "=".join(item))]
    return flags


def chosen_models(ours: HttpTarget, names: str, adapters: int) -> tuple[str, ...]:
    """The names to ask for: as given, or from what the server lists.

    Raises:
        ConfigError: the server serves fewer adapters than asked for.
    """
    if names:
        return tuple(name for name in names.split(",") if name)
    cards = ours.cards()
    listed = [card["id"] for card in cards if card.get("parent")]
    if adapters > len(listed):
        raise ConfigError(f"--adapters {adapters}: the server lists {len(listed)} adapters")
    bases = [card["id"] for card in cards if not card.get("parent")]
    return tuple(listed[:adapters]) if adapters else (bases[0],)


def _peers(args: argparse.Namespace, ours: HttpTarget, models: Sequence[str]) -> dict[str, Target]:
    peers: dict[str, Target] = {}
    if args.peer_url:
        peer = HttpTarget(args.peer_url, args.api_key, args.timeout)
        theirs = [card["id"] for card in peer.cards()]
        bases = [card["id"] for card in ours.cards() if not card.get("parent")]
        peer.names = {name: theirs[0] for name in bases if name not in theirs}
        absent = [name for name in models if peer.names.get(name, name) not in theirs]
        if absent:
            raise ConfigError(f"--peer-url: {args.peer_url} does not serve {absent[0]!r}")
        peers[PEER] = peer
    if args.peer == PEFT:
        from benchmarks.peft_peer import PeftMixed

        cards = {card["id"]: card for card in ours.cards()}
        base = next(card for card in cards.values() if not card.get("parent"))
        adapters = {n: cards[n]["root"] for n in models if cards.get(n, {}).get("parent")}
        peers[PEFT] = PeftMixed(base["root"], adapters, args.threads)
    return peers


def _measure(
    targets: dict[str, Target], args: argparse.Namespace, models: tuple[str, ...]
) -> dict[str, list[dict[str, Any]]]:
    """Every run on every target, in turn; what each came to."""
    runs: dict[str, list[dict[str, Any]]] = {who: [] for who in targets}
    prompts = Prompts(tokenizer=args.tokenizer, id_low=args.id_low, id_high=args.id_high)
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
        asks = asks_of(load, prompts)
        for who, target in targets.items():
            begin = time.perf_counter()
            outcomes = target.run(asks, load)
            stats = run_stats(load, outcomes, time.perf_counter() - begin)
            if number >= 0:
                runs[who].append(stats)
    return runs


def _table(args: argparse.Namespace, runs: dict[str, list[dict[str, Any]]]) -> Table:
    load = runs[OURS][0]["load"]
    kind = "closed loop" if args.rate is None else f"open loop, {args.rate:g} requests/s"
    table = Table(
        title=f"serving: {len(load['models'])} model(s), {load['requests']} requests, "
        f"{load['concurrency']} at once, {kind}, {load['prompt_tokens']} + {load['max_tokens']} "
        "tokens",
        columns=("who", "run", "tokens/s", *(name for name, *_ in LATENCIES), "errors", "digest"),
    )
    for who, found in runs.items():
        for number, run in enumerate(found, 1):
            table.add(who, str(number), *_row(run), run["errors"], run["digest"])
    for who, found in runs.items():
        columns = [[value for value in column if value is not None] for column in _columns(found)]
        medians: list[Cell] = [median(column) if column else None for column in columns]
        table.add(who, "median", *medians, sum(run["errors"] for run in found), "")
    for who, found in runs.items():
        if who != OURS:
            pairs = zip(_columns(runs[OURS]), _columns(found), strict=True)
            shares = [ratio(_there(a), _there(b)) for a, b in pairs]
            table.add(f"{OURS} / {who}", "ratio", *shares, None, _same(runs[OURS], found))
    for who, found in runs.items():
        for run in found:
            if "prompt_tokens_seen" in run:
                seen = run["prompt_tokens_seen"]
                table.notes.append(f"{who}: prompt tokens the server counted: {seen}")
            if "first_error" in run:
                table.notes.append(f"{who}: first error: {run['first_error']}")
    if PEFT in runs:
        table.notes.append(
            f"{PEFT}: batches of {load['concurrency']}, one after the other, without a server; its "
            "TTFT counts from the start of a request's own batch"
        )
    return table


def _row(run: dict[str, Any]) -> list[float | None]:
    return [run["output_tok_s"], *(run[key][share] for _, key, share in LATENCIES)]


def _columns(found: Sequence[dict[str, Any]]) -> list[tuple[float | None, ...]]:
    return list(zip(*map(_row, found), strict=True))


def _there(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _same(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> str:
    same = sum(a["digest"] == b["digest"] for a, b in zip(ours, theirs, strict=True))
    return f"equal in {same} of {len(ours)}"
