"""Break a server on purpose, and check that it never says a wrong thing.

    python scripts/chaos.py --seconds 60 --seed 1 --tp 2

Starts `mstar-tp serve` with a tiny model and asks it for answers on many adapters, while adapters
are loaded and unloaded under the same names, their files are damaged and restored, clients leave,
and one rank's reads are slowed down to seconds. Every answer is compared with what transformers
and PEFT say. Exits with 1 on any wrong text, failure without a reason, divergence between ranks,
leak, hang, step that waited for a read, or broken bound.
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

import aiohttp
from chaos_clients import Clients, Question
from chaos_names import Name
from chaos_operators import Operators
from chaos_report import Report
from chaos_world import BASE, World, make_files, make_world

from mstar_tp.testing.faults import FaultFile, write_faults
from mstar_tp.testing.server import Server

NUM_NAMES = 9
NUM_WEIGHTS = 12
NUM_PROMPTS = 6
NUM_CLIENTS = 12
SLOTS = 3
HOST_ADAPTERS = 5
LOOK_EVERY_S = 2.0
BURST = 24
END_WITHIN_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    seconds: float
    seed: int
    tp: int


def main() -> int:
    settings = _settings()
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
            server = stack.enter_context(Server(*_flags(folder, settings), env=env))
            run = _Run(settings, server, world.result(), FaultFile(faults), report)
        report.figures["ready after"] = f"{time.monotonic() - start:.1f} s"
        asyncio.run(run.run())
        code = server.stop()
        if code != 0:
            report.violation("end", f"the server ended with code {code}")
        if report.violations:
            print(server.log[-8000:], file=sys.stderr)
    report.figures["wall"] = f"{time.monotonic() - start:.1f} s"
    print(f"chaos: {settings.seconds:g} s, seed {settings.seed}, tp {settings.tp}")
    report.print()
    return 1 if report.violations else 0


def _settings() -> Settings:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="of every choice (default 0)")
    parser.add_argument("--tp", type=int, default=2, help="ranks (default 2)")
    args = parser.parse_args()
    return Settings(seconds=args.seconds, seed=args.seed, tp=args.tp)


def _flags(folder: Path, settings: Settings) -> list[str]:
    return [
        str(folder / "model"), "--served-model-name", BASE, "--tp", str(settings.tp),
        "--dtype", "float32", "--lora-root", str(folder / "live"),
        "--max-loras", str(SLOTS), "--max-cpu-loras", str(HOST_ADAPTERS), "--max-lora-rank", "8",
        "--max-model-len", "96", "--max-num-seqs", "8", "--max-num-batched-tokens", "64",
        "--block-size", "4", "--num-kv-pages", "100",
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
        self._names = {name: Name(name) for name in (f"voice-{i}" for i in range(NUM_NAMES))}

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
            await self._storm(clients, operators)
            if self._server.process.poll() is None:
                await self._settle(clients, operators)

    async def _storm(self, clients: Clients, operators: Operators) -> None:
        stop = asyncio.Event()
        work = [clients.run(stop) for _ in range(NUM_CLIENTS)]
        work += [operators.reload(stop), operators.harm(stop), operators.slow(stop)]
        work += [self._watch(operators, stop), self._bursts(clients, stop)]
        tasks = [asyncio.ensure_future(one) for one in work]
        fatal = asyncio.ensure_future(self._server_ends(stop))
        await asyncio.wait({fatal}, timeout=self._settings.seconds)
        stop.set()
        fatal.cancel()
        _, late = await asyncio.wait(tasks, timeout=END_WITHIN_S)
        for task in late:
            task.cancel()
            self._report.violation("hang", f"{task.get_coro()} did not end")
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                self._report.violation("failure", f"an actor failed: {result!r}")

    async def _server_ends(self, stop: asyncio.Event) -> None:
        """Until the server is gone, which it should not be."""
        while self._server.process.poll() is None:
            await asyncio.sleep(0.2)
        self._report.violation("end", f"the server ended with {self._server.process.returncode}")

    async def _bursts(self, clients: Clients, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await clients.burst(BURST)
            await asyncio.sleep(1.0)

    # ------------------------------------------------------------------ checks

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
            if len(rank["tier"]) > HOST_ADAPTERS:
                self._report.violation("bound", f"rank {rank['rank']} holds {rank['tier']}")
            if rank["steps_waited_for_read"]:
                self._report.violation(
                    "read wait",
                    f"{rank['steps_waited_for_read']} steps of rank {rank['rank']} waited",
                )

    def _compare(self, state: dict[str, Any]) -> None:
        """Every rank's tables are the leader's."""
        leader, *followers = state["ranks"]
        for rank in followers:
            for table in ("checks", "slots", "tier", "requests", "pages_used"):
                if rank[table] != leader[table]:
                    self._report.violation(
                        "divergence",
                        f"{table} of rank {rank['rank']} is {rank[table]}, the leader's "
                        f"{leader[table]}",
                    )

    async def _settle(self, clients: Clients, operators: Operators) -> None:
        """With nothing wrong any more, every name answers; then nothing may be left anywhere."""
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
            where = f"rank {rank['rank']}"
            if rank["requests"]:
                self._report.violation("leak", f"{where} holds requests {rank['requests']}")
            if rank["pages_used"]:
                self._report.violation("leak", f"{where} holds {rank['pages_used']} KV pages")
            for slot in rank["slots"]:
                if slot["holders"]:
                    self._report.violation("leak", f"{where}: slot {slot} is held")
        if state["frontend"]["requests"]:
            self._report.violation("leak", f"the frontend holds {state['frontend']['requests']}")
        self._report.figures["steps"] = state["ranks"][0]["steps"]
        self._report.figures["preemptions"] = state["ranks"][0]["preemptions"]
        self._report.figures["steps that waited for a read"] = [
            rank["steps_waited_for_read"] for rank in state["ranks"]
        ]


if __name__ == "__main__":
    sys.exit(main())
