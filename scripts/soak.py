"""Ordinary traffic of every kind for minutes, and nothing may go wrong or grow.

    python scripts/soak.py --seconds 600 --seed 1 --tp 2

Starts `mstar-tp serve` with a tiny model and hundreds of adapters, few of which fit the slots and
the CPU cache. Clients ask in every form (streamed or not, several answers, several prompts,
log-probabilities, echo, prompts that share their beginnings), stop early, close the connection
between two tokens or before the first, and send bodies that are wrong; adapters are loaded and
unloaded meanwhile. Every answer is compared with what transformers and PEFT say. Unlike chaos.py it
harms nothing, so nothing has a reason to fail. Exits with 1 on any wrong text, failure, status of
500 or above, hang or leak, and where a process's memory has grown by more than 2 % since the
warm-up, the first third of the run.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

try:
    import aiohttp
    import peft  # noqa: F401
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    sys.exit(f"error: soak.py needs {error.name}: install the dev extra, pip install -e '.[dev]'")

import support_path  # noqa: F401  # tests/support becomes importable
import yaml
from chaos_clients import Clients
from chaos_names import Name
from chaos_report import Report
from chaos_world import BASE, MAX_TOKENS, World, make_files, make_world
from support.processes import Process, family

from mstar_tp.testing.server import Server

NUM_WEIGHTS = 12
NUM_PROMPTS = 6
NUM_CHANGED = 60
"""Names that are loaded and unloaded while the server runs; the others stay."""
SLOTS, HOST_ADAPTERS = 4, 24
LOOK_EVERY_S = 1.0
WARM_UP = 1 / 3
GROWTH = 0.02
END_WITHIN_S = 120.0
BAD_BODIES: tuple[tuple[str, bytes], ...] = (
    ("/v1/completions", b"{"),
    ("/v1/completions", b"[1, 2]"),
    ("/v1/completions", b"\xff\xfe\x00"),
    ("/v1/completions", b'{"model": "base"}'),
    ("/v1/completions", b'{"model": "base", "prompt": "a", "max_tokens": "many"}'),
    ("/v1/completions", b'{"model": "base", "prompt": [5], "max_tokens": -1}'),
    ("/v1/completions", b'{"model": "base", "prompt": [5], "temperature": 1e999}'),
    ("/v1/completions", b'{"model": "base", "prompt": [99999999]}'),
    ("/v1/completions", b'{"model": "base", "prompt": [5], "max_tokens": 4000}'),
    ("/v1/completions", b'{"model": "base", "prompt": [5], "n": 0}'),
    ("/v1/completions", b'{"model": "nobody", "prompt": [5]}'),
    ("/v1/completions", b'{"model": "../voice-0", "prompt": [5]}'),
    ("/v1/completions", b'{"model": "base", "prompt": [5], "suffix": "x"}'),
    ("/v1/completions", b'{"model": "base", "prompt": [5], "stop": ["a", 5]}'),
    ("/v1/chat/completions", b'{"model": "base", "messages": "hello"}'),
    ("/v1/chat/completions", b'{"model": "base", "messages": []}'),
    ("/v1/embeddings", b'{"model": "base", "input": "x"}'),
    ("/v1/load_lora_adapter", b'{"lora_name": "x", "lora_path": "/etc"}'),
    ("/v1/load_lora_adapter", b'{"lora_name": "x"}'),
    ("/v1/unload_lora_adapter", b'{"lora_name": "nobody"}'),
    ("/v1/nothing", b"{}"),
)


def main() -> int:
    settings = _settings()
    report = Report()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mstar-soak-")))
        make_files(folder, num_weights=NUM_WEIGHTS, seed=settings.seed)
        world = make_world(folder, num_prompts=NUM_PROMPTS, seed=settings.seed)
        weights_of = _write_adapters(world, settings.adapters)
        server = stack.enter_context(Server(str(_write_config(world, weights_of, settings.tp))))
        processes = family(server.process.pid)
        asyncio.run(_Run(settings, server, world, weights_of, report).run())
        code = server.stop()
        if code != 0:
            report.violation("end", f"the server ended with code {code}")
        for process in processes:
            if process.alive:
                report.violation("leak", f"process {process} outlived the server")
        if report.violations:
            print(server.log[-8000:], file=sys.stderr)
    print(f"soak: {settings.seconds:g} s, seed {settings.seed}, tp {settings.tp}")
    report.print()
    return 1 if report.violations else 0


def _settings() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="how long (default 600)")
    parser.add_argument("--seed", type=int, default=0, help="of every choice (default 0)")
    parser.add_argument("--tp", type=int, choices=(1, 2, 4), default=2, help="ranks (default 2)")
    parser.add_argument("--adapters", type=int, default=500, help="how many (default 500)")
    parser.add_argument("--clients", type=int, default=12, help="at a time (default 12)")
    return parser.parse_args()


def _write_adapters(world: World, count: int) -> dict[str, str]:
    """Folders of ``count`` adapters below the server's root; name -> its weights."""
    found = {f"voice-{i}": world.weights[i % len(world.weights)] for i in range(count)}
    for name, weights in found.items():
        shutil.copytree(world.library(weights), world.live / name)
    return found


