"""``scripts/bench.py scale``: thousands of registered adapters, and what they cost.

Three parts, in one table each: one rank's admits, real ranks' steps (the fewest adapters and more
up at once, run in turn), and a server's start, memory and loads at run time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import torch
from support.instance import Instance
from support.processes import family, ranks

from benchmarks.fleet import Fleet
from benchmarks.scale_pool import MISSES, time_pool
from benchmarks.step import Segments
from benchmarks.step_probe import script
from mstar_tp.bench.client import Client
from mstar_tp.bench.hardware import new_report
from mstar_tp.bench.models import SHAPES
from mstar_tp.bench.report import Cell, Report, Table, ratio
from mstar_tp.common.errors import MstarError
from mstar_tp.config import ServeConfig, build_config
from mstar_tp.testing.server import Server
from mstar_tp.wire.values import FIRST_GENERATION, AdapterKey, SamplingParams

POOL_COLUMNS = (
    *("registered", "slots", "register us", "bytes each", "steady admit us", "of fewest"),
    *(f"admit us, {count} more miss" for count in MISSES),
)
STEP_COLUMNS = (
    *("tp", "slots", "registered", "start s", "step us", "of fewest", "admit us", "ingest us"),
    *("turn us", "rank bytes each"),
)
SERVER_COLUMNS = (
    "registered",
    "start s",
    "process",
    "MiB",
    "bytes each",
    "loads/s",
    "loaded bytes",
)


def bench_scale(args: argparse.Namespace) -> Report:
    """Measure everything that the flags name.

    Raises:
        MstarError: ranks or a server do not start, or a load is refused.
    """
    torch.set_num_threads(1)
    report = new_report("scale", args.argv, program="scripts/bench.py")
    with TemporaryDirectory(prefix="mstar-bench-") as name:
        folder = Path(name)
        report.tables.append(_pools(args, folder))
        alike, folders = not args.unlike, args.folders
        fleet = Fleet(folder, SHAPES[args.size], args.rank, alike=alike, folders=folders)
        # More adapters hold the fewer ones: what is measured in turn runs the same ones.
        adapters = fleet.adapters("adapter", max(*args.registered, args.rows))
        report.tables.append(_steps(args, folder, fleet, adapters))
        report.tables.append(_servers(args, folder, fleet, adapters))
    return report


# ---------------------------------------------------------------------- admits


def _pools(args: argparse.Namespace, folder: Path) -> Table:
    table = Table(title="admits of one rank's pool, 64 seated rows", columns=POOL_COLUMNS)
    for slots in args.slots:
        fewest: float | None = None
        for registered in args.registered:
            times = time_pool(folder / f"pool-{registered}-{slots}", registered, slots)
            fewest = fewest or times.steady_us
            share = times.steady_us / fewest
            misses = (times.miss_us.get(count) for count in MISSES)
            table.add(
                registered,
                slots,
                times.register_us,
                round(times.bytes_each),
                times.steady_us,
                share,
                *misses,
            )
    return table


# ---------------------------------------------------------------------- steps


@dataclass(slots=True)
class _Ranks:
    """One instance and what its steps took."""

    instance: Instance
    segments: Segments
    registered: int
    start_s: float
    step_us: list[float] = field(default_factory=list)
    phases_us: dict[str, list[float]] = field(default_factory=dict)

    def run(self, requests: list[Any]) -> None:
        """One run; the median step and phases."""
        steps = self.segments.run(requests, "time")["steps"]
        steady = [s for s in steps if s["rows"] == s["tokens"] == len(requests)]
        pairs = itertools.pairwise(steady)
        gaps = [(b["begin_ns"] - a["begin_ns"]) / 1e3 for a, b in pairs]
        self.step_us.append(median(gaps))
        for phase in ("admit", "ingest", "turn"):
            times = [(s["main"] | s["step"]).get(phase, 0) / 1e3 for s in steady]
            self.phases_us.setdefault(phase, []).append(median(times))

    @property
    def resident(self) -> int:
        """Bytes of all ranks, each with what it shares with others."""
        return sum(_resident(process.pid) for process in self.instance.ranks.processes)


def _steps(
    args: argparse.Namespace, folder: Path, fleet: Fleet, adapters: Mapping[str, str]
) -> Table:
    title = f"steps of real ranks: {args.size}, {args.rows} rows on as many adapters"
    table = Table(title=title, columns=STEP_COLUMNS)
    least, *more = args.registered
    pairs: list[tuple[int, ...]] = [(size,) for size in more] or [()]
    for tp in args.tp:
        for slots in args.slots:
            for at, registered in enumerate(pairs):
                with ExitStack() as stack:
                    few, *others = (
                        _start_ranks(args, stack, folder, _config(args, fleet, chosen, tp, slots))
                        for chosen in (_first(adapters, size) for size in (least, *registered))
                    )
                    _run_in_turn(args, [few, *others], list(adapters)[: min(args.rows, slots)])
                    if at == 0:
                        table.add(*_step_row(few, few, tp, slots))
                    for many in others:
                        table.add(*_step_row(many, few, tp, slots))
    return table


def _step_row(found: _Ranks, few: _Ranks, tp: int, slots: int) -> tuple[Cell, ...]:
    added = found.registered - few.registered
    each = round((found.resident - few.resident) / tp / added) if added else None
    share = ratio(found.step_us, few.step_us) if added else None
    phases = (median(times) for times in found.phases_us.values())
    step = median(found.step_us)
    return (tp, slots, found.registered, found.start_s, step, share, *phases, each)


def _run_in_turn(args: argparse.Namespace, instances: list[_Ranks], names: list[str]) -> None:
    params = SamplingParams(max_tokens=args.tokens, temperature=0)
    requests: list[Any] = [
        (range(300 + row, 332 + row), params, AdapterKey(names[row % len(names)], FIRST_GENERATION))
        for row in range(args.rows)
    ]
    for each in instances:
        each.segments.run(requests, "time")  # warms up
    for number in range(args.runs):
        for each in instances if number % 2 else reversed(instances):
            each.run(requests)


def _start_ranks(
    args: argparse.Namespace, stack: ExitStack, folder: Path, config: ServeConfig
) -> _Ranks:
    home = Path(stack.enter_context(TemporaryDirectory(dir=folder)))
    (home / "mode").write_text("time", encoding="utf-8")
    before = home / "before.py"
    before.write_text(script(home), encoding="utf-8")
    begin = time.perf_counter()
    instance = stack.enter_context(Instance(config, timeout_s=1800, before=before))
    took = time.perf_counter() - begin
    lora = config.engine.lora
    assert lora is not None
    return _Ranks(instance, Segments(instance, home), len(lora.adapters), took)


def _tree(
    args: argparse.Namespace, fleet: Fleet, adapters: Mapping[str, str], tp: int, slots: int
) -> dict[str, Any]:
    lora = {"adapters": dict(adapters), "max_loras": slots, "roots": [str(fleet.root)]}
    return {
        "model": str(fleet.model),
        "tensor_parallel_size": tp,
        "max_model_len": 512,
        "max_num_seqs": args.rows,
        "start_timeout_s": 1800,
        "lora": lora,
    }


def _config(
    args: argparse.Namespace, fleet: Fleet, adapters: Mapping[str, str], tp: int, slots: int
) -> ServeConfig:
    return build_config({"engine": _tree(args, fleet, adapters, tp, slots)}, source="bench")


def _first(adapters: Mapping[str, str], count: int) -> dict[str, str]:
    return dict(itertools.islice(adapters.items(), count))


# ---------------------------------------------------------------------- servers


def _servers(
    args: argparse.Namespace, folder: Path, fleet: Fleet, adapters: Mapping[str, str]
) -> Table:
    """Start with the fewest and the most; then loads at run time into the one with the fewest."""
    tp = args.tp[0]
    table = Table(title=f"servers: tp {tp}, {args.slots[0]} slots", columns=SERVER_COLUMNS)
    table.notes.append(
        f"loads: {args.loads} adapters by {args.clients} clients; bytes are of resident memory, "
        "an adapter's name and path in the configuration included"
    )
    least, most = min(args.registered), max(args.registered)
    base: dict[str, int] = {}
    late = fleet.adapters("late", args.loads)
    for registered in dict.fromkeys((least, most)):
        tree = _tree(args, fleet, _first(adapters, registered), tp, args.slots[0])
        path = folder / f"serve-{registered}.yaml"
        server = {"port": 0, "served_model_name": ["base"]}
        # JSON is YAML, and written in no time.
        path.write_text(json.dumps({"engine": tree, "server": server}), encoding="utf-8")
        begin = time.perf_counter()
        with Server(str(path)) as running:
            took = time.perf_counter() - begin
            _ask(running.url, _decodes(args, list(adapters)))
            before = processes(running.process.pid)
            base = base or before
            rate, after = None, before
            if registered == least and late:
                rate = len(late) / _ask(running.url, lambda client: _load(args, client, late))
                after = processes(running.process.pid)
            for name, size in before.items():
                added = registered - least
                each = round((size - base[name]) / added) if added else None
                grown = round((after[name] - size) / len(late)) if rate else None
                table.add(registered, took, name, size >> 20, each, rate, grown)
    if args.peer_url and late:
        rate = len(late) / _ask(args.peer_url, lambda client: _load(args, client, late))
        table.add(None, None, "peer", None, None, rate, None)
    return table


def processes(pid: int) -> dict[str, int]:
    """Resident bytes of the frontend and of each rank.

    Ranks share the modules imported before they were forked; those count in each.
    """
    found: dict[str, int] = {}
    for process in (family(pid)[0], *ranks(pid)):
        name = "frontend" if process.rank is None else f"rank {process.rank}"
        found[name] = _resident(process.pid)
    return found


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _ask(url: str, work: Callable[[Client], Any]) -> float:
    """Seconds that ``work`` takes with a client of this server."""

    async def run() -> float:
        async with Client(url, "", 600) as client:
            begin = time.perf_counter()
            await work(client)
            return time.perf_counter() - begin

    try:
        return asyncio.run(run())
    except aiohttp.ClientError as error:
        raise MstarError(f"{url}: {error}") from error


def _decodes(args: argparse.Namespace, names: list[str]) -> Callable[[Client], Any]:
    """One step's worth of rows, so that what a first request takes counts for no adapter."""
    body = {"prompt": [300, 301], "max_tokens": 8, "ignore_eos": True}

    async def work(client: Client) -> None:
        asked = ({"model": name, **body} for name in names[: args.rows])
        await asyncio.gather(*(client.ask_once("POST", "/v1/completions", each) for each in asked))

    return work


async def _load(args: argparse.Namespace, client: Client, adapters: Mapping[str, str]) -> None:
    waiting = iter(adapters.items())  # shared: each is taken once

    async def worker() -> None:
        for name, path in waiting:
            body = {"lora_name": name, "lora_path": path}
            await client.ask_once("POST", "/v1/load_lora_adapter", body)

    await asyncio.gather(*(worker() for _ in range(args.clients)))
