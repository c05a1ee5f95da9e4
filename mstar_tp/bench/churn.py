"""``mstar-tp bench churn``: more adapters than slots, and adapters that come and go meanwhile.

Each cell is a closed loop over so many adapters, dealt in turn, twice: quiet, and with a client
that loads and unloads further adapters all the time. Counters are the server's own, from /metrics.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from mstar_tp.bench.client import closed_loop
from mstar_tp.bench.hardware import new_report
from mstar_tp.bench.load import Ask, Load, Prompts, asks_of
from mstar_tp.bench.models import SHAPES, make_adapters, make_model
from mstar_tp.bench.report import Cell, Report, Table, ratio
from mstar_tp.bench.serving import OURS, PEER, HttpTarget
from mstar_tp.bench.stats import run_stats
from mstar_tp.common.errors import ConfigError
from mstar_tp.testing.server import Server

COLUMNS = (
    *("who", "adapters", "slots", "CPU cache", "tokens/s", "of fewest"),
    *("slot hits", "evictions/s", "CPU cache hits", "reads/s", "TTFT p95 ms", "inter-token p95 ms"),
    *("loads/s", "inter-token p95 loading ms", "loading / quiet", "errors"),
)
_COUNTERS = re.compile(
    r'^mstar_tp_(evictions|cpu_cache_adapters_taken)_total\{[^}]*rank="0"[^}]*\} (\S+)$',
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Place:
    """The places of adapters: ``--cells`` has ADAPTERS/SLOTS[/CPU CACHE]."""

    adapters: int
    slots: int
    cpu_cache: int


@dataclass(slots=True)
class Runs:
    """The results of one cell: a value a run."""

    quiet: list[dict[str, Any]] = field(default_factory=list)
    loading: list[dict[str, Any]] = field(default_factory=list)
    evictions_s: list[float] = field(default_factory=list)
    reads_s: list[float] = field(default_factory=list)
    slot_hits: list[float] = field(default_factory=list)
    cpu_cache_hits: list[float] = field(default_factory=list)
    loads_s: list[float] = field(default_factory=list)


def bench_churn(args: argparse.Namespace) -> Report:
    """Measure every cell on our server, and on a peer's that serves the same adapters.

    Raises:
        MstarError: a server does not start or answer, or serves too few adapters.
    """
    report = new_report("churn", args.argv)
    cells = [parse_place(text) for text in args.cells.split(",")]
    table = Table(
        title=f"adapter churn: {args.size} model, {args.requests} requests", columns=COLUMNS
    )
    table.notes.append(
        "loading: the same requests while a client loads and unloads further adapters; loading / "
        "quiet: of the two inter-token p95; of fewest: tokens/s over those of the first cell"
    )
    first: dict[str, list[float]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="mstar-bench-")))
        shape = SHAPES[args.size]
        make_model(folder / "model", shape)
        most = max(cell.adapters for cell in cells)
        adapters = make_adapters(folder / "adapters", shape, most + 1, args.rank)
        extra = adapters.popitem()[1]
        for cell in cells:
            with Server(*_flags(args, folder, adapters, cell)) as server:
                targets = {OURS: HttpTarget(server.url, args.api_key, args.timeout)}
                if args.peer_url:
                    targets[PEER] = HttpTarget(args.peer_url, args.api_key, args.timeout)
                names = tuple(adapters)[: cell.adapters]
                for who, runs in _measure(args, targets, names, extra).items():
                    table.add(who, *_row(cell if who == OURS else None, cell, runs, first, who))
                    report.failed += sum(run["errors"] for run in runs.quiet + runs.loading)
                    details = {"quiet": runs.quiet, "loading": runs.loading}
                    report.details[f"{who} {cell.adapters}/{cell.slots}/{cell.cpu_cache}"] = details
    report.tables.append(table)
    return report


def parse_place(text: str) -> Place:
    """A cell as ``--cells`` has it.

    Raises:
        ConfigError: it is not ADAPTERS/SLOTS or ADAPTERS/SLOTS/TIER with whole numbers from 1.
    """
    parts = text.split("/")
    if len(parts) not in (2, 3) or not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"--cells: got {text!r}, wanted ADAPTERS/SLOTS or ADAPTERS/SLOTS/TIER")
    adapters, slots, *cpu_cache = map(int, parts)
    return Place(adapters, slots, cpu_cache[0] if cpu_cache else 2 * slots)


def _flags(
    args: argparse.Namespace, folder: Path, adapters: Mapping[str, str], cell: Place
) -> list[str]:
    flags = [str(folder / "model"), "--tp", str(args.tp), "--served-model-name", "base"]
    flags += ["--max-loras", str(cell.slots), "--max-cpu-loras", str(cell.cpu_cache)]
    flags += ["--lora-root", str(folder / "adapters")]
    for item in list(adapters.items())[: cell.adapters]:
        flags += ["--lora", "=".join(item)]
    return flags


def _measure(
    args: argparse.Namespace, targets: Mapping[str, HttpTarget], names: tuple[str, ...], extra: str
) -> dict[str, Runs]:
    found = {who: Runs() for who in targets}
    prompts = Prompts(id_low=300, id_high=2000)
    for number in range(-1, args.runs):
        load = Load(
            models=names,
            requests=args.requests,
            concurrency=args.concurrency,
            prompt_tokens=args.prompt_tokens,
            max_tokens=args.max_tokens,
            seed=args.seed + number + 1,
        )
        asks = asks_of(load, prompts)
        for who, target in targets.items():
            runs = Runs() if number < 0 else found[who]  # the first warms up
            _quiet(target, asks, load, runs)
            _loading(target, asks, load, runs, extra)
    return found


def _quiet(target: HttpTarget, asks: list[Ask], load: Load, runs: Runs) -> None:
    before, begin = _counters(target), time.perf_counter()
    outcomes = target.run(asks, load)
    took = time.perf_counter() - begin
    after = _counters(target)
    runs.quiet.append(run_stats(load, outcomes, took))
    if not after:  # a peer counts nothing that we know of
        return
    evictions, taken = (after[name] - before[name] for name in sorted(after))
    runs.evictions_s.append(evictions / took)
    runs.reads_s.append(taken / took)
    # Slots are full by now, so each adapter that came took another's.
    runs.slot_hits.append(1 - evictions / load.requests)
    runs.cpu_cache_hits.append(1 - taken / load.requests)


def _loading(target: HttpTarget, asks: list[Ask], load: Load, runs: Runs, extra: str) -> None:
    """The same, while another client loads and unloads."""

    async def both() -> tuple[list[Any], float, int]:
        async with target.client() as client, target.client() as operator:
            begin = time.perf_counter()
            counted: list[int] = []
            operating = asyncio.ensure_future(_operate(operator, extra, counted))
            outcomes = await closed_loop(client, asks, load)
            took = time.perf_counter() - begin
            operating.cancel()
            await asyncio.gather(operating, return_exceptions=True)
            return outcomes, took, len(counted)

    outcomes, took, loads = asyncio.run(both())
    runs.loading.append(run_stats(load, outcomes, took))
    runs.loads_s.append(loads / took)


async def _operate(client: Any, path: str, done: list[int]) -> None:
    """Load and unload until cancelled; a server that refuses a load gets no further one."""
    number = 0
    while True:
        name = f"bench-{id(done)}-{number}"
        number += 1
        try:
            body = {"lora_name": name, "lora_path": path}
            await client.ask_once("POST", "/v1/load_lora_adapter", body)
            await client.ask_once("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        except aiohttp.ClientError:
            return
        done.append(1)


def _counters(target: HttpTarget) -> dict[str, float]:
    async def ask() -> str:
        async with target.client() as client:
            return str(await client.ask_once("GET", "/metrics"))

    try:
        text = asyncio.run(ask())
    except aiohttp.ClientError:
        return {}
    return {name: float(value) for name, value in _COUNTERS.findall(text)}


def _row(
    place: Place | None, cell: Place, runs: Runs, first: dict[str, list[float]], who: str
) -> tuple[Cell, ...]:
    rates = [run["output_tok_s"] for run in runs.quiet]
    fewest = first.setdefault(who, rates)
    quiet, loading = (
        [run["itl_ms"]["p95"] for run in found if run["itl_ms"]["p95"] is not None]
        for found in (runs.quiet, runs.loading)
    )
    ttft = [run["ttft_ms"]["p95"] for run in runs.quiet if run["ttft_ms"]["p95"] is not None]
    errors = sum(run["errors"] for run in runs.quiet + runs.loading)
    where: tuple[Cell, ...] = (place.slots, place.cpu_cache) if place else (None, None)
    return (
        cell.adapters,
        *where,
        median(rates),
        ratio(rates, fewest),
        *map(_median, (runs.slot_hits, runs.evictions_s, runs.cpu_cache_hits, runs.reads_s)),
        *map(_median, (ttft, quiet, runs.loads_s, loading)),
        ratio(loading, quiet),
        errors,
    )


def _median(values: list[float]) -> float | None:
    return median(values) if values else None