def _write_config(world: World, weights_of: dict[str, str], tp: int) -> Path:
    engine = {
        "model": str(world.model),
        "tensor_parallel_size": tp,
        "dtype": "float32",
        "max_model_len": 96,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "block_size": 4,
        "num_kv_pages": 120,
        "lora": {
            "roots": [str(world.live)],
            "max_loras": SLOTS,
            "max_cpu_loras": HOST_ADAPTERS,
            "max_lora_rank": 8,
            "adapters": {name: str(world.live / name) for name in weights_of},
        },
    }
    path = world.folder / "soak.yaml"
    path.write_text(yaml.safe_dump({"engine": engine, "server": {"served_model_name": [BASE]}}))
    return path


class _Run:
    """One run against a server that serves."""

    def __init__(
        self,
        settings: argparse.Namespace,
        server: Server,
        world: World,
        weights_of: dict[str, str],
        report: Report,
    ) -> None:
        self._settings = settings
        self._server = server
        self._world = world
        self._weights_of = weights_of
        self._report = report
        self._rng = random.Random(settings.seed)
        self._names = {name: Name(name, folder=world.live / name) for name in weights_of}
        self._memory: dict[Process, list[tuple[float, float]]] = {}
        """Process -> (seconds since the start, resident MiB)."""

    async def run(self) -> None:
        now = asyncio.get_running_loop().time()
        for name, served in self._names.items():
            served.settle(now, self._weights_of[name])
        async with aiohttp.ClientSession(
            self._server.url,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
        ) as session:
            clients = Clients(self._world, self._names, session, self._report, self._rng)
            stop = asyncio.Event()
            work = [clients.run(stop) for _ in range(self._settings.clients)]
            work += [self._vary(session, stop), self._misuse(session, stop)]
            work += [self._reload(session, stop), self._weigh(stop), self._look(session, stop)]
            tasks = [asyncio.ensure_future(one) for one in work]
            await asyncio.wait(
                tasks, timeout=self._settings.seconds, return_when=asyncio.FIRST_EXCEPTION
            )
            stop.set()
            _, late = await asyncio.wait(tasks, timeout=END_WITHIN_S)
            for task in late:
                task.cancel()
                self._report.violation("hang", f"{task.get_coro()} did not end")
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception):
                    self._report.violation("failure", f"an actor failed: {result!r}")
            await self._check_rest(session)
        self._check_memory()

    # ------------------------------------------------------------------ traffic

    async def _vary(self, session: aiohttp.ClientSession, stop: asyncio.Event) -> None:
        """Requests of the less usual forms, on the adapters that stay."""
        stay = [BASE, *list(self._names)[NUM_CHANGED:]]
        while not stop.is_set():
            name = self._rng.choice(stay)
            prompts = self._rng.sample(range(len(self._world.prompts)), 2)
            tokens = self._rng.randint(1, MAX_TOKENS)
            body: dict[str, Any] = {
                "model": name,
                "prompt": [list(self._world.prompts[i]) for i in prompts],
                "max_tokens": tokens,
                "temperature": 0,
            }
            form = self._rng.choice(("batch", "several", "logprobs", "echo", "unknown"))
            more: dict[str, dict[str, Any]] = {
                "several": {"n": 2}, "logprobs": {"logprobs": 3}, "echo": {"echo": True},
                "unknown": {"no_such_field": {"deep": [1]}},
            }  # fmt: skip
            body |= more.get(form, {})
            async with session.post("/v1/completions", json=body) as response:
                tree = await response.json()
            if response.status != 200:
                self._report.violation("failure", f"{form} got {response.status}: {tree}")
                continue
            weights = BASE if name == BASE else self._weights_of[name]
            wanted = [self._world.text(weights, i, tokens) for i in prompts]
            if form == "several":
                wanted = [text for text in wanted for _ in range(2)]
            said = [choice["text"] for choice in tree["choices"]]
            # What is echoed is the prompt's own text, by the tokenizer; the answer stands behind.
            right = (
                all(one.endswith(text) for one, text in zip(said, wanted, strict=True))
                if form == "echo"
                else said == wanted
            )
            if not right:
                self._report.violation("wrong text", f"{form} on {name} said {said}, not {wanted}")
            if tree["usage"]["completion_tokens"] != tokens * len(wanted):
                self._report.violation("failure", f"{form} on {name}: {tree['usage']}")
            self._report.events[f"requests of the form {form}"] += 1

    async def _misuse(self, session: aiohttp.ClientSession, stop: asyncio.Event) -> None:
        while not stop.is_set():
            path, data = self._rng.choice(BAD_BODIES)
            headers = {"Content-Type": "application/json"}
            async with session.post(path, data=data, headers=headers) as response:
                text = await response.text()
            if not 400 <= response.status < 500 or "error" not in text:
                self._report.violation(
                    "failure", f"{path} answered {data!r} with {response.status}: {text[:300]}"
                )
            self._report.events["bad requests"] += 1
            await _pause(stop, 0.02)

    async def _reload(self, session: aiohttp.ClientSession, stop: asyncio.Event) -> None:
        """Unload a name and load it again, with the other weights that it has in turn."""
        now = asyncio.get_running_loop().time
        changed = list(self._names.values())[:NUM_CHANGED]
        while not stop.is_set():
            name = self._rng.choice(changed)
            weights = self._rng.choice(self._world.weights)
            name.begin(now(), None)
            await self._post(session, "/v1/unload_lora_adapter", {"lora_name": name.name})
            name.settle(now(), None)
            self._report.events["unloads"] += 1
            name.folder = self._world.copy(
                weights, self._world.live / f"{name.name}-{self._report.events['loads']}"
            )
            name.begin(now(), weights)
            body = {"lora_name": name.name, "lora_path": str(name.folder)}
            await self._post(session, "/v1/load_lora_adapter", body)
            name.settle(now(), weights)
            self._report.events["loads"] += 1
            await _pause(stop, 0.2)

    async def _post(
        self, session: aiohttp.ClientSession, path: str, body: dict[str, object]
    ) -> None:
        async with session.post(path, json=body) as response:
            if response.status != 200:
                text = await response.text()
                self._report.violation("failure", f"{path} {body}: {response.status}: {text}")

    # ------------------------------------------------------------------ checks

    async def _weigh(self, stop: asyncio.Event) -> None:
        """Write down every process's memory, now and then."""
        start = time.monotonic()
        while not stop.is_set():
            for process in family(self._server.process.pid):
                if process.alive:
                    mark = (time.monotonic() - start, process.resident_mib)
                    self._memory.setdefault(process, []).append(mark)
            await _pause(stop, LOOK_EVERY_S)

    async def _look(self, session: aiohttp.ClientSession, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self._state(session)
            await _pause(stop, 5 * LOOK_EVERY_S)

    async def _state(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        async with session.get("/debug/state") as response:
            state: dict[str, Any] = await response.json()
        for rank in state["ranks"]:
            if rank["steps_waited_for_read"]:
                self._report.violation("read wait", f"rank {rank['rank']}")
            if rank["checks"] != state["ranks"][0]["checks"]:
                self._report.violation("divergence", f"rank {rank['rank']}: {rank['checks']}")
        return state

    async def _check_rest(self, session: aiohttp.ClientSession) -> None:
        """Check that nothing is held with no request left."""
        for rank in (await self._state(session))["ranks"]:
            held = [slot for slot in rank["slots"] if slot["holders"]]
            if rank["requests"] or held:
                self._report.violation("leak", f"rank {rank['rank']}: {rank['requests']} {held}")

    def _check_memory(self) -> None:
        warm = self._settings.seconds * WARM_UP
        window = self._settings.seconds / 6
        for process, marks in self._memory.items():
            first = [mib for at, mib in marks if warm <= at < warm + window]
            last = [mib for at, mib in marks if at >= self._settings.seconds - window]
            if not first or not last:
                continue  # a child that came or went, such as a template's process
            before, after = statistics.median(first), statistics.median(last)
            name = f"memory of {process.name} ({process.pid})"
            self._report.stats[name] = f"{before:.1f} -> {after:.1f} MiB"
            if after > before * (1 + GROWTH):
                self._report.violation("leak", f"{name} grew: {before:.1f} -> {after:.1f} MiB")


async def _pause(stop: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return


if __name__ == "__main__":
    sys.exit(main())
