"""Break a server on purpose, and check that it never says a wrong thing.

    python scripts/chaos.py --seconds 60 --seed 1 --tp 2

Starts `mstar-tp serve` with a tiny model and asks it for answers on many adapters, while adapters
are loaded and unloaded under the same names, their files are damaged and restored, clients leave,
and one rank's reads are slowed down to seconds. Every answer is compared with what transformers
and PEFT say. At the end the ranks' recordings are replayed and compared. Exits with 1 on any wrong
text, failure without a reason, divergence between ranks, leak, hang, step that waited for a read,
or broken bound; the recordings are kept then, and the commands that replay them are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import aiohttp
    import peft  # noqa: F401
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    sys.exit(f"error: chaos.py needs {error.name}: install the dev extra, pip install -e '.[dev]'")

import chaos_kill
import chaos_replay
import support_path  # noqa: F401  # tests/support becomes importable
from chaos_clients import Clients, Question
from chaos_names import Name
from chaos_operators import Operators
from chaos_report import Report
from chaos_world import BASE, World, configured, make_files, make_world
from support.processes import Process, family, ranks

from mstar_tp.testing.faults import FaultFile, write_faults
from mstar_tp.testing.server import Server

NUM_NAMES = 9
NUM_WEIGHTS = 12
NUM_PROMPTS = 6
NUM_CLIENTS = 12
READ_TIMEOUT_S = 12
KV_PAGE_BYTES = 2 * 2 * 4 * 2 * 16 * 4
"""Keys and values of the model's 2 layers, 4 tokens, 2 heads of 16 float32."""
RECORDING = "run.rec"
LOOK_EVERY_S = 2.0
BURST = 24
SPARE_FILES = 4
"""Spare files of a rank: a read that happens to run holds one."""
END_WITHIN_S = 120.0
MORE_S = 120.0
"""The seconds past its time that a run goes on for events that have not happened yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    seconds: float
    seed: int
    tp: int
    kill: bool
    mean_s: float


def main() -> int:
    settings = _settings()
    if settings.kill:
        return chaos_kill.run(settings.seconds, settings.seed, settings.tp, settings.mean_s)
    sizes = Sizes.of(settings)
    report = Report()
    start = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mstar-chaos-")))
        make_files(folder, num_weights=NUM_WEIGHTS, seed=settings.seed)
        faults = folder / "faults.json"
        write_faults(faults, [])
        env = {"MSTAR_TP_TEST_MODE": "1", "MSTAR_TP_FAULTS": str(faults)}
        with ThreadPoolExecutor(1) as threads:
            world = threads.submit(make_world, folder, num_prompts=NUM_PROMPTS, seed=settings.seed)
            server = stack.enter_context(Server(*_flags(folder, settings, sizes), env=env))
            run = _Run(settings, server, world.result(), FaultFile(faults), report)
        report.stats["ready after"] = f"{time.monotonic() - start:.1f} s"
        asyncio.run(run.run())
        processes = family(server.process.pid)
        code = server.stop()
        if code != 0 and not report.gone.is_set():
            report.violation("end", f"the server ended with code {code}")
        for process in processes:
            if process.alive:
                report.violation("leak", f"process {process} outlived the server")
        recording = folder / RECORDING
        chaos_replay.check(recording, settings.tp, report)
        if report.violations:
            print(chaos_replay.keep(recording, settings.tp, server.log), file=sys.stderr)
    report.stats["wall"] = f"{time.monotonic() - start:.1f} s"
    print(f"chaos: {settings.seconds:g} s, seed {settings.seed}, tp {settings.tp}, {sizes}")
    report.print()
    return 1 if report.violations else 0


def _settings() -> Settings:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="how long at least (default 60)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of every choice (default 0)")
    parser.add_argument("--tp", type=int, choices=(1, 2, 4), default=2, help="ranks (default 2)")
    parser.add_argument(
        "--kill", action="store_true", help="kill and stop processes instead: see chaos_kill.py"
    )
    parser.add_argument(
        "--every", type=float, default=4.0, help="seconds between two deaths, mean (default 4)"
    )
    args = parser.parse_args()
    return Settings(
        seconds=args.seconds, seed=args.seed, tp=args.tp, kill=args.kill, mean_s=args.every
    )


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the server, drawn from the seed, so that many seeds try many servers."""

    slots: int
    host: tuple[str, int]
    """The CPU cache's flag and bound."""
    pages: int
    """KV pages; with few, requests give theirs back."""
    host_pages: int
    """Those of host memory that keep what others had to give back: none, some, all."""
    step_tokens: int
    overlap: bool

    @classmethod
    def of(cls, settings: Settings) -> Sizes:
        rng = random.Random(f"sizes {settings.seed}")
        slots = rng.choice((2, 3, 4))
        hosts = [("--max-cpu-loras", slots + rng.choice((2, 3)))]
        # On two ranks a large adapter takes 44,032 bytes of each, the small ones about a quarter.
        hosts.append(("--max-cpu-lora-bytes", (slots + 2) * 90_000 // settings.tp))
        return cls(
            slots=slots,
            host=rng.choice(hosts),
            pages=rng.choice((40, 60, 100)),
            step_tokens=rng.choice((32, 64)),
            overlap=rng.random() < 0.7,
            host_pages=rng.choice((0, 12, 80)),
        )


def _names() -> list[str]:
    return [f"voice-{i}" for i in range(NUM_NAMES)]


def _flags(folder: Path, settings: Settings, sizes: Sizes) -> list[str]:
    flag, bound = sizes.host
    names = zip(_names(), configured(folder), strict=False)
    return [
        str(folder / "model"), "--served-model-name", BASE, "--tp", str(settings.tp),
        "--dtype", "float32", "--lora-root", str(folder / "live"),
        "--max-loras", str(sizes.slots), flag, str(bound), "--max-lora-rank", "8",
        "--max-model-len", "96", "--max-num-seqs", "8",
        "--max-num-batched-tokens", str(sizes.step_tokens),
        "--block-size", "4", "--num-kv-pages", str(sizes.pages),
        "--kv-offloading-size", f"{sizes.host_pages * KV_PAGE_BYTES / (1 << 30):.9f}",
        "--async-scheduling" if sizes.overlap else "--no-async-scheduling",
        "--read-timeout", str(READ_TIMEOUT_S), "--record", str(folder / RECORDING),
        *(word for name, path in names for word in ("--lora", f"{name}={path}")),
    ]  # fmt: skip


class _Run:
    """One run against a server that serves."""

    def __init__(
        self, settings: Settings, server: Server, world: World, faults: FaultFile, report: Report
    ) -> None:
        self._settings = settings
        self._server = server
        self._world = world
        self._faults = faults
        self._report = report
        self._names = {name: Name(name) for name in _names()}

    async def run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(
            self._server.url, connector=connector, timeout=timeout
        ) as session:
            rng = random.Random(self._settings.seed)
            clients = Clients(self._world, self._names, session, self._report, rng)
            operators = Operators(
                self._world, self._names, clients, session, self._faults, self._report, rng,
                self._settings.tp,
            )  # fmt: skip
            await operators.load_all()
            before = self._open_files()
            await self._stress(clients, operators)
            if not self._report.gone.is_set():
                await self._settle(clients, operators)
                self._check_files(before, self._open_files())

    async def _stress(self, clients: Clients, operators: Operators) -> None:
        stop = asyncio.Event()
        work = [clients.run(stop) for _ in range(NUM_CLIENTS)]
        work += [operators.reload(stop), operators.harm(stop), operators.slow(stop)]
        work += [self._watch(operators, stop), self._bursts(clients, stop)]
        tasks = [asyncio.ensure_future(one) for one in work]
        ends = [self._server_ends(), self._report.gone.wait()]
        fatal = [asyncio.ensure_future(one) for one in ends]
        ended, _ = await asyncio.wait(
            fatal, timeout=self._settings.seconds, return_when=asyncio.FIRST_COMPLETED
        )
        if not ended and self._report.missing():
            seen = asyncio.ensure_future(self._seen())
            fatal.append(seen)
            await asyncio.wait(fatal, timeout=MORE_S, return_when=asyncio.FIRST_COMPLETED)
            if not seen.done():
                self._report.violation("end", f"never happened: {self._report.missing()}")
        stop.set()
        for one in fatal:
            one.cancel()
        _, late = await asyncio.wait(tasks, timeout=END_WITHIN_S)
        for task in late:
            task.cancel()
            self._report.violation("hang", f"{task.get_coro()} did not end")
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception) and not self._report.gone.is_set():
                self._report.violation("failure", f"an actor failed: {result!r}")

    async def _seen(self) -> None:
        """Until everything that a run must do has happened once."""
        while self._report.missing():
            await asyncio.sleep(0.2)

    async def _server_ends(self) -> None:
        """Until the server is gone, which it should not be."""
        while self._server.process.poll() is None:
            await asyncio.sleep(0.2)
        self._report.ranks_gone(f"the server ended with {self._server.process.returncode}")

    async def _bursts(self, clients: Clients, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await clients.burst(BURST)
            await asyncio.sleep(1.0)

    # ------------------------------------------------------------------ checks

    def _ranks(self) -> list[Process]:
        return ranks(self._server.process.pid)

    def _open_files(self) -> list[int]:
        return [rank.open_files for rank in self._ranks()]

    def _check_files(self, before: list[int], after: list[int]) -> None:
        self._report.stats["open files, a rank"] = f"{before} before, {after} after"
        self._report.stats["memory at the end, a rank"] = (
            f"{[round(rank.resident_mib) for rank in self._ranks()]} MiB"
        )
        for rank, (few, many) in enumerate(zip(before, after, strict=True)):
            if many > few + SPARE_FILES:
                self._report.violation("leak", f"rank {rank} has {many} files open, first {few}")

    async def _watch(self, operators: Operators, stop: asyncio.Event) -> None:
        while not stop.is_set():
            state = await operators.inspect()
            self._check_bounds(state)
            self._compare(state)
            try:
                await asyncio.wait_for(stop.wait(), LOOK_EVERY_S)
            except TimeoutError:
                continue

    def _check_bounds(self, state: dict[str, Any]) -> None:
        for rank in state["ranks"]:
            host = rank["host"]
            if max(host["used"], host["peak"]) > host["capacity"]:
                self._report.violation("bound", f"rank {rank['rank']}: {host}")
            if rank["steps_waited_for_read"]:
                self._report.violation(
                    "read wait",
                    f"{rank['steps_waited_for_read']} steps of rank {rank['rank']} waited",
                )

    def _compare(self, state: dict[str, Any]) -> None:
        """Every rank's tables are the leader's."""
        leader, *followers = state["ranks"]
        for rank in followers:
            for table in (
                "checks",
                "slots",
                "cpu_cache",
                "served",
                "requests",
                "pages_used",
                "kv_host",
            ):
                if rank[table] != leader[table]:
                    self._report.violation(
                        "divergence",
                        f"{table} of rank {rank['rank']} is {rank[table]}, the leader's "
                        f"{leader[table]}",
                    )

    async def _settle(self, clients: Clients, operators: Operators) -> None:
        """Check that every name answers once nothing is wrong, and that then nothing is left."""
        self._faults.write([])
        for name in (BASE, *self._names):
            if name == BASE or self._names[name].weights is not None:
                answer = await clients.ask(Question(name=name, prompt=0, num_tokens=4))
                if answer.error is not None:
                    self._report.violation("failure", f"{name} does not answer: {answer.error}")
        state = await operators.inspect()
        self._check_bounds(state)
        self._compare(state)
        for rank in state["ranks"]:
            self._check_leaks(rank)
        if state["frontend"]["requests"]:
            self._report.violation("leak", f"the frontend holds {state['frontend']['requests']}")
        self._take_stats(await operators.metrics())

    def _check_leaks(self, rank: dict[str, Any]) -> None:
        def leak(what: str) -> None:
            self._report.violation("leak", f"rank {rank['rank']}: {what}")

        if rank["requests"]:
            leak(f"requests {rank['requests']} are still open")
        if rank["pages_used"]:
            leak(f"{rank['pages_used']} KV pages are still held")
        if rank["kv_host"]["pages_used"]:
            leak(f"host memory still holds KV: {rank['kv_host']}")
        served = {name.name for name in self._names.values() if name.weights is not None}
        if {key["name"] for key in rank["served"]} != served:
            leak(f"it serves {rank['served']}, wanted {sorted(served)}")
        for slot in rank["slots"]:
            if slot["holders"]:
                leak(f"slot {slot} is still held")
            if slot["adapter"] is not None and slot["adapter"] not in rank["served"]:
                leak(f"slot {slot} is of an adapter that was unloaded")
        for key in rank["cpu_cache"]:
            if key not in rank["served"]:
                leak(f"the CPU cache holds {key}, which was unloaded")

    def _take_stats(self, found: dict[tuple[str, str], float]) -> None:
        ranks = [str(rank) for rank in range(self._settings.tp)]

        def of_ranks(name: str) -> list[int]:
            return [int(found[f"mstar_tp_{name}", rank]) for rank in ranks]

        stats = self._report.stats
        stats["steps"] = of_ranks("steps_total")[0]
        stats["preemptions"] = of_ranks("preemptions_total")[0]
        stats["preempted rows whose KV host memory kept"] = of_ranks("kv_offloads_total")[0]
        stats["tokens that began, and of these cached"] = [
            of_ranks(f"prefix_tokens_{kind}_total")[0] for kind in ("queried", "cached")
        ]
        stats["evictions"] = of_ranks("evictions_total")[0]
        stats["agreed failures"] = of_ranks("agreed_failures_total")[0]
        stats["steps that waited for a read, a rank"] = of_ranks("steps_waited_for_read_total")
        peaks, bounds = of_ranks("cpu_cache_peak"), of_ranks("cpu_cache_limit")
        stats["CPU cache's high-water mark, a rank"] = f"{peaks} of {bounds[0]}"
        stats["host bytes' high-water mark, a rank"] = of_ranks("cpu_cache_memory_bytes_peak")
        for name in ("evictions_total", "agreed_failures_total"):
            if len(set(of_ranks(name))) > 1:
                self._report.violation("divergence", f"{name}: {of_ranks(name)}")
        if found["mstar_tp_requests_live", ""]:
            self._report.violation("leak", "requests are still counted as live")


if __name__ == "__main__":
    sys.exit(main())
